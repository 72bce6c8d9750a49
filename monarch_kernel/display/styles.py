"""Define the styles of all HTML of this package, in one place.

They are inline, because a saved notebook, an e-mail and a plain front end have no style sheet. Text inherits its colour
from the page, and JupyterLab's variables have fallbacks, so everything is readable on light and dark pages.
"""

from __future__ import annotations

from typing import Final

FONT: Final = "font-family:var(--jp-code-font-family,ui-monospace,monospace)"
#: The box around text in the font of code.
BOX: Final = f"{FONT};font-size:var(--jp-code-font-size,13px);line-height:1.35"
#: The same box around lines that are not wrapped.
SCROLLED: Final = f"{BOX};overflow-x:auto"
#: Each front end styles `<pre>` differently; a bare one inherits everything from the box around it.
BARE_PRE: Final = "all:unset;display:block"
WRAPPED: Final = f"{BARE_PRE};white-space:pre-wrap;overflow-wrap:anywhere;{FONT}"
UNWRAPPED: Final = f"{BARE_PRE};white-space:pre;{FONT}"
#: Lines beside a label, which is not copied with them.
LABELLED: Final = "display:flex;gap:1ch"
LABEL: Final = f"{BARE_PRE};flex:none;user-select:none;opacity:.7"

DIM: Final = "opacity:.7"
BOLD: Final = "font-weight:600"
# No single red or blue has enough contrast on both light and dark pages, so front ends choose.
BAD: Final = "color:var(--jp-error-color1,var(--vscode-errorForeground,#c62828))"
#: Sets of ranks in a tree, where they guide the reader.
RANKS: Final = f"color:var(--jp-brand-color1,var(--vscode-textLink-foreground,#1a6fc4));{BOLD}"
#: The part of a source line that is running.
RUNS_NOW: Final = "background:rgba(255,176,32,.30);border-radius:2px"
#: A small label where ranks diverge.
FORK_CHIP: Final = "background:#d9912b;color:#000;border-radius:8px;padding:0 6px;font-size:85%"
#: Lines of a tree. A line that can be opened begins with a triangle; other lines have the same indentation.
TREE_LINE: Final = "white-space:pre;cursor:default;padding-left:1.05em"
TREE_NOTE: Final = "white-space:pre-wrap;padding-left:1.05em"
TREE_OPENS: Final = (
    "white-space:pre;cursor:pointer;line-height:24px"  # lines below each other, each large enough to hit
)
TREE_INSIDE: Final = "margin:0 0 2px 0.6ch;padding-left:1.4ch;border-left:1px solid rgba(128,128,128,.45)"
TREE_FORK: Final = "margin:2px 0 2px 0.6ch;padding-left:1.4ch;border-left:3px solid #d9912b"
WARNING_LINE: Final = "border-left:3px solid var(--jp-warn-color1,#ef6c00);padding-left:.6em"

#: Cells of tables, which front ends align in different ways.
LEFT: Final = "text-align:left;vertical-align:top;white-space:pre-wrap"
RIGHT: Final = "text-align:right;vertical-align:top;white-space:pre-wrap"
#: A cell with a set of ranks stays on one line.
NAME: Final = "text-align:left;vertical-align:top;white-space:nowrap"
CAPTION: Final = f"{DIM};margin-bottom:2px"
HEADLINE: Final = f"{BOLD};margin-bottom:4px"

#: Numbers in charts, and outliers, which are also marked by shape.
CHART_LINE: Final = "#2b7fd9"
CHART_OUTLIER: Final = "#d9362b"

#: The states of ranks, for light and dark pages. Their shapes also distinguish them.
STATE_COLOURS: Final = {
    "dead": "#d9362b", "unresponsive": "#9a6ae0", "stopped": "#b07d12", "healing": "#17937f",
    "starting": "#7d8792", "running": "#3b82f6", "idle": "#8c959f", "ended": "#8c959f",
}  # fmt: skip
#: The box around a view of a mesh, and a line about a problem in it.
VIEW: Final = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px;line-height:1.45"
VIEW_TITLE: Final = f"{BOLD};font-size:14px"
NEWS: Final = "border-left:3px solid #d9362b;padding-left:.6em;margin:3px 0;white-space:pre-wrap;overflow-wrap:anywhere"

#: A line that can be opened.
OPENS: Final = "cursor:pointer;opacity:.75;margin-top:4px"

#: The sixteen colours of terminals, readable on light and dark pages.
ANSI_COLOURS: Final = (
    "#6e7681", "#e75c58", "#00a250", "#b8860b", "#208ffb", "#d160c4", "#2aa1b3", "#a1a6b2",
    "#8b949e", "#f0706c", "#16b45f", "#d29922", "#4aa3ff", "#e07ed5", "#56c2d1", "#c5c1b4",
)  # fmt: skip
