"""`monarch-kernel up`, `jobs`, `status`, `exec`, `logs` and `kill`, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a command with a list of jobs of its own, which is empty afterwards."""
    root = tmp_path_factory.mktemp("cli")
    (root / "project").mkdir()
    env = {
        **os.environ,
        "XDG_STATE_HOME": str(root / "state"),
        "XDG_CONFIG_HOME": str(root / "config"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-P", "-m", "monarch_kernel", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, env=env, cwd=root / "project")

    yield command
    command("kill", "--orphans")
    assert not list((root / "state" / "monarch_kernel" / "jobs").glob("*"))


def test_hosts_from_the_terminal(run: Run) -> None:
    made = json.loads(run("up", "process", "--hosts", "2", "-e", "SIDE=left", "--json").stdout)
    job = made["job"]
    assert [host["state"] for host in made["hosts"]] == ["up", "up"]
    listed = {each["job"]: each for each in json.loads(run("jobs", "--json").stdout)}
    assert listed[job]["meshes"] == {"hosts": 2} and listed[job]["orphan"]
    assert "2 of 2 hosts up" in run("jobs").stdout
    assert json.loads(run("status", job[:6], "--json").stdout)["job"] == job

    same = run("exec", "--", "sh", "-c", "echo $SIDE")
    assert (same.returncode, same.stdout) == (0, "== 0-1 ==\nleft\n")
    one = run("exec", "--job", job, "--host", "1", "--", "sh", "-c", "echo here; exit 3")
    assert (one.returncode, one.stdout) == (3, "here\n")
    ends = json.loads(run("exec", "--one", "--json", "--", "no-such-program").stdout)
    assert [(end["host"], end["code"]) for end in ends] == [(0, 127)]

    assert "== host 1 " in run("logs").stdout
    ended = run("kill", job)
    assert (ended.returncode, ended.stdout) == (0, f"job {job} of process ended\n")
    assert run("status").returncode == 1


def test_lines_that_are_wrong(run: Run) -> None:
    nowhere = run("up", "nowhere")
    assert nowhere.returncode == 1 and "engines: local, process" in nowhere.stderr
    assert run("kill").returncode == 2
    assert run("up", "process", "-e", "x").returncode == 2
    assert run("up", "process", "--nodes", "a").returncode == 2
    assert "--nodes HOST,..." in run("up", "ssh", "--help").stdout
    gone = run("exec", "--", "true")
    assert gone.returncode == 1 and "there is no job" in gone.stderr


def test_completion(run: Run) -> None:
    def words(*typed: str) -> list[str]:
        return run("completion", "words", "--", *typed).stdout.split()

    assert words("st") == ["status"]
    assert words("up", "") == ["process", "slurm", "ssh"]
    assert words("up", "ssh", "--no") == ["--no-tunnel", "--no-wait", "--nodes"]
    assert words("kill", "--o") == ["--orphans"]
    script = run("completion", "bash").stdout + "complete -p monarch-kernel\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert "-F _monarch_kernel monarch-kernel" in done.stdout
