"""Run a notebook from top to bottom on the Monarch kernel, and keep the result as notebook and HTML.

`make demo` runs this, and the tests do.  Prints the text of the cells tagged "summary", and where the files lie.
The exit status is 1 when a cell fails; its traceback is printed, and the files are written all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from traitlets.config import Config


def execute(source: Path, kernel: str, timeout: float) -> tuple[Any, str | None]:
    """The executed notebook, and the traceback of the cell that failed (None: all is well)."""
    notebook: Any = nbformat.read(source, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:
        # Local sockets instead of TCP: nobody can listen in, and the kernel has nothing to warn about.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        resources = {"metadata": {"path": str(source.parent)}}
        client = NotebookClient(notebook, kernel_name=kernel, timeout=timeout, config=config, resources=resources)
        try:
            client.execute()
        except CellExecutionError as error:
            return notebook, str(error)
    return notebook, None


def text_of(cell: Any) -> str:
    """What a cell printed and returned, as plain text."""
    parts: list[str] = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        parts.append(output.get("text") or data.get("text/plain") or "")
    # Terminal colours and rewritten lines have no place in a summary.
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(p.rstrip("\n") for p in parts if p))


def save(notebook: Any, source: Path, folder: Path) -> list[Path]:
    """Write the executed notebook and its HTML; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    executed, page = folder / source.name, folder / f"{source.stem}.html"
    nbformat.write(notebook, executed)
    html, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": source.stem}})
    page.write_text(html)
    return [executed, page]


def main(argv: list[str] | None = None) -> int:
    """Command line: NOTEBOOK [--out FOLDER] [--kernel NAME] [--timeout SECONDS]."""
    parser = argparse.ArgumentParser(description="Run a notebook on the Monarch kernel.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/notebooks"), help="folder for the results")
    parser.add_argument("--kernel", default="monarch", help="kernelspec to run it on")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one cell may take")
    args = parser.parse_args(argv)
    if not args.notebook.is_file():
        parser.error(f"there is no notebook {args.notebook}")

    print(f"Running {args.notebook} ...", flush=True)
    start = time.monotonic()
    notebook, failure = execute(args.notebook, args.kernel, args.timeout)
    took = time.monotonic() - start
    files = save(notebook, args.notebook, args.out)
    for cell in notebook.cells:
        if "summary" in cell.metadata.get("tags", ()) and (text := text_of(cell)):
            print(f"\n{text}")
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(
        f"\n{cells} code cells in {took:.1f} s"
        + (", and one of them failed:" if failure else ", all of them without error.")
    )
    if failure:
        print(failure)
    for label, path in zip(("notebook", "HTML"), files, strict=True):
        print(f"{label + ':':10}{os.path.relpath(path)}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
