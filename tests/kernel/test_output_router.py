"""Events of ranks, filed with their cells and shown by a publisher that only keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from monarch_kernel.kernel.output.cell_output import CellOutput, OutputRouter
from monarch_kernel.kernel.output.publisher import Source
from monarch_kernel.kernel.output.rank_lines import Limits
from tests.waiting import patience


@dataclass
class Kept:
    """A publisher that keeps what it is given."""

    live: bool = True
    shown: dict[int, dict[str, Any]] = field(default_factory=dict)
    written: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    new: threading.Event = field(default_factory=threading.Event)

    def show(self, key: int, data: dict[str, Any], metadata: dict[str, Any], *, update: bool) -> None:
        assert update == (key in self.shown)
        self.shown[key] = data
        self.new.set()

    def write(self, stream: str, text: str) -> None:
        self.written.append((stream, text))
        self.new.set()

    def progress(self, line: str) -> None:
        self.lines.append(line)

    @property
    def text(self) -> str:
        texts = [data.get("text/plain", "") for _, data in sorted(self.shown.items())]
        return "\n".join(text for text in texts if text)


@dataclass
class Event:
    cell: str
    kind: str = "text"
    data: Any = None
    rank: int = 0
    stream: str = "stdout"
    mesh: str = "m"
    host: str = "h"
    pid: int = 7


class Stage:
    def __init__(self) -> None:
        self.current = "cell-1"
        self.outputs: dict[str, CellOutput] = {}
        self.kept: dict[str, Kept] = {}
        self.router = OutputRouter(self.fallback)

    def open(self, cell: str, **options: Any) -> CellOutput:
        kept = self.kept[cell] = Kept(live=options.pop("live", True))
        return self.router.open(cell, CellOutput(kept, **options))

    def fallback(self, cell: str) -> tuple[str, CellOutput] | None:
        if self.current not in self.outputs:
            self.kept[self.current] = Kept()
            self.outputs[self.current] = CellOutput(self.kept[self.current])
        return self.current, self.outputs[self.current]


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.router.close()


def test_output_goes_to_its_cell_whatever_runs_meanwhile(stage: Stage) -> None:
    one, two = stage.open("a"), stage.open("b")
    stage.router.on_event(Event("a", data="from a\n"))
    stage.router.on_event(Event("b", data="from b\n"))
    stage.router.on_event(Event("a", data="more of a\n"))
    one.show(final=True)
    two.show(final=True)
    assert stage.kept["a"].text == "[0] from a\n    more of a"
    assert stage.kept["b"].text == "[0] from b"
    stage.router.on_event(Event("a", data="after the end\n"))
    one.show(final=True)
    assert "after the end" in stage.kept["a"].text


def test_output_of_no_known_cell_goes_to_the_current_one(stage: Stage) -> None:
    stage.router.on_event(Event("", data="x\n"))
    stage.current = "cell-2"
    stage.router.on_event(Event("unknown", data="y\n"))
    for output in stage.outputs.values():
        output.show(final=True)
    assert stage.kept["cell-1"].text == "[0] x"
    assert stage.kept["cell-2"].text == "[0] y"


def test_the_routers_thread_shows_what_is_new(stage: Stage) -> None:
    stage.open("a")
    kept = stage.kept["a"]
    for text in ("one\n", "two\n"):
        kept.new.clear()
        stage.router.on_event(Event("a", data=text))
        assert kept.new.wait(patience(10))
    assert kept.text == "[0] one\n    two"


def test_what_is_left_is_shown_when_the_router_closes(stage: Stage) -> None:
    stage.open("a")
    for line in range(100):
        stage.router.on_event(Event("a", data=f"{line}\n"))
    stage.router.close()
    assert stage.kept["a"].text.endswith("99")


def test_missing_are_those_whose_end_has_not_come(stage: Stage) -> None:
    output = stage.open("a")
    both = [Source("m", 0), Source("m", 1)]
    for rank in range(2):
        stage.router.on_event(Event("a", "begin", rank=rank))
    assert output.missing(both) == both
    stage.router.on_event(Event("a", "end", rank=0))
    assert output.missing(both) == both
    stage.router.on_event(Event("a", "end", rank=0, stream="stderr"))
    assert output.missing(both) == [Source("m", 1)]
    assert output.has_begun(Source("m", 1))
    assert stage.router.whereabouts(Source("m", 1)) == ("h", 7)
    stage.router.on_event(Event("gone", "end"))
    assert "cell-1" not in stage.kept


def test_every_kind_of_event(stage: Stage) -> None:
    output = stage.open("a")
    bundle = {"data": {"text/html": "<b>", "text/plain": "b"}, "metadata": {"x": 1}}
    stage.router.on_event(Event("a", "display", bundle))
    stage.router.on_event(Event("a", "result", {"data": {"text/plain": "42"}, "metadata": {}}))
    stage.router.on_event(Event("a", "flush", "token"))
    output.show(final=True)
    assert {"text/html": "<b>", "text/plain": "b"} in stage.kept["a"].shown.values()
    assert "[0] 42" in stage.kept["a"].text
    stage.router.on_event(Event("a", "clear", {"wait": False}))
    output.show(final=True)
    assert stage.kept["a"].text == ""


def test_meshes_are_named_once_several_write(stage: Stage) -> None:
    output = stage.open("a")
    stage.router.on_event(Event("a", data="x\n"))
    output.show(final=True)
    assert stage.kept["a"].text == "[0] x"
    stage.router.on_event(Event("a", data="y\n", mesh="w"))
    output.show(final=True)
    assert stage.kept["a"].text == "m[0] x\nw[0] y"


def test_progress_is_shown_and_goes_away(stage: Stage) -> None:
    output = stage.open("a")
    assert output.progress("1 of 2 done")
    assert not output.progress("1 of 2 done")
    output.show()
    assert stage.kept["a"].text == "1 of 2 done"
    output.progress("")
    output.show(final=True)
    assert stage.kept["a"].text == ""


def test_raw_lines_come_one_by_one_with_their_rank(stage: Stage) -> None:
    output = stage.open("a", raw=True)
    stage.router.on_event(Event("a", data="x\npart"))
    stage.router.on_event(Event("a", data="x\n", rank=1))
    stage.router.on_event(Event("a", data="err\n", rank=1, stream="stderr"))
    stage.router.on_event(Event("a", data="ial\nlast"))
    output.show(final=True)
    assert "".join(text for _, text in stage.kept["a"].written) == ("[0] x\n[1] x\n[1] err\n[0] partial\n[0] last\n")


def test_raw_output_is_bounded(stage: Stage) -> None:
    output = stage.open("a", raw=True, limits=Limits(lines=3))
    stage.router.on_event(Event("a", data="x\n" * 10))
    output.show(final=True)
    text = "".join(text for _, text in stage.kept["a"].written)
    assert text.count("[0] x\n") == 3
    assert text.count("%mesh logs -r 0") == 1


def test_a_raw_line_without_end_is_shown_in_pieces(stage: Stage) -> None:
    output = stage.open("a", raw=True, limits=Limits(bytes=100_000))
    for _ in range(10):
        stage.router.on_event(Event("a", data="x" * 30_000))
    output.show(final=False)
    text = "".join(text for _, text in stage.kept["a"].written)
    assert 64_000 < text.count("x") <= 100_000, "not kept until the end of the line comes"
    assert text.count("%mesh logs -r 0") == 1


def test_raw_rich_results_keep_their_place(stage: Stage) -> None:
    output = stage.open("a", raw=True)
    stage.router.on_event(Event("a", data="x\n"))
    stage.router.on_event(Event("a", "display", {"data": {"text/html": "h", "text/plain": "t"}}))
    output.show(final=True)
    assert stage.kept["a"].written == [("stdout", "[0] x\n[0] t\n")]
    assert list(stage.kept["a"].shown.values()) == [{"text/html": "h", "text/plain": "t"}]


def test_a_terminal_gets_lines_once_they_are_settled(stage: Stage) -> None:
    expected = [Source("m", 0), Source("m", 1)]
    output = stage.open("a", live=False, expected=expected, limits=Limits(lines=3))
    kept = stage.kept["a"]
    stage.router.on_event(Event("a", data="x\n"))
    output.feed(Source("m", 1), "text", "stdout", "x\n")
    output.show()
    assert kept.written == [("stdout", "[0-1] x\n")]
    output.feed(Source("m", 0), "text", "stdout", "y\n" * 5)
    output.show(final=True)
    assert kept.written[1][1].startswith("[0] y\n    y\n[0] … 3 lines")
    output.show(final=True)
    assert len(kept.written) == 2
