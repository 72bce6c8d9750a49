"""Reports on a job of torchrun that hangs: on request and by itself, and opened without the job."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from monarch_kernel.debug import JobReport, ReportError, load
from monarch_kernel.debugger.reports.job_report import posted
from monarch_kernel.environment import JOIN_RANK
from tests.conftest import wait_until
from tests.join.conftest import ROOT, Job
from tests.waiting import patience

SCRIPT = Path(__file__).parent / "hanging.py"
LINES = SCRIPT.read_text().split("\n")
WAITS = LINES.index("        dist.all_reduce(torch.ones(1))") + 1


def run_report(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != JOIN_RANK}
    command = [sys.executable, "-m", "monarch_kernel", "report", *args]
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(90),
    )


@pytest.fixture(scope="module")
def hung(start_module_job: Callable[..., Job]) -> Iterator[Job]:
    """A job of which rank 0 waits for rank 1, which sleeps."""
    job = start_module_job("hung", script=SCRIPT)
    wait_until(lambda: sleeping(job), "rank 0 waits", 60)
    yield job
    assert job.end().count("ends") == 2  # reports have not disturbed it


def sleeping(job: Job) -> bool:
    """Whether rank 0 is in the collective that rank 1 does not enter."""
    return run_report_json(job)["verdict"]["kind"] == "standing"


def run_report_json(job: Job) -> dict[str, dict[str, str]]:
    folder = job.gate.parent
    done = run_report(folder, job.name, "--json", "--out", str(folder / "looks"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def written(hung: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a report on request, by their ending."""
    folder = tmp_path_factory.mktemp("requested")
    done = run_report(folder, hung.name)
    assert done.returncode == 0, done.stderr
    found = {path.suffix: path for path in (folder / "hung-reports").iterdir()}
    assert sorted(found) == [".html", ".json", ".txt"]
    assert found[".txt"].read_text() == done.stdout
    return found


def test_a_report_on_request_tells_who_waits_for_whom(written: dict[str, Path]) -> None:
    text = written[".txt"].read_text()
    assert f"waits in all_reduce #6 of the default group at hanging.py:{WAITS}" in text
    # It wakes five times a second to look for the file.
    assert re.search(r"rank 1 has not entered it: it (makes no progress|is running) at hanging\.py:\d+ in load", text)
    assert "times out after 30 min" in text and "torch 2" in text and "Collectives over time" in text
    assert re.search(r"\[1\]\n.*hanging.py:\d+ in train +load\(step\)", text)
    assert "monarch-join" in text.partition("All threads:")[2]
    page = written[".html"].read_text()
    assert page.startswith("<!doctype html>") and "all_reduce #6" in page and "<script" not in page


def test_files_of_a_report_are_private_and_without_values(written: dict[str, Path]) -> None:
    for path in written.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "do-not-tell" not in path.read_text() and "TORCHELASTIC" not in path.read_text()
    assert stat.S_IMODE(written[".txt"].parent.stat().st_mode) == 0o700


def test_a_report_opens_without_the_job_with_the_same_views(written: dict[str, Path]) -> None:
    found = load(written[".json"])
    assert isinstance(found, JobReport)
    assert f"{found}\n" == written[".txt"].read_text()
    assert found.page() == written[".html"].read_text()
    assert found.verdict.ranks == (1,) and found.verdict.decided
    assert found.stacks.classes and "hanging.py" in found.stacks.html()
    assert found.stragglers is not None and found.stragglers.found.meetings
    assert [each.rank for each in found.job.ranks] == [0, 1]


def test_a_rank_that_does_not_answer_is_read_from_outside(start_job: Callable[..., Job], tmp_path: Path) -> None:
    job = start_job("stopped", "--stopped", script=SCRIPT)
    pid = job.pids()[1]
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped", 60)
    try:
        done = run_report(tmp_path, job.name)
        assert done.returncode == 0, done.stderr
        assert "Rank 1 is not running (it is stopped (SIGSTOP)); it was at hanging.py:" in done.stdout
        assert re.search(r"1 +\d+ +no +stopped", done.stdout)
        assert re.search(r"\[1\] thread MainThread\n( .*\n)+? .*hanging.py:\d+ in load", done.stdout)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_folder_that_others_may_write_to_is_refused(hung: Job, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = run_report(tmp_path, hung.name, "--out", str(tmp_path))
    assert done.returncode == 1 and "other users may write to" in done.stderr and not list(tmp_path.iterdir())


def test_no_such_job(tmp_path: Path) -> None:
    done = run_report(tmp_path, "nothing")
    assert done.returncode == 1 and "there is no job 'nothing'" in done.stderr and not list(tmp_path.iterdir())


def test_damaged_and_later_reports_are_refused_in_a_sentence(written: dict[str, Path], tmp_path: Path) -> None:
    whole = json.loads(written[".json"].read_text())
    bad = tmp_path / "bad.json"

    def refused(content: object) -> str:
        bad.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ReportError) as caught:
            load(bad)
        return str(caught.value)

    assert "no report" in refused(written[".json"].read_text()[:500])
    assert "no report" in refused({"form": "something"})
    assert "later version, monarch_kernel 9.9" in refused({**whole, "form": "monarch-report-2", "version": "9.9"})
    assert "is damaged" in refused({**whole, "verdict": 3})
    stacks = whole["stacks"]
    assert "is damaged" in refused({**whole, "stacks": {**stacks, "distinct": []}})
    assert "is damaged" in refused({**whole, "stacks": {**stacks, "ranks": [0, 7]}})
    load(written[".json"])


class Receiver(BaseHTTPRequestHandler):
    """A webhook on this machine, which keeps what it is sent."""

    taken: ClassVar[list[tuple[str, bytes]]] = []
    answers = 200

    def do_POST(self) -> None:
        self.taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.answers)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is printed."""


@pytest.fixture
def receiver() -> Iterator[str]:
    """The URL of a webhook, with a secret in it."""
    Receiver.taken.clear()
    Receiver.answers = 200
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/s3cret"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_job_that_hangs_writes_one_report_by_itself_and_posts_it(
    start_job: Callable[..., Job], tmp_path: Path, receiver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "webhook"
    named.touch(0o600)
    named.write_text(f"{receiver}\n")
    monkeypatch.setenv("MONARCH_KERNEL_JOIN_WEBHOOK", str(named))
    folder = tmp_path / "found"
    options = ["--on-hang", "dump", "--hang-after", "2", "--reports", str(folder)]
    job = start_job("waits", script=SCRIPT, options=options)
    wait_until(lambda: bool(Receiver.taken), "the report is posted", 60)
    assert f"no progress for 2 s: a report on job waits is written to {folder}" in job.log
    [(path, body)] = Receiver.taken
    sent = json.loads(body)
    assert path == "/s3cret" and "rank 1 has not entered it" in sent["text"]
    [written] = folder.glob("*.json")
    found = load(written)
    assert sent["report"] == json.loads(written.read_text())
    assert found.job.reason == "no progress for 2.0 s." and found.verdict.ranks == (1,)
    for each in folder.iterdir():
        assert "s3cret" not in each.read_text() and stat.S_IMODE(each.stat().st_mode) == 0o600
    assert job.end().count("ends") == 2
    assert len(list(folder.glob("*.json"))) == 1  # of one hang, although both ranks have noticed it


def test_ranks_that_fail_after_a_hang_are_held_and_a_report_does_not_end_that(
    start_job: Callable[..., Job], tmp_path: Path
) -> None:
    options = ["--on-hang", "hold", "--hang-after", "1", "--reports", str(tmp_path / "found")]
    job = start_job("held-later", "--times-out", script=SCRIPT, options=options)
    try:
        wait_until(lambda: "held for 600 s after" in job.log, "rank 0 has failed", 60)
        for _ in range(2):
            done = run_report(tmp_path, job.name)
            assert done.returncode == 0 and "Rank 0 is held after" in done.stdout, done
    finally:
        job.kill()


@pytest.mark.parametrize("answers", [404, 301, 302, 303, 307, 308])
def test_a_webhook_that_fails_is_noted_and_does_no_harm(
    written: dict[str, Path], receiver: str, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    Receiver.answers = answers
    monkeypatch.setenv("MONARCH_KERNEL_JOIN_WEBHOOK", receiver)
    said = posted(load(written[".json"]), [])
    assert said == f"It was not posted: the webhook has answered with status {answers}."
    assert len(Receiver.taken) == 1  # it is not followed elsewhere


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.com/s3cret", "ftp://127.0.0.1/s3cret", "https:///s3cret", "/no/such", "http://[::1/s3cret"),
        *("http://127.0.0.1@example.com/s3cret", "http://localhost.example.com/s3cret", "http://127.1/s3cret"),
        *("file:///etc/s3cret", "data://x/s3cret", "http://127.0.0.1\\@example.com/s3cret", "https://?s3cret"),
        *("http://127.0.0.1:99999/s3cret", "http://127.0.0.1:1/s3cret\r\nX: y", "http://127.0.0.1:x/s3cret"),
    ],
)
def test_other_addresses_are_refused_without_showing_them(
    written: dict[str, Path], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_JOIN_WEBHOOK", url)
    said = posted(load(written[".json"]), [])
    assert said.startswith("It was not posted") and "s3cret" not in said
    monkeypatch.setenv("MONARCH_KERNEL_JOIN_WEBHOOK", "")
    assert not posted(load(written[".json"]), [])
