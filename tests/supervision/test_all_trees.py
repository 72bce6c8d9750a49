"""Every small tree of owners, every way to handle, every failure: who is told, who ends, who lives.

Each actor has a mesh of its own, on a process of its own or on its owner's. The trees of all processes are the real
ones; what actors do with what they are told (ask the hook, end with what they own) is written out below, and the
outcome is held against the rules that a reader of the documentation would apply to the whole tree at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent
from monarch_kernel.runtime.supervision import Notice, OwnedMesh, Tree

ROOT = -1
MODES = ("handles", "passes", "raises")
EVENTS = ("fails", "is stopped", "loses its process", "its process is stopped")
KILLED = Death("killed by SIGKILL")
STOPPED = Death("stopped", "stopped")
ONE = Extent(("gpus",), (1,))


def shapes(most: int) -> Iterator[tuple[int, ...]]:
    """All trees of up to so many actors, as the owner of each; owners come before what they own."""
    for n in range(1, most + 1):
        yield from itertools.product(*[range(ROOT, k) for k in range(n)])


def placements(owners: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where each actor is: on a process of its own (named after it), or, if it has one, on that of its owner."""
    own = tuple(range(len(owners)))
    yield own
    beside: list[int] = []
    for k, owner in enumerate(owners):
        beside.append(k if owner == ROOT else beside[owner])
    yield tuple(beside)
    mixed = list(own)
    for k in range(1, len(owners), 2):
        mixed[k] = k if owners[k] == ROOT else mixed[owners[k]]
    yield tuple(mixed)


def ref(proc: int) -> ProcRef:
    return ProcRef(f"p{proc}", "", "host", "agent", "")


@dataclass
class World:
    """Some actors in some processes; each process has its part of the tree."""

    owners: tuple[int, ...]
    procs: tuple[int, ...]
    modes: tuple[str, ...]
    told: list[tuple[int, int, str]] = field(default_factory=list)  # owner, mesh, cause
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trees = {proc: Tree() for proc in {ROOT, *self.procs}}
        self.gone: set[int] = set()
        for k, owner in enumerate(self.owners):
            tree = self.trees[self.at(owner)]
            if self.procs[k] == k:
                tree.spawned_procs(OwnedMesh(f"procs{k}", f"procs{k}", str(owner), ONE, (ref(k),)))
            tree.spawned_actors(OwnedMesh(str(k), str(k), str(owner), ONE, (ref(self.procs[k]),)))

    def at(self, actor: int) -> int:
        return ROOT if actor == ROOT else self.procs[actor]

    def fail(self, actor: int, cause: str) -> None:
        """An actor has raised."""
        if actor in self.ended:
            return
        self.stop_owned(actor)
        self.ended.append(actor)
        owner = self.at(self.owners[actor])
        if owner not in self.gone:
            self.tell(self.trees[owner].actor_failed(str(actor), 0, Death(cause, "actor")))

    def stop(self, actor: int) -> None:
        """An actor is stopped by its owner, or with it."""
        if actor not in self.ended:
            self.trees[self.at(self.owners[actor])].stopped(str(actor))
            self.stop_owned(actor)
            self.ended.append(actor)

    def stop_owned(self, actor: int) -> None:
        """What an actor owns ends with it: the last first, actors before the processes that they are on."""
        for child in reversed([k for k, owner in enumerate(self.owners) if owner == actor]):
            self.stop(child)
            if self.procs[child] == child:
                self.trees[self.at(actor)].stopped(f"procs{child}")
                self.end_proc(child, STOPPED)

    def end_proc(self, proc: int, death: Death) -> None:
        """A process ends, and everybody hears of it."""
        if proc in self.gone:
            return
        self.gone.add(proc)
        for actor, where in enumerate(self.procs):
            if where == proc and actor not in self.ended:
                self.ended.append(actor)
        for where, tree in self.trees.items():
            if where not in self.gone:
                self.tell(tree.proc_died(f"p{proc}", death))
        # Actors whose owner lived there go with it, and so do processes.
        for actor, owner in enumerate(self.owners):
            if owner != ROOT and self.procs[owner] == proc:
                if self.at(actor) not in self.gone and actor not in self.ended:
                    self.stop_owned(actor)
                    self.ended.append(actor)
                if self.procs[actor] == actor:
                    self.end_proc(actor, STOPPED)

    def tell(self, notices: list[Notice]) -> None:
        for notice in notices:
            owner = int(notice.mesh.owner)
            self.told.append((owner, int(notice.mesh.name.removeprefix("procs")), notice.death.cause))
            if owner == ROOT or owner in self.ended:
                continue
            if self.modes[owner] == "passes":
                self.fail(owner, notice.death.cause)
            elif self.modes[owner] == "raises":
                self.fail(owner, f"raised in {owner}")


def below(owners: tuple[int, ...], actor: int) -> set[int]:
    """An actor and all that it owns, directly or not."""
    found = {actor}
    for k, owner in enumerate(owners):
        if owner in found:
            found.add(k)
    return found


def expected(world: World, actor: int, event: str) -> tuple[list[tuple[int, int, str]], set[int]]:
    """Who is told of what, in order, and who is gone in the end: by the rules, for the whole tree at once."""
    owners = world.owners
    if event == "is stopped":
        return [], below(owners, actor)
    if event == "its process is stopped":
        return [], below(owners, world.procs[actor])
    first = actor
    if event == "loses its process":  # the topmost actor of the process is what its owner loses
        first = world.procs[actor]
    told: list[tuple[int, int, str]] = []
    cause = KILLED.cause
    if event == "loses its process":
        # Others on the same process whose owner lives elsewhere do not exist here: they are beside their owner.
        assert all(k == first or world.procs[owners[k]] == first for k, p in enumerate(world.procs) if p == first)
    while True:
        owner = owners[first]
        told.append((owner, first, cause))
        if owner == ROOT or world.modes[owner] == "handles":
            return told, below(owners, first)
        if world.modes[owner] == "raises":
            cause = f"raised in {owner}"
        first = owner


@pytest.mark.parametrize("event", EVENTS)
def test_all_trees(event: str) -> None:
    count = 0
    for owners in shapes(4):
        for procs in dict.fromkeys(placements(owners)):
            for modes in itertools.product(MODES, repeat=len(owners)):
                for actor in range(len(owners)):
                    world = World(owners, procs, modes)
                    if event == "fails":
                        world.fail(actor, KILLED.cause)
                    elif event == "is stopped":
                        world.stop(actor)
                    else:
                        world.end_proc(procs[actor], KILLED if event == "loses its process" else STOPPED)
                    told, gone = expected(world, actor, event)
                    case = (owners, procs, modes, actor)
                    assert world.told == told, case
                    assert set(world.ended) == gone, case
                    assert len(set(world.ended)) == len(world.ended), case
                    count += 1
    assert count > 10_000


def test_what_was_stopped_has_no_failures_any_more() -> None:
    """Late words of a stopped actor are nobody's business; its process is, where it goes on and is killed."""
    for owners in shapes(3):
        for procs in dict.fromkeys(placements(owners)):
            for actor in range(len(owners)):
                world = World(owners, procs, ("handles",) * len(owners))
                world.stop(actor)
                for gone in below(owners, actor):
                    tree = world.trees[world.at(owners[gone])]
                    assert tree.actor_failed(str(gone), 0, KILLED) == []
                alone = [k for k, proc in enumerate(procs) if proc == procs[actor]] == [actor]
                if procs[actor] == actor and alone:
                    world.end_proc(actor, KILLED)
                    assert world.told == [(owners[actor], actor, KILLED.cause)], "as the owner of the process"


def test_a_second_failure_is_told_as_well() -> None:
    """Two siblings fail one after the other: each once, whatever became of their owner."""
    for first, second in itertools.permutations(range(1, 4), 2):
        for mode in MODES:
            world = World((ROOT, 0, 0, 0), (0, 1, 2, 3), (mode, "passes", "passes", "passes"))
            world.fail(first, "one")
            world.fail(second, "two")
            asked = [mesh for owner, mesh, _ in world.told if owner == 0]
            assert asked == ([first, second] if mode == "handles" else [first])
            assert [mesh for owner, mesh, _ in world.told if owner == ROOT] == ([] if mode == "handles" else [0])
