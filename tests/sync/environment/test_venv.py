"""A venv at another prefix has the bytes of one that was made there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.environment.trees import assert_equal_trees, installed, moved, stored
from tests.sync.environment.wheels import venv, wheel
from workspace_sync.environment.kinds import environment
from workspace_sync.environment.manifests import environment_manifest
from workspace_sync.model.errors import IncompatibleError, ScanError
from workspace_sync.scanning import Index


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels with modules, scripts, and a script with a shebang of its own."""
    folder = tmp_path_factory.mktemp("wheels")
    return [
        wheel(
            folder,
            "first",
            {
                "first/__init__.py": "import sys\ndef main():\n    print('first', sys.prefix)\n",
                "first/inner/__init__.py": "def f(x):\n    return [y for y in x]\n",
                "first/data, with comma.txt": "data",
                "first-1.0.data/scripts/plain": "#!python\nimport first\nfirst.main()\n",
            },
            scripts={"first": "first:main", "other": "first.inner:f"},
        ),
        wheel(folder, "second", {"second.py": "X = 1\n"}),
    ]


@pytest.fixture(scope="module")
def venvs(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Venvs of one name, at paths of different lengths; in the last, scripts have no room for their interpreter."""
    root = tmp_path_factory.mktemp("venvs")
    return [venv(root / parent / "env", *wheels) for parent in ("a", "b" * 20, "c" * 120)]


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_moved_venv_is_a_fresh_one(venvs: list[Path], source: int, target: int, tmp_path: Path) -> None:
    scanned = environment_manifest(venvs[source], Index("e", str(tmp_path / "sync")))
    assert scanned.environment.kind == "venv" and scanned.needs.base == sys.base_prefix and not scanned.needs.native
    tree = moved(scanned, venvs[target])
    if target == 2 or source == 2:
        # pip leaves this one shebang too long to work; here it gets the form of the others.
        expected = installed(venvs[target])
        different = {path for path in expected if not path.endswith(".pyc") and tree[path] != expected[path]}
        scripts = {"bin/plain", "lib/python{}.{}/site-packages/first-1.0.dist-info/RECORD".format(*sys.version_info)}
        assert different <= scripts
    else:
        assert_equal_trees(tree, venvs[target])


def test_the_store_of_a_host_makes_it(venvs: list[Path], tmp_path: Path) -> None:
    scanned = environment_manifest(venvs[0], Index("e", str(tmp_path / "sync")))
    made = stored(scanned, tmp_path / "store", str(venvs[1]))
    assert_equal_trees(installed(made), venvs[1])


def test_scripts_run_on_the_host(venvs: list[Path], tmp_path: Path) -> None:
    made = stored(environment_manifest(venvs[0], Index("e", str(tmp_path / "sync"))), tmp_path / ("s" * 100))
    for script in ("first", "plain"):
        done = subprocess.run([made / "bin" / script], capture_output=True, text=True, check=True)
        assert done.stdout == f"first {made}\n"


def test_compiled_modules_of_imports_are_not_synced(wheels: list[Path], tmp_path: Path) -> None:
    prefix = venv(tmp_path / "env", *wheels)
    site = prefix / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (site / "own.py").write_text("x = 1\n")
    index = Index("e", str(tmp_path / "sync"))
    before = environment_manifest(prefix, index)
    code = "import own, first.inner, sys; print(own.__cached__)"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [prefix / "bin" / "python", "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    assert Path(done.stdout.strip()).exists()
    assert environment_manifest(prefix, index).manifest.digest == before.manifest.digest
    names = [path for path, _ in before.manifest.files()]
    assert any(b"first/inner/__pycache__/" in name for name in names)
    # One that is not of its source any more would be compiled again at each start.
    (site / "second.py").write_text("X = 22\n")
    after = [path for path, _ in environment_manifest(prefix, index).manifest.files()]
    assert [os.path.basename(name)[:7] for name in {*names} - {*after}] == [b"second."]


@pytest.mark.usefixtures("movable_python")
def test_its_python_goes_along(venvs: list[Path], tmp_path: Path) -> None:
    index = Index("e", str(tmp_path / "sync"))
    scanned = environment_manifest(venvs[0], index, with_python=True)
    assert not scanned.needs.base and scanned.needs.native and scanned.needs.glibc >= (2, 2)
    assert environment_manifest(venvs[0], index, with_python=True).manifest.digest == scanned.manifest.digest
    made = stored(scanned, tmp_path / "store")
    code = (
        "import sys, math, json, first; print(sys.prefix, sys.base_prefix, sys.executable);"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'python' in line.split()[-1]})"
    )
    done = subprocess.run([made / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    first, maps = done.stdout.splitlines()
    assert first == f"{made} {made / '.python'} {made / 'bin' / 'python'}"
    # Executable, library and modules: all from the host's copy.
    assert eval(maps) and all(path.startswith(str(tmp_path)) for path in eval(maps))


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the system has no Python")
def test_the_python_of_the_system_stays(tmp_path: Path) -> None:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    with pytest.raises(IncompatibleError, match=r"Python at /usr, .* cannot be sent along: .* from a Python of uv"):
        environment_manifest(tmp_path / "env", Index("e", str(tmp_path / "sync")), with_python=True)


def test_what_is_no_environment(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="no folder"):
        environment(tmp_path / "none")
    with pytest.raises(ScanError, match="no conda-meta and no pyvenv.cfg"):
        environment(tmp_path)
    with pytest.raises(ScanError, match=r"is a Python installation and not an environment.*-m venv"):
        environment(sys.base_prefix)


def test_a_project_of_uv(venvs: list[Path], tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "uv.lock").write_text("version = 1\n")
    shutil.copytree(venvs[0], project / ".venv", symlinks=True)
    for named in (project, project / ".venv"):
        found = environment(named)
        assert (found.kind, found.prefix, found.project) == ("uv", str(project / ".venv"), str(project))


def test_the_python_of_the_system_does_not_go_along(venvs: list[Path], tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    shutil.copytree(venvs[0], prefix, symlinks=True)
    config = (prefix / "pyvenv.cfg").read_text()
    (prefix / "pyvenv.cfg").write_text(config.replace(f"home = {sys.base_prefix}/bin", "home = /usr/bin"))
    with pytest.raises(IncompatibleError, match=r"made from the Python at /usr, which belongs to the system"):
        environment_manifest(prefix, Index("e", str(tmp_path / "sync")), with_python=True)
