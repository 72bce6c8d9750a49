"""Implement `%mesh focus`: select the rank that the front end's debugger shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.dap import RankSession

#: Formats a location in code (file, line, function) as a short text.
PlaceText = Callable[[str, int, str], str]


@dataclass(frozen=True, slots=True)
class FocusAnswer:
    """The outcome of `%mesh focus`."""

    text: str
    refused: bool = False


def focus(ranks: RankSession, rank: int | None, mesh: str | None, place: PlaceText | None = None) -> FocusAnswer:
    """Show another stopped rank.

    Args:
        ranks: the session of the front end's debugger.
        rank: the rank to show; None only lists the stopped ranks.
        mesh: its mesh; may be None if that rank is stopped in one mesh only.
        place: formats locations in code.
    """
    from monarch_kernel.debugger.dap import RequestError

    if rank is None:
        return FocusAnswer(state_text(ranks.state(), place))
    try:
        return FocusAnswer(f"{ranks.focus(rank, mesh)} is shown")
    except RequestError as error:
        return FocusAnswer(str(error), refused=True)


def state_text(state: Mapping[str, Any], place: PlaceText | None = None) -> str:
    """Return where ranks are stopped, one stop per line; `*` marks the one that is shown.

    Args:
        state: the result of `RankSession.state`.
        place: formats locations in code.
    """
    lines: list[str] = []
    for mesh in state["meshes"]:
        for rank in mesh["ranks"]:
            for stop in rank.get("stops", ()):
                where = (stop["file"], stop["line"], stop["name"])
                text = place(*where) if place is not None else f"line {stop['line']} in {stop['name']}"
                mark = "*" if stop["shown"] else " "
                lines.append(f"{mark} mesh {mesh['name']} rank {rank['rank']}: {text} ({stop['reason']})")
    return "\n".join(lines) or "No rank is stopped."
