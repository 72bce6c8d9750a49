"""Ranks that run follow their files: in place, with new actors, or in new processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh
from tests.sync.reload.sources import Sources
from tests.waiting import patience
from workspace_sync.reload.client import contact, refresh, refresh_here, stale_modules

PATIENCE = patience(60.0)

ACTOR = """
from monarch_kernel.actor import Actor, endpoint
import lib

class Counter(Actor):
    def __init__(self, start):
        self.value = start

    @endpoint
    def step(self, by{extra}):
        self.value += by
        return lib.name() + "{tag}", self.value

    @endpoint
    def kind(self):
        import sys
        return type(self) is sys.modules["act"].Counter and isinstance(self, sys.modules["act"].Counter)

    @endpoint
    def checkpoint(self):
        return self.value

    def __restore__(self, value):
        self.value = value
{more}
"""


def counter(tag: str, extra: str = "", more: str = "") -> str:
    return ACTOR.format(tag=tag, extra=extra, more=more)


@pytest.fixture
def folders(sources: Sources) -> list[tuple[str, str]]:
    """The workspace, in place."""
    return [(str(sources.folder), str(sources.folder))]


@pytest.fixture
def counters(sources: Sources, procs: ProcMesh, folders: list[tuple[str, str]]) -> Any:
    """Actors of a module of the workspace, which imports another one."""
    sources.write(lib="def name():\n    return 'one'\n")
    act = sources.load("act", counter("-a"))
    made = procs.spawn("counters", act.Counter, 5)
    contact(procs, folders)
    assert made.step.call(1).get(PATIENCE).item(ranks=0) == ("one-a", 6)
    return made


def test_live_actors_follow(sources: Sources, procs: ProcMesh, folders: Any, counters: Any) -> None:
    changed = sources.write(act=counter("-b"), lib="def name():\n    return 'two'\n")
    assert [(each.name, each.ranks, each.state) for each in stale_modules(procs, changed, folders=folders)] == [
        ("act", "0-1", "stale"),
        ("lib", "0-1", "stale"),
    ]
    result = refresh(procs, "reload", changed, folders=folders)
    assert result.done
    assert result.modules() == {("act", "reloaded", ""): [0, 1], ("lib", "reloaded", ""): [0, 1]}
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("two-b", 7), ("two-b", 7)]
    assert all(counters.kind.call().get(PATIENCE).values())
    assert stale_modules(procs, folders=folders) == []


def test_endpoints_come_go_and_change_their_arguments(
    sources: Sources, procs: ProcMesh, folders: Any, counters: Any
) -> None:
    handle = counters.step
    more = "    @endpoint\n    def fresh(self):\n        return 'fresh', self.value\n"
    sources.write(act=counter("-b", ", *, times=1", more))
    assert refresh(procs, folders=folders).done
    assert [each.state for each in refresh_here(folders=folders) if each.name == "act"] == ["reloaded"]
    assert list(counters.fresh.call().get(PATIENCE).values()) == [("fresh", 6)] * 2
    assert list(handle.call(1, times=3).get(PATIENCE).values()) == [("one-b", 7)] * 2
    sources.write(act=counter("-c"))
    assert refresh(procs, folders=folders).done
    refresh_here(folders=folders)
    with pytest.raises(TypeError):
        handle.call(1, times=3)
    with pytest.raises(AttributeError, match="no endpoint 'newer'"):
        _ = counters.newer


def test_what_actors_cannot_follow_is_left_alone(
    sources: Sources, procs: ProcMesh, folders: Any, counters: Any
) -> None:
    broken = counter("-b").replace("    def step(", "    async def step(").replace("    def ", "    async def ")
    sources.write(act=broken.replace("async async", "async").replace("async def __init__", "def __init__"))
    result = refresh(procs, folders=folders)
    (name, state, reason), ranks = next(iter(result.modules("kept").items()))
    assert (name, state, ranks) == ("act", "kept", [0, 1])
    assert "the endpoints of Counter were sync and are async now" in reason
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("one-a", 7)] * 2


def test_errors_name_the_line_at_the_client(sources: Sources, procs: ProcMesh, folders: Any, counters: Any) -> None:
    sources.write(lib="def name():\n    return 'two'\nraise ValueError('no')\n", act=counter("-b"))
    result = refresh(procs, folders=folders)
    assert result.modules("failed") == {
        ("lib", "failed", f"{sources.folder}/lib.py:3: ValueError: no"): [0, 1],
    }
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("one-b", 7)] * 2


def test_ranks_that_import_later_have_the_new_source(sources: Sources, procs: ProcMesh, folders: Any) -> None:
    sources.write(lib="def name():\n    return 'one'\n")
    act = sources.load("act", counter("-a"))
    contact(procs, folders)
    first = procs.slice(ranks=0).spawn("first", act.Counter, 1)
    first.step.call(1).get(PATIENCE)
    sources.write(lib="def name():\n    return 'two'\n")
    second = procs.slice(ranks=1).spawn("second", act.Counter, 1)
    assert second.step.call_one(1).get(PATIENCE)[0] == "two-a"
    assert [(each.name, each.ranks) for each in stale_modules(procs, folders=folders)] == [("lib", "0")]


WAITER = """
from monarch_kernel.actor import Actor, endpoint
import os, time
class Waiter(Actor):
    @endpoint
    def wait(self, path):
        while not os.path.exists(path):
            time.sleep(0.005)
        return self.tag()
    def tag(self):
        return {!r}
    @endpoint
    def now(self):
        return self.tag()
    @endpoint
    def ask(self, other, path):
        return other.wait.call_one(path).get()
"""


def test_a_reload_waits_for_endpoints_and_names_those_that_go_on(
    sources: Sources, procs: ProcMesh, folders: Any, tmp_path: Path
) -> None:
    module = sources.load("waiter", WAITER.format("old"))
    waiters = procs.spawn("waiters", module.Waiter)
    waiters.now.call().get(PATIENCE)
    contact(procs, folders)
    go = tmp_path / "go"
    running = waiters.slice(ranks=1).wait.call_one(str(go))
    sources.write(waiter=WAITER.format("new"))
    result = refresh(procs, folders=folders, wait=0.3)
    assert result.errors == {"waiters.wait did not end within 0.3 s": [1]}
    assert waiters.slice(ranks=0).now.call_one().get(PATIENCE) == "new"
    assert refresh(procs.slice(ranks=1), folders=folders, when="now").done
    go.touch()
    assert running.get(PATIENCE) == "new"  # an endpoint in the middle calls into the new code


def test_a_reload_begins_when_the_endpoint_ends(
    sources: Sources, procs: ProcMesh, folders: Any, tmp_path: Path
) -> None:
    module = sources.load("waiter", WAITER.format("old"))
    waiters = procs.spawn("waiters", module.Waiter)
    others = procs.spawn("others", module.Waiter)
    waiters.now.call().get(PATIENCE)
    contact(procs, folders)
    go = tmp_path / "go"
    # An endpoint that waits for another actor of its process must get its answer while the reload waits.
    running = waiters.slice(ranks=0).ask.call_one(others.slice(ranks=0), str(go))
    sources.write(waiter=WAITER.format("new"))
    go.touch()
    assert refresh(procs, folders=folders, wait=PATIENCE).done
    assert running.get(PATIENCE) in ("old", "new")
    assert list(waiters.now.call().get(PATIENCE).values()) == ["new", "new"]


def test_respawned_actors_keep_their_processes_and_checkpoints(
    sources: Sources, procs: ProcMesh, folders: Any, counters: Any
) -> None:
    pids = list(procs.pids().values())
    sources.write(act=counter("-b", more="    __slots__ = ('x',)\n"))
    kept = refresh(procs, folders=folders)
    assert [state for _, state, _ in kept.modules()] == ["kept"]
    result = refresh(procs, "respawn", folders=folders)
    assert result.done, result
    assert (result.respawned, result.restored) == (["counters"], ["counters"])
    assert list(procs.pids().values()) == pids
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("one-b", 7)] * 2
    assert all(counters.kind.call().get(PATIENCE).values())


def test_a_respawn_that_cannot_import_leaves_all_as_it_was(
    sources: Sources, procs: ProcMesh, folders: Any, counters: Any
) -> None:
    sources.write(lib="def name(:\n    return 'two'\n", act=counter("-b"))
    result = refresh(procs, "respawn", folders=folders)
    assert not result.done
    assert any("lib.py:1: SyntaxError" in reason for _, _, reason in result.modules("failed"))
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("one-a", 7)] * 2
    assert all(counters.kind.call().get(PATIENCE).values())


def test_restarted_ranks_are_new_processes_with_checkpoints(
    sources: Sources, procs: ProcMesh, folders: Any, counters: Any
) -> None:
    pids = list(procs.pids().values())
    sources.write(act=counter("-b"))
    result = refresh(procs, "restart", folders=folders)
    assert result.done, result
    assert set(procs.pids().values()).isdisjoint(pids)
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("one-b", 7)] * 2
    assert stale_modules(procs, folders=folders) == []
    sources.write(lib="def name():\n    return 'two'\n")
    assert refresh(procs, folders=folders).done
    assert list(counters.step.call(1).get(PATIENCE).values()) == [("two-b", 8)] * 2


def test_dead_ranks_are_named(sources: Sources, procs: ProcMesh, folders: Any, counters: Any) -> None:
    procs.slice(ranks=1).kill().get(PATIENCE)
    sources.write(lib="def name():\n    return 'two'\n")
    result = refresh(procs, folders=folders)
    assert result.modules() == {("lib", "reloaded", ""): [0]}
    assert list(result.errors.values()) == [[1]]


ASYNC = """
import asyncio, os
from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
class Talker(Actor):
    @concurrent_endpoint
    async def wait(self, path):
        while not os.path.exists(path):
            await asyncio.sleep(0.005)
        return self.tag()
    def tag(self):
        return {!r}
    @endpoint
    async def now(self):
        return self.tag()
"""


def test_async_actors_are_waited_for_and_follow(
    sources: Sources, procs: ProcMesh, folders: Any, tmp_path: Path
) -> None:
    module = sources.load("talker", ASYNC.format("old"))
    talkers = procs.spawn("talkers", module.Talker)
    talkers.now.call().get(PATIENCE)
    contact(procs, folders)
    go = tmp_path / "go"
    running = talkers.slice(ranks=0).wait.call_one(str(go))
    assert talkers.slice(ranks=0).now.call_one().get(PATIENCE) == "old"  # the other one runs beside it
    sources.write(talker=ASYNC.format("new"))
    assert list(refresh(procs, folders=folders, wait=0.3).errors.values()) == [[0]]
    assert talkers.slice(ranks=0).now.call_one().get(PATIENCE) == "old"  # its messages are not held for good
    go.touch()
    assert running.get(PATIENCE) == "old"
    assert refresh(procs, folders=folders).done
    assert list(talkers.now.call().get(PATIENCE).values()) == ["new", "new"]
