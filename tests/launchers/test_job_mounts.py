"""Mounts of jobs: made by ``state``, as their folders are then, and gone after ``kill``."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint, shutdown_context
from monarch_kernel.job import LocalJob, ProcessJob
from tests.sync.environment.wheels import venv
from tests.sync.mounts.conftest import mounts_below, why_not


class Looking(Actor):
    @endpoint
    def read(self, path: str) -> str:
        return Path(path).read_text()

    @endpoint
    def interpreter(self) -> str:
        return sys.executable


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := why_not():
        pytest.skip(f"nothing can be mounted here: {why}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "sync"))
    yield
    shutdown_context().get()
    assert not mounts_below(tmp_path)


def looking(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 1}).spawn("looking", Looking)


def test_a_job_has_its_mounts(tmp_path: Path) -> None:
    data, at = tmp_path / "data", tmp_path / "on-hosts"
    (site,) = venv(data / "env").glob("lib/*/site-packages")
    (site / "ours.pth").write_text("\n".join(filter(os.path.isdir, sys.path)))  # what a rank needs
    (data / "a.txt").write_text("one")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text("step 1")
    job = ProcessJob({"trainers": 1, "readers": 1})
    job.remote_mount(data, str(at), meshes=["trainers"], python_exe="env/bin/python")
    job.gather_mount(str(tmp_path / "logs"), str(tmp_path / "gathered"))
    try:
        state = job.state(cached_path=None)
        ranks = looking(state.trainers)
        assert ranks.read.call_one(str(at / "a.txt")).get() == "one"
        assert ranks.interpreter.call_one().get() == str(at / "env" / "bin" / "python")
        assert looking(state.readers).interpreter.call_one().get() == sys.executable
        for mesh in ("trainers", "readers"):
            assert (tmp_path / "gathered" / mesh / "hosts_0" / "train.log").read_text() == "step 1"
        (data / "a.txt").write_text("changed")
        job.state(cached_path=None)
        assert ranks.read.call_one(str(at / "a.txt")).get() == "changed"
        assert pickle.loads(pickle.dumps(job)).active
    finally:
        job.kill()
    assert not mounts_below(tmp_path) and not at.exists()


def test_a_mount_for_a_mesh_that_is_not_there(tmp_path: Path) -> None:
    job = LocalJob(("hosts",))
    job.remote_mount(tmp_path, str(tmp_path / "at"), meshes=["trainers"])
    with pytest.raises(ValueError, match=r"no mesh 'trainers' to mount on \(its meshes: hosts\)"):
        job.state(cached_path=None)
    assert not os.path.exists(tmp_path / "at")
    job.kill()
