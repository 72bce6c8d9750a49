"""What ranks put out, in a script's own stdout: whole lines, however they come, and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.runtime.actor.output import LONGEST_LINE, LoggingOption, RankOutput, ScriptTerminal

PLAIN = LoggingOption()
PIECE = "x" * (LONGEST_LINE // 4)


def out(text: str, rank: int = 0, stream: str = "stdout") -> RankOutput:
    return RankOutput("m", f"p.{rank}", rank, {}, "host", 1, stream, "", "text", text)


@pytest.fixture
def terminal() -> ScriptTerminal:
    system: Any = None  # only lines that are held for aggregation need a clock
    return ScriptTerminal(system)


def test_lines_of_ranks_are_not_mixed(terminal: ScriptTerminal, capsys: pytest.CaptureFixture[str]) -> None:
    for output in (out("one "), out("two\n", 1), out("line\nrest"), out("err", 1, "stderr")):
        terminal.show(output, PLAIN)
    terminal.close()
    assert capsys.readouterr() == ("two\none line\nrest\n", "err\n")


def test_a_line_of_megabytes_is_not_kept_until_its_end(
    terminal: ScriptTerminal, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(20):
        terminal.show(out(PIECE), PLAIN)
        assert sum(line.size for line in terminal._partial.values()) <= LONGEST_LINE
    assert len(capsys.readouterr().out) >= 3 * LONGEST_LINE
    terminal.show(out("end\nnext\n"), PLAIN)
    assert capsys.readouterr().out == "end\nnext\n"


def test_such_a_line_arrives_as_it_was_written(terminal: ScriptTerminal, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(9):
        terminal.show(out(PIECE), LoggingOption(prefix=True))
    terminal.show(out("\n"), LoggingOption(prefix=True))
    assert capsys.readouterr().out == "[0] " + 9 * PIECE + "\n"


def test_another_ranks_line_in_the_middle_of_it_stands_alone(
    terminal: ScriptTerminal, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        terminal.show(out(PIECE), PLAIN)
    terminal.show(out("other\n", 1), PLAIN)
    terminal.show(out("end\n"), PLAIN)
    assert [len(line) for line in capsys.readouterr().out.split("\n")] == [5 * len(PIECE), 5, 3, 0]


@pytest.mark.parametrize("last", ["", "y"])
def test_the_end_of_a_rank_ends_its_line(
    terminal: ScriptTerminal, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    for _ in range(5):
        terminal.show(out(PIECE), PLAIN)
    terminal.show(out(last), PLAIN)
    terminal.end("p.0")
    terminal.end("p.0")
    terminal.show(out("other\n", 1), PLAIN)
    assert capsys.readouterr().out == 5 * PIECE + last + "\nother\n"
