"""Render folded output as text, for terminals and plain front ends, and as HTML, for notebooks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from html import escape

from monarch_kernel.display import styles
from monarch_kernel.kernel.output.ansi import ansi_to_html, strip_ansi
from monarch_kernel.kernel.output.transcript import Block, MimeBundle, RichView, Source, TextView, View
from monarch_kernel.meshes import format_ranks

# Longer rank sets are truncated so that labels stay readable; the tooltip has the full set.
_LABEL_RUNS = 6

_STREAMS = {
    "stderr": f";{styles.BAD}",
    "notice": f";{styles.DIM};font-style:italic",
    "progress": f";{styles.DIM}",
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
            f'<div style="{styles.LABELLED}"><pre style="{styles.LABEL};min-width:{width}ch" title="{title}">'
            f'{escape(text)}</pre><pre style="{styles.WRAPPED}{_STREAMS.get(block.stream, "")}">{body}</pre></div>'
        )
    if view.progress:
        rows.append(f'<pre style="{styles.WRAPPED}{_STREAMS["progress"]}">{escape(view.progress)}</pre>')
    only_labels = not view.progress and all(block.stream == "label" for block in view.blocks)
    name = f' class="{_ONLY_LABELS}"' if only_labels else ""
    return f'<div{name} style="{styles.BOX}">{"".join(rows)}</div>'
