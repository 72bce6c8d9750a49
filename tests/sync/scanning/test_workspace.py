"""A workspace is one and the same from every notebook, and wrong arguments are refused when it is made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workspace_sync.model.workspace import CondaEnvironment, Workspace


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two", "one/inner", "x/one"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_list_gives_folders_their_own_names(folders: Path) -> None:
    workspace = Workspace(dirs=["one", folders / "two"])
    assert workspace.roots() == {f"{folders}/one": "one", f"{folders}/two": "two"}
    assert workspace.dirs == {Path("one"): "one", folders / "two": "two"}


def test_a_mapping_gives_them_others(folders: Path) -> None:
    assert Workspace(dirs={"one": "src/a/", "two": "./lib"}).roots() == {
        f"{folders}/one": "src/a",
        f"{folders}/two": "lib",
    }
    assert Workspace(dirs={"one": ""}).roots() == {f"{folders}/one": ""}


def test_the_current_folder_alone_is_the_root(folders: Path) -> None:
    assert Workspace(dirs=["."]).roots() == {str(folders): ""}
    assert Workspace(dirs=["./"]).roots() == {str(folders): ""}
    os.chdir("one/inner")
    assert Workspace(dirs=[".", "../../two"]).roots() == {f"{folders}/one/inner": "inner", f"{folders}/two": "two"}


def test_without_folders(folders: Path) -> None:
    assert Workspace().roots() == Workspace.null().roots() == {}
    assert Workspace.null().env is None
    assert Workspace().name == "workspace"


def test_a_workspace_is_the_same_wherever_it_is_named(folders: Path) -> None:
    here = Workspace(dirs=["one", "two"])
    program = (
        "from workspace_sync.model.workspace import Workspace; import sys;"
        "w = Workspace(dirs=sys.argv[1:]); print(w.id, w.name)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, f"{folders}/two", f"{folders}/x/../one"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.split()
    assert said == [here.id, "two"]
    assert here.name == "one"
    assert re.fullmatch("[0-9a-f]{16}", here.id)
    assert Workspace(dirs={"link": "one"}).id == Workspace(dirs=["one"]).id != here.id
    assert Workspace(dirs={"one": "other"}).id != Workspace(dirs=["one"]).id


def test_a_name_can_stand_in_every_path(folders: Path) -> None:
    odd = folders / ("späte\n../.. Nacht" + "x" * 100).replace("/", "_")
    odd.mkdir()
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", Workspace(dirs=[odd]).name)


@pytest.mark.parametrize(
    ("dirs", "error", "text"),
    [
        (["nowhere"], FileNotFoundError, "there is no folder .*/nowhere"),
        (["file/below"], FileNotFoundError, "there is no folder"),
        (["file"], NotADirectoryError, "is a file: name its folder"),
        (["one", "x/one"], ValueError, "have one place in the tree, 'one'"),
        ({"one": "a", "two": "a/"}, ValueError, "have one place in the tree, 'a'"),
        (["one", "link"], ValueError, "is named twice"),
        (["one", "one/inner"], ValueError, "one/inner is within .*/one"),
        ({"one": "a", "two": "a/b"}, ValueError, "are within each other"),
        ({"one": "", "two": "b"}, ValueError, "are within each other"),
        ({"one": "../up"}, ValueError, "is outside the tree"),
        ({"one": "a/../../up"}, ValueError, "is outside the tree"),
        ({"one": "/etc"}, ValueError, "is outside the tree"),
        ("one", TypeError, r"write dirs=\['one'\]"),
    ],
)
def test_wrong_folders_are_refused(folders: Path, dirs: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Workspace(dirs=dirs)


def test_wrong_links_are_refused() -> None:
    with pytest.raises(ValueError, match='links is "refuse", "follow" or "keep"'):
        Workspace(links="copy")  # type: ignore[arg-type]


def test_an_environment_is_that_of_this_interpreter_or_the_active_one(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CondaEnvironment("one").conda_prefix == f"{folders}/one"
    with pytest.raises(FileNotFoundError):
        CondaEnvironment("nowhere")
    monkeypatch.setattr(sys, "prefix", f"{folders}/two")
    monkeypatch.setenv("CONDA_PREFIX", f"{folders}/one")
    assert CondaEnvironment().conda_prefix == f"{folders}/one"
    (folders / "two" / "conda-meta").mkdir()
    assert CondaEnvironment().conda_prefix == f"{folders}/two"
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.delenv("CONDA_PREFIX")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    with pytest.raises(ValueError, match="no environment is active"):
        _ = CondaEnvironment().conda_prefix
    assert Workspace(env=CondaEnvironment("one")).name == "one"
    assert Workspace(env=CondaEnvironment("one")).id != Workspace().id
