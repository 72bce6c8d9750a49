"""A venv on hosts that lack the Python that it was made from: they are refused, or get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sync.hosts import StoreHosts
from workspace_sync import CondaEnvironment, IncompatibleError, Workspace, sync

VERSION = "python{}.{}".format(*sys.version_info)
#: A descriptor of this process alone.
NUMBER = 250
_LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "lib2to3", "ensurepip", "lib-dynload", "config-*")


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    """A venv whose Python is at a path that leads somewhere only in this process."""
    base = tmp_path / "python"
    (base / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), base / "bin" / VERSION)
    (base / "bin" / "python3").symlink_to(VERSION)
    library = os.path.join(sys.base_prefix, "lib", VERSION)
    shutil.copytree(library, base / "lib" / VERSION, ignore=shutil.ignore_patterns(*_LEFT_OUT, "__pycache__"))
    prefix = tmp_path / "venv"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib" / VERSION / "site-packages").mkdir(parents=True)
    home = f"/proc/self/fd/{NUMBER}/bin"
    version = "{}.{}.{}".format(*sys.version_info)
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\nversion = {version}\n")
    (prefix / "bin" / "python3").symlink_to(f"{home}/python3")
    (prefix / "bin" / "python").symlink_to("python3")
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(fd, NUMBER, inheritable=False)
    os.close(fd)
    yield prefix
    os.close(NUMBER)


def test_a_host_without_the_python_is_refused_or_gets_it(
    store_hosts: Callable[..., StoreHosts], tree: Path, venv: Path
) -> None:
    made = store_hosts(2)
    with pytest.raises(IncompatibleError, match=r"the host has none there.*with_python=True") as caught:
        sync(made.mesh, Workspace(dirs={tree: ""}, env=CondaEnvironment(venv)))
    assert "2 of 2 hosts" in str(caught.value)
    assert made.trees() == [None, None], "nothing was changed"

    report = sync(made.mesh, Workspace(dirs={tree: ""}, env=CondaEnvironment(venv, with_python=True)))
    for host in report.hosts:
        env = Path(host.path, "current", "env")
        said = subprocess.run(
            [env / "bin" / "python", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True
        )
        assert said.stdout.strip() == str(env / ".python"), said.stderr
