"""Run a notebook from top to bottom on the Monarch kernel, and keep the result as notebook and HTML.

`make demo` runs this, and so do the tests. It prints what the cells tagged "summary" print, and where the files
lie. Cells tagged "raises-exception" are meant to fail; when another one does, its error is printed, the files are
written as far as it got, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from traitlets.config import Config


def execute(notebook: Any, folder: Path, kernel: str, timeout: float) -> str | None:
    """Fill in the notebook's outputs; gives what went wrong, or None."""
    running = ["the kernel's start"]

    def on_start(cell: Any, cell_index: int) -> None:
        running[0] = f"cell {cell_index + 1} ({cell.id})"

    with tempfile.TemporaryDirectory() as sockets:
        # Local sockets instead of TCP: no other user can listen in, and the kernel has nothing to warn about.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        client = NotebookClient(
            notebook,
            kernel_name=kernel,
            timeout=timeout,
            config=config,
            resources={"metadata": {"path": str(folder)}},
            on_cell_start=on_start,
            store_widget_state=False,  # a page without a kernel then shows the HTML of views, and not an empty widget
        )
        try:
            client.execute()
        except CellExecutionError as error:
            return f"Failed in {running[0]}:\n{error.traceback}"
        except CellTimeoutError:
            return f"{running[0]} did not end within {timeout:.0f} s (--timeout allows more)."
        except DeadKernelError:
            return f"The kernel ended during {running[0]}."
        except RuntimeError as error:  # it did not start
            return f"The kernel {kernel!r} does not answer: {error}"
    return None


def join_streams(notebook: Any) -> None:
    """Put together what one stream wrote without another output between, as JupyterLab does: a line may come in two
    messages, and nbclient keeps them apart (its ``coalesce_streams`` moves text past what was displayed between)."""
    for cell in code_cells(notebook):
        outputs: list[Any] = []
        for output in cell.outputs:
            if outputs and output.output_type == "stream" and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


def save(notebook: Any, name: str, folder: Path) -> list[Path]:
    """Write the executed notebook and its HTML; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    executed, page = folder / f"{name}.ipynb", folder / f"{name}.html"
    nbformat.write(notebook, executed)
    exporter = HTMLExporter()
    exporter.log.setLevel(logging.ERROR)  # it asks for alternative texts of figures
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    page.write_text(html, encoding="utf-8")
    return [executed, page]


def summary(notebook: Any) -> str:
    """What the cells tagged "summary" printed."""
    outputs = [o for cell in code_cells(notebook) if tagged(cell, "summary") for o in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def shown(notebook: Any) -> str:
    """How much of what the notebook shows, in a few words."""
    counts = {"figure": 0, "table": 0, "error on purpose": 0}
    for cell in code_cells(notebook):
        for output in cell.outputs:
            data = output.get("data", {})
            counts["figure"] += "image/png" in data
            counts["table"] += "<table" in data.get("text/html", "")
            counts["error on purpose"] += output.output_type == "error" and tagged(cell, "raises-exception")
    return ", ".join(f"{count} x {what}" for what, count in counts.items() if count) or "text only"


def code_cells(notebook: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(cell: Any, tag: str) -> bool:
    """Whether the cell has a tag."""
    return tag in cell.metadata.get("tags", ())


def main(argv: list[str] | None = None) -> int:
    """Command line: NOTEBOOK [--out FOLDER] [--kernel NAME] [--timeout SECONDS]."""
    parser = argparse.ArgumentParser(description="Run a notebook on the Monarch kernel.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/notebooks"), help="folder for the results")
    parser.add_argument("--kernel", default="monarch", help="kernelspec to run it on")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one cell may take")
    args = parser.parse_args(argv)
    source: Path = args.notebook
    if not source.is_file():
        parser.error(f"there is no notebook {source}")
    # This environment's kernel, not one that the user has installed from elsewhere.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    try:
        spec = KernelSpecManager().get_kernel_spec(args.kernel)
    except NoSuchKernel:
        install = f"{Path(sys.executable).name} -m monarch_kernel install --sys-prefix"
        parser.error(f"Jupyter knows no kernel {args.kernel!r} in this environment; {install} adds ours")

    notebook: Any = nbformat.read(source, as_version=4)
    cells = len(code_cells(notebook))
    print(f"Running {source} ({cells} cells) on {spec.display_name} ...", flush=True)
    start = time.monotonic()
    failure = execute(notebook, source.resolve().parent, args.kernel, args.timeout)
    took = time.monotonic() - start
    join_streams(notebook)
    files = save(notebook, source.stem, args.out)

    if failure is None:
        print(f"Done in {took:.1f} s.\n\n{summary(notebook)}")
        print(f"shown      {shown(notebook)}")
    else:
        plain = failure if sys.stdout.isatty() else re.sub(r"\x1b\[[0-9;]*m", "", failure)
        print(f"{plain.rstrip()}\n\nStopped after {took:.1f} s.\n")
    for label, path in zip(("notebook", "page"), files, strict=True):
        print(f"{label:<10} {os.path.relpath(path)}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
