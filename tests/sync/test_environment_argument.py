"""An environment that is named beside a workspace is synced with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.sync.hosts import StoreHosts, current_folder
from tests.sync.trees import write
from workspace_sync import CondaEnvironment, Workspace, sync

#: How many workers the tests share.
STANDING = 1


def test_an_environment_beside_a_workspace_is_synced(store_hosts: Callable[..., StoreHosts], tmp_path: Path) -> None:
    write(tmp_path / "source" / "module.py", "VALUE = 1\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    write(packages / "installed.py", "NAME = 'installed'\n")
    hosts = store_hosts(1)
    workspace = Workspace(dirs={tmp_path / "source": ""})
    sync(hosts.mesh, workspace, env=CondaEnvironment(tmp_path / "env"))
    current = current_folder(hosts.stores[0])
    assert (current / "tree" / "module.py").read_text() == "VALUE = 1\n"
    there = current / "env" / packages.relative_to(tmp_path / "env") / "installed.py"
    assert there.read_text() == "NAME = 'installed'\n"
    assert workspace.env is None
