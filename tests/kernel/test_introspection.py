"""Tab and Shift-Tab in `%%mesh` cells: what a rank knows, and nothing that blocks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.kernel.harness import PATIENCE, Bell, Kernel
from tests.kernel.screen import text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks that have variables the notebook has not."""
    kernel.ok("%mesh up --procs 2")
    kernel.ok(
        "%%mesh\nimport string\nclass Net:\n    'A net of a rank.'\n    weight = 1\n    weird = 2\n"
        "netmodel = Net()\ntable = {'alpha': 1}\nif rank == 1:\n    only_on_one = 1"
    )
    kernel.ok("notebook_only = 1")
    # Ranks of a busy machine take longer to answer than a person who types should wait.
    kernel.ok(f"from monarch_kernel.kernel.magics import ipython_hooks as r\nr.FIRST = r.LATER = {PATIENCE}")
    return kernel


def complete(kernel: Kernel, code: str) -> list[str]:
    """The lines that completing the last one gives."""
    content = kernel.client.complete(code, reply=True, timeout=PATIENCE)["content"]
    return [code[: content["cursor_start"]] + match for match in content["matches"]]


def described(kernel: Kernel, code: str) -> str:
    content: dict[str, Any] = kernel.client.inspect(code, reply=True, timeout=PATIENCE)["content"]
    return str(content["data"]["text/plain"]) if content["found"] else ""


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("netmodel.wei", ["netmodel.weight", "netmodel.weird"]),
        ("x = 1\nstring.ascii_low", ["x = 1\nstring.ascii_lowercase"]),
        ("table['al", ["table['alpha"]),
        ("only_on", []),  # rank 0 is the first
        ("notebook_on", []),
    ],
)
def test_completions_are_those_of_the_first_rank(mesh: Kernel, typed: str, wanted: list[str]) -> None:
    assert complete(mesh, f"%%mesh\n{typed}") == [f"%%mesh\n{each}" for each in wanted]


def test_the_ranks_of_the_first_line_are_asked(mesh: Kernel) -> None:
    assert complete(mesh, "%%mesh -r 1\nonly_on") == ["%%mesh -r 1\nonly_on_one"]
    assert complete(mesh, "%%mesh -r 9\nnotebook_on") == ["%%mesh -r 9\nnotebook_only"]  # there is none: as anywhere


def test_descriptions_come_from_a_rank(mesh: Kernel) -> None:
    assert "A net of a rank." in described(mesh, "%%mesh\nnetmodel")
    assert "capwords" in described(mesh, "%%mesh\nstring.capwords(")
    assert described(mesh, "netmodel") == ""


def test_subcommands_offer_what_they_take_and_no_magics(mesh: Kernel) -> None:
    assert complete(mesh, "%mesh pull net") == ["%mesh pull netmodel"]
    assert complete(mesh, "%mesh plot net") == ["%mesh plot netmodel"]
    assert complete(mesh, "%mesh help deb") == ["%mesh help debugger"]
    assert complete(mesh, "%mesh push notebook") == ["%mesh push notebook_only"]
    assert complete(mesh, "%mesh clear ") == ["%mesh clear all"]
    for line in ("%mesh attach ", "%mesh pm ", "%mesh logs -n ", "%mesh pull -"):
        assert not [each for each in complete(mesh, line) if "%" in each.removeprefix("%mesh")]


def test_a_busy_rank_is_spared_and_a_stopped_one_is_not_waited_for(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    gate = f"{bell.path}.gate"
    mesh.ok(
        f"%%mesh -r 0 --no-wait\nimport os, time\nring()\nwhile not os.path.exists({gate!r}):\n    time.sleep(0.01)\n"
    )
    bell.wait()
    assert complete(mesh, "%%mesh\nonly_on") == ["%%mesh\nonly_on_one"]  # rank 1 is idle
    open(gate, "w").close()
    pids = text(mesh.ok("%%mesh\nimport os\nprint(os.getpid()) if rank else None"))
    pid = int(pids.rpartition(" ")[2])
    mesh.ok("r.FIRST = r.LATER = 0.5")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert complete(mesh, "%%mesh -r 1\nnotebook_on") == ["%%mesh -r 1\nnotebook_only"]  # as without a rank
    finally:
        os.kill(pid, signal.SIGCONT)
