"""What may stand after `%mesh` and `%%mesh`, what is refused, and how it is completed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from IPython.core.error import UsageError

from monarch_kernel.actor import Extent
from monarch_kernel.kernel import managed_mesh
from monarch_kernel.kernel.magics import arguments, lifecycle_magics
from monarch_kernel.kernel.magics.dispatch import FUNCTIONS, GROUPS, SUBCOMMANDS
from monarch_kernel.kernel.magics.ipython_hooks import Known, MeshCompleter
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics

FLAT = Extent(("gpus",), (8,))
DEEP = Extent(("hosts", "gpus"), (2, 4))


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("%")
    return text


@pytest.mark.parametrize(
    "words, procs, wanted",
    [
        (["gpus=4"], None, ("m", {"gpus": 4})),
        (["trainers", "dp=2", "tp=3"], None, ("trainers", {"dp": 2, "tp": 3})),
        ([], 3, ("m", {"gpus": 3})),
        (["gpus=2", "x"], None, ("x", {"gpus": 2})),
    ],
)
def test_up(words: list[str], procs: int | None, wanted: Any) -> None:
    assert lifecycle_magics.up_arguments("%mesh up", words, procs) == wanted


@pytest.mark.parametrize(
    "words, procs, said",
    [
        ([], None, "--procs 4"),
        (["4"], None, "--procs 4"),
        (["m", "4"], None, "--procs 4"),
        (["a", "b"], None, "one name"),
        (["1x"], 2, "cannot name a mesh"),
        (["class"], 2, "cannot name a mesh"),
        (["gpus=0"], None, "gpus must be at least 1, not 0"),
        (["gpus=-1"], None, "at least 1"),
        (["gpus=x"], None, "whole number"),
        (["gpus="], None, "whole number"),
        (["1=2"], None, "cannot name a dimension"),
        (["gpus=2", "gpus=3"], None, "given twice"),
        (["gpus=2"], 2, "not both"),
        ([], 0, "--procs must be at least 1, not 0"),
        (["gpus=100000"], None, "at most 1024"),
        ([], 10**9, "at most 1024"),
    ],
)
def test_up_refuses(words: list[str], procs: int | None, said: str) -> None:
    assert said in refused(lifecycle_magics.up_arguments, "%mesh up", words, procs)


def test_env() -> None:
    found = lifecycle_magics.env_arguments("%mesh up", ["A=1", "B=x=y", "~/envs/train", "C="])
    assert found == ({"A": "1", "B": "x=y", "C": ""}, "~/envs/train")
    for wrong in ("", "=1", "1A=2", "A B=1"):
        assert "VARIABLE=VALUE" in refused(lifecycle_magics.env_arguments, "%mesh up", [wrong])
    assert "not in a and b" in refused(lifecycle_magics.env_arguments, "%mesh up", ["a", "b"])


@pytest.mark.parametrize(
    "ranks, where, extent, wanted",
    [
        (None, [], FLAT, tuple(range(8))),
        ("0-3,7", [], FLAT, (0, 1, 2, 3, 7)),
        ("0:8:4", [], FLAT, (0, 4)),
        ("gpus=2", [], DEEP, (2, 6)),
        ("hosts=1,gpus=0-1", [], DEEP, (4, 5)),
        (None, ["hosts=1", "gpus=0:2"], DEEP, (4, 5)),
    ],
)
def test_ranks(ranks: str | None, where: list[str], extent: Extent, wanted: tuple[int, ...]) -> None:
    assert arguments.select("%%mesh", ranks, where, extent, "m") == wanted


@pytest.mark.parametrize(
    "ranks, where, said",
    [
        ("8", [], "out of range"),
        ("nodes=1", [], "does not have a dimension"),
        ("x", [], "cannot read"),
        ("", [], "no ranks"),
        ("3-1", [], "ends before it begins"),
        ("0", ["gpus=1"], "not both"),
        (None, ["gpus"], "--where takes dim=slice"),
    ],
)
def test_ranks_refused(ranks: str | None, where: list[str], said: str) -> None:
    text = refused(arguments.select, "%%mesh", ranks, where, FLAT, "m")
    assert said in text


def test_boxes_and_runs() -> None:
    assert managed_mesh.boxed((4, 5), DEEP) == {"hosts": slice(1, 2, 1), "gpus": slice(0, 2, 1)}
    assert managed_mesh.boxed((0, 2, 4, 6), DEEP) == {"hosts": slice(0, 2, 1), "gpus": slice(0, 3, 2)}
    assert managed_mesh.boxed((0, 1, 4), DEEP) is None
    assert managed_mesh.boxed((0, 1, 3), FLAT) is None
    for ranks in [(0,), (0, 1, 3), (0, 1, 2, 3, 7), (0, 4), (1, 3, 5, 6, 7), (0, 3, 7)]:
        got = [rank for run in managed_mesh.runs(ranks) for rank in range(8)[run]]
        assert got == list(ranks)
    assert len(managed_mesh.runs(tuple(range(0, 64, 8)))) == 1


@pytest.mark.parametrize(
    "command, line, said",
    [
        ("up", "--prcs 4", "there is no option --prcs, did you mean --procs?"),
        ("up", "--procs four", "--procs takes a whole number, not 'four'"),
        ("up", "--memory 12q", "--memory '12q' is no size: write 64GB or 512MiB"),
        ("up", "--walltime soon", "--walltime 'soon' is no time: write 90, 30m, 2h or 1d"),
        ("up", "--dist mpi", "invalid choice: 'mpi'"),
        ("up", "--procs", "--procs expected one argument"),
        ("up", "--env 'A=1", "a quote is opened"),
        ("use", "", "required: NAME"),
        ("use", "a b", "one argument too many: 'b'"),
        ("logs", "-n x", "-n/--lines takes a whole number"),
        ("pm", "In[3] extra", "one argument too many: 'extra'"),
        ("clear", "--every", "there is no option --every"),
        ("debug", "-x where", "there is no option -x"),
        ("debug", "-r", "-r takes a value"),
        ("debug", "-r 0 --on=", "--on takes a value"),
        ("diff", "loss --nonsense", "there is no option --nonsense"),
        ("diff", "--nonsense loss", "there is no option --nonsense"),
        ("diff", "loss --up x", "--up takes a whole number, not 'x'"),
    ],
)
def test_bad_options(command: str, line: str, said: str) -> None:
    text = refused(arguments.parse, FUNCTIONS[command], line)
    assert said in text
    assert text.startswith(f"%mesh {command}: ")


@pytest.mark.parametrize("command", [*SUBCOMMANDS, "mesh_cell"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = FUNCTIONS.get(command, MeshMagics.mesh_cell)
    assert arguments.parse(function, "--help") is None
    text = capsys.readouterr().out
    assert text.startswith("usage: %%mesh" if command == "mesh_cell" else f"usage: %mesh {command}")
    assert arguments.summary(function)


def test_quotes_and_repeated_options() -> None:
    found = arguments.parse(FUNCTIONS["up"], "t --procs 2 --env 'A=a b' --env B=2 --preload x")
    assert found is not None
    assert (found.words, found.env, found.preload) == (["t"], ["A=a b", "B=2"], ["x"])


@pytest.mark.parametrize(
    "command, line, wanted",
    [
        # An expression, and options at both ends of it.
        ("diff", "loss", {"expression": "loss", "ranks": None, "on": None}),
        ("diff", "  d['a b']  ", {"expression": "d['a b']"}),
        ("diff", "-r 0-3 x - y", {"expression": "x - y", "ranks": "0-3"}),
        ("diff", "x - y -r 0-3,7 --on m", {"expression": "x - y", "ranks": "0-3,7", "on": "m"}),
        ("diff", "--in-frame -r gpus=0-3 net --grads", {"expression": "net", "in_frame": True, "grads": True}),
        ("diff", "--ranks=1 f(x, '-r 2')", {"expression": "f(x, '-r 2')", "ranks": "1"}),
        ("diff", "", {"expression": ""}),
        ("diff", "x -r", {"expression": "x -r"}),
        ("diff", "-x # y", {"expression": "-x # y"}),
        # A command of the debugger's, after the options.
        ("debug", "", {"command": "", "ranks": None, "on": None}),
        ("debug", "where all", {"command": "where all"}),
        ("debug", "-r 1-2 print d['a b'] # c", {"command": "print d['a b'] # c", "ranks": "1-2"}),
        ("debug", "--on=m --ranks=0 print x -r 3", {"command": "print x -r 3", "ranks": "0", "on": "m"}),
        # What the debugger's own reader takes apart, at its prompt, too.
        ("break", " train.py:3 --if x > 'a b' -r 0 ", {"where": "train.py:3 --if x > 'a b' -r 0"}),
        ("break", "", {"where": ""}),
        # Words and options in any order.
        ("pm", "--on m -r=0-3  # the last ones", {"on": "m", "ranks": "0-3"}),
        ("clear", "1 2", {"numbers": ["1", "2"]}),
        ("focus", "3 --on m", {"rank": 3, "on": "m"}),
        ("look", "--torchrun --native", {"torchrun": 0, "native": True, "pids": None, "slurm": None, "apart": 1.0}),
        ("look", "--pids 12,34 --apart 0.5", {"pids": "12,34", "torchrun": None, "apart": 0.5}),
        ("stacks", "m -r 0 --over 2", {"name": "m", "ranks": "0", "over": 2.0}),
    ],
)
def test_lines(command: str, line: str, wanted: dict[str, Any]) -> None:
    found = arguments.parse(FUNCTIONS[command], line)
    assert found is not None
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert (found.magic, found.line) == (f"%mesh {command}", line.strip())


@pytest.mark.parametrize("line", ["--help", "-h", "  -r 0 --help"])
@pytest.mark.parametrize("command", ["diff", "debug", "pm", "clear", "up"])
def test_help_is_asked_for_by_an_option(command: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments.parse(FUNCTIONS[command], line) is None
    assert capsys.readouterr().out.startswith(f"usage: %mesh {command}")


def test_a_line_that_nobody_has_run_is_read_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("-r", "--help", "'m"):
        assert arguments.peek(MeshMagics.mesh_cell, line) is None
    found = arguments.peek(MeshMagics.mesh_cell, "m -r 0")
    assert found is not None
    assert (found.name, found.ranks) == ("m", "0")
    assert capsys.readouterr().out == ""


def test_every_subcommand_is_listed_and_stands_in_one_group() -> None:
    assert sorted(SUBCOMMANDS) == sorted(word for group in GROUPS for word in group.functions())


KNOWN = Known(
    {"m": {"gpus": 4}, "trainers": {"hosts": 2, "gpus": 4}},
    "m",
    ["loss", "lr", "_x"],
    [],
    [3],
    ["train.py"],
    lambda: ["net"],
    lambda word: ["library/", "train/"],
)


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("%mesh ", sorted([*SUBCOMMANDS, "help"])),
        ("%mesh u", ["up", "use"]),
        ("%mesh use ", ["m", "trainers"]),
        ("%mesh use t", ["trainers"]),
        ("%mesh use m ", []),
        ("%mesh up --d", ["--dist"]),
        ("%mesh up --dist ", ["gloo", "nccl"]),
        ("%mesh up --dist gloo --d", []),
        ("%mesh up --env A=1 --e", ["--env"]),
        ("%mesh down --", ["--all", "--force", "--help"]),
        ("%mesh push l", ["loss", "lr"]),
        ("%mesh pull ", ["net"]),
        ("%mesh diff n", ["net"]),
        ("%mesh clear ", ["3", "all"]),
        ("%mesh break tr", ["train.py:"]),
        ("%mesh pm ", []),
        ("%mesh sync ", ["library/", "train/"]),
        ("%mesh sync library/ t", ["train/"]),
        ("%mesh sync --links ", ["follow", "keep", "refuse"]),
        ("%mesh nonsense ", []),
        ("%%mesh ", ["m", "trainers"]),
        ("%%mesh -r ", ["gpus="]),
        ("%%mesh trainers -r ", ["gpus=", "hosts="]),
        ("%%mesh --on trainers --where h", ["hosts="]),
        ("%%mesh --on ", ["m", "trainers"]),
        ("%%mesh --r", ["--ranks", "--raw"]),
        ("%%mesh -o x ", ["m", "trainers"]),
    ],
)
def test_completion(line: str, wanted: list[str]) -> None:
    parsers = {word: partial(arguments.parser_for, function) for word, function in FUNCTIONS.items()}
    completer = MeshCompleter(parsers, arguments.parser_of(MeshMagics.mesh_cell), lambda: KNOWN)
    found = completer.complete(line)
    assert found is not None
    texts = [text for text in found[0] if line != "%mesh " or text != "--help"]
    assert texts == wanted


def test_completion_leaves_other_lines_alone() -> None:
    completer = MeshCompleter({}, arguments.parser_of(MeshMagics.mesh_cell), lambda: KNOWN)
    for line in ("mesh ", "x = 1", "%meshes ", "%%meshes ", "%mesh"):
        assert completer.complete(line) is None
