"""Errors of calls in a notebook: the user's line and the remote traceback, and nothing of ours between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.kernel.output.render import strip_ansi
from tests.kernel.harness import Kernel
from tests.kernel.screen import text

SET_UP = """
from monarch.actor import Actor, endpoint, proc_mesh

class Worker(Actor):
    @endpoint
    def invert(self, x):
        return 1 / x

workers = proc_mesh(gpus=2).spawn("worker", Worker)
await workers.invert.call(1)

def outer(x):
    return workers.invert.call(x).get()
"""


@pytest.fixture
def workers(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with two actors that can fail."""
    kernel.ok(SET_UP)
    yield kernel
    kernel.ok("from monarch.actor import shutdown_context\nshutdown_context().get()")


@pytest.mark.parametrize("wait", ["await workers.invert.call(0)", "workers.invert.call(0).get()", "outer(0)"])
def test_a_failed_call_shows_the_cell_and_the_remote_line(workers: Kernel, wait: str) -> None:
    out = workers.run(f"1\n{wait}")
    assert out.ename == "ActorError[ZeroDivisionError]"
    shown = strip_ansi(out.traceback)
    assert wait in shown
    assert "return 1 / x" in shown and "ZeroDivisionError: division by zero" in shown
    assert "future.py" not in shown and "skipping hidden" not in shown
    assert ("in outer" in shown) == (wait == "outer(0)")


def test_a_failed_call_that_was_caught_and_raised_from_shows_both(workers: Kernel) -> None:
    out = workers.run("try:\n    outer(0)\nexcept ZeroDivisionError as e:\n    raise KeyError('mine') from e")
    assert out.ename == "KeyError"
    assert "division by zero" in out.traceback


def test_push_to_a_mesh_with_a_dead_rank_is_one_sentence_and_the_others_have_it(kernel: Kernel) -> None:
    kernel.ok("%mesh up pushed --procs 2\nvalue = 5")
    kernel.run("%%mesh --on pushed -r 1\nimport os\nos._exit(3)")
    out = kernel.run("%mesh push value --on pushed")
    assert "rank 1 of mesh pushed cannot answer: exited with code 3; the other ranks have it" in out.stderr
    assert "Traceback" not in out.stderr
    assert text(kernel.ok("%%mesh --on pushed -r 0\nprint(value)")) == "[0] 5"
    out = kernel.run("%mesh pull value --on pushed")
    assert "rank 1 of mesh pushed cannot answer" in out.stderr
    kernel.ok("%mesh down pushed")
    kernel.ok("from monarch.actor import shutdown_context\nshutdown_context().get()")
