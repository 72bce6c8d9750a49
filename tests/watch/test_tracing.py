"""Traces of real ranks."""

from __future__ import annotations

import os
import queue
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, this_host
from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.runtime.node import recorder
from monarch_kernel.watch import Trace, current_trace, trace
from tests.actor.conftest import Procs
from tests.conftest import needs
from tests.waiting import patience
from tests.watch.actors import Concurrent, Worker
from tests.watch.traces import read_trace


def test_calls_of_all_ranks(procs: Procs, tmp_path: Path) -> None:
    workers = procs(2).spawn("worker", Worker)
    workers.work.call().get()
    with trace(tmp_path / "run.json") as running:
        assert current_trace() is running and running.is_on
        workers.work.call(1).get()
        workers.work.broadcast(2)
        with pytest.raises(ActorError):
            workers.fail.call().get()
        workers.slice(gpus=0).call_on.call_one(workers.slice(gpus=1)).get()
        assert [each.get() for each in workers.work.stream(3)] == [4, 4]
    assert current_trace() is None and call_hooks.sending is None and recorder.recording is None
    assert running.summary is not None and running.summary.processes == 3 and not running.summary.missing
    assert not running.summary.dropped and str(running.summary).startswith(f"{tmp_path / 'run.json'}: ")
    assert stat.S_IMODE(os.stat(running.file).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["run.json"]

    read = read_trace(running.file)
    assert len(read.processes) == 3 and read.processes[1].startswith("controller, ")
    sent = read.named("worker.work", "call")
    assert [each["args"]["ranks"] for each in sent] == [2, 2, 2, 1]
    assert [each["pid"] == 1 for each in sent] == [True, True, True, False]  # the last one is an actor's
    handled = read.named("worker.work", "endpoint")
    led_to = [(start, end) for start, end in read.arrows() if start["name"] == "send" and end in handled]
    assert len(handled) == len(led_to) == 7
    for start, end in led_to:
        (call,) = read.around(start)
        assert call in sent and call["ts"] <= end["ts"] and call["pid"] != end["pid"]  # the clocks are one host's
    back = [end["name"] for start, end in read.arrows() if start["cat"] == "endpoint"]
    assert back == ["answer"] * 5  # all but the broadcast
    assert all(each["args"]["raised"] for each in read.named("worker.fail", "endpoint"))
    for inner in read.named("inner"):
        assert [each["name"] for each in read.around(inner)] == ["worker.work"]
    (outer,) = read.named("worker.call_on", "endpoint")
    assert read.threads[outer["pid"], outer["tid"]] == "actor worker"
    assert outer["ts"] <= sent[-1]["ts"] and sent[-1]["pid"] == outer["pid"]


def test_endpoints_of_one_thread_that_overlap(procs: Procs, tmp_path: Path) -> None:
    meeting = procs(1).spawn("meeting", Concurrent)
    with trace(tmp_path / "run.json.gz") as running:
        calls = [meeting.meet.call_one(), meeting.meet.call_one()]
        assert [call.get() for call in calls] == [2, 2]
    read = read_trace(running.file)
    first, second = read.named("meeting.meet", "endpoint")
    assert first["tid"] != second["tid"]
    assert {read.threads[each["pid"], each["tid"]] for each in (first, second)} == {
        "actor meeting",
        "actor meeting (2)",
    }
    assert sorted(read.around(each)[0]["ts"] for each in read.named("waiting")) == sorted([first["ts"], second["ts"]])
    assert first["ts"] + first["dur"] > second["ts"]


def test_transfers(procs: Procs, tmp_path: Path) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    buffer = workers.slice(gpus=1).memory.call_one().get()
    with trace(tmp_path / "run.json") as running:
        buffer.read_into(bytearray(1 << 16)).get()
        buffer.write_from(bytearray(1 << 16)).get()
    transfers = [each for each in read_trace(running.file).slices if each["cat"] == "transfer"]
    assert [each["name"] for each in transfers] == [f"RDMA read {mesh.name} rank 1", f"RDMA write {mesh.name} rank 1"]
    assert [each["args"]["bytes"] for each in transfers] == [1 << 16] * 2


def test_collectives(procs: Procs, tmp_path: Path) -> None:
    needs("torch")
    from monarch_kernel.spmd import setup_torch_elastic_env

    mesh = procs(2)
    setup_torch_elastic_env(mesh)
    workers = mesh.spawn("worker", _Group)
    workers.join.call().get()
    with trace(tmp_path / "run.json") as running:
        assert set(workers.reduce.call().get().values()) == {2.0}
    assert not any(workers.replaced.call().get().values())  # torch has its own functions again
    read = read_trace(running.file)
    reduced = read.named("all_reduce")
    assert [each["cat"] for each in reduced] == ["collective"] * 2 and len({each["pid"] for each in reduced}) == 2
    assert all(each["args"] == {"bytes": 4000} for each in reduced)
    assert [[each["name"] for each in read.around(one)] for one in reduced] == [["worker.reduce"]] * 2
    assert len(read.named("barrier")) == 2


class _Group(Worker):
    from monarch_kernel.actor import endpoint

    @endpoint
    def join(self) -> None:
        """Make the process group."""
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @endpoint
    def replaced(self) -> bool:
        """Whether a function of torch's records."""
        import torch.distributed as dist

        return hasattr(dist.all_reduce, "_monarch_records")


def test_a_ring_that_is_full_says_what_it_has_dropped_and_a_flush_prevents_it(procs: Procs, tmp_path: Path) -> None:
    mesh = procs(1)
    workers = mesh.spawn("worker", Worker)
    for flushes, name in ((False, "full"), (True, "flushed")):
        with trace(tmp_path / name, records=20) as running:
            for _ in range(6):
                for _ in range(10):  # each records two slices in the rank, and one here
                    workers.work.call_one().get()
                if flushes:
                    running.flush()
        assert running.summary is not None
        handled = len(read_trace(running.file).named("worker.work", "endpoint"))
        rank = next((name for name in running.summary.dropped if name.startswith(mesh.name)), "")
        if flushes:
            assert handled == 60 and not running.summary.dropped
        else:
            assert handled == 10 and running.summary.dropped[rank] == 100
            assert "140 older records were overwritten, most of them in " + rank in str(running.summary)


def test_ranks_that_come_and_go_while_it_is_on(procs: Procs, tmp_path: Path, faults: queue.Queue[Any]) -> None:
    doomed = procs(2)
    workers = doomed.spawn("worker", Worker)
    with trace(tmp_path / "run.json") as running:
        workers.work.call().get()
        running.flush()
        pid = doomed.status().get().get(1).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        faults.get(timeout=30)
        late = procs(1).spawn("late", Worker)
        late.work.call().get()
        doomed.heal().get()
        running.flush()
        running.flush()
        workers.work.call().get()
    assert running.summary is not None
    (missing,) = running.summary.missing
    assert missing.startswith(f"{doomed.name} rank 1, ") and missing.endswith(
        " has ended: nothing of it is shown since it was last collected."
    )
    read = read_trace(running.file)
    assert len(read.named("worker.work", "endpoint")) == 4 and len(read.named("late.work", "endpoint")) == 1
    assert read.about["missing"] == [missing]


def test_a_rank_whose_clock_is_wrong(procs: Procs, tmp_path: Path) -> None:
    mesh = this_host().spawn_procs({"gpus": 2}, bootstrap=_skew_rank_1)
    workers = mesh.spawn("worker", Worker)
    workers.work.call().get()  # the bootstrap has run
    with trace(tmp_path / "run.json") as running:
        for _ in range(5):
            workers.work.call().get()
    assert running.summary is not None and running.summary.clock_error < 0.5
    read = read_trace(running.file)
    calls = read.named("worker.work", "call")
    for call in calls:
        near = [
            each
            for each in read.named("worker.work", "endpoint")
            if abs(each["ts"] - call["ts"]) <= call["dur"] + running.summary.clock_error * 2e6
        ]
        assert {each["pid"] for each in near} == {2, 3}, read.named("worker.work")


def _skew_rank_1() -> None:
    from monarch_kernel.actor import current_rank

    if current_rank().rank == 1:
        own = recorder.clock
        recorder.clock = lambda: own() + 3_600_000_000_000


def test_ranks_behind_other_agents(workers: Any, tmp_path: Path) -> None:

    hosts = workers(2, "tcp").attach()
    mesh = hosts.spawn_procs(per_host={"gpus": 2})
    far = mesh.spawn("worker", Worker)
    with trace(tmp_path / "run.json") as running:
        far.work.call().get()
    read = read_trace(running.file)
    assert len(read.named("worker.work", "endpoint")) == 4 and len(read.processes) == 5
    assert len([end for start, end in read.arrows() if start["name"] == "send"]) == 4


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace(tmp_path / "missing" / "run.json").start()
    with pytest.raises(IsADirectoryError, match="name a file"):
        Trace(tmp_path).start()
    with pytest.raises(ValueError, match="at least 1"):
        Trace(tmp_path / "run.json", records=0)
    assert current_trace() is None
    with trace(tmp_path / "one") as one, pytest.raises(RuntimeError, match="a trace to .*/one is on: end it first"):
        trace(tmp_path / "other").start()
    with pytest.raises(RuntimeError, match="is not on"):
        one.stop()
    with pytest.raises(RuntimeError, match="has ended"):
        one.start()


SCRIPT = """
import sys
from monarch_kernel.actor import this_host
from monarch_kernel.watch import trace
from tests.watch.actors import Worker
workers = this_host().spawn_procs(per_host={"gpus": 1}).spawn("worker", Worker)
trace(sys.argv[1]).start()
workers.work.call().get()
"""


def test_a_script_that_ends_with_a_trace_on_writes_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=Path(__file__).resolve().parents[2],
    )
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert len(read_trace(tmp_path / "run.json").named("worker.work", "endpoint")) == 1
