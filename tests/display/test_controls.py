"""What others have written steers no terminal."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.display.tables import TableView, only_colours, table_text, without_controls
from tests.cli.conftest import Cli, run

__all__ = ["run"]

#: A title, a cleared screen, a colour of C1, a link, a line that is written over, and a sequence that does not end.
HOSTILE = "\x1b]0;title\x07a\x1b[2J\x9b31mb\x1b]8;;http://x\x1b\\c\rd\x1bP\x00\x08e\x1b["
SHOWN = "a31mbcde["


def test_controls_are_left_out() -> None:
    assert without_controls(HOSTILE) == only_colours(HOSTILE) == SHOWN
    assert without_controls("\x1b[1;31mred\x1b[0m\tand\nline") == "red\tand\nline"
    assert only_colours("\x1b[1;31mred\x1b[0m\tand\nline") == "\x1b[1;31mred\x1b[0m\tand\nline"
    assert only_colours(f"\x1b[{'1;' * 5000}m") == ""


@given(st.text(st.sampled_from("\x1b[]0;m\x07\\\x9bPa\r\n\t2J")) | st.text())
def test_nothing_is_left_that_steers(text: str) -> None:
    for shown in (without_controls(text), re.sub(r"\x1b\[[0-9;]{0,64}m", "", only_colours(text))):
        assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in shown)


def test_cells_of_tables_steer_nothing() -> None:
    view = TableView([HOSTILE, "n"], [[HOSTILE, "1"]], caption=HOSTILE, note=HOSTILE)
    assert table_text(view) == f"{SHOWN}\n{SHOWN}  n\n{SHOWN}  1\n{SHOWN}"


def test_errors_and_output_steer_nothing(run: Cli) -> None:
    (run.folder / "cluster.py").write_text(
        f"from monarch_kernel.errors import LaunchError\nraise LaunchError({HOSTILE!r})\n"
    )
    said = run("apply", "cluster.py")
    assert said.returncode == 1 and SHOWN in said.stderr
    made = json.loads(run("up", "process", "--hosts", "2", "--json").stdout)
    shown = run("exec", "--fold", "--", "printf", HOSTILE.replace("\x00", "").replace("\\", "\\\\") + "\n")
    assert shown.stdout == f"== 0-1 ==\n{SHOWN}\n"
    run("kill", made["job"])


@pytest.mark.parametrize("text", ["", "plain", "日本 e\u0301 \U0001f600", "a\tb\nc"])
def test_other_text_is_as_it_was(text: str) -> None:
    assert without_controls(text) == only_colours(text) == text
