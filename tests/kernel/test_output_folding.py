"""The folding of many ranks' output: pure events in, sections out."""

from __future__ import annotations

import io
import random

import pytest

from monarch_kernel.kernel.output.cell_output import Folding
from monarch_kernel.kernel.output.publisher import Block, RichView, Source, TextView
from monarch_kernel.kernel.output.rank_lines import Limits


def source(rank: int, mesh: str = "m") -> Source:
    return Source(mesh, rank)


class Screen:
    """What a front end shows that applies every update."""

    def __init__(self, folding: Folding) -> None:
        self.folding = folding
        self.sections: dict[int, TextView | RichView] = {}
        self.updates = 0

    def refresh(self, progress: str = "") -> Screen:
        for view in self.folding.take(progress):
            self.sections[view.id] = view
            self.updates += 1
        return self

    def lines(self) -> list[tuple[str, str]]:
        """(ranks, line) pairs in the order shown."""
        found: list[tuple[str, str]] = []
        for _, view in sorted(self.sections.items()):
            if isinstance(view, RichView):
                if view.data:
                    found.append((ranks(view.sources), "<" + ",".join(sorted(view.data)) + ">"))
                continue
            for block in view.blocks:
                found.extend((ranks(block.sources), line) for line in block.lines)
            if view.progress:
                found.append(("", view.progress))
        return found

    def of_rank(self, rank: int) -> list[str]:
        """What one rank is shown to have written."""
        found: list[str] = []
        for _, view in sorted(self.sections.items()):
            if isinstance(view, TextView):
                for block in view.blocks:
                    if source(rank) in block.sources and block.stream not in ("label", "notice"):
                        found.extend(block.lines)
        return found


def ranks(sources: frozenset[Source]) -> str:
    return ",".join(str(each.rank) for each in sorted(sources))


def shown(folding: Folding, progress: str = "") -> list[tuple[str, str]]:
    return Screen(folding).refresh(progress).lines()


def test_identical_lines_are_shown_once_with_all_ranks() -> None:
    folding = Folding()
    for rank in (2, 0, 3, 1):
        folding.text(source(rank), "stdout", "hello\nworld\n")
    assert shown(folding) == [("0,1,2,3", "hello"), ("0,1,2,3", "world")]


def test_lines_in_common_fold_again_after_lines_that_differ() -> None:
    folding = Folding()
    for rank in range(3):
        folding.text(source(rank), "stdout", f"start\nloss {rank}\ndone\n")
    assert shown(folding) == [
        ("0,1,2", "start"),
        ("0", "loss 0"),
        ("1", "loss 1"),
        ("2", "loss 2"),
        ("0,1,2", "done"),
    ]


def test_ranks_at_different_speeds_fold() -> None:
    folding = Folding()
    for step in range(50):
        folding.text(source(0), "stdout", f"step {step}\n")
    for step in range(50):
        folding.text(source(1), "stdout", f"step {step}\n")
    assert shown(folding) == [("0,1", f"step {step}") for step in range(50)]


def test_repeated_lines_keep_their_count_for_each_rank() -> None:
    folding = Folding()
    folding.text(source(0), "stdout", "tick\ntick\ntick\n")
    folding.text(source(1), "stdout", "tick\n")
    screen = Screen(folding).refresh()
    assert screen.of_rank(0) == ["tick"] * 3
    assert screen.of_rank(1) == ["tick"]


def test_each_ranks_own_order_is_kept_whatever_arrives_when() -> None:
    shuffle = random.Random(7)
    for _ in range(50):
        folding = Folding()
        screen = Screen(folding)
        written: dict[int, list[str]] = {rank: [] for rank in range(4)}
        for _ in range(200):
            rank, line = shuffle.randrange(4), shuffle.choice("abcde")
            folding.text(source(rank), "stdout", line + "\n")
            written[rank].append(line)
            if shuffle.random() < 0.1:
                screen.refresh()
        screen.refresh()
        for rank, lines in written.items():
            assert screen.of_rank(rank) == lines


def test_only_sections_that_changed_are_repeated() -> None:
    folding = Folding()
    for line in range(1000):
        folding.text(source(0), "stdout", f"{line}\n")
    screen = Screen(folding).refresh()
    assert screen.updates == 10
    folding.text(source(0), "stdout", "last\n")
    assert len(folding.take()) == 1
    assert folding.take() == []
    folding.text(source(1), "stdout", "0\n")
    (view,) = folding.take()
    assert isinstance(view, TextView)
    assert view.id == 0
    assert view.blocks[0] == Block(frozenset({source(0), source(1)}), "stdout", ("0",))


def test_unfinished_lines_show_at_the_end_and_finish_in_place() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.text(source(0), "stdout", "do")
    folding.text(source(1), "stdout", "do")
    assert screen.refresh().lines() == [("0,1", "do")]
    folding.text(source(0), "stdout", "ne\n")
    assert screen.refresh().lines() == [("0", "done"), ("1", "do")]
    folding.text(source(1), "stdout", "ne\n")
    assert screen.refresh().lines() == [("0,1", "done")]


def test_carriage_returns_overwrite_as_in_a_terminal() -> None:
    folding = Folding()
    screen = Screen(folding)
    for percent in range(0, 101, 10):
        folding.text(source(0), "stderr", f"\r{percent}% done")
        screen.refresh()
    assert screen.lines() == [("0", "100% done")]
    folding.text(source(0), "stderr", "\n")
    assert screen.refresh().lines() == [("0", "100% done")]
    folding.text(source(0), "stdout", "abc\rX\r\nnext\n")
    assert screen.refresh().of_rank(0) == ["100% done", "Xbc", "next"]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("leave", [False, True])
def test_nested_progress_bars_stay_two_lines(leave: bool, size: int) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    written = io.StringIO()
    inside = ""
    for _ in tqdm(range(2), desc="epochs", file=written, ascii=True, mininterval=0):
        for batch in tqdm(range(3), desc="batches", file=written, ascii=True, mininterval=0, leave=leave):
            if not inside and batch == 2:
                inside = written.getvalue()
    folding = Folding()
    screen = Screen(folding)
    for start in range(0, len(inside), size):
        folding.text(source(0), "stderr", inside[start : start + size])
        folding.text(source(1), "stderr", inside[start : start + size])
    shown = screen.refresh().lines()
    assert [(ranks, line.partition(":")[0]) for ranks, line in shown] == [("0,1", "epochs"), ("0,1", "batches")]
    assert "67%" in shown[1][1] and "\x1b" not in shown[1][1]
    for rank in (0, 1):
        folding.text(source(rank), "stdout", "a line of the cell\n")
        folding.text(source(rank), "stderr", written.getvalue()[len(inside) :])
        folding.text(source(rank), "stdout", "done\n")
    folding.finish()
    shown = screen.refresh().lines()
    assert {ranks for ranks, _ in shown} == {"0,1"}
    bars = ["batches", "batches"] if leave else []
    assert [line.partition(":")[0] for _, line in shown] == ["a line of the cell", *bars, "epochs", "done"]
    assert "100%" in shown[-2][1]


def test_cursor_movements_colours_and_erasures() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.text(source(0), "stdout", "one\rtwo\nthree\nfour\x1b[2A\rTWO\x1b[")
    assert screen.refresh().of_rank(0) == ["TWO", "three", "four"]
    folding.text(source(0), "stdout", "1B\r\x1b[2K\x1b[31mred\x1b[0m end\x08\x08!\x1b[Jx\n")
    assert screen.refresh().of_rank(0) == ["TWO", "\x1b[31mred\x1b[0m e!x"]
    folding.text(source(0), "stdout", "".join(f"{number}\n" for number in range(200)))
    folding.finish()
    assert screen.refresh().of_rank(0) == ["TWO", "\x1b[31mred\x1b[0m e!x", *map(str, range(200))]
    folding.text(source(1), "stdout", "\x1b[99999999B\x1b[9999999999Cx\x1b[9999999A\x1b[?25l" + "\x1b[3" * 100)
    folding.finish()
    assert len(screen.refresh().of_rank(1)) < 60


def test_a_line_without_end_is_bounded() -> None:
    folding = Folding(Limits(bytes=100_000))
    for _ in range(300):
        folding.text(source(0), "stdout", "x" * 1000)
    folding.finish()
    assert sum(len(line) for _, line in shown(folding)) < 200_000


def test_finish_keeps_an_unfinished_line() -> None:
    folding = Folding()
    folding.text(source(0), "stdout", "no newline")
    folding.finish(source(0))
    folding.text(source(0), "stdout", "later\n")
    assert shown(folding) == [("0", "no newline"), ("0", "later")]


def test_output_beyond_the_limit_is_cut_with_a_notice_and_its_tail() -> None:
    folding = Folding(Limits(lines=10, tail=2))
    for rank in (0, 1):
        for line in range(100):
            folding.text(source(rank), "stdout", f"line {line}\n")
    folding.text(source(2), "stdout", "line 0\n")
    lines = shown(folding)
    assert lines[0] == ("0,1,2", "line 0")
    assert lines[9] == ("0,1", "line 9")
    assert lines[10][0] == "0,1"
    assert "90 lines" in lines[10][1]
    assert "%mesh logs -r 0,1" in lines[10][1]
    assert lines[11:] == [("0,1", "line 98"), ("0,1", "line 99")]


def test_what_is_cut_is_counted_the_same_however_it_comes() -> None:
    rng = random.Random(5)
    lines = [f"line {k} " + "x" * rng.randrange(30) for k in range(500)]
    lines[400] = "progress 1\rprogress 2"
    text = "\n".join(lines) + "\nunfinished"
    for size in (1, 7, 100, 1000, len(text)):
        folding = Folding(Limits(lines=10, tail=3))
        for start in range(0, len(text), size):
            folding.text(source(0), "stdout", text[start : start + size])
        shown_lines = [line for _, line in shown(folding)]
        cut = sum(map(len, lines[10:])) + 490 - len("progress 1\r")
        assert shown_lines[:10] == lines[:10]
        assert any(f"490 lines ({cut / 1000:.0f} kB) not shown" in line for line in shown_lines), size
        assert {*shown_lines[10:]} >= {*lines[-3:], "unfinished"}, size


def test_bytes_are_limited_too() -> None:
    folding = Folding(Limits(bytes=1000))
    for _ in range(20):
        folding.text(source(0), "stdout", "x" * 99 + "\n")
    assert "10 lines (1 kB) not shown" in shown(folding)[10][1]


def test_stdout_and_stderr_do_not_fold_with_each_other() -> None:
    folding = Folding()
    folding.text(source(0), "stdout", "x\n")
    folding.text(source(1), "stderr", "x\n")
    (view,) = folding.take()
    assert isinstance(view, TextView)
    assert [(block.stream, ranks(block.sources)) for block in view.blocks] == [("stdout", "0"), ("stderr", "1")]


def test_plain_results_are_text_and_fold() -> None:
    folding = Folding()
    for rank in range(2):
        folding.display(source(rank), {"text/plain": "[1,\n 2]"}, result=True)
    (view,) = folding.take()
    assert isinstance(view, TextView)
    assert view.blocks == (Block(frozenset({source(0), source(1)}), "result", ("[1,", " 2]")),)


def test_rich_results_keep_their_place_and_fold() -> None:
    folding = Folding()
    screen = Screen(folding)
    html = {"text/html": "<b>1</b>", "text/plain": "1"}
    for rank in range(3):
        folding.text(source(rank), "stdout", "before\n")
        folding.display(source(rank), html if rank < 2 else {"image/png": "AAAA"})
        folding.text(source(rank), "stdout", "after\n")
    lines = screen.refresh().lines()
    assert ("0,1", "<text/html,text/plain>") in lines
    assert ("2", "<image/png>") in lines
    assert lines[0] == ("0,1,2", "before")
    # A label stands before each rich result, and says the same as the result does.
    at = lines.index(("0,1", "<text/html,text/plain>"))
    assert lines[at - 1] == ("0,1", "")
    for rank in range(3):
        assert screen.of_rank(rank) == ["before", "after"]


def test_updating_a_display_leaves_the_others_as_they_are() -> None:
    folding = Folding()
    screen = Screen(folding)
    for rank in range(3):
        folding.display(source(rank), {"text/html": "0%"}, display_id=f"id{rank}")
    assert len(screen.refresh().sections) == 2
    folding.display(source(0), {"text/html": "50%"}, display_id="id0", update=True)
    shown_now = [line for line in screen.refresh().lines() if line[1]]
    assert shown_now == [("1,2", "<text/html>"), ("0", "<text/html>")]
    for rank in (1, 2):
        folding.display(source(rank), {"text/html": "50%"}, display_id=f"id{rank}", update=True)
    assert [line for line in screen.refresh().lines() if line[1]] == [("0,1,2", "<text/html>")]
    assert any(isinstance(view, RichView) and view.data == {"text/html": "50%"} for view in screen.sections.values())
    folding.display(source(1), {"text/html": "nothing shown"}, display_id="unknown", update=True)
    assert folding.take() == []


def test_updating_ones_own_display_happens_in_place() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.display(source(0), {"text/html": "0"}, display_id="a")
    for percent in range(1, 50):
        folding.display(source(0), {"text/html": str(percent)}, display_id="a", update=True)
        screen.refresh()
    assert len(screen.sections) == 2


def test_clear_removes_a_ranks_output_only() -> None:
    folding = Folding()
    screen = Screen(folding)
    for rank in range(2):
        folding.text(source(rank), "stdout", "x\n")
        folding.display(source(rank), {"text/html": "y"})
    screen.refresh()
    folding.clear(source(0))
    assert [line for line in screen.refresh().lines() if line[0]] == [("1", "x"), ("1", ""), ("1", "<text/html>")]
    folding.clear(source(1), wait=True)
    assert ("1", "x") in screen.refresh().lines()
    folding.text(source(1), "stdout", "new\n")
    assert [line for line in screen.refresh().lines() if line[0]] == [("1", "new")]


def test_what_is_closed_makes_room_for_what_comes() -> None:
    folding = Folding(Limits(rich=5))
    screen = Screen(folding)
    for rank in range(3):
        folding.display(source(rank), {"text/html": f"outer {rank}"}, display_id="outer")
    chance = random.Random(1)
    left = dict.fromkeys(range(3), 30)
    opened: dict[int, str] = {}
    while left:
        rank = chance.choice(list(left))
        if rank in opened:
            folding.display(source(rank), {}, display_id=opened.pop(rank), update=True)
            left[rank] -= 1
            if not left[rank]:
                del left[rank]
        else:
            opened[rank] = f"{rank}.{left[rank]}"
            folding.display(source(rank), {"text/html": opened[rank]}, display_id=opened[rank])
        screen.refresh()
    assert [line for line in screen.lines() if line[1]] == [(str(rank), "<text/html>") for rank in range(3)]
    assert len(screen.sections) <= 12  # a label and a bar for each rank, twice

    # The same where ranks draw each frame anew.
    folding = Folding(Limits(rich=5))
    screen = Screen(folding)
    for frame in range(30):
        for rank in chance.sample(range(3), 3):
            folding.clear(source(rank), wait=True)
            folding.text(source(rank), "stdout", f"frame {frame}\n")
            folding.display(source(rank), {"text/html": f"{frame} {rank}"})
            screen.refresh()
    assert [line for line in screen.lines() if line[1]] == [
        ("0,1,2", "frame 29"),
        *[(str(rank), "<text/html>") for rank in range(3)],
    ]
    assert len(screen.sections) < 16


def test_clear_gives_the_limit_back() -> None:
    folding = Folding(Limits(lines=5))
    for frame in range(10):
        folding.clear(source(0))
        folding.text(source(0), "stdout", f"frame {frame}\n" * 4)
    assert shown(folding) == [("0", "frame 9")] * 4


def test_progress_stands_last_and_vanishes() -> None:
    folding = Folding()
    screen = Screen(folding)
    assert screen.refresh("1 of 2 done").lines() == [("", "1 of 2 done")]
    folding.text(source(0), "stdout", "x\n")
    assert screen.refresh("1 of 2 done").lines() == [("0", "x"), ("", "1 of 2 done")]
    folding.display(source(0), {"text/html": "y"})
    assert screen.refresh("2 of 2 done").lines()[-1] == ("", "2 of 2 done")
    assert [line for line in screen.lines() if line[0] == ""] == [("", "2 of 2 done")]
    assert ("", "2 of 2 done") not in screen.refresh("").lines()
    assert folding.take("") == []


def test_empty() -> None:
    folding = Folding()
    assert folding.empty
    assert folding.take("") == []
    folding.text(source(0), "stdout", "")
    assert folding.empty
    folding.text(source(0), "stdout", "x")
    assert not folding.empty


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def blocks(found: list[Block]) -> list[tuple[str, tuple[str, ...]]]:
    return [(ranks(block.sources), block.lines) for block in found]


def test_rows_settle_when_all_ranks_wrote_them() -> None:
    folding = Folding(clock=Clock())
    expected = [source(rank) for rank in range(2)]
    folding.text(source(0), "stdout", "a\nb\n")
    assert folding.take_settled(expected) == []
    folding.text(source(1), "stdout", "a\n")
    assert blocks(folding.take_settled(expected)) == [("0,1", ("a",))]
    assert blocks(folding.take_settled(expected, hold=0)) == [("0", ("b",))]
    folding.text(source(1), "stdout", "b\n")
    assert blocks(folding.take_settled(expected, hold=0)) == [("1", ("b",))]


def test_rows_settle_with_age() -> None:
    clock = Clock()
    folding = Folding(clock=clock)
    expected = [source(rank) for rank in range(2)]
    folding.text(source(0), "stdout", "a\n")
    assert folding.take_settled(expected, hold=0.3) == []
    clock.now = 0.3
    assert blocks(folding.take_settled(expected, hold=0.3)) == [("0", ("a",))]


def test_settled_rich_results_are_their_text() -> None:
    folding = Folding(clock=Clock())
    folding.display(source(0), {"text/html": "<b>", "text/plain": "bold"})
    assert blocks(folding.take_settled(hold=0)) == [("0", ("bold",))]


def _figure(rank: int, name: str) -> dict[str, str]:
    return {"image/png": f"{name}{rank}"}


def _figures(screen: Screen) -> list[str]:
    views = [view for _, view in sorted(screen.refresh().sections.items())]
    return [view.data["image/png"] for view in views if isinstance(view, RichView) and view.data]


def test_figures_stand_in_rank_order_whoever_is_first() -> None:
    folding = Folding()
    screen = Screen(folding)
    for rank in (3, 1, 0, 2):
        folding.text(source(rank), "stdout", f"loss of {rank}\n")
        folding.display(source(rank), _figure(rank, "a"))
    assert _figures(screen) == ["a0", "a1", "a2", "a3"]
    assert [line for who, line in screen.refresh().lines() if who == "0"] == ["loss of 0", "", "<image/png>"]
    for rank in (2, 0):
        folding.display(source(rank), _figure(rank, "b"))
    assert _figures(screen) == ["a0", "a1", "a2", "a3", "b0", "b2"]


def test_a_figure_never_passes_what_its_rank_wrote() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.display(source(2), _figure(2, "a"))
    folding.text(source(2), "stdout", "after it\n")
    folding.display(source(0), _figure(0, "a"))
    assert [line for who, line in screen.refresh().lines() if who == "2"] == ["", "<image/png>", "after it"]
    assert _figures(screen) == ["a2", "a0"]


def test_every_rank_keeps_its_order_of_lines_and_figures() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        scripts = {
            rank: [
                chance.choice(["line", "figure", "common", "shared figure", "bar", "close", "clear"]) for _ in range(9)
            ]
            for rank in range(4)
        }
        folding = Folding()
        screen = Screen(folding)
        wrote: dict[int, list[str]] = {rank: [] for rank in scripts}
        bars: dict[int, list[str]] = {rank: [] for rank in scripts}
        count = 0
        while any(scripts.values()):
            rank = chance.choice([rank for rank, left in scripts.items() if left])
            kind = scripts[rank].pop(0)
            count += 1
            what = f"{9 - len(scripts[rank])}" if kind == "common" or "shared" in kind else f"{rank}.{count}"
            if kind == "close":
                if bars[rank]:
                    wrote[rank].remove(ended := bars[rank].pop(0))
                    folding.display(source(rank), {}, display_id=ended, update=True)
                continue
            if kind == "clear":
                wrote[rank].clear()
                bars[rank].clear()
                folding.clear(source(rank))
                continue
            wrote[rank].append(what)
            if kind == "bar":
                bars[rank].append(what)
                folding.display(source(rank), {"image/png": what}, display_id=what)
            elif "figure" in kind:
                folding.display(source(rank), {"image/png": what})
            else:
                folding.text(source(rank), "stdout", what + "\n")
            if chance.random() < 0.3:
                screen.refresh()
        screen.refresh()
        for rank, said in wrote.items():
            found: list[str] = []
            for _, view in sorted(screen.sections.items()):
                if isinstance(view, RichView):
                    found += [view.data["image/png"] for each in view.sources if each == source(rank)]
                    continue
                for block in view.blocks:
                    if source(rank) in block.sources and block.stream != "label":
                        found += block.lines
            assert found == said, f"seed {seed}, rank {rank}"


def test_after_a_division_nothing_joins_what_stands_above() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.text(source(0), "stdout", "same\nhalf")
    folding.divide()
    folding.text(source(1), "stdout", "same\n")
    folding.text(source(0), "stdout", "rest\n")
    assert screen.refresh().lines() == [("0", "same"), ("0", "half"), ("0", "rest"), ("1", "same")]
    assert [isinstance(view, TextView) and len(view.blocks) for _, view in sorted(screen.sections.items())] == [1, 2]


def test_figures_trade_places_below_a_division_only() -> None:
    folding = Folding()
    screen = Screen(folding)
    folding.display(source(2), _figure(2, "a"))
    folding.divide()
    for rank in (1, 0):
        folding.display(source(rank), _figure(rank, "b"))
    assert _figures(screen) == ["a2", "b0", "b1"]
