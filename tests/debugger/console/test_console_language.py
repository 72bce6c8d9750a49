"""The command language, on ranks that exist in memory only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.debugger.commands.console import Console
from monarch_kernel.debugger.commands.grammar import (
    BREAK_OPTIONS,
    COMMANDS,
    CommandError,
    Spot,
    help_of,
    read_cast,
    read_command,
    read_spot,
    split_options,
)
from monarch_kernel.debugger.controller.breakpoints import Countdown
from monarch_kernel.debugger.frontend import use_frontend
from tests.debugger.console.notebook import Notebook
from tests.debugger.memory import MemoryDebugger, Rank


@pytest.fixture(autouse=True)
def in_a_notebook() -> Iterator[None]:
    use_frontend(Notebook())
    yield
    use_frontend(None)


class Typed:
    """A console, and what it says to each line."""

    def __init__(self, debugger: MemoryDebugger, name: str = "test") -> None:
        self.said: list[str] = []
        self.left = False
        self.console = Console(debugger, self.said.append, name=name)

    def __call__(self, line: str) -> str:
        self.said.clear()
        self.left = self.console.run(line)
        return "".join(self.said).rstrip("\n")


def four(lines: dict[int, list[int]] | None = None, **values: Any) -> MemoryDebugger:
    """Ranks 0 to 3 at line 10, with a loss that is wrong on rank 3."""
    ranks = [Rank((lines or {}).get(at, [10, 11, 12, 13]), {"loss": 0.31, **values}, number=at) for at in range(4)]
    ranks[3].values["loss"] = float("nan")
    return MemoryDebugger(*ranks)


# -- lines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, name, rest",
    [
        ("w", "where", ""),
        ("up 2", "up", "2"),
        ("p x[0] + 1", "print", "x[0] + 1"),
        ("c", "continue", ""),
        ("?", "help", ""),
        ("!up = 3", None, "up = 3"),
        ("list = 3", None, "list = 3"),
        ("print(x)", None, "print(x)"),
        ("next.y", None, "next.y"),
        ("step += 1", None, "step += 1"),
        ("p == 3", "print", "== 3"),
        ("loss.mean()", None, "loss.mean()"),
        ("rank", None, "rank"),
        ("rank in (1, 2)", None, "rank in (1, 2)"),
        ("rank == 3", None, "rank == 3"),
        ("rank 3", "ranks", "3"),
        ("rank gpus=0:2", "ranks", "gpus=0:2"),
    ],
)
def test_what_is_a_command_and_what_is_python(line: str, name: str | None, rest: str) -> None:
    command, said = read_command(line)
    assert (command.name if command else None, said) == (name, rest)


@pytest.mark.parametrize(
    "text, spot",
    [
        ("train.py:12", Spot("train.py", None, 12)),
        ("/a b/train.py:12", Spot("/a b/train.py", None, 12)),
        ("5:3", Spot("", 5, 3)),
        ("In[5]:3", Spot("", 5, 3)),
        ("Cell In[5]:3", Spot("", 5, 3)),
        (":3", Spot("", 0, 3)),
        ("12", Spot("", None, 12)),
        ("'odd 7':2", Spot("'odd 7'", None, 2)),
    ],
)
def test_places(text: str, spot: Spot) -> None:
    assert read_spot(text) == spot


@pytest.mark.parametrize("text", ["train.py", "train.py:", "train.py:0", "x:y", ""])
def test_what_is_no_place_is_said(text: str) -> None:
    with pytest.raises(CommandError, match="names no line"):
        read_spot(text)


def test_expressions_in_options_need_no_quotes() -> None:
    line = "5:3 -r 0-3 --if d['--hits'] > 2 and x --hits 3 --first"
    assert split_options(line, BREAK_OPTIONS, "break") == (
        "5:3",
        {"-r": "0-3", "--if": "d['--hits'] > 2 and x", "--hits": "3", "--first": ""},
    )
    assert split_options("--first a.py:3", BREAK_OPTIONS, "b") == ("a.py:3", {"--first": ""})
    assert split_options("--if 'x > 3' ", BREAK_OPTIONS, "b") == ("", {"--if": "x > 3"})
    assert split_options("a:1 --if x -y", BREAK_OPTIONS, "b") == ("a:1", {"--if": "x -y"})
    assert split_options("--on-error", BREAK_OPTIONS, "b") == ("", {"--on-error": ""})
    for wrong, why in (("a:1 --iff x", "no option --iff"), ("a:1 --if", "takes a value"), ("--first --first", "twice")):
        with pytest.raises(CommandError, match=why):
            split_options(wrong, BREAK_OPTIONS, "b")


def test_cast_is_read_as_monarch_writes_it() -> None:
    assert read_cast("trainer ranks(0:8:2) print x") == ("trainer", "0:8:2", "print x")
    assert read_cast("m ranks(gpus=0:4, hosts=1) n") == ("m", "gpus=0:4, hosts=1", "n")
    with pytest.raises(CommandError, match="write cast NAME"):
        read_cast("trainer 0 print x")


def test_every_command_has_help() -> None:
    for command in COMMANDS:
        assert command.help in help_of(command.name) or command.name == "break"
        assert command.name in help_of("")


# -- looking -----------------------------------------------------------------------------------


def test_identical_answers_stand_together() -> None:
    say = Typed(four())
    assert say("print loss") == "0-2  loss = 0.31\n3    loss = nan"
    assert say("loss * 2") == "0-2  0.62\n3    nan"
    assert say("print nothing") == "0-3  NameError: name 'nothing' is not defined"
    assert say("None") == ""


def test_answers_of_one_rank_stand_alone() -> None:
    say = Typed(four())
    say("ranks 3")
    assert say("print loss") == "loss = nan"


def test_where_groups_identical_stacks_and_hides_library_frames() -> None:
    say = Typed(four({3: [20]}))
    assert say("where").split("\n") == [
        "0-2    train.py:90 in main",
        "           step(x)",
        "     > train.py:10 in step",
        "           line 10",
        "     breakpoint 1",
        "3      train.py:90 in main",
        "           step(x)",
        "     > train.py:20 in step",
        "           line 20",
        "     breakpoint 1",
    ]
    assert "lib.py:7 in call" in say("where all")


def test_up_and_down_go_over_the_users_frames() -> None:
    say = Typed(four())
    assert say("up") == "0-3  train.py:90 in main\n         step(x)"
    assert say("print frame") == "0-3  frame = 2"
    assert say("up") == "That is the outermost frame."
    assert say("down 5") == "0-3  train.py:10 in step\n         line 10"
    assert say("down") == "That is the innermost frame."


def test_locals_are_grouped_one_by_one() -> None:
    say = Typed(four(n=3))
    assert say("locals") == "0-2  loss = 0.31\n3    loss = nan\n0-3  n = 3"
    assert say("locals n") == "0-3  n = 3"
    assert say("locals k") == "There are no such variables."


# -- the set -----------------------------------------------------------------------------------


def test_a_step_that_splits_the_set_says_so_and_chooses_a_group() -> None:
    say = Typed(four({3: [10, 30, 31]}))
    assert say.console.prompt() == "(m 0-3) "
    assert say("n") == (
        "The set has split; group 1 is chosen (group N, ranks and all choose others).\n"
        "1: 0-2  train.py:11 in step\n            line 11\n"
        "2: 3    train.py:30 in step\n            line 30"
    )
    assert say.console.prompt() == "(m 0-2, group 1/2) "
    assert say("n") == "0-2  train.py:12 in step\n         line 12"
    assert say("print loss") == "0-2  loss = 0.31"
    assert say("group 2") == "3  train.py:30 in step\n       line 30"
    assert say.console.prompt() == "(m 3, group 2/2) "
    assert say("group 3") == "There are 2 groups only."
    say("all")
    assert say.console.prompt() == "(m 0-3) "
    assert "has split" not in say("n")  # they were apart already: the person wants both
    assert say.console.prompt() == "(m 0-3) "


def test_an_empty_line_steps_again_but_repeats_nothing_else() -> None:
    say = Typed(four())
    say("next")
    assert "train.py:12" in say("")
    assert "train.py:13" in say("")
    say("print loss")
    assert say("") == ""


def test_ranks_not_in_the_set_stay_where_they_are() -> None:
    say = Typed(four())
    say("ranks 1-2")
    assert "1-2  train.py:11" in say("n")
    say("all")
    assert say("groups") == (
        "1: 0,3  train.py:10 in step  (breakpoint 1)\n            line 10\n"
        "2: 1-2  train.py:11 in step\n            line 11"
    )


def test_continue_lets_the_set_go_and_the_others_stay() -> None:
    say = Typed(four())
    say("ranks 0-1")
    assert say("c") == "Ranks 0-1 continue."
    assert say("where") == "None of the chosen ranks is stopped; 2-3 are, and all chooses them."
    say("all")
    assert say("continue") == "Ranks 2-3 continue."
    assert say("next") == "No rank is stopped; break sets a breakpoint, pause stops ranks where they are."
    assert say.console.prompt() == "(mesh) "


def test_a_rank_that_does_not_stop_again_is_named() -> None:
    say = Typed(four({2: [10]}))
    assert say("n").startswith("Rank 2 continues.\n0-1,3  train.py:11")


def test_two_stops_of_one_rank_are_told_apart() -> None:
    debugger = MemoryDebugger(
        Rank([10, 11], {"x": 1}, number=0), Rank([20, 21], {"x": 2}, number=0, thread=200, stop=5)
    )
    say = Typed(debugger)
    assert say("print x") == "0.1  x = 1\n0.5  x = 2"
    say("ranks 0.5")
    assert say("n") == "0  train.py:21 in step\n       line 21"
    assert say("print x") == "x = 2"


def test_several_meshes_are_named() -> None:
    say = Typed(MemoryDebugger(Rank([1], {"x": 1}), Rank([1], {"x": 1}, mesh="other", number=4)))
    assert say("print x") == "m 0; other 4  x = 1"
    assert say.console.prompt() == "(m 0; other 4) "
    say("mesh other")
    assert say.console.prompt() == "(other 4) "
    assert say("mesh nix") == "no mesh is called 'nix'."


def test_a_collectives_timeout_stands_in_the_prompt() -> None:
    debugger = four()
    debugger.left = Countdown(252.9, 600.0, "m", (4, 5, 6, 7), "all_reduce")
    say = Typed(debugger)
    assert say.console.prompt() == "(m 0-3, 4:12 left) "
    assert "4-7 of m wait in all_reduce for stopped ranks, and give up in 4:12." in say("all")


def test_until_goes_to_a_line() -> None:
    say = Typed(four())
    assert "train.py:13" in say("until 13")


def test_pause_says_who_is_not_stopped_yet() -> None:
    debugger = four()
    say = Typed(debugger)
    assert say("pause 3-5") == "Ranks 4-5 will stop at the next line of user code; unpause cancels that."
    assert debugger.said == [("pause", "m", (3, 4, 5))]
    assert say("unpause 3-5") == "Rank 3 stopped before that; continue ends it.\nRanks 4-5 will not stop."
    assert debugger.said[1:] == [("cancel_pause", "m", (3, 4, 5))]
    assert "out of range" in say("pause 9")


# -- Monarch's commands ------------------------------------------------------------------------


def test_list_attach_and_detach() -> None:
    say = Typed(four({3: [20]}))
    assert say("list").split("\n") == [
        "mesh  actor    endpoint  ranks  where                why",
        "m     trainer  train     0-2    train.py:10 in step  breakpoint 1",
        "m     trainer  train     3      train.py:20 in step  breakpoint 1",
    ]
    assert "train.py:20" in say("attach trainer 3")
    assert say.console.prompt() == "(m 3) "
    assert say("list").startswith("train.py:20")  # one rank: its source, as in pdb
    say("detach")
    assert not say.left
    assert say.console.prompt() == "(m 0-3) "
    say("attach m 1")
    assert say.console.prompt() == "(m 1) "
    assert "list shows which ranks are" in say("attach trainer 7")
    assert "with the name" in say("attach trainer")


def test_cast_shows_its_output_and_changes_no_choice() -> None:
    say = Typed(four())
    say("attach m 1")
    assert say("cast trainer ranks(2:4) print loss") == "2  loss = 0.31\n3  loss = nan"
    assert "2-3  train.py:11" in say("cast m ranks(gpus=2:4) n")
    assert say.console.prompt() == "(m 1) "
    assert say("cast trainer ranks(7) n") == "None of these ranks of trainer is stopped; list shows which ranks are."


def test_detach_and_quit_leave() -> None:
    for line in ("detach", "q", "quit", "exit"):
        say = Typed(four())
        say(line)
        assert say.left


# -- post mortem -------------------------------------------------------------------------------


def test_post_mortem_opens_frames_and_does_not_step() -> None:
    ranks = [Rank([10], {"x": at}, number=at, error="ValueError: boom") for at in range(2)]
    say = Typed(MemoryDebugger(*ranks))
    assert say("pm").endswith("> train.py:10 in step\n           line 10\n     ValueError: boom")
    assert say("print x") == "0  x = 0\n1  x = 1"
    assert "cannot be stepped" in say("n")
    assert say("continue") == "0-1: closed."
    assert say("pm 0") == "There is no exception to look at on these ranks of mesh m."


def test_ranks_that_failed_as_others_had_gone_are_one_line_of_post_mortem() -> None:
    ranks = [
        Rank([10], {"x": at}, number=at, error=f"RuntimeError: closed by {at}", of_peer=at != 1) for at in range(4)
    ]
    ranks[1].error = "ValueError: boom"
    say = Typed(MemoryDebugger(*ranks))
    told = say("pm")
    assert "ValueError: boom" in told and "RuntimeError" not in told
    assert "0,2-3  failed in a collective because the ranks above had left it, at train.py:10 in step" in told
    assert say("print x") == "x = 1"  # of the rank that failed first


# -- breakpoints -------------------------------------------------------------------------------


def test_break_sets_lists_and_clears() -> None:
    debugger = four()
    say = Typed(debugger)
    assert say("b") == "There are no breakpoints."
    assert say("b 5:3 -r 0-1 --if loss > 1 --hits 2") == "Breakpoint 1: In[5]:3, on m 0-1, if loss > 1, from hit 2 on"
    assert say("break 12") == "Breakpoint 2: train.py:12"
    assert say("break :2 --when-differs loss") == "Breakpoint 3: In[5]:2, if ranks disagree on loss"
    assert say("break --on-error ValueError --on m") == (
        "Breakpoint 4: where an endpoint or cell fails with ValueError, on m"
    )
    assert [(made.spec.file, made.spec.line) for made in debugger.breakpoints()[:3]] == [
        ("/cells/5.py", 3),
        ("/src/train.py", 12),
        ("/cells/5.py", 2),
    ]
    assert say("clear 2") == "Breakpoint 2 cleared."
    assert say("b").split("\n")[1] == "3  In[5]:2, if ranks disagree on loss"
    assert say("clear 9") == "clear: there is no breakpoint 9; there are none."
    assert say("clear") == "clear: say which: a number, or all."
    assert say("clear all") == "3 breakpoints cleared."


@pytest.mark.parametrize(
    "line, why",
    [
        ("b 5:9", "In[5] has 4 lines, so no line 9"),
        ("b 7:1", "there is no cell In[7]"),
        ("b train.py", "names no line"),
        ("b 5:3 x > 1", "more than one place"),
        ("b 5:3 --hits many", "--hits takes a whole number"),
        ("b --on-error ValueError --if x", "goes with -r and --on only"),
        ("b 5:3 -r 9", "out of range"),
        ("b 5:3 -r 1 --on nix", "no mesh is called"),
    ],
)
def test_a_breakpoint_that_cannot_be_is_told_why(line: str, why: str) -> None:
    say = Typed(four())
    assert why in say(line)
    assert say.console.debugger.breakpoints() == []


# -- viewers -----------------------------------------------------------------------------------


def test_one_viewer_has_control_and_others_watch() -> None:
    debugger = four()
    first, second = Typed(debugger, "the notebook"), Typed(debugger, "a terminal")
    first("n")
    assert second("n").startswith("the notebook controls the debugger")
    assert second("print loss") == "0-2  loss = 0.31\n3    loss = nan"
    assert second("drive --force") == "This console controls the debugger."
    assert "train.py:12" in second("n")
    assert first("n").startswith("a terminal controls the debugger")
    second.console.close()
    assert "train.py:13" in first("n")


# -- completion --------------------------------------------------------------------------------


def test_completion_knows_commands_options_and_variables() -> None:
    say = Typed(four(lossless=1))
    assert say.console.complete("wh") == ["where"]
    assert say.console.complete("print lo") == ["loss", "lossless"]
    assert say.console.complete("break 5:3 --w") == ["--when-differs"]
    assert say.console.complete("help unt") == ["until"]
