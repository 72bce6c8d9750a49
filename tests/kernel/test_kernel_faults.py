"""Unhandled faults in a notebook: one notice, below a cell, and nothing else happens."""

from __future__ import annotations

from tests.kernel.harness import Kernel

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


def test_several_faults_are_one_notice_and_none_is_told_twice(kernel: Kernel) -> None:
    kernel.ok(FAIL)
    out = kernel.ok("for name in ('c', 'd', 'c'):\n    actor.unhandled_fault_hook(fail(name))")
    (notice,) = out.displays
    assert notice["text/plain"].count("'c'") == notice["text/plain"].count("'d'")
    assert kernel.ok("actor.unhandled_fault_hook(fail('c'))").displays == []


def test_a_fault_that_the_cells_error_has_told_is_not_told_again(kernel: Kernel) -> None:
    kernel.ok(FAIL)
    out = kernel.run(
        "actor.unhandled_fault_hook(fail('e', ranks=[2]))\n"
        "raise SupervisionError('the call failed', mesh_name='e', ranks=[2])"
    )
    assert out.ename == "SupervisionError"
    assert out.displays == []
    assert kernel.ok("actor.unhandled_fault_hook(fail('e', ranks=[2]))").displays == []
    assert len(kernel.ok("actor.unhandled_fault_hook(fail('e', ranks=[0]))").displays) == 1
