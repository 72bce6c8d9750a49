"""What `make` does before a target: install its extras once, with uv or pip, from where pip is set to take them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from bench.environments import bare_above
from tests.test_project import ROOT

SCRIPT = ROOT / "constraints" / "install.py"
# No package is taken from anywhere: all are in the environment below.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def path_without_uv() -> str:
    return os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "uv").exists())


def run(python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **OFFLINE, "PATH": path_without_uv(), **environment}
    env = {name: value for name, value in env.items() if not name.startswith("UV_")}
    return subprocess.run([str(python), *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=150)


def test_each_target_adds_what_it_needs_once(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    pytest.importorskip("duckdb")
    python = bare_above(tmp_path / "env")

    first = run(python, str(SCRIPT), "the test", "gpu")
    assert first.returncode == 0, first.stderr
    told = first.stdout.splitlines()
    assert told[0] == "Setting up .venv for the test with pip, once, in 3 steps:"
    assert told[1:4] == [
        "1/3 packages of the kernel and of gpu ...",
        "2/3 compiling them ...",
        "3/3 monarch_kernel itself, editable ...",
    ]
    where = "import monarch_kernel, sys; print(monarch_kernel.__file__)"
    assert run(python, "-I", "-c", where).stdout.strip() == str(ROOT / "monarch_kernel" / "__init__.py")
    share = tmp_path / "env" / "share" / "jupyter"
    assert (share / "kernels" / "monarch" / "kernel.json").exists()
    assert (share / "labextensions" / "monarch-kernel-lab" / "package.json").exists()

    again = run(python, str(SCRIPT), "the test", "gpu")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    more = run(python, str(SCRIPT), "another", "gpu,history")
    assert more.returncode == 0, more.stderr
    assert more.stdout.splitlines()[:2] == [
        "Setting up .venv for another with pip, once, in 2 steps:",
        "1/2 packages of the kernel and of gpu, history ...",
    ]
    less = run(python, str(SCRIPT), "the test", "history")
    assert (less.returncode, less.stdout, less.stderr) == (0, "", "")


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    python = bare_above(tmp_path / "env")
    tree = tmp_path / "tree"
    for name in ("constraints", "monarch_kernel/kernel/kernelspec", "monarch_kernel/server/config"):
        shutil.copytree(ROOT / name, tree / name)
    (tree / "labextension").mkdir()
    for name in ("pyproject.toml", "labextension/bundles.json"):
        shutil.copy(ROOT / name, tree / name)
    # Another version than that of the environment below: it would have to be installed, from nowhere.
    pins = tree / "constraints" / "py{}.{}.txt".format(*sys.version_info[:2])
    pins.write_text(re.sub(r"^rich==.*", "rich==1.0", pins.read_text(), flags=re.MULTILINE))
    for _ in range(2):
        done = run(python, str(tree / "constraints" / "install.py"), "the test", "")
        assert done.returncode == 1
        assert "pip has failed, so the environment is not complete; the next make tries again" in done.stderr


def test_an_extra_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(Path(sys.executable), str(SCRIPT), "the test", "demo,frameworks")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert done.returncode == 1
    assert done.stderr.strip() == f"pyproject.toml has no extra 'frameworks'; it has {', '.join(sorted(extras))}"


def wheel(folder: Path, version: str) -> None:
    """A wheel of one module, whose version it tells."""
    folder.mkdir(exist_ok=True)
    info = f"zoo-{version}.dist-info"
    with zipfile.ZipFile(folder / f"zoo-{version}-py3-none-any.whl", "w") as packed:
        packed.writestr("zoo.py", f"VERSION = {version!r}\n")
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: zoo\nVersion: {version}\n")
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", f"zoo.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_uv_and_pip_take_the_same_from_the_same_places(tmp_path: Path, with_uv: bool) -> None:
    pytest.importorskip("uv")
    # pip is told of two folders, in a file and by a variable, which hides the file's; and of a constraint.
    for folder, version in (("hidden", "9.0"), ("one", "1.0"), ("two", "2.0"), ("two", "3.0")):
        wheel(tmp_path / folder, version)
    (tmp_path / "pins.txt").write_text("zoo<3\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nno-index = true\nconstraint = {tmp_path}/pins.txt\nfind-links = {tmp_path}/hidden\n"
    )
    env = {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_FIND_LINKS": f"{tmp_path}/one {tmp_path}/two",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }
    if with_uv:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "uv").symlink_to(Path(sys.prefix, "bin", "uv"))
        env["PATH"] = f"{tmp_path}/bin{os.pathsep}{path_without_uv()}"
    python = bare_above(tmp_path / "env")
    program = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import install; install.install(['zoo'])"
    done = run(python, "-c", program, **env)
    assert done.returncode == 0, done.stderr
    assert ("uv" in done.stderr.lower() or "Resolved" in done.stderr) == with_uv, done.stderr
    assert run(python, "-c", "import zoo; print(zoo.VERSION, zoo.__file__)").stdout.split() == [
        "2.0",
        str(next((tmp_path / "env").glob("lib/python3*/site-packages")) / "zoo.py"),
    ]
