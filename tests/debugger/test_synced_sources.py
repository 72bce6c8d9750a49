"""Files that were synced to hosts: the controller's names for them, and breakpoints that follow their lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.commands.breakpoint_commands import described
from monarch_kernel.debugger.controller.breakpoints import follow_line
from monarch_kernel.debugger.controller.hub import MeshDebugger
from monarch_kernel.debugger.controller.stacks import stacks
from monarch_kernel.debugger.dap.rank_session import RankSession
from monarch_kernel.debugger.events import evidence_at_client
from monarch_kernel.debugger.model.evidence import WAITS, Evidence, Operation, Wait
from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.workers import Placement, client_path, place_ranks
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until
from workspace_sync.reload.client import contact, refresh

FIRST = """\
def work(n):
    total = 0
    for i in range(n):
        total += i  # add
    return total
"""
SHIFTED = """\
import os


def helper():
    return os.getpid()


def work(n):
    total = 100
    for i in range(n):
        total += i  # add
    return total
"""
GONE = """\
def work(n):
    return sum(range(n))
"""


class Runs(Actor):
    """Calls the synced module."""

    @endpoint
    def enter(self, folder: str) -> None:
        """Import from a folder."""
        sys.path.insert(0, folder)

    @endpoint
    def run(self, n: int) -> Any:
        """Call its function."""
        import synced_code  # type: ignore[import-not-found]

        return synced_code.work(n), synced_code.__file__


class Host:
    """A folder of the client, and what a host's store makes of it: two slots, and a link that is renamed over."""

    def __init__(self, folder: Path) -> None:
        self.client = folder / "client"
        self.client.mkdir()
        self.workspace = folder / "store" / "w" / "ws"
        self.workspace.mkdir(parents=True)
        self.file = self.client / "synced_code.py"
        self.tree = self.workspace / "current" / "tree"
        self._count = 0

    def sync(self, text: str) -> None:
        """Save the file, and switch the host to a tree that has it."""
        self._count += 1
        self.file.write_text(text)
        slot = self.workspace / "slots" / str(self._count)
        slot.mkdir(parents=True)
        (slot / "synced_code.py").write_text(text)
        generation = self.workspace / "generations" / str(self._count)
        generation.mkdir(parents=True)
        (generation / "tree").symlink_to(f"../../slots/{self._count}")
        (self.workspace / "next").symlink_to(f"generations/{self._count}")
        os.replace(self.workspace / "next", self.workspace / "current")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.sync(FIRST)
    return made


@pytest.fixture
def debugger() -> Iterator[MeshDebugger]:
    debugger = get_debugger()
    yield debugger
    if debugger.breakpoints():
        debugger.clear()


def stop_of(debugger: MeshDebugger) -> Any:
    (at,) = debugger.wait(lambda stops: len(stops) == 1, PATIENCE)
    return at


def test_breakpoints_stops_and_stacks_name_the_controllers_file(host: Host, debugger: MeshDebugger) -> None:
    hosts = this_host()
    place_ranks(hosts, Placement({str(host.client): str(host.tree)})).get(PATIENCE)
    procs = hosts.spawn_procs({"ranks": 1})
    runs = procs.spawn("runs", Runs)
    runs.enter.call_one(str(host.tree)).get(PATIENCE)
    contact(procs)
    file = str(host.file)
    made = debugger.break_at(file, 4, mesh=procs, condition="i == 2")
    asked = runs.run.call_one(5)
    at = stop_of(debugger)
    frame = at.stop.frames[0]
    assert (frame.file, frame.line, frame.source, frame.loaded) == (
        file,
        4,
        "total += i  # add",
        str(host.tree / "synced_code.py"),
    )
    shown = stacks(procs).snapshots[0].stacks
    assert any(each.place.file == file for stack in shown for each in stack.frames)
    session = RankSession(debugger, lambda _event: None, lambda *_: None, lambda: [procs])  # type: ignore[list-item]
    session.attach()
    assert session.source(file) == FIRST
    # The file changes, and ranks load it: the breakpoint moves with its line.
    debugger.resume([at])
    assert asked.get(PATIENCE) == (10, str(host.tree / "synced_code.py"))
    host.sync(SHIFTED)
    assert refresh(procs).done
    assert made.spec.line == 11
    wait_until(lambda: all(each.line == 11 for each in made.bound.values()) and made.bound, "the rank is armed")
    asked = runs.run.call_one(5)
    at = stop_of(debugger)
    assert (at.stop.frames[0].file, at.stop.frames[0].line, at.stop.frames[0].source) == (file, 11, "total += i  # add")
    debugger.resume([at])
    assert asked.get(PATIENCE)[0] == 110
    # Its line is gone: it says so, and stops nothing.
    host.sync(GONE)
    assert refresh(procs).done
    assert "its line 11 (total += i  # add) is gone from the file" in described(made)
    assert runs.run.call_one(5).get(PATIENCE)[0] == 10
    assert debugger.stops() == []
    session.close()


def test_a_resolved_path_of_any_tree_is_the_controllers_file(host: Host) -> None:
    assert client_path(str(host.tree / "synced_code.py")) is None
    place_ranks(this_host(), Placement({str(host.client): str(host.tree)})).get(PATIENCE)
    for path in (host.tree, host.workspace / "slots/7", host.workspace / "generations/3/tree"):
        assert client_path(str(path / "deep" / "a.py")) == str(host.client / "deep" / "a.py")
    assert client_path("/elsewhere/slots/7/a.py") is None


def test_the_evidence_of_hosts_names_the_same_lines(host: Host) -> None:
    place_ranks(this_host(), Placement({str(host.client): str(host.tree)})).get(PATIENCE)
    there, here = str(host.tree / "synced_code.py"), str(host.file)

    def evidence(file: str) -> Evidence:
        place = SourceLocation(file, 4, "work")
        called = Operation("g", 1, "all_reduce", place=place)
        return Evidence(0, WAITS, history={"g": (called,)}, waits=(Wait(called, place=place),), place=place)

    assert evidence_at_client(evidence(there)) == evidence(here)
    assert evidence_at_client(evidence("/usr/lib/x.py")) == evidence("/usr/lib/x.py")


@pytest.mark.parametrize(
    ("old", "new", "line", "found"),
    [
        ("a b c d", "a b c d", 3, 3),
        ("a b c d", "x y a b c d", 3, 5),
        ("a b c d", "b c d", 3, 2),
        ("a b c d", "a b d", 3, None),
        ("a b c d", "a x b y c d z", 3, 5),
        ("a b c d", "d c b a", 2, 3),
        ("a b same c same d", "x same y b z same q", 5, 6),
        ("one total+=value two", "one total-=value two", 2, 2),
        ("one total+=value two", "one something_else two", 2, None),
        ("a b", "", 1, None),
        ("a b", "a b", 9, None),
    ],
)
def test_a_line_is_followed(old: str, new: str, line: int, found: int | None) -> None:
    assert follow_line(old.split(), new.split(), line) == found
