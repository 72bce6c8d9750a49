"""Ranks whose workspace switches to another tree, and the working directory of ranks."""

from __future__ import annotations

import os
from pathlib import Path

from monarch_kernel.actor import ProcMesh
from tests.sync.reload.sources import Sources
from tests.waiting import patience
from workspace_sync.reload.client import contact, enter, folders_of, refresh, stale_modules

PATIENCE = patience(60.0)

PLACE = """
from monarch_kernel.actor import Actor, endpoint
import os, sys, traceback
class Place(Actor):
    @endpoint
    def enter(self, folder):
        os.chdir(folder)
        sys.path.insert(0, folder)
    @endpoint
    def where(self):
        import code_of_tree
        return os.getcwd(), code_of_tree.__file__, code_of_tree.value()
    @endpoint
    def fails(self):
        import code_of_tree
        try:
            code_of_tree.fail()
        except ValueError:
            return traceback.format_exc()
"""
TREE = "def value():\n    return {!r}\ndef fail():\n    raise ValueError({!r})\n"


def test_ranks_follow_a_switch_of_trees(sources: Sources, procs: ProcMesh, tmp_path: Path) -> None:
    """As a host's store does it: `current` is renamed over, and the working directory is a resolved path."""
    place = sources.load("place", PLACE)
    workspace = tmp_path / "store" / "w" / "ws"
    for slot, tag in (("a", "old"), ("b", "new")):
        (workspace / "slots" / slot).mkdir(parents=True)
        (workspace / "slots" / slot / "code_of_tree.py").write_text(TREE.format(tag, tag))
        (workspace / "generations" / slot).mkdir(parents=True)
        (workspace / "generations" / slot / "tree").symlink_to(f"../../slots/{slot}")
    (workspace / "current").symlink_to("generations/a")
    client = tmp_path / "client"
    client.mkdir()
    (client / "code_of_tree.py").write_text(TREE.format("new", "new"))
    folders = [(str(client), str(workspace / "current" / "tree"))]
    places = procs.spawn("places", place.Place)
    contact(procs, folders)
    places.enter.call(folders[0][1]).get(PATIENCE)
    here, file, value = places.where.call().get(PATIENCE).item(ranks=0)
    assert (here, file, value) == (str(workspace / "slots/a"), f"{folders[0][1]}/code_of_tree.py", "old")
    (workspace / "next").symlink_to("generations/b")
    os.replace(workspace / "next", workspace / "current")
    assert not enter(procs, folders).errors
    assert "raise ValueError('new')" in places.fails.call().get(PATIENCE).item(ranks=0)  # the file of that name
    assert [each.name for each in stale_modules(procs, [str(client / "code_of_tree.py")], folders=folders)] == [
        "code_of_tree"
    ]
    assert refresh(procs, folders=folders).done
    for here, file, value in places.where.call().get(PATIENCE).values():
        assert (here, file, value) == (str(workspace / "slots/b"), f"{folders[0][1]}/code_of_tree.py", "new")


def test_without_placements_the_working_directory_is_the_workspace(procs: ProcMesh) -> None:
    assert folders_of(procs) == [(os.getcwd(), os.getcwd())]
