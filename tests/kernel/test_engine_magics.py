"""`%mesh up --on` and `%mesh jobs`: hosts from an engine, by name, by profile, waited for or not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.kernel import harness
from tests.kernel.harness import Kernel
from tests.kernel.screen import ever, text
from tests.kernel.views.page import Page


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
    assert "engines: local, kubernetes, lightning, process, ray, sky, slurm, ssh" in refusal(
        engine, "%mesh up --on nowhere"
    )
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
    cell.until(lambda out: "ssh: 0 of 1 hosts up: 1 starting" in ever(out))
    engine.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert not jobs(folder)


def test_a_page_sees_what_is_waited_for_and_ends_it(engine: Kernel, folder: Path) -> None:
    slow = folder / "waiting"  # it starts no worker, and the end of the job finds that host gone
    slow.write_text("#!/bin/sh\n[ -e $0.began ] && exit 255\ntouch $0.began\nexec sleep 600\n")
    slow.chmod(0o700)
    page = Page(engine)
    try:
        page.lease()
        cell = engine.send(f"%mesh up slow --on ssh --nodes h1 --ssh {slow}")
        told = page.until(lambda: [job for each in page.messages for job in each.get("jobs", ()) if "reason" in job])
        seen = told[-1]
        assert (seen["engine"], seen["mesh"], seen["hosts"], seen.get("up", 0)) == ("ssh", "slow", 1, 0)
        key = seen["key"]
        listed = [job for job in page.ask("jobs")["jobs"] if job["key"] == key]  # while the cell waits
        assert [(job["mesh"], job["hosts"]) for job in listed] == [("slow", 1)]
        assert page.do("kill_job", job=key) == f"job {key} of ssh ended, and mesh slow with it"
        assert cell.wait().ename == "UsageError"
        page.until(lambda: any(key in each.get("gone", {}).get("jobs", ()) for each in page.messages))
        assert "there is no one job" in page.request("do", "kill_job", job=key)["error"]["message"]
        assert "needs the id" in page.request("do", "kill_job")["error"]["message"]
    finally:
        page.close()
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


WARNED = """import time
from monarch_kernel.job import EngineJob
from monarch_kernel.launchers.base import Resources
from monarch_kernel.launchers.process import ProcessLauncher
job = EngineJob(ProcessLauncher(), {"hosts": 1}, resources=Resources(walltime=600), warn_before=WARN, idle=60)
w = job.state(cached_path=None).hosts.spawn_procs({"gpus": 1}, name="w")
w.initialized.get(60)
print("up", flush=True)
"""


def test_the_end_of_a_walltime_is_told_of_once(engine: Kernel) -> None:
    cell = engine.send("%mesh up brief --on process --hosts 2 --procs 1 --walltime 250")  # less than 300 s before
    said = "save what you need; when they have ended, %mesh heal brief asks process for others in their places"
    out = cell.wait()
    while "walltime" not in ever(out):  # below the cell, which has ended
        cell.read()
    told = rf"^mesh brief: the walltime of hosts0, hosts1 ends in 2[45]\d s, at [\d:]+: {said}$"
    assert re.search(told, ever(out), re.MULTILINE)
    engine.ok("%mesh use brief")
    status = engine.ok("%mesh status")
    assert status.text.count("the walltime of ") == 1 and said in status.text
    seen = engine.ok(
        "from monarch_kernel.watch import watch\n"
        "from tests.conftest import wait_until\n"
        "with watch() as live:\n"
        "    warned = lambda: [host for host in live.snapshot().hosts.values() if host.ends_at]\n"
        "    wait_until(warned, 'hosts that end')\n"
        "    print(len(warned()), warned()[0].then)"
    )
    assert seen.stdout == f"2 {said}\n"
    assert "walltime" not in ever(status) + ever(seen)  # it was told of once
    engine.ok("%mesh down brief")


def test_the_notice_of_a_walltime_comes_while_a_cell_runs_and_never_too_early(engine: Kernel) -> None:
    calm = engine.ok(WARNED.replace("WARN", "1"))
    assert "walltime" not in ever(calm) + calm.stderr
    assert "walltime" not in engine.ok("%mesh status w").text
    engine.ok("job.kill()")
    cell = engine.send(WARNED.replace("WARN", "599") + "while True: time.sleep(0.02)")
    out = cell.until(lambda out: "mesh w: the walltime of " in ever(out))
    assert re.search(r"heal\(hosts=job\) asks process for others", ever(out))
    engine.interrupt()
    cell.wait()
    engine.ok("job.kill()")
