"""`monarch-kernel up`, `jobs`, `status`, `exec`, `logs` and `kill`, as processes."""

from __future__ import annotations

import json
import subprocess

from tests.cli.conftest import Cli


def test_hosts_from_the_terminal(run: Cli) -> None:
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


def test_lines_that_are_wrong(run: Cli) -> None:
    nowhere = run("up", "nowhere")
    assert nowhere.returncode == 1 and "engines: local, kubernetes, lightning, process" in nowhere.stderr
    assert run("kill").returncode == 2
    assert run("up", "process", "-e", "x").returncode == 2
    assert run("up", "process", "--nodes", "a").returncode == 2
    assert "--nodes HOST,..." in run("up", "ssh", "--help").stdout
    gone = run("exec", "--", "true")
    assert gone.returncode == 1 and "there is no job" in gone.stderr


def test_completion(run: Cli) -> None:
    def words(*typed: str) -> list[str]:
        return run("completion", "words", "--", *typed).stdout.split()

    assert words("st") == ["status"]
    assert words("up", "") == ["kubernetes", "lightning", "process", "ray", "slurm", "ssh"]
    assert words("up", "ssh", "--no") == ["--no-tunnel", "--no-wait", "--nodes"]
    assert words("kill", "--o") == ["--orphans"]
    script = run("completion", "bash").stdout + "complete -p monarch-kernel\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert "-F _monarch_kernel monarch-kernel" in done.stdout
