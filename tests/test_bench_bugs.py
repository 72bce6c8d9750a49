"""The comparison of debuggers: its own logic, and one real bug with this debugger."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.bugs.__main__ import arguments, cell, replaced, session
from bench.bugs.cases import BUGS, Session, prepare
from bench.bugs.ours import singled_out
from tests.conftest import needs


@pytest.mark.parametrize("bug", BUGS)
def test_a_program_has_its_bug_on_a_seeded_rank(bug: str, tmp_path: Path) -> None:
    cases = [prepare(bug, tmp_path / str(n), 8, seed=n // 2) for n in range(4)]
    assert [(each.guilty, each.step) for each in cases[::2]] == [(each.guilty, each.step) for each in cases[1::2]]
    for case in cases:
        assert f"GUILTY = {case.guilty}\n" in (case.folder / "seeded.py").read_text()
        assert case.lines
        assert "# guilty" not in case.program.read_text()


def test_lines_move_with_an_edit(tmp_path: Path) -> None:
    case = prepare("loader", tmp_path / "case", 4, seed=1)
    before = case.program.read_text().splitlines()
    inside, inner, loop = case.lines
    case.edit("x, y =", "if step == 3:", "    breakpoint()")
    after = case.program.read_text().splitlines()
    assert after[loop + 1] == before[loop - 1]
    assert after[loop - 1 : loop + 1] == ["        if step == 3:", "            breakpoint()"]
    assert sorted(case.lines) == [inside, inner, loop, loop + 1, loop + 2]


def test_an_answer_has_to_single_out_the_rank_and_hold_the_line(tmp_path: Path) -> None:
    case = prepare("loader", tmp_path / "case", 8, seed=1)
    line, other = case.lines[0], (case.guilty + 1) % 8
    assert singled_out(case, f"ranks 0-7 wait; rank {case.guilty} stands at train.py:{line} in fetch")
    assert not singled_out(case, f"ranks 0-7 wait; rank {other} stands at train.py:{line} in fetch")
    assert not singled_out(case, f"rank {case.guilty} has not entered it: it stands at train.py:1{line}")
    assert not singled_out(case, f"ranks {case.guilty}-{case.guilty + 1} stand at train.py:{line}")


def test_the_table_has_the_worst_finding(tmp_path: Path) -> None:
    case = prepare("early", tmp_path / "case", 4, seed=1)
    good, bad = (Session("x", case, [("list", "a\n\nb")], 1.0, found) for found in ("named", "by eye"))
    assert cell([]) == "–"
    assert cell([good]) == "named: 1 typed, 1.0 s, 2 lines"
    assert cell([good, bad]) == "by eye: 1 typed, 1.0 s, 2 lines"
    assert cell([good, bad, Session("x", case)]) == "not found (1 typed)"


def test_a_page_without_marks_is_refused() -> None:
    assert replaced("a <b> old </b> c", "<b>", "</b>", "new") == "a <b>\n\nnew\n\n</b> c"
    with pytest.raises(ValueError, match="no place"):
        replaced("a", "<b>", "</b>", "new")


@pytest.mark.parametrize("given", [["heisenbug"], ["--tools", "ours,heisenbug"]])
def test_an_unknown_word_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
    assert "heisenbug: not one of " in capsys.readouterr().err


def test_tools_come_in_the_order_of_the_table() -> None:
    assert arguments(["--tools", "py-spy,ours"]).tools == ["ours", "py-spy"]
    assert len(arguments([]).tools) == 8


def test_the_debugger_names_the_rank_and_the_line() -> None:
    needs("torch")
    found = session("ours", "loader", 2, 2, Path(sys.executable))
    assert found is not None
    assert (found.found, found.commands) == ("named", ["%mesh hang"]), found.transcript(40)
