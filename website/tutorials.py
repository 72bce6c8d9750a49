"""Render the notebooks as tutorials, with the outputs that were recorded when they last ran.

``python -m website.tutorials FOLDER`` takes executed notebooks (``make notebooks`` runs them) and records their outputs
in ``website/recorded``, which is in git: building the site runs no notebook. Outputs are shown only if the code of the
notebook is still the code that produced them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Required, TypedDict

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
RECORDED = ROOT / "website" / "recorded"
#: Longer texts are cut in the middle (lines).
LONGEST = 60
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFERRED = ("image/png", "text/html", "text/markdown", "text/plain")


class Output(TypedDict, total=False):
    """An output of a cell in a notebook file (nbformat 4)."""

    output_type: Required[str]
    name: str
    text: str | list[str]
    data: dict[str, str | list[str]]
    traceback: list[str]


class Cell(TypedDict, total=False):
    """A cell in a notebook file (nbformat 4)."""

    id: str
    cell_type: str
    source: str | list[str]
    outputs: list[Output]
    metadata: dict[str, list[str]]


class Recording(TypedDict):
    """The outputs of a notebook: the digest of the code that produced them, and the outputs by the id of the cell."""

    code: str
    outputs: dict[str, list[Output]]


@dataclass
class Tutorial:
    """A notebook as a page.

    Attributes:
        path: the path of the page below ``docs/``.
        text: its Markdown.
        pictures: the pictures in it, by their paths below ``docs/``.
        outputs: why the page has no outputs; empty if it has them.
    """

    path: str
    text: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict[str, bytes])
    missing: str = ""


def tutorial(notebook: Path) -> Tutorial:
    """Render a notebook with its recorded outputs."""
    cells = _cells(notebook)
    page = Tutorial(f"tutorials/{notebook.stem}.md")
    recording, page.missing = _recording(notebook, cells)
    parts: list[str] = []
    for cell in cells:
        source = _text(cell.get("source", ""))
        if cell.get("cell_type") == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(_fenced(source, "python"))
            parts += [_output(each, page) for each in recording.get(cell.get("id", ""), [])]
    where = f"This page is the notebook `notebooks/{notebook.name}`."
    note = f"{where} {page.missing}" if page.missing else f"{where} The outputs are those of its last recorded run."
    heading, _, rest = "\n\n".join(part for part in parts if part).partition("\n")
    page.text = f"{heading}\n\n*{note}*\n{rest}\n"
    return page


def record(folder: Path) -> list[Path]:
    """Record the outputs of the executed notebooks in a folder; return the files that were written.

    Raises:
        SystemExit: an executed notebook is not the notebook of that name.
    """
    RECORDED.mkdir(exist_ok=True)
    written: list[Path] = []
    for executed in sorted(folder.glob("*.ipynb")):
        cells, source = _cells(executed), NOTEBOOKS / executed.name
        if not source.is_file() or _digest(cells) != _digest(_cells(source)):
            sys.exit(f"{executed} was not made from the current {source.relative_to(ROOT)}: run the notebook again")
        if any(_failed(cell) for cell in cells):
            print(f"{executed.name} is not recorded: it ended in an error", file=sys.stderr)
            continue
        outputs = {cell.get("id", ""): _kept(cell.get("outputs", [])) for cell in cells if cell.get("outputs")}
        recording: Recording = {"code": _digest(cells), "outputs": outputs}
        target = RECORDED / f"{executed.stem}.json"
        target.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n")
        written.append(target)
    return written


def _failed(cell: Cell) -> bool:
    """Whether a cell ended in an error that it does not show on purpose."""
    on_purpose = "raises-exception" in cell.get("metadata", {}).get("tags", [])
    return not on_purpose and any(output.get("output_type") == "error" for output in cell.get("outputs", []))


def _recording(notebook: Path, cells: Sequence[Cell]) -> tuple[dict[str, list[Output]], str]:
    """Return the outputs of each cell, or the reason why there are none."""
    path = RECORDED / f"{notebook.stem}.json"
    if not path.is_file():
        return {}, "Its outputs are not shown: it needs what the machine that recorded the others does not have."
    recording: Recording = json.loads(path.read_text())
    if recording["code"] != _digest(cells):
        return {}, "Its outputs are not shown: its code has changed since they were recorded."
    return recording["outputs"], ""


def _cells(notebook: Path) -> list[Cell]:
    found: list[Cell] = json.loads(notebook.read_text())["cells"]
    return found


def _digest(cells: Sequence[Cell]) -> str:
    code = [[cell.get("id"), _text(cell.get("source", ""))] for cell in cells if cell.get("cell_type") == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def _text(content: str | list[str]) -> str:
    return content if isinstance(content, str) else "".join(content)


def _kept(outputs: Sequence[Output]) -> list[Output]:
    """Return outputs with only the best form of each, and without what names the machine that made them."""
    kept: list[Output] = []
    for output in outputs:
        data = output.get("data", {})
        best = next((kind for kind in _PREFERRED if kind in data), None)
        if output["output_type"] in ("display_data", "execute_result"):
            if best is not None:
                kept.append({"output_type": "display_data", "data": {best: _anonymous(_text(data[best]))}})
        elif output["output_type"] == "stream":
            text = _anonymous(_COLOURS.sub("", _text(output.get("text", ""))))
            kept.append({"output_type": "stream", "name": output.get("name", "stdout"), "text": text})
        else:
            traceback = _anonymous(_COLOURS.sub("", "\n".join(output.get("traceback", []))))
            kept.append({"output_type": "error", "traceback": traceback.splitlines()})
    return kept


def _anonymous(text: str) -> str:
    """Replace the paths of this checkout and of temporary folders."""
    return re.sub(
        r"/tmp/[\w./-]*?(?=[\w-]+\.\w+\b|['\"\s,:)<]|$)", "/tmp/…/", text.replace(str(ROOT), "~/monarch_kernel")
    )


def _output(output: Output, page: Tutorial) -> str:
    """Return an output as Markdown; a picture is added to the page's."""
    if output["output_type"] == "stream":
        return _shown(_text(output.get("text", "")))
    if output["output_type"] == "error":
        return _shown("\n".join(output.get("traceback", [])), "error")
    ((kind, content),) = output.get("data", {}).items()
    content = _text(content)
    if kind == "image/png":
        picture = base64.b64decode(content)
        name = f"{Path(page.path).stem}_{len(page.pictures) + 1}.png"
        page.pictures[f"tutorials/{name}"] = picture
        return f"![Figure {len(page.pictures)} of this notebook]({name})"
    if kind == "text/html":
        return f'<div class="output html" markdown="0">{re.sub(chr(10) + "+", chr(10), content.strip())}</div>'
    return content if kind == "text/markdown" else _shown(content)


def _shown(text: str, kind: str = "text") -> str:
    lines = text.rstrip().splitlines()
    if len(lines) > LONGEST:
        left_out = len(lines) - LONGEST
        lines = [*lines[: LONGEST // 2], f"… {left_out} lines …", *lines[-LONGEST // 2 :]]
    escaped = html.escape("\n".join(lines), quote=False).replace("\n", "&#10;")
    return f'<pre class="output {kind}" tabindex="0">{escaped}</pre>' if lines else ""


def _fenced(source: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", source)), default=0))
    return f"{fence}{language}\n{source.rstrip()}\n{fence}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: FOLDER."""
    parser = argparse.ArgumentParser(description="Record the outputs of executed notebooks for the site.")
    parser.add_argument("folder", type=Path, help="the folder of executed notebooks, such as build/notebooks")
    written = record(parser.parse_args(argv).folder)
    if not written:
        print("There are no notebooks in that folder; make notebooks runs them.", file=sys.stderr)
        return 1
    print(f"Recorded {', '.join(path.name for path in written)}; commit website/recorded.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
