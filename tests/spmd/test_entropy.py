"""Random numbers: every rank has its own, and so has every child of one; what the user has seeded can be repeated."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from typing import Any

import pytest

from monarch_kernel import actor as public
from monarch_kernel.actor import Actor, MeshFailure, endpoint, this_host
from tests.waiting import patience

torch = pytest.importorskip("torch")
numpy: Any = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

CHILDREN = 2


def numbers() -> tuple[float, ...]:
    """One of each source."""
    cuda: list[float] = [torch.rand(1, device="cuda").item()] if torch.cuda.is_available() else []
    return (torch.rand(1).item(), float(numpy.random.rand()), random.random(), float(torch.initial_seed()), *cuda)


def _send(port: Any) -> None:
    port.send((torch.rand(1).item(), float(numpy.random.rand()), random.random()))


def of_children() -> list[tuple[float, ...]]:
    """What children draw that are forked by multiprocessing."""
    context = multiprocessing.get_context("fork")
    found: list[tuple[float, ...]] = []
    for _ in range(CHILDREN):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender,))
        process.start()
        found.append(receiver.recv())
        process.join()
    return found


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, _i: int) -> tuple[float, ...]:
        return torch.rand(1).item(), float(numpy.random.rand()), random.random()


class Drawer(Actor):
    @endpoint
    def draw(self) -> tuple[float, ...]:
        return numbers()

    @endpoint
    def children(self) -> list[tuple[float, ...]]:
        return of_children()

    @endpoint
    def loaded(self) -> list[tuple[float, ...]]:
        loader: Any = torch.utils.data.DataLoader(
            Samples(), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        return list(loader)

    @endpoint
    def seeded(self) -> tuple[Any, ...]:
        torch.manual_seed(3)
        numpy.random.seed(3)
        children = [(first, second) for first, second, _ in of_children()]
        return torch.rand(1).item(), float(numpy.random.rand()), children


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Failures that nobody handled; they end nothing here."""
    seen: list[MeshFailure] = []
    monkeypatch.setattr(public, "unhandled_fault_hook", seen.append)
    return seen


def all_differ(rows: Sequence[tuple[float, ...]]) -> bool:
    """Whether no two of these share a number of the same source."""
    return all(len(set(column)) == len(column) for column in zip(*rows, strict=True))


@pytest.mark.parametrize("preload", [("torch", "numpy"), ()], ids=["forked", "imported later"])
def test_every_rank_and_every_child_of_one_has_its_own(preload: tuple[str, ...]) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, preload=preload)
    drawers = procs.spawn("drawer", Drawer)
    drawn = list(drawers.draw.call().get(patience(60)).values())
    if preload:  # the same for ranks that come later: by heal(), and in another mesh, as after a restart
        other = this_host().spawn_procs({"gpus": 2}, preload=preload).spawn("drawer", Drawer)
        drawn += other.draw.call().get(patience(60)).values()
        procs.slice(gpus=1).kill("for the test").get(patience(20))
        procs.heal().get(patience(60))
        drawn.append(drawers.slice(gpus=1).draw.call_one().get(patience(60)))
    assert all_differ(drawn), drawn
    children = [row for rows in drawers.children.call().get(patience(60)).values() for row in rows]
    assert len(children) == 2 * CHILDREN
    assert all_differ(children), children
    loaded = [row for rows in drawers.loaded.call().get(patience(60)).values() for row in rows]
    assert len(loaded) == 8
    assert all_differ(loaded), loaded
    # What the user seeds is the same everywhere, each time, and torch's as in any process.
    first, second = drawers.seeded.call().get(patience(60)).values()
    assert first == second
    torch.manual_seed(3)
    assert first[0] == torch.rand(1).item()
    assert [child[0] for child in first[2]] == [first[0]] * CHILDREN
    assert len({child[1] for child in first[2]}) == CHILDREN
