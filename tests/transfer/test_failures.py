"""What breaks: owners that die or stand still, memory that goes away, systems that forbid, handles that lie."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.rdma import (
    RDMAAction,
    RDMABuffer,
    RDMAError,
    RDMATimeoutError,
    configure,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.deaths import PROCESS_KINDS, Mortal
from tests.transfer.actors import KeeperActor, Peer, forbid_cross_memory
from tests.transfer.conftest import FAR_BACKENDS, Owner, make_owner
from tests.waiting import patience


class MortalKeeper(Mortal):
    """An owner that dies on request."""

    @endpoint
    def words(self, n: int) -> RDMABuffer:
        return RDMABuffer(np.arange(n))


def test_memory_that_torch_counts_users_in_ends_with_a_killed_rank() -> None:
    told = threading.Event()
    with hook(lambda _failure: told.set()):
        keeper = this_host().spawn_procs(per_host={"gpus": 1}).spawn("keeper", MortalKeeper)
        left = Path("/dev/shm") / f"torch_{keeper.pid.call_one().get()}_1_0"
        left.write_text("0")
        try:
            keeper.die.broadcast("sigkill")
            wait_until(lambda: not left.exists(), "it is removed")
            assert told.wait(patience(20))
        finally:
            left.unlink(missing_ok=True)


def changed(buffer: RDMABuffer, **fields: Any) -> RDMABuffer:
    """The same buffer with another handle."""
    other = RDMABuffer.__new__(RDMABuffer)
    other._handle = msgspec.structs.replace(buffer._handle, **fields)
    return other


@pytest.mark.parametrize("kind", PROCESS_KINDS)
@pytest.mark.parametrize("backend", FAR_BACKENDS)
def test_a_dead_owner_is_named_with_its_cause(backend: str, kind: str, forced: Callable[[str], None]) -> None:
    forced(backend)
    with hook(lambda _failure: None):
        keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="doomed").spawn("keeper", MortalKeeper)
        buffer, pid = keeper.words.call_one(1 << 16).get(), keeper.pid.call_one().get()
        into = np.zeros(1 << 16, "i8")
        buffer.read_into(into).get()
        keeper.die.broadcast(kind)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), "the owner's end")
        into[:] = 0
        for attempt in (
            lambda: buffer.read_into(into),
            lambda: buffer.read_into(into, size=8),
            lambda: buffer.write_from(into),
            lambda: buffer.fetch_add(1),
            lambda: RDMAAction().write_remote(buffer, into).submit(),
        ):
            with pytest.raises(RDMAError, match=f"doomed.*pid {pid} on .*is gone: .+") as failure:
                attempt().get()
            assert failure.value.owner == buffer.owner
        assert not into.any(), "the target is untouched"
        assert buffer.drop().get() is None


@pytest.mark.parametrize("backend", FAR_BACKENDS)
def test_a_peer_that_never_met_the_owner_learns_of_its_death(backend: str, forced: Callable[[str], None]) -> None:
    forced(backend)
    with hook(lambda _failure: None):
        keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="doomed").spawn("keeper", MortalKeeper)
        buffer, pid = keeper.words.call_one(8).get(), keeper.pid.call_one().get()
        peer = this_host().spawn_procs(per_host={"gpus": 1}).spawn("peer", Peer)
        keeper.die.broadcast("sigkill")
        wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), "the owner's end")
        with pytest.raises(RDMAError, match=r"doomed.* is gone: .*SIGKILL"):
            peer.read.call_one(buffer, 8, "i8").get()


@pytest.mark.parametrize("backend", ["segment", "tcp", "tcp in the clear"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_transfer_under_way_ends_when_the_owner_dies(
    backend: str, write: bool, forced: Callable[[str], None]
) -> None:
    forced(backend)
    with hook(lambda _failure: None):
        keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="doomed").spawn("keeper", MortalKeeper)
        buffer, pid = keeper.words.call_one(1 << 20).get(), keeper.pid.call_one().get()
        mine = np.zeros(1 << 20, "i8")
        buffer.read_into(mine, size=8).get()
        os.kill(pid, signal.SIGSTOP)
        transfer = (buffer.write_from if write else buffer.read_into)(mine, timeout=None)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RDMAError, match=r"doomed.* is gone: .*SIGKILL") as failure:
            transfer.get(patience(30))
        assert failure.value.owner == buffer.owner


def test_cross_memory_attach_needs_nothing_of_the_owner(forced: Callable[[str], None]) -> None:
    owner = make_owner("cma", forced)
    assert owner.actor is not None
    buffer, pid = owner.do("words", 1 << 18), owner.actor.pid.call_one().get()
    os.kill(pid, signal.SIGSTOP)
    try:
        into = np.zeros(1 << 18, "i8")
        buffer.read_into(into).get()
        buffer.write_from(into + 1).get()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert np.array_equal(owner.do("base", "words"), into + 1)


def states(pid: int) -> list[str]:
    """The states of the threads of a process, as in proc(5)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return [task.read_text().rpartition(")")[2].split()[0] for task in tasks]


def test_what_needs_the_owner_times_out_when_it_stands_still(far: Owner) -> None:
    assert far.actor is not None
    buffer, pid = far.do("words", 8), far.actor.pid.call_one().get()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: set(states(pid)) == {"T"}, "all threads of the owner stand still")
        with pytest.raises(RDMATimeoutError, match="fetch_add at byte 8 of a buffer of 64 bytes of proc owner"):
            buffer.fetch_add(1, offset=8, timeout=0.05).get()
        with pytest.raises(TimeoutError):
            buffer.drop(timeout=0.05).get()
        if far.backend != "cma":
            with pytest.raises(RDMATimeoutError, match="of a buffer of 64 bytes of proc owner"):
                buffer.read_into(bytearray(64), timeout=0.05).get()
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(RDMAError, match="dropped"):  # the request was heard in the end
        wait_until(lambda: buffer.read_into(bytearray(64)).get(), "the drop")


def test_a_pid_that_is_used_again_is_not_taken_for_the_owner(forced: Callable[[str], None]) -> None:
    owner = make_owner("cma", forced)
    buffer = owner.do("words", 8)
    later = changed(buffer, started=buffer._handle.started - 1)
    with pytest.raises(RDMAError, match="is gone"):
        later.write_from(bytes(64)).get()
    nobody = changed(buffer, pid=(1 << 22) - 1)
    with pytest.raises(RDMAError, match="is gone"):
        nobody.read_into(bytearray(64)).get()
    assert owner.do("base", "words").tolist() == list(range(8))


def test_memory_that_was_unmapped_is_an_error_and_no_crash(forced: Callable[[str], None]) -> None:
    owner = make_owner("cma", forced)
    buffer = owner.do("unmapped")
    for attempt in (buffer.read_into, buffer.write_from):
        with pytest.raises(RDMAError, match=r"bytes 0 to 65536 .* failed near byte 0: the memory is no longer mapped"):
            attempt(bytearray(1 << 16)).get()
    assert owner.do("words", 4).fetch_add(1).get() == 0, "the owner lives"


def test_a_read_that_fails_half_way_says_where(forced: Callable[[str], None]) -> None:
    owner = make_owner("cma", forced)
    buffer = owner.do("words", 1 << 16)
    handle = buffer._handle
    longer = changed(buffer, dims=((3, 1 << 40),), run=handle.size)
    with pytest.raises(RDMAError, match=f"failed near byte {handle.size}"):
        longer.read_into(bytearray(3 * handle.size)).get()


def test_where_cross_memory_attach_is_forbidden_a_segment_serves() -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", KeeperActor)
    jailed = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=forbid_cross_memory).spawn("peer", Peer)
    buffer = keeper.do.call_one("words", 1 << 16).get()
    assert buffer.backend == "cma"
    assert jailed.backend.call_one(buffer).get() == "segment"
    assert np.array_equal(jailed.read.call_one(buffer, 1 << 16, "i8").get(), np.arange(1 << 16))
    jailed.write.call_one(buffer, np.array([7, 8]), 8).get()
    assert keeper.do.call_one("base", "words").get()[:4].tolist() == [0, 7, 8, 3]


def test_one_that_is_forbidden_later_falls_back(forced: Callable[[str], None]) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", KeeperActor)
    peer = this_host().spawn_procs(per_host={"gpus": 1}).spawn("peer", Jailable)
    buffer = keeper.do.call_one("words", 8).get()
    assert peer.before_and_after.call_one(buffer).get() == ("cma", list(range(8)), "segment", list(range(8)))


class Jailable(Actor):
    """Loses the right to look into others, after it has done so."""

    @endpoint
    def before_and_after(self, buffer: RDMABuffer) -> tuple[str, list[int], str, list[int]]:
        first, into = buffer.backend, np.zeros(8, "i8")
        buffer.read_into(into).get()
        one = into.tolist()
        forbid_cross_memory()
        into[:] = 0
        buffer.read_into(into).get()
        return first, one, buffer.backend, into.tolist()


def test_no_way_to_another_machine_is_said(forced: Callable[[str], None]) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", KeeperActor)
    mine = keeper.do.call_one("words", 8).get()
    forced("cma")
    elsewhere = changed(mine, machine="another")
    assert elsewhere.backend == "none"
    with pytest.raises(RDMAError, match=r"no backend reaches .* proc owner.*cma: its owner is on another machine"):
        elsewhere.read_into(bytearray(64)).get()
    forced("local")
    with pytest.raises(RDMAError, match=r"local: its owner is another process.*forced by MONARCH_KERNEL_RDMA_BACKEND"):
        mine.read_into(bytearray(64)).get()
    forced("cuda_ipc")
    with pytest.raises(RDMAError, match="cuda_ipc: "):
        mine.write_from(bytes(64)).get()


def test_settings(monkeypatch: pytest.MonkeyPatch, forced: Callable[[str], None]) -> None:
    assert get_rdma_backend() == ("ibverbs" if is_ibverbs_available() else "tcp")
    assert is_rdma_available()
    with pytest.raises(ValueError, match="'magic' is not valid: it must be one of `auto`, `local`, `cuda_ipc`, `cma`"):
        configure(backend="magic")
    with pytest.raises(ValueError, match="'plain' is not valid: it must be `encrypted` or `trusted-network`"):
        configure(tcp="plain")
    forced("segment")
    assert get_rdma_backend() == os.environ["MONARCH_KERNEL_RDMA_BACKEND"] == "segment"
    forced("tcp in the clear")
    assert os.environ["MONARCH_KERNEL_RDMA_TCP"] == "trusted-network"


def test_a_drop_waits_for_transfers_under_way(forced: Callable[[str], None]) -> None:
    """A peer that stands still in the middle of a transfer holds its lock; one that dies lets it go."""
    owner = make_owner("cma", forced)
    buffer = owner.do("words", 8)
    holder = this_host().spawn_procs(per_host={"gpus": 1}).spawn("holder", Holder)
    pid = holder.hold.call_one(buffer).get()
    owner.do("forget", "words")
    dropping = buffer.drop()
    with pytest.raises(RDMAError, match="dropped"):  # nothing new begins
        wait_until(lambda: buffer.read_into(bytearray(64)).get(), "the refusal")
    assert owner.do("lives", "words") and not dropping.done()
    failures: list[object] = []
    with hook(failures.append):
        os.kill(pid, signal.SIGKILL)
        dropping.get(patience(30))
        wait_until(lambda: failures, "the death is told")
    assert not owner.do("lives", "words")


def test_a_drop_at_the_owner_can_time_out(forced: Callable[[str], None]) -> None:
    forced("cma")
    memory = bytearray(8)
    buffer = RDMABuffer(memory)
    holder = this_host().spawn_procs(per_host={"gpus": 1}).spawn("holder", Holder)
    pid = holder.hold.call_one(buffer).get()
    with pytest.raises(RDMATimeoutError, match="transfers are still under way"):
        buffer.drop(timeout=0.05).get()
    failures: list[object] = []
    with hook(failures.append):
        os.kill(pid, signal.SIGKILL)
        buffer.drop().get(patience(30))
        wait_until(lambda: failures, "the death is told")
    memory.append(1)


class Holder(Actor):
    """Stops between the beginning and the end of a transfer."""

    @endpoint
    def hold(self, buffer: RDMABuffer) -> int:
        from monarch_kernel.runtime.transfer.service import transfer_service

        assert transfer_service().peer(buffer._handle).hold(buffer._handle.slot, buffer._handle.key)
        return os.getpid()


def test_forged_requests_are_refused(far: Owner) -> None:
    """The owner itself checks what it is asked to do."""
    buffer = far.do("words", 8)
    longer = changed(buffer, run=1 << 20)
    if far.backend != "cma":
        with pytest.raises(RDMAError, match="not within its 64 bytes"):
            longer.read_into(bytearray(1 << 20)).get()
        with pytest.raises(RDMAError, match="not within its 64 bytes"):
            longer.write_from(bytearray(100)).get()
    with pytest.raises(RDMAError, match="not within its 64 bytes"):
        longer.fetch_add(1, offset=64).get()
    with pytest.raises(RDMAError, match="the buffer was dropped"):
        changed(buffer, key=1).read_into(bytearray(64)).get()
    fixed = far.do("readonly")
    if far.backend != "cma":
        with pytest.raises(RDMAError, match="read-only"):
            changed(fixed, why_readonly="").write_from(bytes(16)).get()
    with pytest.raises(RDMAError, match="no aligned, writable"):
        changed(fixed, why_readonly="", address=1 << 20).fetch_add(1).get()
