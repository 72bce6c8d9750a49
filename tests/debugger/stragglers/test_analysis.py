"""Stragglers from records that are made up: a simulated program, clocks that are wrong, and files."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.debugger.controller.stragglers import (
    RecordsError,
    StragglerReport,
    compare_clocks,
    find_stragglers,
    report_of,
    save,
)
from monarch_kernel.debugger.model.evidence import CollectiveTimes, TimedCollective
from monarch_kernel.debugger.source_locations import SourceLocation

LOAD, STEP = SourceLocation("train.py", 5, "train"), SourceLocation("train.py", 9, "train")
START = 1_795_000_000.0


def program(
    size: int,
    steps: int,
    delay: Callable[[int, int], float],
    *,
    hosts: int = 1,
    ahead: tuple[float, ...] = (0.0,),
    blocking: bool = True,
    seed: int = 0,
) -> list[CollectiveTimes]:
    """The records of ranks that call two collectives in each step; `delay(rank, step)` comes before the second."""
    chance = random.Random(seed)
    now = [START] * size
    calls: list[list[TimedCollective]] = [[] for _ in range(size)]
    number = 0
    for step in range(steps):
        for place in (LOAD, STEP):
            number += 1
            for rank in range(size):
                now[rank] += chance.uniform(0.001, 0.002) + (delay(rank, step) if place is STEP else 0.0)
                moment = now[rank] + ahead[rank * hosts // size]
                calls[rank].append(TimedCollective("0", number, "all_reduce", "all_reduce", place, moment))
            if blocking:
                now = [max(now) + 0.0002] * size
    everyone = {"0": tuple(range(size))}
    names = [f"h{rank * hosts // size}" for rank in range(size)]
    return [CollectiveTimes(r, r, "w", names[r], names[r], everyone, tuple(calls[r])) for r in range(size)]


def test_a_rank_that_is_always_late() -> None:
    found = find_stragglers(program(4, 20, lambda rank, _step: 0.1 * (rank == 2)), 100)
    (straggler,) = found.stragglers
    assert straggler.rank == 2 and straggler.last >= 20 and straggler.meetings == 40
    assert (straggler.place, straggler.after, straggler.name) == (STEP, LOAD, "all_reduce")
    assert straggler.lost == pytest.approx(2.0, rel=0.05)
    waited = {share.rank: share.waited for share in found.ranks}
    assert waited[0] == pytest.approx(2.0, rel=0.05) and waited[2] < 0.05
    assert found.lines[0].place == STEP and next(iter(found.lines[0].last)) == 2


def test_chance_is_no_straggler() -> None:
    chance = random.Random(3)
    for size in (2, 4, 8):
        found = find_stragglers(program(size, 50, lambda _rank, _step: chance.uniform(0, 0.05)), 100)
        assert found.stragglers == () and len(found.meetings) == 100


def test_only_the_latest_collectives_of_each_line_count() -> None:
    records = program(3, 30, lambda rank, step: 0.1 * (rank == (0 if step < 20 else 1)))
    assert [each.rank for each in find_stragglers(records, 10).stragglers] == [1]
    assert len(find_stragglers(records, 10).meetings) == 20
    assert [each.rank for each in find_stragglers(records, 100).stragglers] == [0]


@pytest.mark.parametrize("ahead", [3.7, -0.25, 0.02])
def test_clocks_of_hosts_are_compared_by_the_collectives(ahead: float) -> None:
    records = program(4, 20, lambda rank, _step: 0.01 * (rank == 1), hosts=2, ahead=(0.0, ahead))
    clocks = compare_clocks(records)
    assert clocks.within < 0.005
    assert abs(clocks.ahead["h1"] - ahead) <= clocks.within + 1e-3
    assert [each.rank for each in find_stragglers(records, 100).stragglers] == [1]


def test_clocks_that_agree_are_left_as_they_are() -> None:
    clocks = compare_clocks(program(4, 20, lambda _rank, _step: 0.0, hosts=2, ahead=(0.0, 0.0)))
    assert clocks.ahead == {"h0": 0.0, "h1": 0.0} and "agree" in clocks.sentence
    assert compare_clocks(program(4, 20, lambda _rank, _step: 0.0)).sentence == ""


def test_clocks_are_not_compared_by_collectives_that_are_not_waited_for() -> None:
    records = program(4, 20, lambda rank, _step: 0.05 * (rank == 0), hosts=2, ahead=(0.0, 5.0), blocking=False)
    clocks = compare_clocks(records)
    assert math.isinf(clocks.within) and "does not wait" in clocks.sentence
    assert find_stragglers(records, 100).stragglers == ()  # clocks that are seconds apart blame no rank


def test_durations_need_no_clocks() -> None:
    records = program(3, 5, lambda rank, _step: 0.1 * (rank == 1), hosts=3, ahead=(0.0, 9.0, -4.0), blocking=False)
    timed = [
        msgspec.structs.replace(
            record,
            calls=tuple(
                msgspec.structs.replace(call, seconds=0.01 if record.rank == 1 or call.place == LOAD else 0.11)
                for call in record.calls
            ),
        )
        for record in records
    ]
    report = StragglerReport("x", timed)
    assert report.found.measured and [each.rank for each in report.found.stragglers] == [1]
    assert not any("clock" in note for note in report.notes)


def test_what_some_ranks_have_not_entered_is_left_out() -> None:
    records = program(3, 4, lambda _rank, _step: 0.0)
    records[1] = msgspec.structs.replace(records[1], calls=records[1].calls[:-1])
    found = find_stragglers(records, 100)
    assert found.incomplete == 1 and len(found.meetings) == 7
    assert "One collective is left out" in StragglerReport("x", records).text()
    assert find_stragglers(records[:2], 100).meetings == ()  # rank 2 was not asked


def test_words_and_tables() -> None:
    report = StragglerReport("mesh m", program(3, 20, lambda rank, _step: 0.1 * (rank == 1)), each=True)
    assert report.sentence.startswith("Rank 1 keeps the others waiting: it came last to ")
    assert "mostly to all_reduce at train.py:9, after the collective at train.py:5." in report.sentence
    text = report.text()
    assert "time lost by it" in text and "all_reduce #40 at train.py:9" in text and "rank 2" in text
    assert "all_reduce at train.py:9" in report._repr_html_()
    quiet = StragglerReport("mesh m", program(3, 20, lambda _rank, _step: 0.0))
    assert quiet.sentence.startswith("No rank stands out in 40 collectives")
    empty = StragglerReport("mesh m", [])
    assert "Nothing is recorded" in empty.sentence and "TORCH_FR_BUFFER_SIZE" in empty.text()


def test_records_in_a_file(tmp_path: Path) -> None:
    report = StragglerReport("mesh m", program(3, 20, lambda rank, _step: 0.1 * (rank == 1)))
    path = tmp_path / "records.json"
    save(report, str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    again = report_of([str(path)])
    assert again.records == report.records and again.asdict() == report.asdict()
    assert json.loads(json.dumps(again.asdict()))["stragglers"][0]["place"] == {
        "file": "train.py",
        "line": 9,
        "function": "train",
    }
    with pytest.raises(RecordsError, match="several of these files are of rank 0"):
        report_of([str(path), str(path)])


def trace(rank: int, durations: list[float], groups: int = 1) -> dict[str, Any]:
    """A trace of `torch.profiler`, as PyTorch 2.13 exports it of a program that uses gloo."""
    named = [{"pg_name": str(n), "pg_desc": "", "pg_size": 2, "ranks": [0, 1]} for n in range(groups)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "ts": 1000.0 * at, "dur": each * 1e6}
        for at, each in enumerate(durations, 1)
    ]
    return {
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2, "pg_count": groups, "pg_config": named},
        "host_name": f"h{rank}",
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": [{"ph": "M", "name": "process_name"}, *events],
    }


def test_traces_of_the_profiler(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(json.dumps(trace(0, [0.2, 0.3, 0.25])))
    (tmp_path / "1.json.gz").write_bytes(gzip.compress(json.dumps(trace(1, [0.01, 0.01, 0.01])).encode()))
    report = report_of([str(tmp_path / "0.json"), str(tmp_path / "1.json.gz")])
    assert [each.rank for each in report.found.stragglers] == [1] and report.found.measured
    assert report.found.lost == pytest.approx(0.72)
    (tmp_path / "0.json").write_text(json.dumps(trace(0, [0.2], groups=2)))
    with pytest.raises(RecordsError, match="has 2 process groups"):
        report_of([str(tmp_path / "0.json")])
    (tmp_path / "0.json.gz").write_bytes(gzip.compress(b"[" + b" " * (32 << 20) + b"]"))
    with pytest.raises(RecordsError, match="larger than what a compressed trace of its size can be"):
        report_of([str(tmp_path / "0.json.gz")])
    (tmp_path / "0.json").write_text("[1]")
    with pytest.raises(RecordsError, match="has no records of collectives"):
        report_of([str(tmp_path / "0.json")])
