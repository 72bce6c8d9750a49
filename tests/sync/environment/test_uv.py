"""An environment of uv at another prefix has the bytes of one that uv makes there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.environment.trees import assert_equal_trees, installed, moved, stored
from tests.sync.environment.uv_projects import UvProject, packages, project
from workspace_sync.environment.editables import editables, follow
from workspace_sync.environment.kinds import environment
from workspace_sync.environment.manifests import environment_manifest
from workspace_sync.model.errors import ScanError
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan

SITE = "lib/python{}.{}/site-packages".format(*sys.version_info)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> UvProject:
    root = tmp_path_factory.mktemp("uv")
    return project(root, packages(root / "links"))


@pytest.fixture(scope="module")
def venvs(zoo: UvProject, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Environments of the project at four paths: for the last two, shebangs have no room, or no form."""
    root = tmp_path_factory.mktemp("venvs")
    return [zoo.sync(root / parent / "env") for parent in ("a", "b" * 20, "c" * 120, "with a blank")]


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("target", range(4))
def test_a_moved_environment_is_a_fresh_one(venvs: list[Path], source: int, target: int, tmp_path: Path) -> None:
    scanned = environment_manifest(venvs[source], Index("e", str(tmp_path / "sync")))
    assert not scanned.notes
    assert_equal_trees(moved(scanned, venvs[target]), venvs[target])


@pytest.mark.parametrize("how", [["--link-mode=hardlink"], ["--link-mode=copy"], ["--link-mode=clone"]])
def test_it_is_the_same_however_uv_made_its_files(
    zoo: UvProject, venvs: list[Path], how: list[str], tmp_path: Path
) -> None:
    made = environment_manifest(zoo.sync(tmp_path / "env", *how), Index("e", str(tmp_path / "sync")))
    assert_equal_trees(moved(made, venvs[0]), venvs[0])
    # The files on a host are its own, and none of uv's cache, which is on the same disk here.
    there = stored(made, tmp_path / "store")
    ours, uvs = (
        {path.stat().st_ino for path in root.rglob("*") if path.is_file()} for root in (there / SITE, zoo.cache)
    )
    assert ours and uvs and not ours & uvs


def test_links_to_the_cache_are_refused(zoo: UvProject, tmp_path: Path) -> None:
    prefix = zoo.sync(tmp_path / "env", "--link-mode=symlink")
    assert (prefix / SITE / "one.py").is_symlink()
    with pytest.raises(ScanError, match=r"of packages in .*/env are links to a cache, such as .*--link-mode=copy"):
        environment_manifest(prefix, Index("e", str(tmp_path / "sync")))


def test_a_relocatable_one(zoo: UvProject, tmp_path: Path) -> None:
    made: list[Path] = []
    for name in ("a", "b" * 150):
        prefix = tmp_path / name / "env"
        zoo.run("venv", "--relocatable", str(prefix))
        made.append(zoo.sync(prefix))
    scanned = environment_manifest(made[0], Index("e", str(tmp_path / "sync")))
    assert_equal_trees(moved(scanned, made[1]), made[1])
    there = stored(scanned, tmp_path / "store")
    assert subprocess.run([there / "bin" / "one"], capture_output=True, text=True, check=True).stdout == "1\n"


def test_a_project_with_its_members(zoo: UvProject, tmp_path: Path) -> None:
    """The project is the workspace, or an editable install that follows: hosts have what uv would make of it there."""
    own = tmp_path / "zoo"
    shutil.copytree(zoo.folder, own)
    zoo.sync(own / ".venv", folder=own)
    about = environment(own)
    assert (about.kind, about.project) == ("uv", str(own))
    installs = editables(about)
    assert {each.name for each in installs} == {"zoo", "animal"}
    followed = follow(installs, {})
    assert followed.dirs == {str(own): "editables/zoo"} and not followed.notes
    for dirs, place in ((followed.dirs, "tree/editables/zoo"), ({str(own): ""}, "tree")):
        root = tmp_path / f"host-{len(place)}"
        workspace = Workspace(dirs)
        scanned = environment_manifest(about, Index(place[:4], str(root / "sync")), dirs=workspace.roots())
        made = stored(scanned, root / "store", tree=scan(workspace, Index("t", str(root / "sync"))))
        there = made.parent / place
        assert not (there / ".venv").exists()
        for name, file in (("zoo", "src/zoo"), ("animal", "packages/animal/src/animal")):
            done = subprocess.run([made / "bin" / name], capture_output=True, text=True, check=True, cwd="/")
            assert done.stdout == f"{name} {there}/{file}/__init__.py\n"
        # uv itself makes the same there.
        moved_here = installed(made)
        made.unlink()  # a link to the slot
        zoo.sync(made, folder=there)
        # When a project's files were made is part of uv's own note on it, and so of that note's row in RECORD.
        times = tuple(
            f"{SITE}/{name}-1.0.dist-info/{file}" for name in ("zoo", "animal") for file in ("uv_cache.json", "RECORD")
        )
        assert_equal_trees(moved_here, made, without=times)
