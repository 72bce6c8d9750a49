"""The command `monarch`: the job of a folder, its contexts, and its telemetry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel import actor
from monarch_kernel.cli.monarch import main
from monarch_kernel.tools import commands
from tests.waiting import patience

JOB = "from monarch_kernel.job import LocalJob, ProcessJob\njob = ProcessJob({'a': 2, 'b': 1})\nlocal = LocalJob()\n"
TELEMETRY = """
from monarch_kernel.job import load_current_job
job = load_current_job().enable_telemetry()
job.state()
print(job.telemetry_query_client().base_url, flush=True)
input()
"""
PROGRAM = [sys.executable, "-c", "import sys; from monarch_kernel.cli.monarch import main; sys.exit(main())"]
Monarch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a job, and a list of jobs of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "jobs_of_monarch.py").write_text(JOB)
    return tmp_path


@pytest.fixture
def monarch(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Monarch]:
    """Runs it, in a process of its own if anything is given; its exit code, what it printed, and its errors."""
    monkeypatch.setattr(actor, "unhandled_fault_hook", actor.unhandled_fault_hook)  # it sets one, for its process

    def run(*words: str, given: str | None = None) -> tuple[int, str, str]:
        if given is not None:
            done = subprocess.run([*PROGRAM, *words], input=given, capture_output=True, text=True, timeout=patience(60))
            return done.returncode, done.stdout, done.stderr
        capfd.readouterr()
        code = main(words)
        out, errors = capfd.readouterr()
        return code, out, errors

    yield run
    main(["kill"])


def test_the_job_of_a_folder(monarch: Monarch, folder: Path) -> None:
    code, _, said = monarch("exec", "true")
    assert code == 1 and "no current job" in said
    code, _, said = monarch("apply")
    assert code == 1 and "no current job" in said
    code, _, said = monarch("apply", "jobs_of_monarch.local")
    assert code == 1 and "end with the program" in said
    code, out, _ = monarch("apply", "jobs_of_monarch.job")
    assert code == 0 and "3 of 3 hosts up" in out
    _, again, _ = monarch("apply")
    assert out == again
    assert monarch("exec", "sh", "-c", "echo one; exit 3") == (3, "one\n", "")
    code, out, _ = monarch("exec", "--all", "--per-host", "gpu=2", "sh", "-c", "echo $MONARCH_RANK_hosts")
    assert code == 0 and sorted(out.splitlines()) == ["[0] 0", "[0] 0", "[1] 0", "[1] 0", "[2] 1", "[3] 1"]
    assert monarch("exec", "--point", "hosts=1", "-e", "X=y", "sh", "-c", "echo $X $MONARCH_RANK_hosts")[1] == "y 1\n"
    assert monarch("exec", "--script", "-", given="echo of bash")[1] == "of bash\n"
    assert commands.exec_on_job(["sh", "-c", "exit 5"], mesh_name="b") == 5
    code, _, said = monarch("shell", "--point", "gpus=1")
    assert code == 2 and "--point hosts=0" in said

    code, _, _ = monarch("context", "create", "other")
    assert code == 0 and monarch("context", "create", "other")[0] == 1
    assert monarch("context", "use", "other")[0] == 0
    assert monarch("context", "ls")[1] == "  default\n* other\n"
    assert monarch("exec", "true")[0] == 1
    assert monarch("apply", "jobs_of_monarch.job", given="")[0] == 0  # the module that this process has knows its job
    code, _, said = monarch("context", "rm", "other")
    assert code == 1 and "is active" in said
    assert monarch("context", "use", "default")[0] == 0
    assert monarch("exec", "echo", "still") == (0, "still\n", "")
    assert len(os.listdir(folder / "state" / "monarch_kernel" / "jobs")) == 2
    assert monarch("context", "rm", "other")[0] == 0
    assert monarch("context", "ls")[1] == "* default\n"
    assert monarch("kill", "nothing")[0] == 1 and monarch("kill")[0] == 0
    assert os.listdir(folder / "state" / "monarch_kernel" / "jobs") == []
    code, _, said = monarch("query", "SELECT 1")
    assert code == 1 and "apply it first" in said
    assert monarch("exec", "echo", "anew") == (0, "anew\n", "")


def test_the_telemetry_of_a_program(monarch: Monarch, folder: Path) -> None:
    assert monarch("apply", "jobs_of_monarch.job")[0] == 0
    code, _, said = monarch("query", "SHOW TABLES")
    assert code == 1 and "no distributed telemetry" in said
    with subprocess.Popen(
        [sys.executable, "-c", TELEMETRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            url = program.stdout.readline().strip()
            assert monarch("dashboard") == (0, f"{url}\n", "")
            sql = "SELECT node_kind, COUNT(*) AS n FROM nodes WHERE node_id = 'root' GROUP BY node_kind"
            assert "root" in monarch("query", sql)[1]
            assert json.loads(monarch("query", "--format", "json", "-", given=sql)[1]) == [
                {"node_kind": "root", "n": 1}
            ]
            code, _, said = monarch("query", "SELEC 1")
            assert code == 1 and "400" in said
            assert monarch("tui", "--addr", url)[1].startswith("root  ->  ")
            code, out, _ = monarch("profile", "--time", "100ms", "-o", str(folder / "trace.json.gz"))
            assert code == 0 and (folder / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b" and "perfetto" in out
        finally:
            program.communicate("\n", timeout=patience(60))
    assert program.returncode == 0 and monarch("dashboard")[0] == 1


def test_it_is_the_program_of_torchmonarch_where_that_is_installed(folder: Path) -> None:
    about = folder / "torchmonarch-0.7.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchmonarch\nVersion: 0.7.0\n")
    (about / "entry_points.txt").write_text("[console_scripts]\nmonarch = theirs:main\n")
    (folder / "theirs.py").write_text("def main(): print('theirs'); return 7\n")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([*PROGRAM, "--help"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "theirs\n")
