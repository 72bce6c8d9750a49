"""`monarch-kernel up`, `jobs`, `status`, `exec`, `logs` and `kill`, as processes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess

import pytest

from tests.cli.conftest import Cli
from tests.conftest import wait_until
from tests.waiting import patience


def test_hosts_from_the_terminal(run: Cli) -> None:
    made = json.loads(run("up", "process", "--hosts", "2", "-e", "SIDE=left", "--json").stdout)
    job = made["job"]
    assert [host["state"] for host in made["hosts"]] == ["up", "up"]
    listed = {each["job"]: each for each in json.loads(run("jobs", "--json").stdout)}
    assert listed[job]["meshes"] == {"hosts": 2} and listed[job]["orphan"]
    assert "2 of 2 hosts up" in run("jobs").stdout
    assert json.loads(run("status", job[:6], "--json").stdout)["job"] == job

    same = run("exec", "--fold", "--", "sh", "-c", "echo $SIDE")
    assert (same.returncode, same.stdout) == (0, "== 0-1 ==\nleft\n")
    one = run("exec", "--job", job, "--host", "1", "--", "sh", "-c", "echo here; exit 3")
    assert (one.returncode, one.stdout) == (3, "here\n")

    assert "== host 1 " in run("logs").stdout
    assert [each["host"] for each in json.loads(run("logs", "--json").stdout)] == [0, 1]
    (log,) = json.loads(run("logs", "--host", "1", "--json").stdout)
    assert log["host"] == 1 and "listens at ipc://" in log["log"]
    nowhere = run("logs", "--host", "2")
    assert nowhere.returncode == 1 and f"job {job} has no host 2: its hosts so far are 0 to 1" in nowhere.stderr
    ended = run("kill", job, "--json")
    assert (ended.returncode, json.loads(ended.stdout)) == (0, [{"job": job, "engine": "process"}])
    assert run("status").returncode == 1


def test_lines_that_are_wrong(run: Cli) -> None:
    nowhere = run("up", "nowhere")
    assert nowhere.returncode == 1 and "engines: local, kubernetes, lightning, process" in nowhere.stderr
    assert run("kill").returncode == 2
    assert run("up", "process", "-e", "x").returncode == 2
    assert run("up", "process", "--nodes", "a").returncode == 2
    assert "--nodes HOST,..." in run("up", "ssh", "--help").stdout
    size = run("up", "process", "--memory", "12q")
    assert size.returncode == 2 and "--memory: '12q' is no size: write 64GB or 512MiB" in size.stderr
    # Options of an engine may come before its name, which none of their values is.
    before = run("up", "--hosts", "1", "--nodes", "h1", "--ssh", "/nowhere/ssh", "ssh")
    assert before.returncode == 1 and "there is no command /nowhere/ssh" in before.stderr
    keyless = run("up", "kubernetes", "--attach-to", "app=trainer")
    assert keyless.returncode == 1 and "app=trainer have a key already: name its file with key_file=" in keyless.stderr
    gone = run("exec", "--", "true")
    assert gone.returncode == 1 and "there is no job" in gone.stderr


def test_an_interrupt_while_hosts_are_waited_for_leaves_no_job(run: Cli) -> None:
    slow = run.root / "ssh"
    slow.write_text("#!/bin/sh\n[ -e $0.began ] && exit 255\ntouch $0.began\nexec sleep 600\n")
    slow.chmod(0o700)
    line = run.line("up", "ssh", "--nodes", "h1", "--ssh", str(slow))
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=run.env, cwd=run.folder) as asking:
        wait_until((run.root / "ssh.began").exists, "a start has begun")
        asking.send_signal(signal.SIGINT)
        _, said = asking.communicate(timeout=patience(60))
    assert (asking.returncode, said) == (130, "monarch-kernel: interrupted\n")
    assert not list((run.root / "state" / "monarch_kernel" / "jobs").glob("*"))


GRID = """
import os
from monarch_kernel.errors import LaunchError
from monarch_kernel.launchers.base import LauncherOption
from monarch_kernel.launchers.process import ProcessLauncher

class GridLauncher(ProcessLauncher):
    name = "grid"
    OPTIONS = (LauncherOption(name="rack", type=int, metavar="N", help="of this rack"),)

    @classmethod
    def configured(cls, values):
        if values.get("rack", 0) > 7:
            raise ValueError("there are racks 0 to 7")
        return cls()

    def end(self, ticket, hosts=None):
        if os.path.exists("grid-is-down"):
            raise LaunchError("the grid does not answer")
        super().end(ticket, hosts)
"""


def test_a_launcher_of_another_package(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    package = run.root / "package"
    metadata = package / "our_grid-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our-grid\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[monarch_kernel.launchers]\ngrid = our_grid:GridLauncher\n")
    (package / "our_grid.py").write_text(GRID)
    monkeypatch.setitem(run.env, "PYTHONPATH", f"{package}:{run.env['PYTHONPATH']}")
    assert "--rack N" in run("up", "grid", "--help").stdout
    assert "grid" in run("completion", "words", "--", "up", "").stdout.split()
    wrong = run("up", "grid", "--rack", "9")
    assert wrong.returncode == 1 and "grid: there are racks 0 to 7" in wrong.stderr
    made = json.loads(run("up", "grid", "--rack", "2", "--json").stdout)
    other = json.loads(run("up", "process", "--json").stdout)
    assert {each["engine"] for each in json.loads(run("jobs", "--json").stdout)} >= {"grid", "process"}
    # An engine that does not answer keeps no other job.
    down = run.folder / "grid-is-down"
    down.touch()
    kept = run("kill", "--orphans")
    assert kept.returncode == 1 and kept.stdout == f"job {other['job']} of process ended\n"
    assert f"job {made['job']} of grid was not ended: the grid does not answer" in kept.stderr
    down.unlink()
    assert run("kill", "--orphans").stdout == f"job {made['job']} of grid ended\n"


def test_jobs_of_files_are_applied(run: Cli) -> None:
    (run.folder / "cluster.py").write_text(
        "from monarch_kernel.job import EngineJob, LocalJob, ProcessJob, SlurmJob\n"
        "job = ProcessJob({'hosts': 2})\n"
        "def small():\n    return ProcessJob({'one': 1})\n"
        "here = LocalJob()\n"
    )
    made = json.loads(run("apply", "cluster.py", "--json").stdout)
    assert made["new"] and made["meshes"] == {"hosts": 2} and [host["state"] for host in made["hosts"]] == ["up", "up"]
    again = run("apply", "cluster.job")
    assert again.returncode == 0 and f"the job is {made['job']} (it already existed)" in again.stdout, again.stderr
    echoed = run("exec", "--job", made["job"], "--fold", "--", "echo", "there")
    assert echoed.stdout == "== 0-1 ==\nthere\n"
    assert run("kill", made["job"]).returncode == 0

    started = json.loads(run("apply", "cluster.py:small", "--no-wait", "--json").stdout)
    assert started["meshes"] == {"one": 1}
    assert run("kill", started["job"]).returncode == 0

    for spec, said in (
        ("nowhere.py", "there is no file nowhere.py"),
        ("cluster.py:other", "defines no 'other'"),
        ("nowhere.job", "there is no module 'nowhere'"),
        ("cluster.py:here", "which only its own program can use"),
        ("cluster.py:EngineJob", "name a job"),
    ):
        wrong = run("apply", spec)
        assert wrong.returncode == 2 and said in wrong.stderr, wrong.stderr
    script = run("apply", "cluster.py", "--script", "train.py")
    assert script.returncode == 2 and "batch" in script.stderr, script.stderr


@pytest.mark.parametrize("name", ["x$(touch taken)", "x\\ntouch taken", "x' && touch taken '", "-x"])
def test_a_name_that_is_completed_runs_nothing(run: Cli, name: str) -> None:
    project = run.folder / ".monarch" / "config.toml"
    project.parent.mkdir(exist_ok=True)  # jobs keep their state there
    project.write_text(f'[profiles."{name}"]\non = "process"\n[profiles.fine-1]\non = "process"\n')
    # What Tab and Enter do, to each word that is offered.
    script = run("completion", "bash").stdout + (
        f'monarch-kernel() {{ {shlex.join(run.line())} "$@"; }}\n'
        "COMP_WORDS=(monarch-kernel up ''); COMP_CWORD=2; _monarch_kernel\n"
        'for each in "${COMPREPLY[@]}"; do eval "true up $each"; done\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    try:
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=run.env, cwd=run.folder
        )
        said = run("up", "fine-1")
    finally:
        project.unlink()
    assert not (run.folder / "taken").exists() and not done.stderr
    assert {"slurm", "ssh"} <= set(offered := done.stdout.split()) and all(
        re.fullmatch(r"[a-z]+", each) for each in offered
    )
    assert said.returncode == 1 and "a profile has the name" in said.stderr


def test_completion(run: Cli) -> None:
    def words(*typed: str) -> list[str]:
        return run("completion", "words", "--", *typed).stdout.split()

    assert words("sta") == ["status"]
    assert words("up", "") == ["kubernetes", "lightning", "process", "ray", "sky", "slurm", "ssh"]
    assert words("up", "ssh", "--no") == ["--no-tunnel", "--no-wait", "--nodes"]
    assert words("up", "--nodes", "h1", "--hosts", "2", "ssh", "--hostf") == ["--hostfile"]
    assert words("kill", "--o") == ["--orphans"]
    script = run("completion", "bash").stdout + "complete -p monarch-kernel\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=patience(20))
    assert "-F _monarch_kernel monarch-kernel" in done.stdout
