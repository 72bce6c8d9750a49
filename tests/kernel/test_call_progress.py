"""The line below an ordinary cell that waits for calls of actors."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Bell, Kernel
from tests.kernel.screen import ever, text

ACTOR = """from monarch_kernel.actor import Actor, current_rank, endpoint, this_host
class Waiter(Actor):
    @endpoint
    def hold(self, gate, after=None):
        import os, time
        while current_rank().rank == 1 and not os.path.exists(gate):
            time.sleep(0.005)
        if after and current_rank().rank == 1:
            raise ValueError(after)
        return current_rank().rank
"""

#: Calls a function when the kernel has looked at the cell that runs, at a time when it shows what has taken long.
LOOKED = """import time
from monarch_kernel.kernel import call_progress
def when_looked_at(call=lambda: None):
    began, seen, real = time.monotonic(), [], call_progress.awaited_here
    def counted():
        seen.append(time.monotonic())
        return real()
    call_progress.awaited_here = counted
    while not seen or seen[-1] < began + 2:
        time.sleep(0.01)
    call_progress.awaited_here = real
    call()
"""


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh that runs cells, one that does not, and actors on both."""
    kernel.ok("%mesh up --procs 2")
    kernel.ok(LOOKED)
    kernel.ok(
        f"{ACTOR}from monarch_kernel import get_mesh\n"
        "waiters = get_mesh('m').spawn('waiters', Waiter)\n"
        "others = this_host().spawn_procs({'gpus': 2}, name='others').spawn('others', Waiter)\n"
        "await waiters.initialized\nawait others.initialized"
    )
    return kernel


@pytest.mark.parametrize("code", ["await CALL", "(CALL).get()", "[await each for each in waiters.hold.stream(GATE)]"])
def test_who_is_waited_for_and_where_it_is(mesh: Kernel, bell: Bell, code: str) -> None:
    gate = f"{bell.path}.gate"
    cell = mesh.send(code.replace("CALL", "waiters.hold.call(GATE)").replace("GATE", repr(gate)))
    cell.until(lambda out: "waiters.hold: 1 of 2 ranks done · waiting for 1 · In[" in ever(out))
    open(gate, "w").close()
    assert cell.wait().status == "ok"
    assert not text(cell.outcome)


def test_several_calls_one_of_which_fails(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    cell = mesh.send(
        f"import asyncio\nawait asyncio.gather(waiters.hold.call({gate!r}, 'no'), others.hold.call({gate!r}))"
    )
    said = "others.hold: 1 of 2 ranks done · waiting for 1"
    shown = cell.until(lambda out: said in ever(out))
    assert "waiters.hold: " in ever(shown)
    open(gate, "w").close()
    assert cell.wait().ename == "ActorError[ValueError]"
    assert not text(cell.outcome)


def test_a_stop_takes_the_line_away(mesh: Kernel, bell: Bell) -> None:
    for code in ("await CALL", "(CALL).get()"):
        cell = mesh.send(code.replace("CALL", f"others.hold.call('{bell.path}.never')"))
        cell.until(lambda out: "others.hold: 1 of 2 ranks done" in ever(out))
        mesh.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert not text(cell.outcome)


def test_what_a_cell_does_not_wait_for_is_not_shown(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    mesh.ok(
        f"import asyncio\nasync def background():\n    await others.hold.call({gate!r})\n"
        f"task, call = asyncio.create_task(background()), waiters.hold.call({gate!r})\n"
        "await asyncio.sleep(0)"
    )
    outcome = mesh.ok("when_looked_at()")
    assert not outcome.displays, outcome
    mesh.ok(f"open({gate!r}, 'w').close()\nawait task\ncall.get();")


def test_captured_output_holds_no_such_line(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    mesh.ok(
        "%%capture captured\nimport threading\n"
        f"threading.Thread(target=when_looked_at, args=(lambda: open({gate!r}, 'w').close(),)).start()\n"
        f"waiters.hold.call({gate!r}).get()\nprint('done')"
    )
    assert mesh.ok("captured.stdout, captured.outputs").text == "('done\\n', [])"
