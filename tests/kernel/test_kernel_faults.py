"""Unhandled faults in a notebook: one notice, below a cell, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.harness import Kernel
from tests.kernel.screen import text

FAIL = """
from monarch_kernel import actor
from monarch_kernel.errors import MeshFailure, SupervisionError

def fail(name="trainers", ranks=(1, 3), reason="killed by <SIGKILL>", cause=None):
    failure = MeshFailure(name, reason, ranks=ranks)
    failure.__cause__ = cause
    return failure
"""


def test_a_fault_during_a_cell_is_told_below_it_and_does_not_interrupt_it(kernel: Kernel) -> None:
    kernel.ok(FAIL)
    out = kernel.ok("actor.unhandled_fault_hook(fail('a', cause=OSError('why')))\nprint('went on')\n6*7")
    assert (out.stdout, out.text) == ("went on\n", "42")
    (notice,) = out.displays
    headline = "Mesh 'a' lost ranks 1,3: killed by <SIGKILL>"
    assert notice["text/plain"] == f"{headline}\ncaused by: why"
    assert "&lt;SIGKILL&gt;</summary><pre>caused by: why</pre>" in notice["text/html"]
    assert kernel.ok("1").displays == []


def test_a_fault_between_cells_is_told_below_the_next(kernel: Kernel) -> None:
    kernel.ok(FAIL)
    # Hooks run in the order they came in: ours after the one that shows notices below this cell.
    kernel.ok(
        "import threading\n"
        "ended, told = threading.Event(), threading.Event()\n"
        "get_ipython().events.register('post_run_cell', lambda _: ended.set())\n"
        "def later():\n"
        "    ended.wait(60)\n"
        "    actor.unhandled_fault_hook(fail('b'))\n"
        "    told.set()\n"
        "threading.Thread(target=later).start()"
    )
    out = kernel.ok("told.wait(60)")
    assert out.text == "True"
    assert len(out.displays) == 1


REAL = """
import os, signal
from monarch_kernel.actor import Actor, SupervisionError, endpoint, proc_mesh

class Worker(Actor):
    @endpoint
    def pid(self): return os.getpid()

procs = proc_mesh(gpus=2)
first, second = procs.spawn("first", Worker), procs.spawn("second", Worker)
pids = list((await first.pid.call()).values())
await second.pid.call()

def heard():
    # The notice of a death comes through the host agent; asking for the status waits for it.
    import time
    end = time.monotonic() + 60
    while procs.status().get(10)[0].state != "dead" and time.monotonic() < end:
        time.sleep(0.01)
"""


@pytest.fixture
def ranks(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with two ranks and two actor meshes on them."""
    kernel.ok(REAL)
    yield kernel
    kernel.ok("from monarch_kernel.actor import shutdown_context\nshutdown_context().get()")


def test_several_faults_are_one_notice(kernel: Kernel) -> None:
    kernel.ok(FAIL)
    out = kernel.ok("for name in ('c', 'd'):\n    actor.unhandled_fault_hook(fail(name))")
    (notice,) = out.displays
    assert notice["text/plain"].count("'c'") == notice["text/plain"].count("'d'") == 1


def test_a_dead_process_is_told_once_whatever_ran_on_it(ranks: Kernel) -> None:
    out = ranks.ok("os.kill(pids[0], signal.SIGKILL)\nheard()")
    (notice,) = out.displays
    assert "Mesh 'first' lost rank 0 of 2" in notice["text/plain"]
    assert "With it went actors of 'second'." in notice["text/plain"]
    assert ranks.ok("1").displays == []


def test_a_death_that_an_error_has_told_is_not_told_again(ranks: Kernel) -> None:
    out = ranks.run("os.kill(pids[0], signal.SIGKILL)\nawait first.pid.call()\nheard()")
    assert out.ename == "SupervisionError"
    assert not text(out)
    assert ranks.ok("heard()").displays == []


def test_a_cell_that_waits_for_a_port_is_marked(ranks: Kernel) -> None:
    ranks.ok(
        "from monarch_kernel.actor import Channel\n"
        "class Sender(Actor):\n"
        "    @endpoint\n"
        "    def keep(self, port): self.port = port\n"
        "senders = procs.slice(gpus=0).spawn('senders', Sender)\n"
        "port, receiver = Channel.open()\n"
        "await senders.keep.call_one(port)"
    )
    out = ranks.run("os.kill(pids[0], signal.SIGKILL)\nawait receiver.recv()")
    assert out.ename == "SupervisionError"
    assert "all holders of the port are gone: rank 0 of 1 of mesh 'senders'" in out.evalue
    told = [notice["text/plain"] for notice in [*out.displays, *ranks.ok("heard()").displays]]
    assert all("senders" not in each for each in told), "that has been told"


def test_a_death_that_a_cell_has_caught_is_not_told_again(ranks: Kernel) -> None:
    out = ranks.ok(
        "os.kill(pids[0], signal.SIGKILL)\n"
        "try:\n    await first.pid.call()\nexcept SupervisionError:\n    print('caught')\n"
        "heard()"
    )
    assert (out.stdout, text(out)) == ("caught\n", "")
