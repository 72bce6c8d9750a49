"""Notebooks whose meshes stay when their kernel ends, however it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from monarch_kernel.meshes import kept
from tests.conftest import alive, children, needs, wait_until
from tests.kept.conftest import nothing_kept
from tests.kernel.harness import PATIENCE, Bell, Kernel
from tests.kernel.screen import text

UP = "%mesh up m --procs 2 --keep"

ACTORS = """
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel import get_mesh

class Counter(Actor):
    def __init__(self, start):
        self.count = start
    @endpoint
    def add(self):
        self.count += 1
        return self.count

counters = get_mesh("m").spawn("counters", Counter, 10)
print((await counters.add.call()).values())
"""

FIND = """
from monarch_kernel.meshes import held
counters = held()[0].actors("counters")
list((await counters.add.call()).values())
"""


def end(kernel: Kernel, how: str) -> None:
    """End a kernel, and whatever would end with it."""
    if how == "restart":
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=PATIENCE)
        return
    pid = kernel.pid
    kernel.manager.shutdown_kernel(now=how == "kill")
    wait_until(lambda: not alive(pid), "the kernel has ended")


def pids(kernel: Kernel) -> list[int]:
    """The ranks of mesh m."""
    out = kernel.ok("print(list(__import__('monarch_kernel').get_mesh('m').pids().values()))")
    return list(json.loads(out.stdout))


@pytest.mark.parametrize("how", ["restart", "kill", "shutdown"])
def test_a_mesh_outlives_its_kernel(how: str, start_kernel: Callable[..., Kernel], kept_folder: str) -> None:
    kernel = start_kernel()
    up = kernel.ok(UP)
    assert "kept when this kernel ends" in up.stdout
    kernel.ok("%%mesh\nimport os\nx = [rank, 'here']\nos.getpid()")
    kernel.ok("import numpy\nbig = numpy.arange(1_000_000)")
    kernel.ok("%mesh push big")
    kernel.ok(ACTORS)
    before = pids(kernel)
    end(kernel, how)
    assert all(map(alive, before))
    wait_until(lambda: kept()[0].held_by == 0, "the keeper has noticed")
    after = kernel if how == "restart" else start_kernel()
    assert "free for" in after.ok("%mesh ls").text
    if how == "shutdown":  # the notebook's own first cell does it, too
        said = after.ok(f"{UP} --reuse").stdout
        assert "mesh m: 2 ranks (gpus=2), reused with its variables" in said
    else:
        said = after.ok("%mesh attach m").stdout
        assert "mesh m: 2 ranks (gpus=2), attached, in use" in said
    assert "died" not in said and "running" not in said
    assert pids(after) == before
    assert "[0, 'here']" in str(after.ok("%%mesh -r 0\nx").displays)
    assert after.ok("list((_).values())").text == "[[0, 'here']]"
    after.ok("%%mesh -o sums\nint(big.sum())")
    assert after.ok("set(sums.values())").text == str({sum(range(1_000_000))})
    assert after.ok(FIND).text == "[12, 12]"
    keeper = kept()[0].pid
    family = {keeper, *children(keeper)}
    assert "stopped" in after.ok("%mesh down m").stdout
    assert nothing_kept(kept_folder)
    wait_until(lambda: not any(map(alive, family)), "all of it has ended")


def test_without_keep_all_ends_with_the_kernel(start_kernel: Callable[..., Kernel], kept_folder: str) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up m --procs 2")
    before = pids(kernel)
    end(kernel, "kill")
    wait_until(lambda: not any(map(alive, before)), "the ranks have ended")
    assert nothing_kept(kept_folder)


@pytest.mark.parametrize("how", ["restart", "kill", "shutdown"])
def test_work_goes_on_and_its_output_is_there(
    how: str, start_kernel: Callable[..., Kernel], bell: Bell, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel = start_kernel()
    kernel.ok(UP)
    kernel.send(
        f"%%mesh\n{bell.code()}"
        "import os, time\n"
        "ring('begun')\n"
        f"while not os.path.exists({str(bell.path)!r} + '.one'):\n    time.sleep(0.01)\n"
        "print('meanwhile')\n"
        "ring('printed')\n"
        f"while not os.path.exists({str(bell.path)!r} + '.two'):\n    time.sleep(0.01)\n"
        "print('afterwards')\n"
        "done = 'yes'\n"
    )
    bell.wait(2)
    end(kernel, how)  # jupyter_client interrupts it first, which is not for the ranks
    wait_until(lambda: kept()[0].held_by == 0, "the keeper has noticed")
    bell.path.with_suffix(".one").touch()
    bell.wait(2)
    after = kernel if how == "restart" else start_kernel()
    found = after.ok("%mesh attach m")
    assert "still running a cell: 0" in found.stdout and "of a cell of an earlier kernel" in found.stdout
    assert "[0-1] meanwhile" in str([*found.displays, *found.updates])
    bell.path.with_suffix(".two").touch()
    assert "'yes'" in str(after.ok("%%mesh\ndone").displays)
    assert "Exception in message handler" not in capfd.readouterr().err  # of the cell that the end has interrupted


TRAIN = """
import os, time, torch
import torch.distributed as dist

total = torch.ones(1)
dist.all_reduce(total)
{ring}
ring("begun")
while dist.get_rank() == 1 and not os.path.exists({gate!r}):
    time.sleep(0.01)
dist.all_reduce(total)
ring(str(int(total)))
"""

TRAINER = """
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel import get_mesh

class Trainer(Actor):
    @endpoint
    def train(self):
{body}

trainers = get_mesh("m").spawn("trainers", Trainer)
"""


@pytest.mark.parametrize("how", ["restart", "detach", "taken"])
def test_ranks_stay_in_their_collective_when_their_kernel_lets_go(
    how: str, start_kernel: Callable[..., Kernel], bell: Bell
) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up m --procs 3 --keep --dist gloo")
    for what in ("cell", "endpoint"):  # the mesh, which has loaded torch, serves for both
        gate = bell.path.with_suffix(f".{what}")
        body = TRAIN.format(ring=bell.code(), gate=str(gate))
        if what == "endpoint":
            kernel.ok(TRAINER.format(body=indent(body, " " * 8)))
        if how == "detach":
            kernel.ok(f"%%mesh --no-wait\n{body}" if what == "cell" else "running = trainers.train.call()")
        else:
            kernel.send(f"%%mesh\n{body}" if what == "cell" else "await trainers.train.call()")
        assert bell.wait(3) == ["begun"] * 3
        after = kernel
        if how == "taken":
            after = start_kernel()
            after.ok("%mesh attach m --force")
        elif how == "detach":
            kernel.ok("%mesh detach m")
        else:
            end(kernel, how)
        if how != "taken":
            wait_until(lambda: kept()[0].held_by == 0, "the keeper has noticed")
            after.ok("%mesh attach m")
        # A rank is released from a wait that has not moved for a while: none is, though rank 1 comes late.
        after.ok("import time; time.sleep(2)")
        gate.touch()
        assert bell.wait(3) == ["9"] * 3
        kernel = after
    kernel.ok("%mesh down m")


def test_a_cell_on_a_kept_mesh_is_interrupted(start_kernel: Callable[..., Kernel], bell: Bell) -> None:
    kernel = start_kernel()
    kernel.ok(UP)
    cell = kernel.send(f"%%mesh\n{bell.code()}import time\nring('begun')\ntime.sleep(60)")
    bell.wait(2)
    kernel.interrupt()
    assert "KeyboardInterrupt" in cell.wait().traceback
    kernel.ok("%mesh down m")


def test_what_died_meanwhile_is_healed(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    kernel.ok(UP)
    kernel.ok(ACTORS)
    kernel.ok("%%mesh\nx = rank")
    before = pids(kernel)
    end(kernel, "kill")
    os.kill(before[1], 9)
    wait_until(lambda: kept()[0].meshes[0].alive == 1, "the keeper has noticed")
    second = start_kernel()
    assert "died meanwhile: 1, killed by SIGKILL; %mesh heal m" in second.ok("%mesh attach m").stdout
    assert "1 healed" in second.ok("%mesh heal m").stdout
    assert second.ok(FIND).text == "[12, 11]"
    healed = pids(second)
    assert healed[0] == before[0] and healed[1] != before[1]
    end(second, "kill")
    third = start_kernel()  # which finds the successor, and can heal again
    assert "died" not in third.ok("%mesh attach m").stdout
    assert third.ok(FIND).text == "[13, 12]"
    os.kill(healed[1], 9)
    third.run("%%mesh\nrank")
    assert "1 healed" in third.ok("%mesh heal m").stdout
    assert third.ok(FIND).text == "[14, 11]"
    third.ok("%mesh down m")


def test_two_kernels_do_not_hold_one_mesh(start_kernel: Callable[..., Kernel]) -> None:
    first, second = start_kernel(), start_kernel()
    first.ok(UP)
    first.ok("%%mesh\nx = 5")
    refused = second.run("%mesh attach m")
    assert f"process {first.pid}" in refused.evalue and "--force" in refused.evalue
    assert f"by process {first.pid}" in second.ok("%mesh ls").text
    assert "--force" in second.run("%mesh down m").evalue
    second.ok("%mesh attach m --force")
    lost = first.run("%%mesh\nx")
    assert lost.ename == "UsageError"
    assert f"taken over by process {second.pid}" in lost.evalue
    assert "5" in str(second.ok("%%mesh\nx").displays)
    first.ok("%mesh attach m --force")  # and back, which the ranks must allow
    assert "5" in str(first.ok("%%mesh\nx").displays)
    assert first.ok("%mesh detach m").stdout.startswith("mesh m: detached")
    second.ok("%mesh attach m")
    assert "5" in str(second.ok("%%mesh\nx").displays)
    second.ok("%mesh detach")
    first.ok("%mesh attach m")
    assert "5" in str(first.ok("%%mesh\nx").displays)
    assert "a kept mesh 'm' already exists" in second.run("%mesh up m --procs 1 --keep").evalue
    first.ok("%mesh detach")
    assert "2 ranks stopped" in second.ok("%mesh down m").stdout
    assert not kept()


def test_a_forgotten_mesh_ends(start_kernel: Callable[..., Kernel], kept_folder: str) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up m --procs 1 --keep --idle 0.0001")
    before = pids(kernel)
    end(kernel, "kill")
    wait_until(lambda: not any(map(alive, before)), "the ranks have ended")
    wait_until(lambda: nothing_kept(kept_folder), "its folder is gone")


def test_a_failed_up_leaves_nothing(start_kernel: Callable[..., Kernel], kept_folder: str) -> None:
    kernel = start_kernel()
    assert "nonesuch" in kernel.run(f"{UP} --preload nonesuch").evalue
    wait_until(lambda: nothing_kept(kept_folder), "its folder is gone")
    kernel.ok(UP)
    kernel.ok("%%mesh\nx = 1")
    assert "ready in" in kernel.ok("%mesh restart m").stdout
    assert kernel.run("%%mesh\nx").ename == "MeshCellError"
    kernel.ok("%mesh down m")


def test_a_dead_keeper_takes_its_ranks_along(start_kernel: Callable[..., Kernel], kept_folder: str) -> None:
    kernel = start_kernel()
    kernel.ok(UP)
    ranks = pids(kernel)
    os.kill(kept()[0].pid, 9)
    wait_until(lambda: not any(map(alive, ranks)), "the ranks have died with it")
    assert kernel.run("%%mesh\n1").ename == "MeshCellError"
    assert "no longer: its host agent died" in kernel.ok("%mesh ls").text
    assert "its host agent died" in kernel.ok("%mesh status").text
    assert not kept()
    said = kernel.ok("%mesh heal m").stdout
    assert "2 healed" in said
    assert "a new one keeps it from now on" in said
    assert "by this kernel" in kernel.ok("%mesh ls").text
    kernel.ok("%%mesh\nx = 5")
    healed = pids(kernel)
    end(kernel, "kill")
    wait_until(lambda: kept() and not kept()[0].held_by, "it is free")
    # The next kernel finds what was healed.
    kernel = start_kernel()
    kernel.ok("%mesh attach m")
    assert pids(kernel) == healed
    assert "5" in str(kernel.ok("%%mesh -r 0\nprint(x)").displays)
    kernel.ok("%mesh down m")
    wait_until(lambda: not any(map(alive, healed)), "the ranks have ended")
    assert not kept() and nothing_kept(kept_folder)


REDUCE = """%%mesh
import torch, torch.distributed as dist
t = torch.ones(1) * (rank + 1)
dist.all_reduce(t)
int(t.item()), dist.get_world_size()
"""


@pytest.mark.torch
def test_a_process_group_outlives_its_kernel(start_kernel: Callable[..., Kernel]) -> None:
    needs("torch")
    kernel = start_kernel()
    assert "torch.distributed over gloo, kept" in kernel.ok("%mesh up m --procs 2 --dist gloo --keep").stdout
    assert "(3, 2)" in str(kernel.ok(REDUCE).displays)
    before = pids(kernel)
    end(kernel, "kill")
    kernel = start_kernel()
    kernel.ok("%mesh attach m")
    assert pids(kernel) == before
    assert "(3, 2)" in str(kernel.ok(REDUCE).displays)
    # A rank that dies is healed under the next kernel, and all meet anew.
    os.kill(before[1], 9)
    assert kernel.run("%%mesh\n1").ename == "MeshCellError"
    assert "1 healed" in kernel.ok("%mesh heal m").stdout
    assert "(3, 2)" in str(kernel.ok(REDUCE).displays)
    kernel.ok("%mesh down m")


def test_invalid_options(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel()
    assert "add --keep" in kernel.run("%mesh up --procs 1 --idle 2").evalue
    assert "above 0" in kernel.run("%mesh up --procs 1 --keep --idle 0").evalue
    assert "no kept mesh 'x'" in kernel.run("%mesh attach x").evalue
    assert "no mesh" in kernel.run("%mesh detach").evalue
    kernel.ok("%mesh up --procs 1")
    assert "started with %mesh up --keep can be detached" in kernel.run("%mesh detach m").evalue


def test_no_stop_touches_what_another_kernel_left_running(
    start_kernel: Callable[..., Kernel], kept_folder: str, bell: Bell, tmp_path: Path
) -> None:
    """Neither that of a cell that waits behind it, nor that of an ordinary cell, nor with nothing running."""
    gate = tmp_path / "gate"
    kernel = start_kernel()
    kernel.ok(UP)
    kernel.ok(bell.code())
    kernel.ok("%mesh push ring")
    training = (
        f"import os, time\nring()\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\ntrained = rank"
    )
    kernel.ok(f"%%mesh --no-wait\n{training}")
    bell.wait(2)
    before = pids(kernel)
    kernel.ok("%mesh detach")
    other = start_kernel()
    other.ok("%mesh attach m")
    handled = "from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay\nassert get_relay().flush(30)"

    queued = other.send("%%mesh\nprint('never')")
    while "queued behind a cell of another notebook since" not in text(queued.outcome):
        queued.read()
    other.interrupt()
    assert queued.wait().ename == "MeshCellInterrupt"  # at once
    assert "had not begun" in queued.outcome.traceback
    other.interrupt()
    other.ok(handled)

    background = other.send("%%mesh --no-wait -o job\nprint('never')")
    background.wait()
    other.interrupt()
    assert other.run("job.result(30)").ename == "MeshCellInterrupt"
    other.interrupt()
    other.ok(handled)

    plain = other.send("import time\nprint('sleeping', flush=True)\ntime.sleep(600)")
    plain.prints("sleeping")
    other.interrupt()
    assert plain.wait().ename == "KeyboardInterrupt"
    other.interrupt()
    other.ok(handled)

    assert pids(other) == before
    gate.touch()
    assert text(other.ok("%%mesh\ntrained")) == "[0] 0\n[1] 1"
    assert all(map(alive, before))
    other.ok("%mesh down")
