"""`%mesh diff` in the kernel: expressions as they are, options at both ends, namespaces and stopped frames."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import kernel as kernel
from tests.kernel.harness import Kernel, Outcome


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """A kernel with a mesh of four ranks."""
    kernel.ok("%mesh up --procs 4")
    kernel.ok("%%mesh\nloss = 0.7 if rank == 3 else 0.5\nd = {'a b': rank // 2, \"c\": -1}")
    return kernel


def shown(outcome: Outcome) -> list[str]:
    assert outcome.result is not None
    return outcome.result["text/plain"].split("\n")


def test_namespaces_of_the_ranks_are_compared(mesh: Kernel) -> None:
    lines = shown(mesh.ok("%mesh diff loss"))
    assert lines[0].startswith("loss: 2 distinct values on 4 ranks of mesh m, in the ranks' namespaces (")
    assert lines[1:] == ["[3]    0.7", "[0-2]  0.5"]
    assert shown(mesh.ok("%mesh diff d['a b'] + d[\"c\"]"))[1:] == ["[0-1]  -1", "[2-3]  0"]
    assert shown(mesh.ok("%mesh diff loss * 2 -r 0,3"))[1:] == ["[0]  1.0", "[3]  1.4"]
    assert shown(mesh.ok("%mesh diff rank // 4 --on m"))[1:] == ["[0-3]  0"]


def test_the_result_is_an_object_with_html(mesh: Kernel) -> None:
    outcome = mesh.ok("%mesh diff loss")
    assert outcome.result is not None
    assert "<table" in outcome.result["text/html"]
    assert mesh.ok("[each.ranks for each in _.groups]").result == {"text/plain": "[(3,), (0, 1, 2)]"}


def test_actors_in_a_variable(mesh: Kernel) -> None:
    mesh.ok(
        "from monarch_kernel.actor import Actor, context, endpoint\n"
        "from monarch_kernel.meshes import get_mesh\n"
        "class Holder(Actor):\n"
        "    def __init__(self):\n"
        "        self.half = context().actor_instance.rank.rank // 2\n"
        "holders = get_mesh('m').spawn('holder', Holder)\n"
        "holders.initialized.get()"
    )
    lines = shown(mesh.ok("%mesh diff self.half --on holders"))
    assert ", on the actors holder (" in lines[0]
    assert lines[1:] == ["[0-1]  0", "[2-3]  1"]
    mesh.ok("holders.stop().get()")


@pytest.mark.parametrize(
    "line, said",
    [
        ("", "%mesh diff: give an expression to compare"),
        ("x = 3", "'x = 3' is no expression"),
        ("loss -r 9", "rank '9' is out of range"),
        ("loss --nonsense", "there is no option --nonsense"),
        ("loss --timeout 0", "--timeout takes a number of seconds above 0"),
        ("loss --on nowhere", "there is no mesh 'nowhere'"),
        ("loss --in-frame", "there is no stopped frame to evaluate in"),
    ],
)
def test_mistakes_are_one_sentence(mesh: Kernel, line: str, said: str) -> None:
    outcome = mesh.run(f"%mesh diff {line}")
    assert outcome.ename == "UsageError"
    assert said in outcome.evalue


def test_help(mesh: Kernel) -> None:
    said = mesh.ok("%mesh diff --help").stdout
    assert said.startswith("usage: %mesh diff")
    assert "--in-frame" in said
    assert "diff" in mesh.ok("%mesh --help").stdout


@pytest.fixture
def stopped(mesh: Kernel) -> Iterator[Kernel]:
    """All ranks but one are stopped in a cell that nobody waits for."""
    mesh.ok("%%mesh -a -r 0-2\ndef inner(x):\n    here = x + rank // 2\n    breakpoint()\ninner(10)")
    mesh.ok(
        "from monarch_kernel.debugger import get_debugger\n"
        "debugger = get_debugger()\n"
        "assert len(debugger.wait(lambda stops: len(stops) == 3, 20)) == 3"
    )
    yield mesh
    mesh.ok("debugger.resume(debugger.stops())\nassert not debugger.wait(lambda stops: not stops, 20)")


def test_stopped_frames_are_looked_into(stopped: Kernel) -> None:
    lines = shown(stopped.ok("%mesh diff here"))
    assert ", in the stopped frame " in lines[0]
    assert " in inner (" in lines[0]
    assert lines[1:] == ["[2]    11", "[0-1]  10", "[3]    not stopped, left out"]
    assert shown(stopped.ok("%mesh diff --up 1 'here' in locals()"))[1:] == [
        "[0-2]  False",
        "[3]    not stopped, left out",
    ]
