"""A job of two machines, which torchrun has started on each: the notebook's machine has no rank of it.

A machine is a mount namespace in which the folder of joinable ranks is another one, and an sshd of its own leads there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.engines.join.announcements import join_folder
from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import ROOT, TRAIN
from tests.kernel import harness
from tests.kernel.harness import Kernel, stop_kernel
from tests.launchers import sshd
from tests.launchers.engines import CannotRunError
from tests.ports import free_port
from tests.waiting import patience

LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1


def elsewhere() -> list[str]:
    """Runs a command on a machine of its own, as far as joinable ranks are concerned."""
    with join_folder() as folder:
        mount = f'mount -t tmpfs -o mode=0700 tmpfs {folder.path} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[sshd.Sshd]]:
    """Two machines."""
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("only root can make mount namespaces here")
    with ExitStack() as running:
        found: list[sshd.Sshd] = []
        for number in range(2):
            (folder := tmp_path / f"machine{number}").mkdir()
            try:
                found.append(running.enter_context(sshd.running(folder, elsewhere())))
            except CannotRunError as error:
                pytest.skip(str(error))
        yield found


@pytest.fixture
def far_notebook(tmp_path: Path) -> Iterator[Kernel]:
    """A notebook on a machine without ranks."""
    spec = tmp_path / "kernels" / "far"
    spec.mkdir(parents=True)
    argv = [*elsewhere(), sys.executable, "-m", "monarch_kernel", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "far", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", f"{tmp_path}{os.pathsep}{os.environ.get('JUPYTER_PATH', '')}")
        kernel = harness.start_kernel("far")
    try:
        yield kernel
    finally:
        stop_kernel(kernel)


def report(folder: Path, config: Path, *args: str) -> dict[str, Any]:
    """What ``monarch-kernel report`` says on a machine without ranks, whose ssh is configured like that."""
    (programs := folder / "programs").mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    (programs / "ssh").chmod(0o755)
    command = [
        *elsewhere(),
        sys.executable,
        "-m",
        "monarch_kernel",
        "report",
        *args,
        "--json",
        "--out",
        str(folder / "out"),
    ]
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(90))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_of_two_machines_are_one_mesh(machines: list[sshd.Sshd], far_notebook: Kernel, tmp_path: Path) -> None:
    # One configuration for both: node0 and node1 are hosts of different daemons.
    config = tmp_path / "config"
    config.write_text(
        "".join(
            f"Host node{number}\n  HostName 127.0.0.1\n  Port {each.port}\n  IdentityFile {each.folder}/user\n"
            f"  UserKnownHostsFile {each.folder}/known\n"
            for number, each in enumerate(machines)
        )
        + "Host *\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
    )
    port = free_port()
    gate = tmp_path / "ends"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MONARCH_KERNEL_JOIN": "far-job"}
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for number, each in enumerate(machines):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            rest = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            with (tmp_path / f"log{number}").open("wb") as log:
                command = ["nsenter", "--mount", f"--target={each.pid}", "--", *torchrun, *rest]
                job = [*command, "-m", "monarch_kernel.join", str(TRAIN), str(gate)]
                jobs.append(subprocess.Popen(job, stdout=log, stderr=subprocess.STDOUT, env=environment))
        assert "'far-job'" in far_notebook.run("%mesh join far-job").evalue  # not on this machine
        (tmp_path / "hosts").write_text("node0\n# a comment\nnode1 slots=1\n")
        until(far_notebook, f"%mesh jobs --hostfile {tmp_path}/hosts --ssh 'ssh -F {config}'", r"far-job .*\branks=2\b")
        join = f"%mesh join far-job --hosts node0,node1 --ssh 'ssh -F {config}'"
        wait_until(lambda: far_notebook.run(join).status == "ok", "both machines have their rank", 60)
        wait_until(lambda: far_notebook.run("%%mesh\nlen(losses)").status == "ok", "it trains", 40)
        assert "2 ranks" in shown(far_notebook.ok("%mesh stacks"))
        far_notebook.ok(f"%mesh break {TRAIN}:{LINE}")
        until(far_notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
        assert f"train.py:{LINE + 1}" in shown(far_notebook.ok("%mesh debug next"))
        # A connection that is lost releases what was stopped, and is told as the end of the rank for the viewer.
        machines[0].drop_connections()
        until(far_notebook, "%mesh ls", r"far-job.*\b2 +1\b")
        far_notebook.ok("%mesh clear\n%mesh debug continue\n%mesh leave")
        found = report(tmp_path, config, "far-job", "--hosts", "node0,node1")
        assert [each["rank"] for each in found["job"]["ranks"]] == [0, 1] and "train.py" in str(found["stacks"])
        gate.touch()
        assert [job.wait(patience(60)) for job in jobs] == [0, 0], [
            (tmp_path / f"log{number}").read_text() for number in range(2)
        ]
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_a_machine_that_cannot_be_reached_is_said_with_ssh_s_own_words(far_notebook: Kernel) -> None:
    out = far_notebook.run("%mesh join any --hosts nowhere.invalid")
    assert out.ename == "UsageError" and "nowhere.invalid cannot be reached" in out.evalue
    assert "resolve" in out.evalue or "exit status 255" in out.evalue
