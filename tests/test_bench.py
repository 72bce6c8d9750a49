"""The bench's own arithmetic, and one real measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench import report, spent
from bench.__main__ import arguments, plan
from bench.metrics import ROWS, Row
from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent


def result(peer: str, metric: str, value: float | None, **extra: object) -> report.Result:
    return {"peer": peer, "metric": metric, "value": value, **extra}


def test_medians_are_over_rounds_and_skip_notes() -> None:
    rounds = [result("ours", "call1_us", v) for v in (9.0, None, 1.0, 2.0)]
    assert report.medians(rounds) == {("ours", "call1_us"): 2.0}


@pytest.mark.parametrize(
    "row, ours, said",
    [
        (Row("call1_us", "x", bar=0.5), 20.0, "<= 0.5 ok"),
        (Row("call1_us", "x", bar=0.5), 60.0, "<= 0.5 MISS"),
        (Row("cast8_per_s", "x", bar=0.5), 60.0, ">= 0.5 ok"),
        (Row("cast8_per_s", "x", bar=0.5), 40.0, ">= 0.5 MISS"),
        (Row("call1_us", "x", bar=0.5), None, "<= 0.5 ?"),
        (Row("uss_idle_mb", "x", most=5), 4.9, "own < 5 ok"),
        (Row("uss_idle_mb", "x", most=5), 5.0, "own < 5 MISS"),
        (Row("bulk_read_GBps", "x", bar=10, of_limit=0.8), 900.0, ">= 10 MISS, limit >= 0.8 ok"),
        (Row("call1_us", "x"), 20.0, ""),
    ],
)
def test_a_bar_knows_its_direction(row: Row, ours: float | None, said: str) -> None:
    assert report.verdict(row, ours, reference=100.0, limit=1000.0) == said


def test_a_missed_bar_is_named() -> None:
    row = next(r for r in ROWS if r.bar)
    found = report.medians([result("ours", row.metric, 99.0), result("torchmonarch", row.metric, 100.0)])
    assert report.missed(found) == [row.label]


def test_a_note_is_said_once() -> None:
    same = [result("ray", "group:calls", None, note="no"), result("ray", "group:calls", None, note="no")]
    assert report.notes([*same, result("ray", "version", None, note="ray 1")]) == ["ray calls: no"]


def test_peers_take_turns_within_a_group_and_limits_run_once() -> None:
    order = plan(["ours", "limit"], ["calls", "spawn8", "spawn32"])
    assert order[:3] == [("calls", "ours"), ("pingpong", "limit"), ("fanout", "limit")]
    assert order.count(("spawn", "limit")) == 1


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--peers", "ours,nobody"])
    assert "nobody: not one of ours, " in capsys.readouterr().err


def test_a_page_gets_the_figures_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    about: dict[str, object] = dict.fromkeys(
        ("cpu", "cores", "memory_gib", "kernel", "python", "when", "load_before"), 1
    )
    found = [result("ours", "call1_us", 30.0), result("torchmonarch", "call1_us", 300.0)]
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for figures"):
        report.write_into(page, about, found, ["ours", "torchmonarch"])
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    report.write_into(page, about, found, ["ours", "torchmonarch"])
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "<= 0.15 ok" in text and "| one call, round trip (µs) |" in text


def test_the_stages_of_a_call_leave_no_gap() -> None:
    assert spent.STAGES[0][1] == "c begin" and spent.STAGES[-1][2] == "c end"
    assert all(before[2] == after[1] for before, after in zip(spent.STAGES, spent.STAGES[1:]))


def test_every_stage_of_a_call_is_measured() -> None:
    command = [sys.executable, "-m", "bench.spent", "--calls", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(spent.STAGES) + 3
    assert lines[-1].startswith("round trip without stamps, median")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import bench.debugger as d; s = d.Simulated(16); print(d.first_stop(s.mesh) > 0); s.close()", "True"),
        (
            "from bench import views; views.main('--ranks 16 --turns 0 --no-page --budget 1'.split())",
            "all ranks have reported",
        ),
    ],
    ids=["debugger", "views"],
)
def test_simulated_ranks_speak_the_wire_of_real_ones(program: str, said: str) -> None:
    with tempfile.TemporaryDirectory(prefix="mkt") as folder:  # short: Unix socket paths have 108 bytes
        env = {**os.environ, "TMPDIR": folder}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=patience(120))
        assert done.returncode == 0 and said in done.stdout, (done.stdout, done.stderr)
        assert not done.stderr and not os.listdir(folder), (done.stderr, os.listdir(folder))


def measured(peer: str, group: str) -> list[report.Result]:
    """Run one group in a process of its own, because the bench ends all descendants of its process."""
    code = (
        "import json, sys; from pathlib import Path; from bench import run; "
        f"print(json.dumps(run.measure({peer!r}, Path(sys.executable), {group!r}, 0.01, 60)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout)


def test_a_peer_that_cannot_start_is_a_note() -> None:
    (found,) = measured("dask", "calls")
    assert found["value"] is None
    assert "No module named 'distributed'" in str(found["note"])


def test_the_limits_measure_for_real() -> None:
    assert report.medians(measured("limit", "fail"))["limit", "fail_pidfd_s"] > 0
