"""Render folded output as text, for terminals and plain front ends, and as HTML, for notebooks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from html import escape

from monarch_kernel.display import tables
from monarch_kernel.display.tables import ANSI_COLOURS, SEQUENCE, UNSEEN
from monarch_kernel.kernel.output.publisher import Block, MimeBundle, RichView, Source, TextView, View
from monarch_kernel.meshes import format_ranks

# Convert terminal colour codes to HTML, or strip them.

#: Real codes have at most three digits, and sequences only a few codes. Longer ones are dropped, as terminals do.
_COLOUR = re.compile(r"\x1b\[((?:[0-9]{0,3};){0,31}[0-9]{0,3})m")


def strip_ansi(text: str) -> str:
    """Return `text` without terminal control codes."""
    return UNSEEN.sub("", SEQUENCE.sub("", text)) if "\x1b" in text else text


def ansi_to_html(text: str) -> str:
    """Return `text` escaped for HTML, with colours and weights as spans. Other control codes are dropped."""
    if "\x1b" not in text:
        return escape(UNSEEN.sub("", text), quote=False)
    return "".join(_spans(text))


def _spans(text: str) -> Iterator[str]:
    style: dict[str, str] = {}
    at = 0
    for match in SEQUENCE.finditer(text):
        yield _span(text[at : match.start()], style)
        at = match.end()
        if codes := _COLOUR.fullmatch(match.group()):
            _apply([int(code or 0) for code in codes[1].split(";")], style)
    yield _span(text[at:], style)


def _span(text: str, style: dict[str, str]) -> str:
    text = escape(UNSEEN.sub("", text), quote=False)
    if not text or not style:
        return text
    return f'<span style="{";".join(f"{name}:{value}" for name, value in style.items())}">{text}</span>'


_SWITCHES = {
    1: ("font-weight", "bold"),
    2: ("opacity", "0.7"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
    9: ("text-decoration", "line-through"),
}
_OFF = {
    22: ("font-weight", "opacity"),
    23: ("font-style",),
    24: ("text-decoration",),
    29: ("text-decoration",),
    39: ("color",),
    49: ("background-color",),
}


def _apply(codes: list[int], style: dict[str, str]) -> None:
    rest = iter(codes)
    for code in rest:
        if code == 0:
            style.clear()
        elif code in _SWITCHES:
            name, value = _SWITCHES[code]
            style[name] = value
        elif code in _OFF:
            for name in _OFF[code]:
                style.pop(name, None)
        elif code in (38, 48):
            colour = _extended(rest)
            if colour:
                style["color" if code == 38 else "background-color"] = colour
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["color"] = ANSI_COLOURS[code - 30 if code < 90 else code - 82]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["background-color"] = ANSI_COLOURS[code - 40 if code < 100 else code - 92]


def _extended(rest: Iterator[int]) -> str:
    """Parse the colour after a 38 or 48: `5;n` or `2;r;g;b`."""
    kind = next(rest, 0)
    if kind == 2:
        red, green, blue = (min(next(rest, 0), 255) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    if kind != 5:
        return ""
    index = next(rest, 0)
    if index < 16:
        return ANSI_COLOURS[index]
    if index >= 232:
        grey = min(8 + (index - 232) * 10, 255)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    levels = (0, 95, 135, 175, 215, 255)
    cube = index - 16
    return "#" + "".join(f"{levels[part]:02x}" for part in (cube // 36, cube // 6 % 6, cube % 6))


# Longer rank sets are truncated so that labels stay readable; the tooltip has the full set.
_LABEL_RUNS = 6

_STREAMS = {
    "stderr": f";{tables.BAD}",
    "notice": f";{tables.DIM};font-style:italic",
    "progress": f";{tables.DIM}",
}

#: Marks figures of ranks. The JupyterLab extension shows them side by side, each with the label in this value.
FIGURE_MIME = "application/vnd.monarch-kernel.figure+json"
#: Accompanies an output with progress: the same output without it. The JupyterLab extension shows it in a saved
#: notebook, where the progress is no longer updated.
PROGRESS_MIME = "application/vnd.monarch-kernel.progress+json"
#: The class of HTML that contains only labels. Labels of figures are repeated at the figures.
_ONLY_LABELS = "mk-OnlyLabels"

#: Returns the text of a label's tooltip for some ranks.
Tooltip = Callable[[frozenset[Source]], str]


def label(sources: Collection[Source], *, name_meshes: bool = False, limit: int | None = _LABEL_RUNS) -> str:
    """Format a set of ranks in brackets, `[0-3,7]`; with `name_meshes`, after the name of each mesh."""
    meshes: dict[str, list[int]] = {}
    for source in sources:
        meshes.setdefault(source.mesh, []).append(source.rank)
    return " ".join(
        f"{mesh if name_meshes else ''}[{format_ranks(ranks, limit=limit)}]" for mesh, ranks in sorted(meshes.items())
    )


def blocks_text(blocks: Sequence[Block], *, name_meshes: bool = False, colours: bool = True) -> str:
    """Format blocks as text: each begins with its label, and its lines are aligned after it."""
    labels = [label(block.sources, name_meshes=name_meshes) for block in blocks]
    width = max(map(len, labels), default=0)
    lines: list[str] = []
    for text, block in zip(labels, blocks, strict=True):
        head = text.ljust(width)
        for line in block.lines:
            shown = line if colours else strip_ansi(line)
            lines.append(f"{head} {shown}".rstrip())
            head = " " * width
    return "\n".join(lines)


def raw_line(source: Source, line: str, *, name_mesh: bool = False) -> str:
    """Format one line for `--raw`."""
    return f"{label((source,), name_meshes=name_mesh)} {line}"


def bundle(view: View, *, name_meshes: bool = False, tooltip: Tooltip | None = None) -> MimeBundle:
    """Return the MIME bundle for the current state of a section. An empty section shows nothing."""
    if isinstance(view, RichView):
        data = dict(view.data) or {"text/plain": "", "text/html": ""}
        if any(mime.startswith("image/") for mime in data) and "text/html" not in data:
            data[FIGURE_MIME] = {"ranks": label(view.sources, name_meshes=name_meshes)}
        return data
    text = blocks_text(view.blocks, name_meshes=name_meshes, colours=False)
    if view.progress:
        text += f"\n{view.progress}" if text else view.progress
    data: MimeBundle = {"text/plain": text, "text/html": _section_html(view, name_meshes, tooltip) if text else ""}
    if view.progress:
        data[PROGRESS_MIME] = bundle(TextView(view.id, view.blocks), name_meshes=name_meshes, tooltip=tooltip)
    return data


def _section_html(view: TextView, name_meshes: bool, tooltip: Tooltip | None) -> str:
    labels = [label(block.sources, name_meshes=name_meshes) for block in view.blocks]
    width = max(map(len, labels), default=0)
    rows: list[str] = []
    for text, block in zip(labels, view.blocks, strict=True):
        title = escape(tooltip(block.sources)) if tooltip is not None else ""
        body = ansi_to_html("\n".join(block.lines))
        rows.append(
            f'<div style="{tables.LABELLED}"><pre style="{tables.LABEL};min-width:{width}ch" title="{title}">'
            f'{escape(text)}</pre><pre style="{tables.WRAPPED}{_STREAMS.get(block.stream, "")}">{body}</pre></div>'
        )
    if view.progress:
        rows.append(f'<pre style="{tables.WRAPPED}{_STREAMS["progress"]}">{escape(view.progress)}</pre>')
    only_labels = not view.progress and all(block.stream == "label" for block in view.blocks)
    name = f' class="{_ONLY_LABELS}"' if only_labels else ""
    return f'<div{name} style="{tables.BOX}">{"".join(rows)}</div>'
