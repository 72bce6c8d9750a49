"""``sync_workspace`` of host and proc meshes, by Monarch's names, in a program without a notebook."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, HostMesh, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.tools.config.workspace import CondaEnvironment, Workspace
from monarch_kernel.workers import client_path
from tests.actor.actors import PATIENCE
from tests.sync.hosts import StoreHosts
from tests.sync.kernel.project import Project, make_environment
from workspace_sync import SyncError


class Reader(Actor):
    @endpoint
    async def read(self) -> tuple[str, str]:
        """The module that this rank imports, and its working directory."""
        import model  # type: ignore[import-not-found]

        return model.VERSION, os.getcwd()

    @endpoint
    async def sync(self, folder: str) -> str:
        """Ranks cannot sync."""
        try:
            await this_host().sync_workspace(Workspace(dirs=[folder]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.fixture
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The project, in which this process runs."""
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(project.store))
    monkeypatch.chdir(project.folder)
    monkeypatch.syspath_prepend(project.folder)
    yield project
    shutdown_context().get(PATIENCE)  # the agents have this project's store


def versions(mesh: HostMesh) -> list[str]:
    readers: Any = mesh.spawn_procs().spawn("reader", Reader)
    return [version for version, _ in readers.read.call().get(PATIENCE).values()]


@pytest.mark.parametrize("kind", [HostMesh, ProcMesh])
def test_the_signature_is_monarchs(kind: type[Any]) -> None:
    """As ``inspect.signature`` shows that of torchmonarch 0.7.0."""
    assert inspect.iscoroutinefunction(kind.sync_workspace)
    found = inspect.signature(kind.sync_workspace).parameters
    assert [(name, each.default) for name, each in found.items()][2:] == [("conda", False), ("auto_reload", False)]
    assert list(found)[:2] == ["self", "workspace"]


def test_hosts_slices_and_procs(here: Project, store_hosts: Callable[..., StoreHosts]) -> None:
    """What Monarch refuses: a slice, the hosts of procs, and this host."""
    hosts = store_hosts(2).mesh
    report = asyncio.run(hosts.slice(hosts=1).sync_workspace(Workspace(dirs=["."])))
    assert [host.switched for host in report.hosts] == [True]
    here.write("model.py", "VERSION = 'second'\n")
    procs = hosts.spawn_procs()
    assert versions(hosts) == ["second", "first"]  # the first host has no tree, and this machine's folders
    asyncio.run(procs.sync_workspace(Workspace(dirs=["."])))
    here.write("model.py", "VERSION = 'third'\n")
    assert versions(hosts) == ["second", "second"]
    asyncio.run(this_host().sync_workspace(Workspace(dirs=["."])))
    assert versions(this_host()) == ["third"]
    tree = report.hosts[0].path + "/current/tree"
    assert client_path(f"{tree}/data/load.py") == str(here.folder / "data" / "load.py")


def test_an_event_loop_goes_on(here: Project) -> None:
    async def work() -> int:
        task = asyncio.create_task(this_host().sync_workspace(Workspace(dirs=["."])))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        return turns

    assert asyncio.run(work()) > 10


def test_errors(here: Project, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes a Workspace, as in Workspace\(dirs=\['.'\]\), not '.'"):
        asyncio.run(this_host().sync_workspace("."))
    workspace = Workspace(dirs=["."])
    (here.folder / "link").symlink_to(tmp_path)
    with pytest.raises(SyncError, match="link"):
        asyncio.run(this_host().sync_workspace(workspace))
    reader: Any = this_host().spawn_procs().spawn("reader", Reader)
    (here.folder / "link").unlink()
    assert "for the controller" in reader.sync.call_one(str(here.folder)).get(PATIENCE)


def test_auto_reload_reaches_live_actors(here: Project) -> None:
    """Also those that were spawned before the first sync; Monarch's reaches none."""
    reader: Any = this_host().spawn_procs().spawn("reader", Reader)
    assert reader.read.call_one().get(PATIENCE)[0] == "first"
    here.write("model.py", "VERSION = 'second'\n")
    report = asyncio.run(this_host().sync_workspace(Workspace(dirs=["."]), auto_reload=True))
    assert [(module.name, module.state) for module in report.stale] == [("model", "reloaded")]
    assert reader.read.call_one().get(PATIENCE)[0] == "second"
    here.write("model.py", "VERSION = 'third'\n")
    report = asyncio.run(this_host().sync_workspace(Workspace(dirs=["."])))
    assert [(module.name, module.state) for module in report.stale] == [("model", "stale")]
    assert reader.read.call_one().get(PATIENCE)[0] == "second"


def test_ranks_run_from_the_synced_environment(here: Project, tmp_path: Path) -> None:
    """Those that start later, without being told so; with_python_executable() names it as this process does."""
    env = make_environment(tmp_path / "env")
    program = Path(env) / "bin" / "only-there"
    program.write_text("#!/bin/sh\necho found $FROM_SCRIPT\n")
    program.chmod(0o755)
    scripts = Path(env) / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "own.sh").write_text("echo noise; export FROM_SCRIPT=script:${VIRTUAL_ENV##*/}\n")
    other = make_environment(tmp_path / "other")
    workspace = Workspace(dirs=["."], env=CondaEnvironment(env))
    report = asyncio.run(this_host().sync_workspace(workspace, conda=True))
    synced = f"{report.hosts[0].path}/current/env"
    reader: Any = this_host().spawn_procs().spawn("prefix", Prefix)
    assert reader.prefix.call_one().get(PATIENCE) == [synced, "in the environment", synced]
    assert reader.program.call_one().get(PATIENCE) == "found script:env"
    reader = this_host().with_python_executable(f"{env}/bin/python").spawn_procs().spawn("prefix", Prefix)
    assert reader.prefix.call_one().get(PATIENCE)[0] == synced
    reader = this_host().with_python_executable(f"{other}/bin/python").spawn_procs().spawn("prefix", Prefix)
    assert reader.prefix.call_one().get(PATIENCE)[0] == str(other)  # not synced, and here


class Prefix(Actor):
    @endpoint
    def prefix(self) -> list[str]:
        """Where this rank's interpreter is, a value of a package there, and what its programs take for active."""
        import only_there  # type: ignore[import-not-found]

        return [sys.prefix, only_there.HERE, os.environ.get("VIRTUAL_ENV", "")]

    @endpoint
    def program(self) -> str:
        """What a program of the environment prints, which is found by its name."""
        return subprocess.run("only-there", capture_output=True, text=True, check=True).stdout.strip()
