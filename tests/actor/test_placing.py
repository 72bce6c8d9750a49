"""Ranks that start in other folders of their host: what a sync has put there, and not the controller's own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, HostMesh, endpoint, this_host
from monarch_kernel.protocol.placement import Placement as Value
from monarch_kernel.workers import Placement, client_path, place_ranks, placement_of
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until
from tests.workers import Start

pytestmark = pytest.mark.own_runtime


class Witness(Actor):
    @endpoint
    def where(self) -> dict[str, Any]:
        """What this rank has for the folders of the test."""
        import placed_module  # type: ignore[import-not-found]

        return {
            "cwd": os.getcwd(),
            "module": placed_module.__file__,
            "version": placed_module.VERSION,
            "workspace": os.environ.get("WORKSPACE_DIR"),
            "python": sys.executable,
        }

    @endpoint
    def of_child(self, command: bool = False) -> dict[str, Any]:
        """The same, of a rank that this one starts."""
        child = this_host().spawn_procs().spawn("witness", Witness)
        return child.where.call_one().get(PATIENCE)


class SyncedTree:
    """A folder of the controller, and the trees of a host with other versions of it."""

    def __init__(self, root: Path) -> None:
        self.client = root / "client" / "project"
        self.root = root / "host"
        self.root.mkdir()
        self.current = self.root / "current"
        self.write(self.client, "client")
        (self.client / "ignored").mkdir()
        self.switch("first")

    @staticmethod
    def write(folder: Path, version: str) -> None:
        (folder / "sub").mkdir(parents=True)
        (folder / "placed_module.py").write_text(f"VERSION = {version!r}\n")

    def switch(self, version: str) -> None:
        """Make another tree, and lead the link there."""
        self.write(self.root / version / "project", version)
        (self.root / "new").symlink_to(version)
        os.replace(self.root / "new", self.current)

    @property
    def placement(self) -> Placement:
        return Placement({str(self.client): str(self.current / "project")}, {"WORKSPACE_DIR": str(self.current)})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SyncedTree:
    tree = SyncedTree(tmp_path)
    monkeypatch.chdir(tree.client / "sub")
    monkeypatch.syspath_prepend(tree.client)
    return tree


def where(hosts: HostMesh, **options: Any) -> dict[str, Any]:
    return hosts.spawn_procs(**options).spawn("witness", Witness).where.call_one().get(PATIENCE)


def in_tree(seen: dict[str, Any], tree: SyncedTree, version: str) -> None:
    assert seen["version"] == version
    assert seen["module"] == str(tree.current / "project" / "placed_module.py")
    assert seen["cwd"] == str(tree.root / version / "project" / "sub")
    assert seen["workspace"] == str(tree.current)


# -- the value -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, expected",
    [("/a", "/h/a"), ("/a/x/y", "/h/a/x/y"), ("/a/b/c", "/h/b/c"), ("/ab", None), ("/", None), ("a", None)],
)
def test_paths_move_with_the_longest_folder(path: str, expected: str | None) -> None:
    assert Value({"/a": "/h/a", "/a/b": "/h/b"}).on_host(path) == expected


def test_a_newer_placement_covers_what_lies_in_its_folders() -> None:
    old = Value({"/a/b": "/1/b", "/c": "/1/c"}, {"X": "1", "Y": "1"}, "/1/python")
    new = old.updated(Value({"/a": "/2/a"}, {"X": "2"}))
    assert new == Value({"/c": "/1/c", "/a": "/2/a"}, {"X": "2", "Y": "1"}, "/1/python")
    assert new.on_host("/a/b/file") == "/2/a/b/file"


def test_a_folder_that_goes_takes_all_that_names_it_along() -> None:
    old = Value({"/a": "/w/one/a", "/b": "/w/two/b"}, {"TREE": "/w/one", "X": "1", "GONE": None}, "/w/one/bin/python")
    assert old.without("/w/one") == Value({"/b": "/w/two/b"}, {"TREE": None, "X": "1", "GONE": None}, "")
    assert old.without("/w/on") == old


# -- ranks -----------------------------------------------------------------------------------------


def test_ranks_start_in_the_tree_and_follow_its_switch(tree: SyncedTree) -> None:
    hosts = this_host()
    before = hosts.spawn_procs().spawn("before", Witness)
    assert before.where.call_one().get(PATIENCE)["version"] == "client"
    assert placement_of(hosts) == [None]
    place_ranks(hosts, tree.placement).get(PATIENCE)
    assert placement_of(hosts) == [tree.placement]
    in_tree(where(hosts), tree, "first")
    tree.switch("second")
    in_tree(where(hosts), tree, "second")
    in_tree(before.of_child.call_one().get(PATIENCE), tree, "second")  # its agent knows, although it started earlier


def test_ranks_of_ranks_follow_the_switch(tree: SyncedTree) -> None:
    place_ranks(this_host(), tree.placement).get(PATIENCE)
    parent = this_host().spawn_procs().spawn("parent", Witness)
    in_tree(parent.where.call_one().get(PATIENCE), tree, "first")
    tree.switch("second")
    in_tree(parent.of_child.call_one().get(PATIENCE), tree, "second")


@pytest.mark.parametrize("started", ["before", "after"])
def test_healed_ranks_run_the_new_tree(tree: SyncedTree, faults: Any, started: str) -> None:
    hosts = this_host()
    if started == "after":
        place_ranks(hosts, tree.placement).get(PATIENCE)
    procs = hosts.spawn_procs()
    witness = procs.spawn("witness", Witness)
    assert witness.where.call_one().get(PATIENCE)["version"] == {"before": "client", "after": "first"}[started]
    place_ranks(hosts, tree.placement).get(PATIENCE)
    tree.switch("second")
    os.kill(procs.pids().item(), signal.SIGKILL)
    wait_until(lambda: bool(procs.dead()), "the rank is dead")
    procs.heal().get(PATIENCE)
    in_tree(witness.where.call_one().get(PATIENCE), tree, "second")
    faults.get(timeout=PATIENCE)


@pytest.mark.parametrize("how", ["command", "placement"])
def test_other_interpreters(tree: SyncedTree, tmp_path: Path, how: str) -> None:
    """A path of the controller's environment means the environment on the host, also for ranks of ranks."""
    client, host = tmp_path / "client" / "env" / "bin", tmp_path / "host" / "env" / "bin"
    for folder in (client, host):
        folder.mkdir(parents=True)
    python = host / "python"
    python.write_text(f'#!/bin/sh\nTREE_PYTHON=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    place_ranks(this_host(), tree.placement).get(PATIENCE)
    if how == "command":
        place_ranks(this_host(), Placement({str(client.parent): str(host.parent)})).get(PATIENCE)
        hosts = this_host().with_python_executable(str(client / "python"))
    else:
        place_ranks(this_host(), Placement(python=str(python))).get(PATIENCE)
        hosts = this_host()
    procs = hosts.spawn_procs().spawn("witness", Shown)
    in_tree(procs.where.call_one().get(PATIENCE), tree, "first")
    assert procs.shown.call_one().get(PATIENCE) == ["yes", "yes"]
    tree.switch("second")
    in_tree(procs.of_child.call_one().get(PATIENCE), tree, "second")


class Shown(Witness):
    @endpoint
    def shown(self, deep: bool = True) -> list[str | None]:
        """Which interpreter runs this rank, and one that it starts."""
        mine = os.environ.get("TREE_PYTHON")
        if not deep:
            return [mine]
        return [mine, *this_host().spawn_procs().spawn("shown", Shown).shown.call_one(False).get(PATIENCE)]


def test_preloaded_modules_are_loaded_again_after_a_switch(tree: SyncedTree) -> None:
    hosts = this_host()
    place_ranks(hosts, tree.placement).get(PATIENCE)
    assert where(hosts, preload=["placed_module"])["version"] == "first"
    tree.switch("second")
    place_ranks(hosts, tree.placement).get(PATIENCE)
    assert where(hosts, preload=["placed_module"])["version"] == "second"


def test_templates_of_other_modules_survive_a_placement(tree: SyncedTree) -> None:
    hosts = this_host()
    parent = hosts.spawn_procs(preload=["decimal"]).spawn("parents", Parents)
    template = parent.pid.call_one().get(PATIENCE)
    place_ranks(hosts, tree.placement).get(PATIENCE)
    again = hosts.spawn_procs(preload=["decimal"]).spawn("parents", Parents)
    assert again.pid.call_one().get(PATIENCE) == template


class Parents(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getppid()


def test_what_the_tree_lacks_stays_as_it_is(tree: SyncedTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not synced: its parent for the working directory, and itself for imports."""
    packages = tree.client / "ignored"
    (packages / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(packages)
    place_ranks(this_host(), tree.placement).get(PATIENCE)
    seen = this_host().spawn_procs().spawn("paths", ImportPaths).see.call_one().get(PATIENCE)
    assert str(packages) in seen[1]
    assert seen[0] == str(tree.root / "first" / "project")


class ImportPaths(Actor):
    @endpoint
    def see(self) -> tuple[str, list[str]]:
        return os.getcwd(), list(sys.path)


def test_a_folder_behind_a_symbolic_link(tree: SyncedTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree.client)
    monkeypatch.setattr(sys, "path", [str(link), *(entry for entry in sys.path if entry != str(tree.client))])
    monkeypatch.chdir(link / "sub")
    placement = Placement({str(link): str(tree.current / "project")}, tree.placement.env)
    place_ranks(this_host(), placement).get(PATIENCE)
    in_tree(where(this_host()), tree, "first")
    assert client_path(str(tree.current / "project" / "a.py")) == str(link / "a.py")


def test_each_host_has_its_own_tree(tree: SyncedTree, workers: Start) -> None:
    hosts = workers(2, "tcp").attach()
    second = Placement(tree.placement.folders, {"WORKSPACE_DIR": "of the second"})
    place_ranks(hosts.spawn_procs(), [tree.placement, second]).get(PATIENCE)
    seen = hosts.spawn_procs().spawn("witness", Witness).where.call().get(PATIENCE)
    assert [place["workspace"] for place in seen.values()] == [str(tree.current), "of the second"]
    assert [place["version"] for place in seen.values()] == ["first", "first"]
    assert placement_of(hosts.slice(hosts=1)) == [second]
    assert where(this_host())["version"] == "client"  # nothing was placed here


def test_a_successor_of_the_host_agent_places_ranks_in_the_same_way(tree: SyncedTree, faults: Any) -> None:
    place_ranks(this_host(), tree.placement).get(PATIENCE)
    procs = this_host().spawn_procs()
    witness = procs.spawn("witness", Witness)
    witness.where.call_one().get(PATIENCE)
    hosts = this_host()
    os.kill(hosts._system.agent_process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    wait_until(lambda: bool(procs.dead()), "the rank is dead")
    procs.heal().get(PATIENCE)
    in_tree(witness.where.call_one().get(PATIENCE), tree, "first")
    faults.get(timeout=PATIENCE)


def test_dead_hosts_are_left_out(tree: SyncedTree, workers: Start) -> None:
    team = workers(2, "tcp")
    hosts = team.attach()
    hosts.spawn_procs().stop().get(PATIENCE)
    team[0].end(signal.SIGKILL)
    place_ranks(hosts, tree.placement).get(PATIENCE)
    in_tree(where(hosts.slice(hosts=1)), tree, "first")


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placements, message",
    [
        ([], "got 0 placements for 1 hosts"),
        (Placement({"a": "/b"}), "'a' is not an absolute path"),
        (Placement({"/a": "b"}), "'b' is not an absolute path"),
    ],
)
def test_bad_placements(placements: Placement | Sequence[Placement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_ranks(this_host(), placements)
    assert placement_of(this_host()) == [None]


def test_ranks_cannot_place(tree: SyncedTree) -> None:
    place_ranks(this_host(), tree.placement).get(PATIENCE)
    ranks = this_host().spawn_procs().spawn("placer", Placer)
    assert "for the controller" in ranks.place.call_one().get(PATIENCE)
    assert ranks.path.call_one(str(tree.current / "project" / "x.py")).get(PATIENCE) == str(tree.client / "x.py")


class Placer(Actor):
    @endpoint
    def place(self) -> str:
        with pytest.raises(RuntimeError) as raised:
            place_ranks(this_host(), Placement())
        return str(raised.value)

    @endpoint
    def path(self, path: str) -> str | None:
        return client_path(path)
