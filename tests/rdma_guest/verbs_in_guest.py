"""Transfers over a real verbs device. Not collected by default: ``tests/transfer/test_verbs.py`` runs it in the guest.

The conformance tests of the other backends run here, too, as they are.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_kernel import environment
from monarch_kernel.actor import attach_to_workers, start_worker_loop_forever, this_host
from monarch_kernel.protocol.keys import make_key_file
from monarch_kernel.rdma import (
    RDMABuffer,
    RDMAError,
    RDMATimeoutError,
    configure,
    get_rdma_backend,
    is_ibverbs_available,
)
from monarch_kernel.runtime.transfer import service as engines
from monarch_kernel.runtime.transfer.memory import memory_of
from monarch_kernel.runtime.transfer.verbs import backend as verbs_backend
from monarch_kernel.runtime.transfer.verbs import regions as verbs_regions
from monarch_kernel.runtime.transfer.verbs.backend import Route, Verbs
from monarch_kernel.runtime.transfer.verbs.card import CLASS, Card, Gid, QueuePairEnd
from monarch_kernel.runtime.transfer.verbs.regions import WINDOW, RegionCache
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.transfer.actors import KeeperActor, Peer
from tests.transfer.conftest import Owner
from tests.transfer.test_conformance import (  # noqa: F401  collected here
    test_a_dropped_buffer_is_refused_and_its_memory_let_go,
    test_a_slot_that_is_used_again_does_not_revive_old_handles,
    test_an_action_does_all_of_it_and_can_be_submitted_again,
    test_any_range_of_a_buffer_can_be_read_and_written,
    test_atomics_of_many_are_atomic,
    test_atomics_on_words,
    test_awaited,
    test_buffers_travel_on_to_others_which_may_drop_them,
    test_every_shape_with_every_shape,
    test_many_megabytes_in_both_directions,
    test_others_pull_and_push_while_the_owner_is_busy,
    test_the_backend_is_the_one_that_was_asked_for,
    test_what_cannot_be_written_is_not,
)


def backend() -> Verbs:
    """This process's."""
    return next(b for b in engines.transfer_service().backends if isinstance(b, Verbs))


def route_to(buffer: RDMABuffer) -> Route:
    """The queue pairs to a buffer's owner."""
    return next(route for (owner, _), route in backend()._routes.items() if owner == buffer.owner)


def regions() -> RegionCache:
    """What is registered here."""
    return next(iter(backend()._cards.values()))[1]


def test_the_device_is_found() -> None:
    assert is_ibverbs_available() and get_rdma_backend() == "ibverbs"


def test_every_size(far: Owner) -> None:
    rng = np.random.default_rng(1)
    for size in (1, 1000, 64 << 10, (64 << 10) + 1, 1 << 20, (5 << 20) + 3, WINDOW + (1 << 20)):
        buffer = far.do("words", -(-size // 8))
        data = rng.integers(0, 255, size, "u1")
        into = np.zeros(size, "u1")
        buffer.write_from(data).get()
        buffer.read_into(into, size=size).get()
        assert np.array_equal(into, data), size
        if size < 8 << 20:  # larger ones take their time as messages
            assert far.do("contents", "words")[:size] == data.tobytes(), size
        buffer.drop().get()


def test_large_transfers_take_several_queue_pairs_which_stay(far: Owner) -> None:
    buffer = far.do("words", 1 << 20)
    into = np.zeros(1 << 20, "i8")
    buffer.read_into(into).get()
    route = route_to(buffer)
    assert len(route._free) == environment.RDMA_QUEUE_PAIRS.get()
    numbers = {queue_pair.end.number for queue_pair in route._free}
    buffer.read_into(into).get()
    assert {queue_pair.end.number for queue_pair in route._free} == numbers


def test_scattered_memory_of_long_and_of_many_short_pieces(far: Owner) -> None:
    n = 1 << 20
    buffer = far.do("words", n)
    wide = np.zeros((16, n // 8), "i8")
    buffer.read_into(wide[::2]).get()  # 8 pieces of 1 MiB: straight from the card
    assert np.array_equal(wide[::2].ravel(), np.arange(n)) and not wide[1::2].any()
    thin = np.zeros((n, 3), "i8")
    buffer.read_into(thin[:, 1]).get()  # a million pieces of 8 bytes: through memory in between
    assert np.array_equal(thin[:, 1], np.arange(n)) and not thin[:, ::2].any()
    buffer.write_from(thin[::-1, 1]).get()
    assert np.array_equal(far.do("base", "words"), np.arange(n)[::-1])


def test_many_transfers_at_once(far: Owner) -> None:
    buffer = far.do("words", 1 << 17)
    parts = [np.zeros(1 << 14, "i8") for _ in range(8)]
    reads = [buffer.read_into(part, offset=i << 17, size=1 << 17) for i, part in enumerate(parts)]
    for read in reads:
        read.get()
    assert np.array_equal(np.concatenate(parts), np.arange(1 << 17))


def test_regions_are_kept_while_it_is_certain_what_they_are(far: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = far.do("words", 1 << 15)
    known = regions()

    def read(into: Any) -> tuple[int, int, int]:
        hits, misses = known.hits, known.misses
        buffer.read_into(into).get()
        return known.hits - hits, known.misses - misses, len(known._kept)

    gc.collect()
    before = len(known._kept)
    into = np.zeros(1 << 15, "i8")
    assert read(into) == (0, 1, before + 1)
    assert read(into[:]) == (1, 0, before + 1)  # a view of the same memory
    with pytest.raises(ValueError, match="cannot resize"):
        into.resize(1 << 20)  # NumPy sees that somebody watches the array
    del into
    wait_until(lambda: len(known._kept) == before, "the region's end, with that of the array")
    data = bytearray(1 << 18)
    assert read(data) == (0, 1, before)
    data.append(1)  # nothing holds it
    assert read(data) == (0, 1, before)
    mine = RDMABuffer(data)
    assert read(data) == (0, 1, before + 1)
    assert read(memoryview(data)) == (1, 0, before + 1)
    mine.drop().get()
    assert len(known._kept) == before
    monkeypatch.setenv("MONARCH_KERNEL_RDMA_REGIONS", "2")
    arrays = [np.zeros(1 << 15, "i8") for _ in range(3)]
    for array in arrays:
        read(array)
    assert list(known._kept) == [(id(array), *memory_of(array).layout.span()) for array in arrays[1:]]
    monkeypatch.setenv("MONARCH_KERNEL_RDMA_REGION_BYTES", str(1 << 18))
    assert read(arrays[0])[1:] == (1, 1)


def test_memory_that_cannot_be_registered_is_gone_through_in_pieces(
    far: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monarch_kernel.runtime.transfer.errors import Unfit

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise Unfit("no more")

    buffer = far.do("words", 1 << 20)
    monkeypatch.setattr(verbs_regions, "MemoryRegion", refuse)
    into = np.zeros(1 << 20, "i8")
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(1 << 20))


def test_a_deadline_ends_a_transfer_and_the_next_one_works(far: Owner) -> None:
    n = 4 << 20
    buffer = far.do("words", n)
    into = np.zeros(n, "i8")
    buffer.read_into(into).get()
    with pytest.raises(RDMATimeoutError, match="read of bytes 0 to 33554432 .* did not (begin|end) in time"):
        buffer.read_into(into, timeout=0.02).get()
    into[:] = 0
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(n))
    assert len(route_to(buffer)._free) == environment.RDMA_QUEUE_PAIRS.get()


def test_a_buffer_that_is_dropped_during_a_transfer(far: Owner) -> None:
    n = 8 << 20
    buffer, other = far.do("words", n), far.do("shaped", "bytes")
    into = np.zeros(n, "i8")
    buffer.read_into(into).get()
    readings = [buffer.read_into(into) for _ in range(4)]  # takes seconds
    buffer.drop().get()
    with pytest.raises(RDMAError, match="dropped"):
        for reading in readings:
            reading.get()
    with pytest.raises(RDMAError, match="dropped"):
        buffer.read_into(into).get()
    other.read_into(bytearray(240)).get()


def test_a_card_that_never_answers_is_no_way_to_the_owner(far: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a firewall dropped RDMA traffic: the first transfer finds out, and the next best way would be taken."""
    verbs, connect = backend(), Card.connect

    def astray(
        card: Card, pair: Any, mine: QueuePairEnd, here: Gid, theirs: QueuePairEnd, *rest: Any, **named: Any
    ) -> None:
        connect(card, pair, mine, here, QueuePairEnd(theirs.number + 1000, theirs.psn), *rest, **named)

    def forget() -> None:
        for key in [key for key in verbs._routes if key[0] == buffer.owner]:
            verbs._routes.pop(key).end()

    buffer = far.do("words", 8)
    forget()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Card, "connect", astray)
            with pytest.raises(RDMAError, match="ibverbs: the owner's card does not answer rxe0:1"):
                buffer.read_into(bytearray(64)).get()
            assert buffer.backend == "none"
            patch.setattr(verbs_backend, "BARRED_FOR", 0)
            assert buffer.backend == "ibverbs"
    finally:
        verbs._barred.clear()
        forget()
    buffer.read_into(bytearray(64)).get()


def test_an_owner_that_stands_still_is_not_needed(far: Owner) -> None:
    assert far.actor is not None
    buffer, pid = far.do("words", 1 << 18), far.actor.pid.call_one().get()
    into = np.zeros(1 << 18, "i8")
    buffer.read_into(into).get()
    os.kill(pid, signal.SIGSTOP)
    try:
        buffer.read_into(into).get()
        buffer.write_from(into + 1).get()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert np.array_equal(far.do("base", "words"), into + 1)


def test_an_owner_that_dies(far: Owner) -> None:
    with hook(lambda _failure: None):
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="doomed")
        keeper = procs.spawn("keeper", KeeperActor)
        n = 4 << 20
        buffer, pid = keeper.do.call_one("words", n).get(), keeper.pid.call_one().get()
        into = np.zeros(n, "i8")
        buffer.read_into(into).get()
        readings = [buffer.read_into(into) for _ in range(4)]  # takes a second
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RDMAError, match=r"read of bytes .* failed: the buffer's owner, proc doomed.* is gone: "):
            for reading in readings:
                reading.get()
        with pytest.raises(RDMAError, match="is gone"):
            buffer.write_from(into).get()
        wait_until(lambda: all(owner != buffer.owner for owner, _ in backend()._routes), "the queue pairs' end")
    again = this_host().spawn_procs(per_host={"gpus": 1}).spawn("keeper", KeeperActor)
    words = again.do.call_one("words", 8).get()
    words.read_into(into, size=64).get()
    assert into[:8].tolist() == list(range(8))


def test_a_peer_that_dies_leaves_no_queue_pair_with_the_owner() -> None:
    mine = np.arange(1 << 18)
    buffer = RDMABuffer(mine)
    with hook(lambda _failure: None):
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="visitor")
        peer = procs.spawn("peer", Peer)
        assert np.array_equal(peer.read.call_one(buffer, 1 << 18, "i8").get(), mine)
        owned = backend()._responder._pairs
        (name,) = (peer for peer in owned if peer.startswith("visitor"))
        assert owned[name]
        procs.stop().get()
        wait_until(lambda: name not in owned, "the queue pairs' end")
    buffer.drop().get()


def test_a_fork_takes_nothing_away(far: Owner) -> None:
    buffer = far.do("words", 1 << 18)
    into = np.zeros(1 << 18, "i8")
    buffer.read_into(into).get()
    child = os.fork()
    if not child:
        try:
            engines._engine = None
            del into
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    into[:] = 0
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(1 << 18))


def test_threads_of_one_process(far: Owner) -> None:
    buffer = far.do("words", 1 << 10)
    failures: list[Any] = []

    def work() -> None:
        into = np.zeros(1 << 10, "i8")
        for _ in range(20):
            into[:] = 0
            buffer.read_into(into).get()
            if not np.array_equal(into, np.arange(1 << 10)):
                failures.append(into)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_worker_of_another_host_is_reached_by_it_unasked(
    far: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has an address of its own and shares nothing with us, as if it were elsewhere."""
    n = 1 << 18
    make_key_file(tmp_path / "key")
    monkeypatch.setenv("MONARCH_KERNEL_KEY_FILE", str(tmp_path / "key"))
    configure(backend="auto")
    try:
        hosts = attach_to_workers(workers=[start_worker_loop_forever(address="tcp://127.0.0.1:0")])
        procs = hosts.spawn_procs(per_host={"gpus": 1}, name="elsewhere")
        buffer = procs.spawn("keeper", KeeperActor).do.call_one("words", n).get()
        assert buffer.backend == "ibverbs"
        into = np.zeros(n, "i8")
        buffer.read_into(into).get()
        assert np.array_equal(into, np.arange(n))
        ours = far.do("words", n)  # a rank's, which the worker's rank reads
        peer = procs.spawn("peer", Peer)
        assert peer.backend.call_one(ours).get() == "ibverbs"
        assert np.array_equal(peer.read.call_one(ours, n, "i8").get(), into)
        hosts.shutdown().get()
    finally:
        configure(backend="ibverbs")


@pytest.fixture
def second_device() -> str:
    """Another RDMA device, on a network interface of its own. It stays: the guest ends after this."""
    for command in (
        "ip link add name other type dummy",
        "ip addr add 10.77.0.1/24 dev other",
        "ip link set other up",
        "rdma link add rxe1 type rxe netdev other",
    ):
        subprocess.run(command.split(), check=True)
    wait_until(lambda: Path(CLASS, "rxe1/ports/1/state").read_text().startswith("4:"), "the port")
    return "rxe1"


def sent(device: str) -> int:
    """Packets."""
    return int(Path(CLASS, device, "ports/1/hw_counters/sent_pkts").read_text())


def test_devices_can_be_named_also_several(second_device: str, far: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1 << 20
    buffer = far.do("words", n)
    into = np.zeros(n, "i8")
    devices = ("rxe0", second_device)
    before = [sent(device) for device in devices]
    monkeypatch.setenv("MONARCH_KERNEL_RDMA_DEVICE", second_device)
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(n))
    between = [sent(device) for device in devices]
    assert before[0] == between[0] and before[1] < between[1]
    monkeypatch.setenv("MONARCH_KERNEL_RDMA_DEVICE", f"rxe0,{second_device}:1")  # both at once
    buffer.write_from(into[::-1].copy()).get()
    assert np.array_equal(far.do("base", "words"), np.arange(n)[::-1])
    after = [sent(device) for device in devices]
    assert between[0] < after[0] and between[1] < after[1]
    monkeypatch.setenv("MONARCH_KERNEL_RDMA_DEVICE", "mlx5_9")
    assert not is_ibverbs_available() and get_rdma_backend() == "none"
