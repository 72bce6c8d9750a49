"""`%mesh up --on` and `%mesh jobs`: hosts from an engine, by name, by profile, waited for or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.kernel import harness
from tests.kernel.harness import Kernel
from tests.kernel.screen import text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of the kernel, with a list of jobs and profiles of its own."""
    root = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(root / "config"))
        (root / "project" / ".monarch").mkdir(parents=True)
        (root / "config" / "monarch_kernel").mkdir(parents=True)
        patch.chdir(root / "project")
        yield root


@pytest.fixture(scope="module")
def engine(folder: Path, kernel_of: Callable[[], Kernel]) -> Iterator[Kernel]:
    """A kernel that leaves no job."""
    kernel = kernel_of()
    kernel.ok(f"%cd -q {folder}/project\n%mesh up own --procs 1")  # what stays with the kernel is there then
    yield kernel
    kernel.ok("%mesh down --all\n%mesh jobs kill --orphans")
    assert not jobs(folder)


@pytest.fixture(scope="module")
def kernel_of() -> Iterator[Callable[[], Kernel]]:
    """Start the file's kernel, once its environment is set."""
    started: list[Kernel] = []

    def start() -> Kernel:
        started.append(harness.start_kernel())
        return started[-1]

    yield start
    for kernel in started:
        harness.stop_kernel(kernel)


def jobs(folder: Path) -> list[str]:
    """The jobs in the list of this file; engines may know others, of other tests."""
    return os.listdir(folder / "state" / "monarch_kernel" / "jobs")


def refusal(kernel: Kernel, code: str) -> str:
    outcome = kernel.run(code)
    assert (outcome.status, outcome.ename) == ("error", "UsageError"), outcome
    return outcome.evalue


def test_a_mesh_on_hosts_of_an_engine(engine: Kernel, folder: Path) -> None:
    said = engine.ok("%mesh up m --on process --hosts 2 --gpus 2 --env CUDA_VISIBLE_DEVICES=4,MIG-b").stdout
    assert "m: 4 ranks (hosts=2, gpus=2) on 2 hosts of process (job " in said
    assert text(engine.ok("%%mesh\nimport os\nos.environ['CUDA_VISIBLE_DEVICES']")) == "[0,2] '4'\n[1,3] 'MIG-b'"
    status = engine.ok("%mesh status").text
    assert "devices" in status and status.count("MIG-b") == 2
    listed = engine.ok("%mesh jobs").text
    assert "process" in listed and "hosts=2" in listed and "2 of 2 hosts up" in listed and "this process" in listed
    assert "--replace" in refusal(engine, "%mesh up m --on process")
    assert "reused" in engine.ok("%mesh up m --on process --gpus 2 --env CUDA_VISIBLE_DEVICES=4,MIG-b --reuse").stdout
    assert "ready in" in engine.ok("%mesh restart m").stdout  # on the same hosts
    said = engine.ok("%mesh down m").stdout
    assert "4 ranks stopped; job " in said and "of process ended" in said
    assert not jobs(folder)


def test_more_ranks_than_devices_and_other_mistakes(engine: Kernel, folder: Path) -> None:
    told = refusal(engine, "%mesh up --on process --gpus 2 --procs 3 --env CUDA_VISIBLE_DEVICES=0,1")
    assert "3 ranks on each host need a device each, and the engine gave" in told and "2 (0, 1)" in told
    assert not jobs(folder)  # nothing is left of it
    assert "add --on ENGINE" in refusal(engine, "%mesh up --procs 1 --hosts 2")
    assert "engines: local, kubernetes, lightning, process, ray, slurm, ssh" in refusal(engine, "%mesh up --on nowhere")
    assert "--hostfile FILE" in refusal(engine, "%mesh up --on ssh")
    assert "there is no option --nodes" in refusal(engine, "%mesh up --on process --nodes a,b")
    assert "--nodes HOST,..." in engine.ok("%mesh up --on ssh --help").stdout
    assert "there is no command /nowhere/ssh" in refusal(engine, "%mesh up --on ssh --ssh /nowhere/ssh --nodes h1")


def test_without_waiting(engine: Kernel) -> None:
    cell = engine.send("%mesh up later --on process --procs 1 --no-wait")
    assert "is asked for" in cell.wait().stdout
    engine.ok(
        "import time\nfrom monarch_kernel.kernel.session import session\n"
        "while session().managed('later') is None: time.sleep(0.02)"
    )
    assert text(engine.ok("%%mesh later\nrank")) == "[0] 0"
    engine.ok("%mesh down later")


def test_an_interrupt_cancels(engine: Kernel, folder: Path) -> None:
    slow = folder / "ssh"
    slow.write_text("#!/bin/sh\n[ -e $0.began ] && exit 255\ntouch $0.began\nexec sleep 600\n")
    slow.chmod(0o700)
    cell = engine.send(f"%mesh up slow --on ssh --nodes h1 --ssh {slow}")
    wait_until(lambda: (folder / "ssh.began").exists(), "a start has begun")
    engine.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert not jobs(folder)


def test_profiles_and_whom_they_are_from(engine: Kernel, folder: Path) -> None:
    user = folder / "config" / "monarch_kernel" / "config.toml"
    project = folder / "project" / ".monarch" / "config.toml"
    user.write_text('[profiles.small]\non = "process"\nhosts = 1\nprocs = 2\nenv = { SIDE = "user" }\n')
    user.chmod(0o600)
    said = engine.ok("%mesh up p --on small").stdout
    assert f"profile small of {user}: process, 1 host, env SIDE" in said
    assert text(engine.ok("%%mesh p\nimport os\nos.environ['SIDE']")) == "[0-1] 'user'"
    engine.ok("%mesh down p")
    project.write_text('[profiles.small]\non = "process"\nhosts = 1\nprocs = 1\n')
    project.chmod(0o600)
    assert "1 rank (hosts=1, gpus=1)" in engine.ok("%mesh up p --on small").stdout  # the project's wins
    engine.ok("%mesh down p")
    project.write_text('[profiles.small]\non = "process"\npython = "./evil"\n')
    told = refusal(engine, "%mesh up p --on small")
    assert "python = './evil'" in told and "--trust" in told
    project.write_text('[profiles.ssh]\non = "process"\n')
    assert "has the name of an engine" in refusal(engine, "%mesh up p --on small")
    project.chmod(0o666)
    assert "other users may write" in refusal(engine, "%mesh up p --on small")
    os.unlink(project)
    told = refusal(engine, "%mesh up p --on smal")
    assert "profiles: small" in told
