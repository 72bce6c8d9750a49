"""The kernel and real ranks: interrupts that reach them, faults, and what is left when the kernel ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.kernel.harness import Bell, Kernel, stop_kernel, wait_gone

UP = """
import asyncio, os, time
from monarch_kernel.actor import Actor, current_rank, endpoint, this_host

class Worker(Actor):
    @endpoint
    def nap(self, ring):
        ring('asleep')
        time.sleep(120)

    @endpoint
    def stubborn(self, ring, who):
        rank, said = current_rank().rank, False
        while True:
            try:
                if not said:
                    said = True
                    ring('asleep')
                time.sleep(120)
            except KeyboardInterrupt:
                ring('interrupted')
                if rank not in who:
                    raise

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def die(self):
        os._exit(3)

class Dozer(Actor):
    @endpoint
    async def nap(self, ring):
        ring('asleep')
        await asyncio.sleep(120)

    @endpoint
    async def pid(self):
        return os.getpid()
"""


@pytest.fixture(scope="module")
def meshed(kernel: Kernel) -> Kernel:
    """The file's kernel, with its host agent already there: that is no leak of a test's."""
    kernel.ok(UP)
    kernel.ok("this_host().spawn_procs(per_host={'gpus': 1}).stop().get(30);")
    return kernel


@pytest.fixture
def workers(meshed: Kernel, bell: Bell) -> Iterator[Kernel]:
    """A kernel with `procs` and `workers`, four ranks, and `ring`."""
    meshed.ok(bell.code())
    meshed.ok("procs = this_host().spawn_procs(per_host={'gpus': 4}, name='m')")
    meshed.ok("workers = procs.spawn('workers', Worker)\ndozers = procs.spawn('dozers', Dozer)")
    yield meshed
    meshed.ok("procs.stop().get(30);")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("workers.nap.call(ring).get()", id="get"),
        pytest.param("await workers.nap.call(ring)", id="await"),
        pytest.param("dozers.nap.call(ring).get()", id="async actor"),
        pytest.param("await asyncio.sleep(0); workers.nap.call(ring).get()", id="get in async cell"),
    ],
)
def test_an_interrupt_stops_the_cell_on_every_rank(workers: Kernel, bell: Bell, call: str) -> None:
    cell = workers.send(call)
    assert bell.wait(4) == ["asleep"] * 4
    workers.interrupt()
    out = cell.wait()
    assert out.ename == "KeyboardInterrupt", out
    assert "Killed" not in out.stderr
    # Same processes, same actors, free again.
    for mesh in ("workers", "dozers"):
        assert workers.ok(f"list({mesh}.pid.call().get().values()) == list(procs.pids().values())").text == "True"


def test_a_second_press_kills_what_did_not_answer(workers: Kernel, bell: Bell) -> None:
    workers.ok("get_ipython().kernel.interrupts.logic.window = 120")
    cell = workers.send("workers.stubborn.call(ring, (1, 2)).get()")
    assert bell.wait(4) == ["asleep"] * 4
    workers.interrupt()
    assert bell.wait(4) == ["interrupted"] * 4
    assert cell.wait().ename == "KeyboardInterrupt"
    workers.interrupt()
    while "Killed" not in cell.outcome.stderr:
        cell.read()
    assert "Killed ranks 1-2 of mesh 'm': no answer to the interrupt." in cell.outcome.stderr
    assert workers.ok("len(workers.slice(gpus=0).pid.call().get())").text == "1"
    assert workers.ok("[s.state for s in procs.status().get().values()]").text == "['alive', 'dead', 'dead', 'alive']"


def test_a_slice_is_named_by_the_ranks_of_its_mesh(workers: Kernel, bell: Bell) -> None:
    workers.ok(
        "from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay\n"
        "from monarch_kernel.kernel.interrupts.sigint_handler import MeshTarget\n"
        "get_relay().logic.window = 120\n"
        "others = workers.slice(gpus=0).stubborn.call(ring, range(4))\n"
        "target = MeshTarget(procs.slice(gpus=slice(2, 4)))"
    )
    assert bell.wait(1) == ["asleep"]
    cell = workers.send(
        "with get_relay().active(target):\n    workers.slice(gpus=slice(2, 4)).stubborn.call(ring, range(4)).get()"
    )
    assert bell.wait(2) == ["asleep"] * 2
    workers.interrupt()
    assert bell.wait(2) == ["interrupted"] * 2
    assert cell.wait().ename == "KeyboardInterrupt"
    workers.interrupt()
    while "Killed" not in cell.outcome.stderr:
        cell.read()
    assert "Killed ranks 2-3 of mesh 'm': no answer to the interrupt." in cell.outcome.stderr
    assert workers.ok("others.done()").text == "False"
    workers.ok("procs.kill().get(30)")


def test_a_dead_rank_never_interrupts_another_cell_nor_the_kernel(workers: Kernel) -> None:
    out = workers.run("workers.slice(gpus=1).die.call().get()")
    assert (out.status, out.ename) == ("error", "SupervisionError")
    assert workers.ok("6*7").text == "42"
    out = workers.ok("workers.slice(gpus=2).die.broadcast()\nimport time\nx = sum(range(10**6))\nx")
    assert out.text == "499999500000"
    assert workers.ok("len(workers.slice(gpus=slice(3, 4)).pid.call().get())").text == "1"


@pytest.mark.parametrize("end", ["shutdown", "restart", "kill"])
def test_no_process_outlives_the_kernel(start_kernel: Callable[..., Kernel], end: str) -> None:
    kernel = start_kernel()
    kernel.ok(UP)
    kernel.ok("procs = this_host().spawn_procs(per_host={'gpus': 2}); workers = procs.spawn('w', Worker)")
    kernel.ok("workers.pid.call().get()")
    pids = [process.pid for process in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(pids) >= 3  # the host agent, its fork server, two ranks
    if end == "kill":
        os.kill(kernel.pid, signal.SIGKILL)
    elif end == "restart":
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
    else:
        kernel.manager.shutdown_kernel()
    wait_gone(pids)
    stop_kernel(kernel)


def test_import_monarch_gives_this_package(meshed: Kernel) -> None:
    out = meshed.ok("import monarch.actor, monarch_kernel.actor\nmonarch.actor is monarch_kernel.actor")
    assert out.text == "True"


def test_a_mesh_without_its_host_agent(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    kernel.ok("import os, signal\nfrom monarch_kernel.runtime.actor.process import get_system")
    end = "os.kill(get_system().agent_process.pid, signal.SIGKILL)"
    kernel.ok("%mesh up m --procs 2")
    kernel.ok(end)
    assert kernel.run("%%mesh\n1").ename == "MeshCellError"
    assert "its host agent died" in kernel.ok("%mesh status").text
    assert "the logs of mesh m were lost with its host agent" in kernel.run("%mesh logs").evalue
    kernel.ok("x = 1")
    assert "the others" not in kernel.run("%mesh push x").evalue
    assert "2 healed" in kernel.ok("%mesh heal").stdout
    kernel.ok("%%mesh\n1")
    kernel.ok(end)
    assert "2 ranks stopped" in kernel.ok("%mesh down").stdout
