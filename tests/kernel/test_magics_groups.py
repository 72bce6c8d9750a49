"""Process groups of `%mesh dist` and of the user's own code, on ranks that have torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.conftest import needs, wait_until
from tests.kernel.harness import Bell, Kernel, Outcome
from tests.kernel.screen import text

needs("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of four ranks, forked from a process that has torch."""
    kernel.ok("%mesh up --procs 4 --preload torch")
    return kernel


@pytest.fixture
def fresh(mesh: Kernel) -> Iterator[Kernel]:
    """The same, with a mesh of the test's own in use, `own`, which it may spoil."""
    mesh.ok("%mesh up own --procs 4 --preload torch")
    yield mesh
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


def plain(outcome: Outcome) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)


def test_dist_joins_a_process_group_and_leaves_it(mesh: Kernel) -> None:
    assert "torch.distributed over gloo" in mesh.ok("%mesh up group --procs 2 --dist gloo").stdout
    outcome = mesh.ok(
        "%%mesh\nimport torch, torch.distributed as dist\nt = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\n"
        "dist.get_rank() == rank, dist.get_world_size(), t.item()"
    )
    assert text(outcome) == "[0-1] (True, 2, 3.0)"
    mesh.ok("%mesh down group")
    mesh.ok("%mesh use m")


def test_dist_over_hosts_that_are_one(mesh: Kernel) -> None:
    mesh.ok("%mesh up group hosts=2 gpus=2 --dist gloo")
    outcome = mesh.ok(
        "%%mesh\nimport os, torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\n"
        "t.item(), os.environ['LOCAL_RANK'], os.environ['GROUP_RANK']"
    )
    for rank, told in enumerate([("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]):
        assert re.search(rf"\[{rank}\] +\(4.0, {told[0]!r}, {told[1]!r}\)", text(outcome))
    mesh.ok("%mesh down group")
    mesh.ok("%mesh use m")


def test_a_users_own_init_works_as_it_stands(fresh: Kernel) -> None:
    outcome = fresh.ok(
        "%%mesh\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_world_size()"
    )
    assert text(outcome) == "[0-3] 4"


def test_ranks_that_wait_for_a_failed_one_are_let_go(mesh: Kernel) -> None:
    mesh.ok("%mesh up group --procs 3 --dist gloo")
    outcome = mesh.run(
        "%%mesh\nimport torch, torch.distributed as dist\n"
        "if rank == 1:\n    raise ValueError('left')\ndist.all_reduce(torch.ones(1))"
    )
    told = plain(outcome)
    assert "ValueError: left" in told
    assert "Failed on rank 1 (gpus=1) of the 3" in told
    assert re.search(
        r"Ranks 0,2 waited in torch.distributed at Cell In\[\d+\], line 5 for rank 1, and were released", told
    )
    assert text(mesh.ok("%%mesh\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")) == "[0-2] 3.0"
    mesh.ok("%mesh down group")
    mesh.ok("%mesh use m")


def test_kept_failures_do_not_keep_the_connections_of_a_group(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 4 --preload torch")
    outcome = mesh.run(
        "%%mesh\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "def step(i):\n    if rank == 2 and i == 2:\n        raise ValueError('no more')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "for i in range(4):\n    step(i)"
    )
    # All have come out of it, though some had waited for ranks that waited themselves.
    assert "ValueError: no more" in plain(outcome)
    assert "ValueError: no more" in mesh.ok("%mesh pm -r 2").stdout
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


DISAGREE = "dist.all_reduce(torch.ones(1)) if RANK == 0 else dist.barrier()"


def disagreed(mesh: Kernel) -> None:
    """Wait until both ranks of the mesh in use are in their collectives."""

    def there() -> bool:
        stacks = mesh.ok("%mesh stacks").text
        return "torch: all_reduce" in stacks and "torch: barrier" in stacks

    wait_until(there, "both ranks wait in collectives")


def test_interrupts_end_waits_in_collectives_of_cells_and_endpoints(mesh: Kernel, bell: Bell) -> None:
    mesh.ok("%mesh up group --procs 2 --dist gloo")
    # A cell, in a group that it made: `%mesh interrupt` tells the interrupt first, and what torch said below it.
    mesh.ok(
        f"%%mesh -a -o job\nimport torch, torch.distributed as dist\n{bell.code()}group = dist.new_group()\n"
        + DISAGREE.replace("RANK", "rank")
    )
    disagreed(mesh)
    assert "mesh group: interrupted a cell on ranks 0-1" in mesh.ok("%mesh interrupt").stdout
    ended = mesh.run("job.result(60)")
    assert ended.ename == "MeshCellInterrupt"
    told = plain(ended)
    assert "c10d_logger" not in told and "GLHF" not in told
    assert re.search(r"\nKeyboardInterrupt\nIt ended a wait in torch.distributed \(.*closed by peer", told)
    # Endpoints, on the main thread, on a thread of their own and in an event loop.
    mesh.ok(
        "from monarch.actor import Actor, current_rank, endpoint\n"
        "def wait():\n    import torch, torch.distributed as dist\n"
        f"    {DISAGREE.replace('RANK', 'current_rank().rank')}\n"
        "class Plain(Actor):\n    @endpoint\n    def wait(self):\n        wait()\n"
        "class Loop(Actor):\n    @endpoint\n    async def wait(self):\n        wait()\n"
        + bell.code()
        + "import monarch_kernel\nprocs = monarch_kernel.get_mesh('group')\n"
        "actors = {'plain': procs.spawn('plain', Plain), 'loop': procs.spawn('loop', Loop)}"
    )
    for name in ("plain", "loop"):
        mesh.ok("%mesh heal")
        mesh.ok(f"call = actors[{name!r}].wait.call()")
        disagreed(mesh)
        assert f"interrupted {name}.wait on ranks 0-1" in mesh.ok("%mesh interrupt").stdout
        ended = mesh.run("call.get(60)")
        assert "KeyboardInterrupt\nIt ended a wait in torch.distributed" in plain(ended)
        # The stop button does the same.
        assert "process group had been shut down; a new one replaces it" in mesh.ok("%mesh heal").stdout
        mesh.ok(f"call = actors[{name!r}].wait.call()")
        disagreed(mesh)
        cell = mesh.send("print('waits', flush=True); call.get()")
        cell.prints("waits")
        mesh.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert "It ended a wait in torch.distributed" in plain(mesh.run("call.get(60)"))
    mesh.ok("%mesh heal")
    assert text(mesh.ok("%%mesh\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")) == "[0-1] 2.0"
    # A second `%mesh interrupt` kills what does not answer, and no rank that does.
    mesh.ok(
        "%%mesh -a -o job\nimport time\n"
        "def stubborn():\n    while True:\n        try:\n            time.sleep(1000)\n"
        "        except KeyboardInterrupt:\n            ring('heard')\n"
        "ring()\nstubborn() if rank == 1 else time.sleep(1000)"
    )
    bell.wait(2)
    mesh.ok("%mesh interrupt")
    bell.wait()
    said = mesh.ok("%mesh interrupt").stdout
    assert said == "mesh group: killed rank 1; %mesh heal group replaces it (no answer to the first interrupt)\n"
    assert "1: killed" in mesh.run("job.result(60)").evalue
    mesh.ok("%mesh down group")
    mesh.ok("%mesh use m")
