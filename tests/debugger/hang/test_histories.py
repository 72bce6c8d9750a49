"""The verdict on a hang after random histories of a mesh: as on a fresh one, whatever happened there before."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import needs
from tests.kernel.harness import Cell, Kernel

needs("torch")

SEEDS = range(6)
_NAMES = "%%mesh\nimport time\nimport torch, torch.distributed as dist\n"

#: Cells that hang, and the first line of the verdict on a fresh mesh; numbers of cells and of operations are `n`.
CASES = {
    "another size": (
        "t = torch.ones(4 if rank != 3 else 5)\ndist.all_reduce(t)",
        "Rank 3 called all_reduce with 5 elements of Float at Cell In[n]:5 where ranks 0-2 called all_reduce with 4 "
        "elements of Float at Cell In[n]:5 (#n of the default group).",
    ),
    "a loop left early": (
        "for step in range(4):\n    if rank == 1 and step == 2:\n        break\n    dist.all_reduce(torch.ones(3))",
        "Ranks 0, 2-3 wait in all_reduce #n of the default group at Cell In[n]:7; rank 1 never entered it and is "
        "finished or idle.",
    ),
    "a skipped operation": (
        "for step in range(3):\n    dist.all_reduce(torch.ones(5))\n    if not (rank == 2 and step == 1):\n"
        "        dist.broadcast(torch.ones(7), src=0)\ndist.barrier()",
        "Rank 2 skipped broadcast #n at Cell In[n]:7, so that it called all_reduce at Cell In[n]:5 where ranks 0-1, 3 "
        "called broadcast at Cell In[n]:7 (#n of the default group).",
    ),
    "a rank that does not come": (
        "while rank == 0:\n    time.sleep(1000)\ndist.barrier()",
        "Ranks 1-3 wait in barrier #n of the default group at Cell In[n]:6; rank 0 has not entered it: it makes no "
        "progress at Cell In[n]:5.",
    ),
}


@pytest.fixture(scope="module")
def mesh(runtime: None, kernel: Kernel) -> Iterator[Kernel]:
    """The file's kernel with a kept mesh `past` of four ranks in a process group."""
    kernel.ok("%mesh up past --procs 4 --dist gloo --keep")
    kernel.ok(
        "from monarch_kernel import get_mesh\nfrom monarch_kernel.actor import Actor, endpoint\n"
        "class Failing(Actor):\n    @endpoint\n    def fail(self): raise KeyError('of an actor')\n"
    )
    yield kernel
    kernel.ok("%mesh down past")


# -- what may have happened ------------------------------------------------------------------------


def fails(mesh: Kernel, chance: random.Random) -> None:
    """A cell in which a rank raises, and the others wait for it."""
    size = chance.choice((4, 5, 64))
    code = f"if rank == {chance.randrange(4)}:\n    raise ValueError('no batch')\ndist.all_reduce(torch.ones({size}))"
    assert mesh.run(_NAMES + code).ename == "MeshCellError"


def fails_in_an_actor(mesh: Kernel, chance: random.Random) -> None:
    """An endpoint that raises on one rank."""
    rank = chance.randrange(4)
    mesh.ok("failing = get_mesh('past').spawn('failing', Failing)")
    assert "KeyError" in mesh.run(f"failing.slice(gpus={rank}).fail.call_one().get()").ename


def works(mesh: Kernel, chance: random.Random) -> None:
    """A cell with some operations."""
    mesh.ok(f"{_NAMES}for _ in range({chance.randrange(1, 9)}):\n    dist.all_reduce(torch.ones(5))\ndist.barrier()")


def is_healed(mesh: Kernel, chance: random.Random) -> None:
    """A rank is killed and replaced."""
    assert "killed" in mesh.ok(f"%mesh kill -r {chance.randrange(4)}").stdout
    assert "1 healed" in mesh.ok("%mesh heal").stdout


def forms_a_group(mesh: Kernel, chance: random.Random) -> None:
    """Some ranks form a group of their own, and use it."""
    ranks = sorted(chance.sample(range(4), chance.choice((2, 3))))
    mesh.ok(
        f"{_NAMES}group = dist.new_group({ranks})\nif rank in {ranks}:\n    dist.all_reduce(torch.ones(9), group=group)"
    )


def is_interrupted(mesh: Kernel, chance: random.Random) -> None:
    """A cell that hangs, until it is interrupted."""
    cell = mesh.send(
        f"{_NAMES}while rank == {chance.randrange(4)}:\n    time.sleep(0.01)\ndist.broadcast(torch.ones(3), 0)"
    )
    verdict(mesh, cell)
    end(mesh, cell)


def is_attached_again(mesh: Kernel, _chance: random.Random) -> None:
    """The notebook leaves the mesh, and comes back."""
    mesh.ok("%mesh detach past")
    mesh.ok("%mesh attach past")


EVENTS: tuple[Callable[[Kernel, random.Random], None], ...] = (
    fails,
    fails_in_an_actor,
    works,
    is_healed,
    forms_a_group,
    is_interrupted,
    is_attached_again,
)


# -- the verdict -------------------------------------------------------------------------------------


def verdict(mesh: Kernel, cell: Cell) -> str:
    """The first line of `%mesh hang` while a cell runs, once two in a row say the same of ranks that wait."""
    subshell = mesh.control("create_subshell_request")["subshell_id"]
    before = ""
    while True:
        said = mesh.send("%mesh hang", subshell).wait().text
        first = re.sub(r"#\d+", "#n", re.sub(r"In\[\d+\]", "In[n]", said.partition("\n")[0]))
        if first == before and not first.startswith("No rank waits"):
            break
        before = first
        cell.until(lambda _out: True)  # fails once the cell has ended
    mesh.control("delete_subshell_request", {"subshell_id": subshell})
    return first


def end(mesh: Kernel, cell: Cell) -> None:
    """Interrupt a cell that hangs."""
    mesh.interrupt()
    assert cell.wait().status == "error"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verdict_is_as_on_a_fresh_mesh(mesh: Kernel, seed: int) -> None:
    chance = random.Random(seed)
    history = [chance.choice(EVENTS) for _ in range(3)]
    name = [*CASES][seed % len(CASES)]
    for event in history:
        event(mesh, chance)
    code, right = CASES[name]
    cell = mesh.send(_NAMES + code)
    said = verdict(mesh, cell)
    end(mesh, cell)
    assert said == right, f"{name}, after {[event.__name__ for event in history]}"
