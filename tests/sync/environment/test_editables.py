"""Editable installs: what they lead to goes along, and they lead there on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.environment.trees import stored
from tests.sync.environment.wheels import pip, venv, wheel
from workspace_sync.environment.editables import editables, follow
from workspace_sync.environment.kinds import environment
from workspace_sync.environment.manifests import environment_manifest
from workspace_sync.environment.rewriting import record_hash
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import FileEntry, Folder, seal
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.scanning import Index, scan
from workspace_sync.sources import WorkspaceSource, stale_extensions

SITE = "lib/python{}.{}/site-packages".format(*sys.version_info)
# What setuptools leaves for a package whose modules are not all in one folder.
FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location
MAPPING: dict[str, str] = {mapping!r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname in MAPPING:
            base = MAPPING[fullname]
            return spec_from_file_location(fullname, base + "/__init__.py", submodule_search_locations=[base])
def install():
    sys.meta_path.append(_EditableFinder)
"""


def editable(folder: Path, name: str, files: dict[str, str]) -> Path:
    """The wheel that a build backend makes for an editable install."""
    return wheel(folder, name, files, scripts={name: f"{name}:main"})


def note_project(site: Path, name: str, project: Path) -> None:
    """Have the metadata say what pip says of an editable install, and not that it was a wheel of ours."""
    info = site / f"{name}-1.0.dist-info"
    text = json.dumps({"dir_info": {"editable": True}, "url": project.as_uri()}).encode()
    (info / "direct_url.json").write_bytes(text)
    rows = [row for row in (info / "RECORD").read_text().splitlines() if "direct_url.json" not in row]
    rows.append(f"{info.name}/direct_url.json,{record_hash(text)},{len(text)}")
    (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(an environment with editable installs of three kinds, the folder with their projects)."""
    root = tmp_path_factory.mktemp("editable")
    for package, place in (("by_path", "paths/src"), ("by_finder", "finders"), ("by_link", "links")):
        folder = root / place / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"def main():\n    print({package!r}, __file__)\n")
    finder = FINDER.format(mapping={"by_finder": str(root / "finders" / "by_finder")})
    prefix = venv(
        root / "env",
        editable(root, "by_path", {"__editable__.by_path-1.0.pth": f"{root}/paths/src\n"}),
        editable(
            root,
            "by_finder",
            {
                "__editable__.by_finder-1.0.pth": "import __editable___by_finder; __editable___by_finder.install()",
                "__editable___by_finder.py": finder,
            },
        ),
    )
    site = prefix / SITE
    note_project(site, "by_path", root / "paths")
    note_project(site, "by_finder", root / "finders")
    (site / "by-link.egg-link").write_text(f"{root}/links\n.")
    (site / "easy-install.pth").write_text(f"{root}/links\n# a comment\n{site}/inside\n")
    return prefix, root


def test_they_are_found(installed: tuple[Path, Path]) -> None:
    prefix, root = installed
    found = {each.file.removeprefix(SITE + "/"): each for each in editables(environment(prefix))}
    assert {file: [path for path, _ in each.paths] for file, each in found.items()} == {
        "__editable__.by_path-1.0.pth": [f"{root}/paths/src"],
        "by_path-1.0.dist-info/direct_url.json": [f"{root}/paths"],
        "__editable___by_finder.py": [f"{root}/finders/by_finder"],
        "by_finder-1.0.dist-info/direct_url.json": [f"{root}/finders"],
        "by-link.egg-link": [f"{root}/links"],
        "easy-install.pth": [f"{root}/links"],
    }
    assert found["__editable___by_finder.py"].name == "by_finder"
    assert found["__editable__.by_path-1.0.pth"].project == f"{root}/paths"


def test_they_lead_to_the_tree_on_the_host(installed: tuple[Path, Path], tmp_path: Path) -> None:
    prefix, root = installed
    own = tmp_path / "notebooks"
    own.mkdir()
    workspace = Workspace({own: ""})
    followed = follow(editables(environment(prefix)), workspace.roots())
    assert followed.notes == []
    assert followed.dirs == {str(root / name): f"editables/{name}" for name in ("paths", "finders", "links")}
    whole = Workspace({str(own): "own", **followed.dirs})
    index = Index("e", str(tmp_path / "sync"))
    scanned = environment_manifest(prefix, index, dirs=whole.roots())
    tree = scan(whole, Index("t", str(tmp_path / "sync")))
    made = stored(scanned, tmp_path / "store", tree=tree)
    for package, inner in (("by_path", "paths/src"), ("by_finder", "finders"), ("by_link", "links")):
        code = f"import {package}; {package}.main()"
        done = subprocess.run(
            [made / "bin" / "python", "-c", code], capture_output=True, text=True, check=True, cwd="/"
        )
        assert done.stdout == f"{package} {made.parent}/tree/editables/{inner}/{package}/__init__.py\n"
    assert subprocess.run([made / "bin" / "by_path"], capture_output=True, text=True, check=True).stdout.startswith(
        f"by_path {made.parent}/tree/"
    )
    # RECORD holds the hashes of what is there now: pip finds the file to be as it was installed.
    code = (
        "import importlib.metadata as m, hashlib, base64\n"
        "for name in ('by_path', 'by_finder'):\n"
        "    for file in m.files(name):\n"
        "        if file.hash:\n"
        "            data = file.locate().read_bytes()\n"
        "            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()\n"
        "            assert found == file.hash.value and file.size == len(data)\n"
        "            print(file)\n"
    )
    done = subprocess.run([made / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert "__editable__.by_path-1.0.pth" in done.stdout and "../../../bin/by_path" in done.stdout
    # Nothing leads to the client any more.
    for path in made.joinpath(SITE).rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert str(root).encode() not in path.read_bytes().replace(bytes(made.parent), b""), path


def test_without_their_sources_they_stay_as_they_are(installed: tuple[Path, Path], tmp_path: Path) -> None:
    prefix, _ = installed
    scanned = environment_manifest(prefix, Index("e", str(tmp_path / "sync")))
    entry = scanned.manifest.file(f"{SITE}/__editable__.by_path-1.0.pth".encode())
    assert entry is not None and entry.rewrite is None


def test_folders_of_the_workspace_are_enough(installed: tuple[Path, Path]) -> None:
    prefix, root = installed
    found = editables(environment(prefix))
    followed = follow(found, {str(root / "paths"): "p", str(root / "finders" / "by_finder"): "f"})
    # The other folder of finders cannot be a folder of the workspace: one of its own is within it.
    assert followed.dirs == {str(root / "links"): "editables/links"}
    (note,) = follow(found, {str(root / "links" / "by_link"): ""}).notes
    assert f"by-link is in {root}/links, which also holds {root}/links/by_link: sync {root}/links itself" in note


def test_packages_of_another_environment_are_not_sent(tmp_path: Path) -> None:
    other = tmp_path / "other" / SITE
    other.mkdir(parents=True)
    prefix = venv(tmp_path / "env")
    (prefix / SITE / "more.pth").write_text(f"{other}\n")
    followed = follow(editables(environment(prefix)), {})
    assert not followed.dirs
    (note,) = followed.notes
    assert f"more.pth leads to {other}, which is another environment's" in note


def test_a_home_folder_is_not_sent(installed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, root = installed
    monkeypatch.setenv("HOME", str(root / "links"))
    followed = follow(editables(environment(prefix)), {})
    assert str(root / "links") not in followed.dirs
    assert any("which is too much to sync: hosts do not get it" in note for note in followed.notes)


def test_a_backend_of_the_real_world(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("editables")
    project = tmp_path / "member"
    (project / "src" / "member").mkdir(parents=True)
    (project / "src" / "member" / "__init__.py").write_text("X = 1\n")
    (project / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
        "[project]\nname = 'member'\nversion = '1'\n"
        "[tool.hatch.build.targets.wheel]\npackages = ['src/member']\n"
    )
    prefix = venv(tmp_path / "env")
    # The venv sees hatchling as this environment has it, and gets only the package.
    hatch = prefix / SITE / "hatch.pth"
    hatch.write_text(os.path.dirname(os.path.dirname(pytest.importorskip("hatchling").__file__)) + "\n")
    pip(prefix, "--no-build-isolation", "-e", str(project))
    hatch.unlink()
    followed = follow(editables(environment(prefix)), {})
    assert followed.dirs == {str(project): "editables/member"} and followed.notes == []


def test_a_sync_takes_them_along(installed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "sync"))
    prefix, root = installed
    own = tmp_path / "own"
    own.mkdir()
    (own / "notebook.py").write_text("x = 1\n")
    workspace = Workspace({own: ""}, env=CondaEnvironment(str(prefix)))
    parts = {part.name: part for part in WorkspaceSource(workspace.id).find(workspace, None).parts}
    names = {path for path, _ in parts["tree"].manifest.files()}
    assert {b"notebook.py", b"editables/paths/src/by_path/__init__.py"} <= names
    module = parts["tree"].manifest.file(b"editables/paths/src/by_path/__init__.py")
    assert module is not None
    data = memoryview(bytearray(module.size))
    parts["tree"].read(module.digest, data)
    assert bytes(data) == (root / "paths/src/by_path/__init__.py").read_bytes()
    link = parts["env"].manifest.file(f"{SITE}/easy-install.pth".encode())
    assert link is not None and link.rewrite is not None
    assert link.rewrite.places == ((f"{root}/links".encode(), b"editables/links"),)
    (own / "editables").mkdir()
    with pytest.raises(ScanError, match="the tree has 'editables', which is where the editable installs"):
        WorkspaceSource(workspace.id).find(workspace, None)


def test_stale_extensions_are_named() -> None:
    def file(mtime: int) -> FileEntry:
        return FileEntry(1, 0o755, bytes(32), mtime)

    files = {
        b"old.cpython-311-x86_64-linux-gnu.so": file(1),
        b"new.abi3.so": file(3),
        b"other.cpython-310-x86_64-linux-gnu.so": file(9),
        b"code.pyx": file(2),
    }
    notes = stale_extensions(seal({b"": Folder(0o755, {}, {}, {}), b"p": Folder(0o755, files, {}, {})}), "3.11")
    assert notes == [
        "p/old.cpython-311-x86_64-linux-gnu.so is older than a source beside it: build it again",
        "p/other.cpython-310-x86_64-linux-gnu.so is for Python 3.10, and the environment has 3.11",
    ]
