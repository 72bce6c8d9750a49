"""Clocks, lanes and the file of a trace, without processes."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.introspection import trace_records
from monarch_kernel.protocol.trace_records import RecordedTrace, TraceRecord
from monarch_kernel.watch.tracing import (
    ChromeTrace,
    ClockAlignment,
    ClockOffset,
    ClockSample,
    LaneSpan,
    ProcessRecords,
    estimate,
    lanes_of,
)
from tests.watch.traces import ReadTrace

MS = 1_000_000

# -- clocks -----------------------------------------------------------------------------------------


def round_trips(skew: int, drift: float, at: int, seed: int, count: int = 8) -> list[ClockSample]:
    """Round trips to a clock that is ``skew`` ahead at 0 and runs ``drift`` faster; each way takes its own time."""
    chance = random.Random(seed)
    samples: list[ClockSample] = []
    for _ in range(count):
        there, back = (chance.randint(20_000, 60_000) + chance.choice((0, 0, 5 * MS)) for _ in "12")
        arrives = at + there
        samples.append(ClockSample(at, arrives + skew + round(drift * arrives), arrives + back))
        at = arrives + back + 1000
    return samples


@pytest.mark.parametrize("skew", [-86_400_000 * MS, -300 * MS, 0, 7 * MS, 3_600_000 * MS])
@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_a_skewed_clock_is_aligned(skew: int, drift: float) -> None:
    hour = 3_600_000 * MS
    for seed in range(20):
        first = estimate(round_trips(skew, drift, 1000, seed))
        last = estimate(round_trips(skew, drift, hour, seed + 100))
        assert first is not None and last is not None
        assert first.error <= 60_000  # the shortest trip counts
        clock = ClockAlignment(first, last)
        for at in (1000, hour // 3, hour // 2, hour):
            remote = at + skew + round(drift * at)
            assert abs(clock.ours(remote) - at) <= clock.error + 1000, (seed, at)


def test_clocks_that_no_trip_tells_apart_are_equal() -> None:
    found = estimate([ClockSample(0, 90, 100), ClockSample(200, 201, 220)])
    assert found == ClockOffset(210, 0, 10)
    found = estimate([ClockSample(0, 90, 100), ClockSample(200, 221, 220)])  # after the trip: it is ahead
    assert found == ClockOffset(210, 11, 10)
    assert estimate([]) is None and ClockAlignment().ours(5) == 5


# -- lanes ------------------------------------------------------------------------------------------

spans = st.builds(
    lambda start, length, group: LaneSpan(start, start + length, group),
    st.integers(0, 60),
    st.integers(0, 30),
    st.integers(0, 3),
)


@given(st.lists(spans, max_size=40))
def test_spans_of_a_lane_are_nested_or_apart(given_spans: list[LaneSpan]) -> None:
    placed = lanes_of(given_spans)
    assert len(placed) == len(given_spans) and set(placed) == set(range(max(placed, default=-1) + 1))
    for one in range(len(placed)):
        for other in range(one):
            a, b = sorted((given_spans[one], given_spans[other]), key=lambda span: (span.start, -span.end))
            assert placed[one] != placed[other] or b.start >= a.end or b.end <= a.end, (a, b)


def test_what_nests_stays_together_and_what_overlaps_does_not() -> None:
    coroutines = [LaneSpan(0, 10, 1), LaneSpan(1, 9, 1), LaneSpan(2, 8, 2), LaneSpan(3, 4, 2), LaneSpan(10, 12, 3)]
    assert lanes_of(coroutines) == [0, 0, 1, 1, 0]  # the second coroutine is not inside the first
    assert lanes_of([LaneSpan(0, 10, 0), LaneSpan(1, 9, 0), LaneSpan(20, 30, 5)]) == [0, 0, 1]


# -- the file ---------------------------------------------------------------------------------------


def written(processes: list[ProcessRecords], origin: int = 0, now: int = 1 << 62) -> ReadTrace:
    """The file of these records."""
    text = io.StringIO()
    file = ChromeTrace(text, origin, now, {"p.0": "m rank 0"})
    for process in processes:
        file.add(process)
    file.close({"dropped": {"m rank 0": 3}})
    return ReadTrace(text.getvalue())


def recorded(*records: TraceRecord, running: tuple[TraceRecord, ...] = ()) -> RecordedTrace:
    return RecordedTrace(1, 0, {7: "MainThread"}, list(records), list(running))


def test_a_call_is_a_slice_with_arrows_there_and_back() -> None:
    ahead = ClockAlignment(ClockOffset(0, 5_000, 0))
    call = TraceRecord(1, trace_records.CALL, "a.step", 7, 0, 1_000, "c-1", 2, 9_000)
    far = [TraceRecord(4, trace_records.ENDPOINT, "a.step", 7, 0, 8_000 + n, "c-1", 10, 12_000 + n) for n in (0, 1)]
    open_call = TraceRecord(2, trace_records.CALL, "a.hangs", 7, 0, 9_500, "c-2", 1)
    read = written(
        [
            ProcessRecords("controller", [(recorded(call, running=(open_call,)), ClockAlignment())]),
            *(ProcessRecords(f"m rank {n}", [(recorded(each), ahead)]) for n, each in enumerate(far)),
        ],
        now=20_000,
    )
    (sent,) = read.named("a.step", "call")
    assert (sent["ts"], sent["dur"], sent["args"]) == (1.0, 8.0, {"ranks": 2})
    zero, one = read.named("a.step", "endpoint")
    assert (zero["ts"], zero["dur"], one["ts"], one["dur"]) == (3.0, 4.0, 3.001, 4.0)
    (send,), (answer,) = (
        [each for each in read.named(name) if each["tid"] == sent["tid"] and each["ts"] < 9]
        for name in ("send", "answer")
    )
    assert read.arrows() == [(send, zero), (send, one), (one, answer)]
    assert (answer["ts"], answer["dur"]) == (7.0, 2.0)
    (hangs,) = read.named("a.hangs")
    assert hangs["args"] == {"ranks": 1, "unfinished": True} and hangs["ts"] + hangs["dur"] == 20.0
    assert read.about == {"dropped": {"m rank 0": 3}}


def test_what_was_still_running_when_it_was_collected_is_shown_once() -> None:
    begun = TraceRecord(1, trace_records.SPAN, "load", 7, 0, 10, "", 0)
    ended = TraceRecord(1, trace_records.SPAN, "load", 7, 0, 10, "", 0, 90)
    same = ClockAlignment()
    read = written([ProcessRecords("m rank 0", [(recorded(running=(begun,)), same), (recorded(ended), same)])])
    assert [(each["ts"], each["dur"]) for each in read.named("load")] == [(0.01, 0.08)]


times = st.one_of(st.integers(0, 3_000), st.integers(-(1 << 70), 1 << 70))
names = st.text(max_size=8) | st.text(st.characters(min_codepoint=0xD7FE, max_codepoint=0xE000), max_size=3)
kinds = st.sampled_from(["call", "endpoint", "cell", "transfer", "collective", "span", "", "\ud800"])
records = st.builds(
    TraceRecord,
    st.integers(-5, 50),
    kinds,
    names,
    st.integers(0, 2),
    st.integers(-1, 2),
    times,
    st.sampled_from(["", "c-1", "c-2", "\x00"]),
    st.integers(-1, 1 << 66),
    times,
    times,
)
clocks = st.builds(
    lambda *given: ClockAlignment(*given),
    st.none() | st.builds(ClockOffset, times, times, st.integers(0, 1000)),
    st.none() | st.builds(ClockOffset, times, times, st.integers(0, 1000)),
)
batches = st.tuples(
    st.builds(
        RecordedTrace,
        st.integers(0, 9),
        st.integers(0, 9),
        st.dictionaries(st.integers(0, 2), names, max_size=2),
        st.lists(records, max_size=8),
        st.lists(records, max_size=3),
    ),
    clocks,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.builds(ProcessRecords, names, st.lists(batches, max_size=3)), max_size=4), st.integers(0, 2_000))
def test_whatever_ranks_record_the_file_is_a_trace(processes: list[ProcessRecords], origin: int) -> None:
    written(processes, origin, origin + 2_000)
