"""An environment beside the folders, and hosts whose meshes outlive the client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from monarch_kernel.meshes import end_kept, kept
from tests.conftest import wait_until
from tests.sync.hosts import StoreHosts
from tests.waiting import patience
from workspace_sync import CondaEnvironment, Workspace, sync

Hosts = Callable[..., StoreHosts]


def test_an_environment_has_the_prefix_of_each_host(store_hosts: Hosts, tmp_path: Path, tree: Path) -> None:
    prefix = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, timeout=patience(60))
    tool = prefix / "bin" / "tool"
    tool.write_text(f"#!{prefix}/bin/python\nprint(1)\n")
    tool.chmod(0o755)
    made = store_hosts(2)
    report = sync(made.mesh, Workspace(dirs={tree: ""}, env=CondaEnvironment(str(prefix))))
    assert report.environment
    for host, store in zip(report.hosts, made.stores, strict=True):
        assert host.environment == report.environment
        env = next(store.glob("w/*")) / "current" / "env"
        assert (env / "bin" / "tool").read_text().startswith(f"#!{env}/bin/python\n")
        said = subprocess.run([env / "bin" / "python", "-c", "import sys; print(sys.prefix)"], capture_output=True)
        assert said.stdout.decode().strip() == str(env)
    assert not any(
        host.switched for host in sync(made.mesh, Workspace(dirs={tree: ""}, env=CondaEnvironment(str(prefix)))).hosts
    )


def test_a_kept_mesh_is_synced_and_its_agent_ends_with_the_client(tmp_path: Path, tree: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import sys\n"
        "from monarch_kernel.meshes import keep, list_proc_meshes\n"
        "from workspace_sync import Workspace, sync\n"
        "host = keep(sys.argv[2])\n"
        "procs = host.hosts.spawn_procs({'gpus': 1}, name='train')\n"
        "procs.initialized.get(30)\n"
        "assert sync(procs, Workspace(dirs={sys.argv[1]: ''})).hosts[0].switched\n"
        "assert [mesh.name for mesh in host.proc_meshes] == ['train']\n"
        "assert [mesh.name for mesh in list_proc_meshes()] == ['train']\n"
    )
    name = f"sync{tmp_path.name[-8:]}".replace("_", "")
    env = {**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(tmp_path / "store")}
    try:
        command = [sys.executable, str(script), str(tree), name]
        ended = subprocess.run(command, env=env, capture_output=True, timeout=patience(60), check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        assert not ended.stderr, ended.stderr.decode()
        wait_until(lambda: [mesh.alive for mesh in kept()[0].meshes if mesh.name != "train"] in ([], [0]), "it ended")
    finally:
        end_kept(name)
