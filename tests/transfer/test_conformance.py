"""What every backend must do, in the same words for each."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.rdma import RDMAAction, RDMABuffer, RDMAError, configure
from tests.transfer.actors import AsyncPeer, Peer
from tests.transfer.arrays import SHAPES, contents
from tests.transfer.conftest import FAR_BACKENDS, LOCAL_BACKENDS, Owner, force, make_owner


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests come backend by backend, so that all of one backend have the same owner."""
    if "owner" in metafunc.fixturenames:
        backends = FAR_BACKENDS if "far" in metafunc.fixturenames else LOCAL_BACKENDS
        metafunc.parametrize("owner", backends, indirect=True, scope="module")


@pytest.fixture(autouse=True)
def no_faults() -> None:
    """Instead of the one that ends a test's meshes: the owners stay."""


@pytest.fixture(scope="module")
def owner(request: pytest.FixtureRequest, runtime: None) -> Iterator[Owner]:
    """An owner that this process reaches through each backend."""
    made = make_owner(request.param, force)
    yield made
    if made.procs is not None:
        made.procs.stop().get()
    configure(backend="auto", tcp="encrypted")


@pytest.fixture
def far(owner: Owner) -> Owner:
    """The same, but always another process."""
    return owner


@pytest.fixture(scope="module")
def two(owner: Owner) -> Iterator[ProcMesh]:
    """Two others, which reach the owner in the same way."""
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    yield procs
    procs.stop().get()


def pattern(size: int) -> bytes:
    return np.random.default_rng(size).integers(1, 255, size, "u1").tobytes()


def outside(base: Any, like_base: Any, like_view: Any) -> bytes:
    """The bytes of a base array that are not in the view of it that ``like_view`` is of ``like_base``."""
    at = like_view.__array_interface__["data"][0] - like_base.__array_interface__["data"][0]
    if not 0 <= at < like_base.nbytes:
        return b""  # a copy, not a view
    offsets = np.array([at])
    for n, stride in zip(like_view.shape, like_view.strides):
        offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
    mask = np.ones(like_base.nbytes, bool)
    mask[(offsets[:, None] + np.arange(like_view.itemsize)).ravel()] = False
    return np.frombuffer(base.tobytes(), "u1")[mask].tobytes()


def clear(view: Any) -> None:
    """Make every byte zero."""
    view[...] = np.zeros((), view.dtype)


def test_the_backend_is_the_one_that_was_asked_for(owner: Owner) -> None:
    buffer = owner.do("words", 8)
    assert buffer.backend == owner.backend
    assert buffer.size() == 64
    assert (owner.procs is None) == (buffer.owner.startswith("controller"))
    assert len(pickle.dumps(buffer)) < 1000
    assert pickle.loads(pickle.dumps(buffer)) == buffer
    assert "64 bytes" in repr(buffer)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_every_shape_with_every_shape(owner: Owner, write: bool) -> None:
    for theirs in SHAPES:
        buffer = owner.do("shaped", theirs)
        whole, held = owner.do("both", theirs)
        around = outside(whole, *SHAPES[theirs]())
        for mine, make in SHAPES.items():
            base, view = make()
            if write:
                buffer.write_from(view).get()
                whole, held = owner.do("both", theirs)
                assert outside(whole, *SHAPES[theirs]()) == around, f"{mine} to {theirs}: beside it"
            else:
                clear(view)
                beside = outside(base, *make())
                buffer.read_into(view).get()
                assert outside(base, *make()) == beside, f"{theirs} to {mine}: bytes beside it were written"
            assert held == contents(view), f"{theirs} and {mine}"
        if not write:
            assert owner.do("contents", theirs) == held, f"{theirs}: was written"


@pytest.mark.parametrize("name", ["bytes", "columns", "permuted", "backwards", "every other"])
def test_any_range_of_a_buffer_can_be_read_and_written(owner: Owner, name: str) -> None:
    buffer = owner.do("shaped", name)
    expected = bytearray(owner.do("contents", name))
    for offset, size in [(0, 1), (7, 3), (1, 239), (8, 16), (100, 140), (239, 1), (0, 240), (3, 50)]:
        into = bytearray(b"\xff" * (size + 5))
        buffer.read_into(into, offset=offset, size=size).get()
        assert into[:size] == expected[offset : offset + size]
        assert into[size:] == b"\xff" * 5, "what lies behind the range in dst was written"
        data = pattern(size)
        buffer.write_from(data, offset=offset).get()
        expected[offset : offset + size] = data
        assert owner.do("contents", name) == expected
    tail = bytearray(10)
    buffer.read_into(tail, offset=230).get()
    assert tail == expected[230:]


def test_registering_copies_nothing(owner: Owner) -> None:
    buffer = owner.do("words", 4)
    buffer.write_from(np.array([5, 6, 7, 8])).get()
    assert owner.do("base", "words").tolist() == [5, 6, 7, 8]


def test_many_megabytes_in_both_directions(owner: Owner) -> None:
    n = (24 << 20) // 8 + 3  # several pieces, and a rest
    buffer = owner.do("words", n)
    into = np.zeros(n, "i8")
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(n))
    buffer.write_from(into[::-1]).get()
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(n)[::-1])
    wide = np.zeros((n, 2), "i8")
    buffer.read_into(wide[:, 1]).get()
    assert np.array_equal(wide[:, 1], into) and not wide[:, 0].any()


@pytest.mark.parametrize(
    "offset, size, text",
    [(-1, None, "not within the buffer"), (60, 8, "bytes 60 to 68 are not within"), (64, None, "nothing at byte 64")],
)
def test_a_range_outside_is_an_error_that_names_it(owner: Owner, offset: int, size: int | None, text: str) -> None:
    buffer = owner.do("words", 8)
    into = bytearray(64)
    with pytest.raises(ValueError, match=text):
        buffer.read_into(into, offset=offset, size=size)
    assert into == bytes(64)


def test_sizes_that_do_not_fit(owner: Owner) -> None:
    buffer = owner.do("words", 8)
    with pytest.raises(ValueError, match="dst has 63 bytes, and bytes 0 to 64 of the buffer are 64"):
        buffer.read_into(bytearray(63))
    with pytest.raises(ValueError, match="bytes 0 to 65 are not within the buffer, which has 64"):
        buffer.write_from(bytes(65))
    with pytest.raises(ValueError, match="nothing to transfer"):
        buffer.write_from(b"")
    with pytest.raises(ValueError, match="nothing to transfer"):
        buffer.read_into(bytearray(8), size=0)
    with pytest.raises(ValueError, match="size is negative"):
        buffer.read_into(bytearray(8), size=-3)
    assert owner.do("base", "words").tolist() == list(range(8))


def test_what_cannot_be_written_is_not(owner: Owner) -> None:
    buffer = owner.do("readonly")
    into = bytearray(16)
    buffer.read_into(into).get()
    assert into == bytes(range(16))
    with pytest.raises(ValueError, match="the memoryview is read-only"):
        buffer.write_from(into)
    with pytest.raises(ValueError, match="read-only"):
        buffer.fetch_add(1)
    with pytest.raises(ValueError, match="dst cannot be written: the bytes is read-only"):
        buffer.read_into(bytes(16))
    shared = owner.do("broadcasted")
    shared.read_into(into).get()
    assert into == bytes([0, 1, 2, 3] * 4)
    with pytest.raises(ValueError, match=r"read-only|share memory"):
        shared.write_from(into)
    with pytest.raises(ValueError, match=r"read-only|share memory"):
        shared.read_into(np.lib.stride_tricks.as_strided(np.zeros(20, "u1"), (5, 4), (1, 1)))


def test_a_dropped_buffer_is_refused_and_its_memory_let_go(owner: Owner) -> None:
    buffer = owner.do("words", 8)
    other = owner.do("shaped", "bytes")
    owner.do("forget", "words")
    assert owner.do("lives", "words"), "the registration must keep it"
    buffer.drop().get()
    assert not owner.do("lives", "words")
    into = bytearray(64)
    for attempt in (
        lambda: buffer.read_into(into),
        lambda: buffer.write_from(into),
        lambda: buffer.fetch_add(1),
        lambda: buffer.compare_and_swap(1, 2),
        lambda: RDMAAction().read_remote(into, buffer).submit(),
    ):
        with pytest.raises(RDMAError, match="the buffer was dropped") as failure:
            attempt().get()
        assert failure.value.owner == buffer.owner
    assert into == bytes(64)
    assert buffer.drop().get() is None, "dropping twice is no error"
    other.read_into(bytearray(240)).get()


def test_a_slot_that_is_used_again_does_not_revive_old_handles(owner: Owner) -> None:
    old = owner.do("words", 8)
    old.drop().get()
    new = owner.do("words", 8)
    with pytest.raises(RDMAError, match="dropped"):
        old.read_into(bytearray(64)).get()
    new.read_into(bytearray(64)).get()


def test_atomics_on_words(owner: Owner) -> None:
    signed = owner.do("words", 4)
    assert signed.fetch_add(5, offset=16).get() == 2
    assert signed.fetch_add(-10, offset=16).get() == 7
    assert signed.fetch_add(0, offset=16).get() == -3
    assert signed.compare_and_swap(-3, 100, offset=16).get() == -3
    assert signed.compare_and_swap(-3, 7, offset=16).get() == 100
    assert owner.do("base", "words").tolist() == [0, 1, 100, 3]
    unsigned = owner.do("words", 4, "u8")
    assert unsigned.fetch_add(-1).get() == 0
    assert unsigned.fetch_add(2).get() == (1 << 64) - 1
    assert unsigned.compare_and_swap(1, (1 << 64) - 2).get() == 1
    assert owner.do("base", "words").tolist() == [(1 << 64) - 2, 1, 2, 3]


def test_words_that_are_none(owner: Owner) -> None:
    buffer = owner.do("words", 4)
    with pytest.raises(ValueError, match="not at a multiple of 8"):
        buffer.fetch_add(1, offset=4)
    with pytest.raises(ValueError, match="not within"):
        buffer.fetch_add(1, offset=28)
    with pytest.raises(ValueError, match="does not fit into 8 bytes"):
        buffer.fetch_add(1 << 64)
    scattered = owner.do("shaped", "columns")
    with pytest.raises(ValueError, match="not in one piece"):
        scattered.fetch_add(1, offset=16)


def test_an_action_does_all_of_it_and_can_be_submitted_again(owner: Owner) -> None:
    numbers = owner.do("words", 8)
    text = owner.do("shaped", "bytes")
    into, source = np.zeros(4, "i8"), np.full(8, 9, "u1")
    action = (
        RDMAAction()
        .read_remote(into, numbers, offset=32)
        .write_remote(text, source, offset=100)
        .fetch_add(numbers, 1)
        .compare_and_swap(numbers, 1, 50, offset=8)
        .fetch_add(numbers, 2)
    )
    assert action.submit().get() in ([0, 1, 1], [2, 1, 0])
    assert into.tolist() == [4, 5, 6, 7]
    assert owner.do("contents", "bytes")[99:109] == bytes([100, *[9] * 8, 109])
    numbers.write_from(np.array([14, 15, 16, 17]), offset=32).get()
    source[:] = 8
    assert action.submit(timeout=30).get() in ([3, 50, 4], [5, 50, 3])
    assert into.tolist() == [14, 15, 16, 17]
    assert owner.do("contents", "bytes")[100:108] == bytes([8] * 8)


def test_an_action_with_overlaps_is_refused(owner: Owner) -> None:
    buffer = owner.do("words", 8)
    a, b = bytearray(64), bytearray(64)
    with pytest.raises(
        ValueError, match=r"local memory of operation 2 \(read_remote\) and the local memory of operation 1"
    ):
        RDMAAction().read_remote(a, buffer).read_remote(a, buffer)
    with pytest.raises(ValueError, match="the buffer of operation 2"):
        RDMAAction().read_remote(a, buffer).write_remote(buffer, b)
    with pytest.raises(ValueError, match="the local memory"):
        RDMAAction().read_remote(a, buffer, size=8).write_remote(buffer, memoryview(a)[:8], offset=56)
    with pytest.raises(ValueError, match="the buffer of operation 2"):
        RDMAAction().write_remote(buffer, bytes(9)).write_remote(buffer, b"x", offset=8)
    with pytest.raises(ValueError, match="the word of operation 2"):
        RDMAAction().read_remote(a, buffer).fetch_add(buffer, 1)
    # These only touch: nothing is read or written twice.
    matrix = np.zeros((4, 4), "u2")
    action = RDMAAction()
    for column in range(4):
        action.read_remote(matrix[:, column], buffer, offset=8 * column, size=8)
    action.submit().get()
    assert matrix.T.tobytes() == np.arange(4).tobytes()
    RDMAAction().write_remote(buffer, b"12345678").write_remote(buffer, b"abcdefgh", offset=8).submit().get()
    assert owner.do("contents", "words")[:16] == b"12345678abcdefgh"
    RDMAAction().read_remote(a, buffer).read_remote(b, buffer).submit().get()
    assert a == b
    assert RDMAAction().submit().get() is None


def test_arguments_of_the_wrong_kind() -> None:
    with pytest.raises(ValueError, match="an empty buffer cannot be registered"):
        RDMABuffer(bytearray())
    with pytest.raises(TypeError, match="not list"):
        RDMABuffer([1, 2])
    with pytest.raises(ValueError, match="holds Python objects"):
        RDMABuffer(np.array([object()]))
    with pytest.raises(TypeError, match="not str"):
        RDMABuffer(bytearray(1)).write_from("x")
    with pytest.raises(TypeError, match="needs an RDMABuffer there, not bytearray"):
        RDMAAction().read_remote(bytearray(8), bytearray(8))  # type: ignore[arg-type]


def test_a_registered_bytearray_cannot_be_resized() -> None:
    data = bytearray(8)
    buffer = RDMABuffer(data)
    with pytest.raises(BufferError):
        data.append(1)
    buffer.drop().get()
    data.append(1)


def test_the_callers_memory_is_let_go_before_the_end_is_told(owner: Owner) -> None:
    """A bytearray whose memory is still in use cannot be resized; with one thread, and with several."""
    buffer = owner.do("words", 1 << 21)
    for size in [1 << 18] * 20 + [1 << 24] * 2:
        into = bytearray(size)
        buffer.read_into(into, size=size).get()
        into.append(1)


def test_awaited(owner: Owner) -> None:
    buffer = owner.do("words", 1 << 18)

    async def go() -> Any:
        parts = [np.zeros(1 << 16, "i8") for _ in range(4)]
        reads = [buffer.read_into(p, offset=i << 19, size=1 << 19) for i, p in enumerate(parts)]
        for read in reads:
            await read
        await buffer.write_from(parts[0][::-1], offset=1 << 19)
        with pytest.raises(ValueError):
            await buffer.read_into(bytearray(3))
        return np.concatenate(parts)

    assert np.array_equal(asyncio.run(go()), np.arange(1 << 18))
    assert owner.do("base", "words")[1 << 16] == (1 << 16) - 1


def test_others_pull_and_push_while_the_owner_is_busy(far: Owner, two: ProcMesh) -> None:
    n = 1 << 18
    buffer = far.do("words", n)
    assert far.actor is not None
    busy = far.actor.spin_until_last_is.call_one(-1)  # nothing but a write from elsewhere ends this
    peers = two.spawn("peer", Peer)
    assert {value for _, value in peers.backend.call(buffer).get()} == {far.backend}
    for _, pulled in peers.read.call(buffer, n, "i8").get():
        assert np.array_equal(pulled, np.arange(n))
    half = np.full(n // 2, -1)
    pulls = peers.read.call(buffer, n, "i8")
    pushes = [peers.slice(gpus=i).write.call_one(buffer, half, i * n * 4) for i in range(2)]
    for _, pulled in pulls.get():
        assert ((pulled == np.arange(n)) | (pulled == -1)).all()
    for push in pushes:
        push.get()
    assert busy.get()[-1] == -1
    assert (far.do("base", "words") == -1).all()


def test_atomics_of_many_are_atomic(far: Owner, two: ProcMesh) -> None:
    buffer = far.do("words", 2)
    buffer.write_from(np.zeros(2, "i8")).get()
    peers = two.spawn("peer", Peer)
    adds = peers.add.call(buffer, 50)
    for _ in range(50):
        buffer.fetch_add(1).get()
    adds.get()
    peers.increment.call(buffer, 25).get()
    assert far.do("base", "words").tolist() == [150, 50]


def test_buffers_travel_on_to_others_which_may_drop_them(far: Owner, two: ProcMesh) -> None:
    first, second = far.do("shaped", "bytes"), far.do("words", 30)
    two.slice(gpus=0).spawn("mover", AsyncPeer).copy.call_one(first, second, 240).get()
    assert far.do("contents", "words") == far.do("contents", "bytes")
    mine = bytearray(range(16))
    here = RDMABuffer(mine)
    peer = two.slice(gpus=1).spawn("peer", Peer)
    assert peer.backend.call_one(here).get() == far.backend
    peer.write.call_one(here, b"theirs", 2).get()
    assert mine[:10] == b"\0\1theirs\x08\t"
    peer.drop.call_one(here).get()
    mine.append(0)  # nothing holds it any more
    peer.drop.call_one(first).get()
    with pytest.raises(RDMAError, match="dropped"):
        first.read_into(bytearray(240)).get()
