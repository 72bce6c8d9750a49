"""The debugger as methods of a mesh, and what ranks keep of their failures."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debug import ask, get_debugger
from monarch_kernel.errors import ActorError
from monarch_kernel.meshes import attach
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until
from tests.debugger.debuggee import FILE, Worker, line, still_held, texts
from tests.waiting import patience


def kept() -> list[tuple[str, str, str]]:
    from monarch_kernel.introspection import failures

    return [(each.actor, each.endpoint, str(each.error)) for each in failures()]


def keep_for(seconds: float) -> None:
    os.environ["MONARCH_KERNEL_POST_MORTEM"] = str(seconds)


def test_a_mesh_has_the_tools_as_methods(procs: Any) -> None:
    mesh: ProcMesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    workers.initialized.get(PATIENCE)
    assert "idle" in mesh.stacks(timeout=PATIENCE).text()
    assert "2 distinct" in str(mesh.diff("__import__('os').getpid()"))
    assert mesh.pull("1 + 1", rank=1) == 2
    assert str(mesh.hang())
    asked = workers.stop_here.call()
    get_debugger().wait(lambda stops: len(stops) == 2, PATIENCE)
    stopped = mesh.debug
    assert texts(stopped.print("inside")) == {0: "5", 1: "5"}
    stopped.cont()
    asked.get(PATIENCE)
    assert not mesh.debug


def test_a_rank_that_was_not_asked_has_nothing_of_it(procs: Any) -> None:
    mesh = procs(1)
    workers = mesh.spawn("worker", Worker)
    assert workers.loaded.call_one("monarch_kernel.debugger").get(PATIENCE) == []
    with pytest.raises(ActorError):
        workers.fail.call_one(1).get(PATIENCE)
    assert workers.loaded.call_one("monarch_kernel.debugger").get(PATIENCE) == []
    mesh.stacks(timeout=PATIENCE)
    loaded = workers.loaded.call_one("monarch_kernel.debugger").get(PATIENCE)
    assert loaded
    assert "monarch_kernel.debugger.rank.stopping.tracer" not in loaded
    assert not workers.loaded.call_one("debugpy").get(PATIENCE)


def test_failures_are_kept_in_a_bounded_number(procs: Any) -> None:
    mesh = procs(1)
    for number in range(6):
        workers = mesh.spawn(f"worker{number}", Worker)
        for value in (1, 2):
            with pytest.raises(ActorError):
                workers.fail.call_one(10 * number + value).get(PATIENCE)
    found = ask(mesh, kept, timeout=PATIENCE).values[0]
    assert found == [(f"worker{number}", "fail", f"it was {20 * number + 4}") for number in range(2, 6)]


def test_failures_are_let_go_when_their_lease_is_over(procs: Any) -> None:
    mesh = procs(1)
    ask(mesh, keep_for, 0.3, timeout=PATIENCE)
    with pytest.raises(ActorError):
        mesh.spawn("worker", Worker).fail.call_one(1).get(PATIENCE)
    wait_until(lambda: not ask(mesh, kept, timeout=PATIENCE).values[0], "it is let go")
    assert get_debugger().post_mortem(mesh) == []


@pytest.mark.parametrize("kind", [MemoryError, ValueError])
def test_a_failure_for_want_of_memory_keeps_none(procs: Any, kind: type[Exception]) -> None:
    mesh = procs(1)
    with pytest.raises(kind):
        mesh.spawn("worker", Worker).fail_full.call_one(kind).get(PATIENCE)
    assert ask(mesh, kept, timeout=PATIENCE).values[0] == [("worker", "fail_full", "it is full")]
    assert ask(mesh, still_held, timeout=PATIENCE).values[0] is (kind is ValueError)


SCRIPT = """
import os, signal, sys
from monarch_kernel.debug import get_debugger
from monarch_kernel.meshes import keep
from tests.debugger.debuggee import Worker

host = keep("t")
mesh = host.hosts.spawn_procs(per_host={"gpus": 2}, name="t", env=ENV)
workers = mesh.spawn("workers", Worker)
asked = workers.stop_here.call()
assert len(get_debugger().wait(lambda stops: len(stops) == 2, 30)) == 2
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("orphaned", ["resume", "end"])
def test_the_end_of_the_controller_strands_nobody(orphaned: str, monkeypatch: pytest.MonkeyPatch, faults: Any) -> None:
    folder = tempfile.mkdtemp(prefix="mk-kept-", dir="/tmp")
    monkeypatch.setenv("MONARCH_KERNEL_KEPT_DIR", folder)
    try:
        code = SCRIPT.replace("ENV", repr({"MONARCH_KERNEL_ORPHANED_STOPS": orphaned}))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            timeout=patience(60),
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        host = attach("t")
        try:
            (mesh,) = host.proc_meshes
            if orphaned == "end":
                wait_until(lambda: len(mesh.dead()) == 2, "the stopped ranks have ended")
                return
            workers = host.actors("workers")
            assert list(workers.count.call(3).get(PATIENCE).values()) == [3, 3]
            made = get_debugger().break_at(FILE, line("after"), mesh=mesh)
            wait_until(lambda: len(made.bound) == 2, "both are armed by the next controller")
            asked = workers.count.call(1)
            assert len(get_debugger().wait(lambda stops: len(stops) == 2, PATIENCE)) == 2
            get_debugger().clear()
            get_debugger().select().cont()
            asked.get(PATIENCE)
        finally:
            host.down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not os.path.exists(folder)
