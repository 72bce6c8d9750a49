"""The parts of the agent that need no process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from monarch_kernel.protocol import output_records
from monarch_kernel.runtime.host import forkserver
from monarch_kernel.runtime.host.procs import OomMonitor, OutputLog
from monarch_kernel.runtime.host.start_command import describe_exit


def test_a_log_keeps_the_newest_and_counts_what_it_dropped(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path / "log"), limit=1000)
    written = b""
    for i in range(100):
        line = b"line %03d %s\n" % (i, b"x" * 30)
        log.append(line)
        written += line
    kept = log.read()
    assert len(kept) <= 1000
    assert len(kept) + log.dropped == len(written)
    assert written.endswith(kept)
    assert kept.endswith(line)
    log.close()
    log.append(b"after closing\n")
    assert log.read().endswith(b"after closing\n")
    log.remove()
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path / "no" / "folder"))
    log.append(b"12345")
    assert (log.read(), log.dropped) == (b"", 5)


def test_how_a_process_ended() -> None:
    assert describe_exit(0) == "exited with code 0"
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert describe_exit(-signal.SIGSEGV) == "segmentation fault (SIGSEGV)"
    assert describe_exit(-signal.SIGABRT) == "aborted (SIGABRT)"
    assert describe_exit(-64) == "killed by SIGRTMAX"
    assert describe_exit(-50) == "killed by signal 50"
    assert describe_exit(-signal.SIGKILL, "the memory of this machine was used up", 2_500_000_000) == (
        "killed by SIGKILL, out of memory (the memory of this machine was used up; it had used 2.50 GB)"
    )


def test_no_news_of_the_out_of_memory_killer_when_it_did_not_strike() -> None:
    assert OomMonitor().news(1.0) == ""


def test_the_out_of_memory_killer_is_told_when_it_has_just_struck(tmp_path: Path) -> None:
    cgroup, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    cgroup.write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    machine.write_text("nr_free_pages 12\noom_kill 7\n")
    watch = OomMonitor([(str(cgroup), "limit of its cgroup"), (str(machine), "of this machine")])
    assert watch.news(10.0) == ""
    machine.write_text("nr_free_pages 12\noom_kill 8\n")
    # All whom it has killed together are told, and nobody who dies later.
    assert watch.news(20.0) == watch.news(20.1) == "the memory of this machine was used up"
    assert watch.news(20.1 + watch.RECENT) == ""
    # The cgroup has a victim, too, but its limit was not hit.
    cgroup.write_text("oom 4\noom_kill 3\n")
    machine.write_text("oom_kill 9\n")
    assert watch.news(30.0) == "the memory of this machine was used up"
    assert watch.news(40.0) == ""
    cgroup.write_text("oom 5\noom_kill 4\n")
    machine.write_text("oom_kill 10\n")
    watch.look(50.0)
    assert watch.news(51.0) == "the memory limit of its cgroup was used up"
    assert watch.news(70.0) == ""
    cgroup.unlink()
    assert watch.news(71.0) == ""


def test_packets_carry_descriptors_and_any_size() -> None:
    ours, theirs = forkserver.make_pair()
    read, write = os.pipe()
    with ours, theirs:
        for size in (10, 1_000_000):
            request = forkserver.Fork("p", b"c" * size, {}, "/", [])
            forkserver.send_packet(ours, request, [write])
            got, fds = forkserver.receive_packet(theirs, forkserver.decode_request)
            assert got == request
            (fd,) = fds
            assert os.fstat(fd).st_ino == os.fstat(write).st_ino
            assert not os.get_inheritable(fd)
            os.close(fd)
        ours.close()
        assert forkserver.receive_packet(theirs, forkserver.decode_request) == (None, [])
    os.close(read)
    os.close(write)


def test_what_was_sent_before_a_reset_is_still_read() -> None:
    ours, theirs = forkserver.make_pair()
    with ours, theirs:
        forkserver.send_packet(ours, forkserver.Retire())  # never read
        forkserver.send_packet(theirs, forkserver.Forked("p", 1))
        theirs.close()
        got, _ = forkserver.receive_packet(ours, forkserver.decode_event)
        assert got == forkserver.Forked("p", 1)
        assert forkserver.receive_packet(ours, forkserver.decode_event) == (None, [])


def test_the_end_of_a_log_is_read_alone(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path / "log"))
    try:
        for number in range(20_000):
            for record in output_records.encode_text("stdout", "cell", f"line {number}\n".encode()):
                log.append(record)
        whole, end = log.read(), log.read(3)
        assert len(end) < len(whole) / 5
        assert whole.endswith(end)
        assert output_records.plain_text([(1, end)]).splitlines()[-3:] == ["line 19997", "line 19998", "line 19999"]
        assert output_records.plain_text([(1, end)]).startswith("line ")
        assert log.read(19_999) == log.read(10**9) == whole
    finally:
        log.remove()


@pytest.mark.parametrize("cut", range(1, 9000, 700))
def test_a_log_is_cut_between_records_and_between_lines_of_plain_bytes(tmp_path: Path, cut: int) -> None:
    bundle = {"data": {"text/plain": "shown", "image/png": "A" * 9_000}}
    display = output_records.encode_message("display", "c", 1, bundle)
    records = b"".join(display) + b"".join(output_records.encode_text("stdout", "c", b"after\n"))
    part = records[cut:]
    assert output_records.plain_text([(1, part[output_records.beginning(part) :])]) == "after\n"
    plain = b"a line of C code\n" * 800
    part = plain[cut:]
    assert set(output_records.plain_text([(1, part[output_records.beginning(part) :])]).splitlines()) == {
        "a line of C code"
    }
