"""What only TCP has: connections, who may make them, who listens, and what is said when it is used unasked."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from monarch_kernel import environment
from monarch_kernel.actor import endpoint, this_host
from monarch_kernel.rdma import (
    RDMABuffer,
    RDMAError,
    RDMATcpFallbackWarning,
    RDMATimeoutError,
    configure,
    get_rdma_backend,
)
from monarch_kernel.runtime.transfer import backend_settings, tcp
from monarch_kernel.runtime.transfer.service import transfer_service
from monarch_kernel.runtime.transfer.tcp import Connection, EncryptedConnection
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.transfer.actors import KeeperActor
from tests.transfer.backends import tcp as here
from tests.transfer.test_failures import changed
from tests.waiting import patience

# What connections there are is looked at: those of other tests would be among them.
pytestmark = pytest.mark.own_runtime
HOWS = ("tcp", "tcp in the clear")


class Keeper(KeeperActor):
    """An owner that tells of its connections."""

    @endpoint
    def state(self) -> tuple[int, int, int]:
        """Listeners, connections, and connections that nobody looks after but the poller."""
        backend = here()
        return len(backend._data_ports), len(backend._connections), len(backend._parked)

    @endpoint
    def hang_up(self) -> None:
        """Lose every connection."""
        backend = here()
        backend._cut(list(backend._connections))

    @endpoint
    def drop_begins(self, buffer: RDMABuffer) -> bool:
        """Drop, and tell whether it was done at once."""
        self.dropping = buffer.drop()
        return self.dropping.done()

    @endpoint
    def drop_ends(self) -> None:
        self.dropping.get(20)

    @endpoint
    def settings(self, how: str) -> None:
        configure(tcp=how)


@pytest.fixture(params=HOWS)
def keeper(request: pytest.FixtureRequest, forced: Callable[[str], None]) -> Any:
    """An owner that is reached by TCP."""
    forced(request.param)
    return this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, forced: Callable[[str], None]) -> Iterator[Callable[..., None]]:
    """``elsewhere(here="tcp://...")``: this process is of another site from now on, whose gateway listens there."""
    forced("auto")
    monkeypatch.setattr(backend_settings, "_configured", {})
    monkeypatch.delenv(environment.RDMA_TCP_FALLBACK.name, raising=False)

    def move(address: str = "") -> None:
        node = transfer_service().node
        monkeypatch.setattr(node, "ref", msgspec.structs.replace(node.ref, site="another", gateway_address=address))

    yield move


def at_address(buffer: RDMABuffer, address: str) -> RDMABuffer:
    """The same buffer, but its owner's gateway listens there."""
    return changed(buffer, owner=msgspec.structs.replace(buffer._handle.owner, gateway_address=address))


def test_connections_are_made_when_needed_and_used_again(keeper: Any) -> None:
    buffer, other = keeper.do.call_one("words", 1 << 20).get(), keeper.do.call_one("shaped", "bytes").get()
    assert keeper.state.call_one().get() == (0, 0, 0), "nothing listens before the first transfer"
    into = np.zeros(1 << 20, "i8")
    for _ in range(3):
        buffer.read_into(into, size=64).get()
        other.read_into(into[:30]).get()
    assert keeper.state.call_one().get()[:2] == (1, 1)
    for _ in range(3):
        buffer.read_into(into).get()
        buffer.write_from(into).get()
    assert keeper.state.call_one().get()[1] <= max(environment.RDMA_STREAMS.get(), 1)
    wait_until(lambda: (s := keeper.state.call_one().get())[1] == s[2], "no thread waits at idle connections")
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(1 << 20))


def test_more_connections_than_threads_that_wait_at_them(keeper: Any) -> None:
    buffer = keeper.do.call_one("words", 8).get()
    made = [connection(buffer) for _ in range(3 * tcp.LINGERERS)]
    for _ in range(2):
        for each in made:
            each.send(tcp._REQUEST.pack(tcp._READ, buffer._handle.key, 8, 16))
        for each in made:
            answer = memoryview(bytearray(tcp._REPLY.size + 16))
            each.recv_into(answer)
            assert bytes(answer[-16:]) == np.arange(1, 3).tobytes()
    for each in made:
        here()._end(each)


def test_idle_connections_are_closed(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "IDLE", 0.1)
    buffer = keeper.do.call_one("words", 8).get()
    buffer.read_into(bytearray(64)).get()
    wait_until(lambda: keeper.state.call_one().get()[1] == 0, "the connection's end")
    assert not here()._connections
    buffer.read_into(bytearray(64)).get()


def test_a_lost_connection_is_made_anew(keeper: Any) -> None:
    buffer = keeper.do.call_one("words", 1 << 20).get()
    into = np.zeros(1 << 20, "i8")
    buffer.read_into(into).get()
    for wait in (False, True):
        keeper.hang_up.call_one().get()
        if wait:
            wait_until(lambda: keeper.state.call_one().get()[1] == 0, "the connections' end")
        into[:] = 0
        buffer.read_into(into).get()
        assert np.array_equal(into, np.arange(1 << 20))
        buffer.write_from(into).get()


def test_a_connection_that_breaks_each_time_is_an_error(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise ConnectionResetError("cut by a test")

    buffer = keeper.do.call_one("words", 8).get()
    monkeypatch.setattr(Connection, "_fill", broken)
    with pytest.raises(RDMAError, match=r"no TCP connection to its owner, or it broke each time \(cut by a test\)"):
        buffer.read_into(bytearray(64)).get()
    monkeypatch.undo()
    buffer.read_into(bytearray(64)).get()


def connection(buffer: RDMABuffer) -> Connection:
    """A connection of our own to a buffer's owner, as the backend makes them."""
    return here()._connect(buffer._handle, None)


def test_a_drop_waits_for_a_transfer_under_way_and_ends_the_rest(keeper: Any) -> None:
    buffer = keeper.do.call_one("words", 4 << 20).get()
    slow = connection(buffer)
    slow.send(tcp._REQUEST.pack(tcp._READ, buffer._handle.key, 0, 32 << 20))
    slow.recv_into(memoryview(bytearray(100)))  # it has begun, and we take no more
    keeper.do.call_one("forget", "words").get()
    assert not keeper.drop_begins.call_one(buffer).get()
    with pytest.raises(RDMAError, match="dropped"):
        buffer.read_into(bytearray(32 << 20)).get()
    assert keeper.do.call_one("lives", "words").get()
    here()._end(slow)
    keeper.drop_ends.call_one().get()
    # No transfer accesses it any more; the thread of the one that was cut lets go of it as its error ends.
    wait_until(lambda: not keeper.do.call_one("lives", "words").get(), "the memory is free")


def test_a_large_transfer_from_one_that_stands_still_times_out(keeper: Any) -> None:
    buffer, pid = keeper.do.call_one("words", 8 << 20).get(), keeper.pid.call_one().get()
    mine = np.zeros(8 << 20, "i8")
    buffer.read_into(mine).get()
    os.kill(pid, signal.SIGSTOP)
    try:
        for transfer in (buffer.read_into, buffer.write_from):
            with pytest.raises(RDMATimeoutError, match=r"bytes 0 to 67108864 .* did not end in time"):
                transfer(mine, timeout=0.1).get()
    finally:
        os.kill(pid, signal.SIGCONT)
    buffer.read_into(mine).get()


def test_an_owner_that_never_answers_is_given_up_when_it_dies(keeper: Any) -> None:
    buffer, pid = keeper.do.call_one("words", 8).get(), keeper.pid.call_one().get()
    with hook(lambda _failure: None):
        os.kill(pid, signal.SIGSTOP)
        reading = buffer.read_into(bytearray(64), timeout=None)  # not even connected yet
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RDMAError, match=r"read of bytes 0 to 64 .*proc owner.* is gone: .*SIGKILL"):
            reading.get(patience(20))
    assert not here()._connections


# -- who may connect ----------------------------------------------------------------------------------


def answered(sock: socket.socket) -> bytes:
    """What the other side says until it closes the connection."""
    sock.settimeout(10)
    heard = b""
    try:
        while data := sock.recv(4096):
            heard += data
    except ConnectionResetError:
        pass
    return heard


@pytest.fixture
def data_port(forced: Callable[[str], None]) -> Iterator[tcp.DataPort]:
    """This process's listener, with a buffer behind it."""
    forced("tcp")
    found = here()._data_port("127.0.0.1")
    yield found


def test_without_a_token_nobody_gets_in(data_port: tcp.DataPort, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(data_port.address) as sock:
        sock.sendall(os.urandom(tcp.TOKEN))
        assert answered(sock) == b""
    refusal = "refused a data connection from 127.0.0.1: "
    wait_until(lambda: refusal + "its token is unknown" in caplog.text, "the log")
    with socket.create_connection(data_port.address) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert answered(sock) == b""
    wait_until(lambda: refusal + "it showed no token" in caplog.text, "the log")


def test_many_refusals_are_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One at once, and one with their number; not a line each in the user's terminal."""
    data_port = tcp.DataPort(transfer_service().node.poller, "127.0.0.1")
    try:
        for _ in range(50):
            with socket.create_connection(data_port.address) as sock:
                sock.sendall(os.urandom(tcp.TOKEN))
                assert answered(sock) == b""
        assert caplog.text.count("refused a data connection") == 1
    finally:
        data_port.close()
    said = [line for line in caplog.text.splitlines() if "refused a data connection" in line]
    assert len(said) == 2
    assert said[1].endswith("from 127.0.0.1: its token is unknown (49 more since)")


def test_whoever_says_nothing_is_shown_out(
    data_port: tcp.DataPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "UNIDENTIFIED", 2)
    silent = [socket.create_connection(data_port.address) for _ in range(3)]
    assert answered(silent[0]) == b"", "the first goes when there are too many"
    monkeypatch.setattr(tcp, "GREETING", 0.05)
    with socket.create_connection(data_port.address) as sock:
        sock.sendall(b"half a token")
        assert answered(sock) == b""
    for sock in silent:
        sock.close()


def test_a_token_is_good_once_and_not_for_ever(data_port: tcp.DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[socket.socket] = []
    token = data_port.expect(came.append)
    first = tcp.dial(data_port.address, token, None)
    wait_until(lambda: came, "the guest")
    with tcp.dial(data_port.address, token, None) as second:
        assert answered(second) == b""
    monkeypatch.setattr(tcp, "EXPIRY", -1.0)
    with tcp.dial(data_port.address, data_port.expect(came.append), None) as late:
        assert answered(late) == b""
    assert len(came) == 1
    first.close()
    came[0].close()


def test_a_token_without_the_key_opens_nothing(forced: Callable[[str], None]) -> None:
    forced("tcp")
    memory = bytearray(b"secret" * 10)
    buffer, backend = RDMABuffer(memory), here()
    ask = tcp._encode(tcp.ConnectionRequest(True, "127.0.0.1"))
    answer = tcp._decode_answer(backend.offer(buffer._handle.key, ask, "thief"))
    assert answer.secret, "the owner encrypts although the other side need not"
    request = tcp._REQUEST.pack(tcp._READ, buffer._handle.key, 0, 60)
    for said in (request, struct.pack("<I", len(request) + 16) + request + bytes(16), struct.pack("<I", 1 << 30)):
        token = tcp._decode_answer(backend.offer(buffer._handle.key, ask, "thief")).token
        with tcp.dial(("127.0.0.1", answer.port), token, None) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            assert answered(sock) == b""
    wait_until(lambda: not backend._connections, "the end of the connections")


def test_what_goes_over_the_wire_is_encrypted_unless_both_sides_trust_the_network(
    forced: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced("tcp")
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    seen: list[type] = []
    for mine, theirs in itertools.product(("encrypted", "trusted-network"), repeat=2):
        configure(tcp=mine)
        keeper.settings.call_one(theirs).get()
        made = connection(buffer)
        seen.append(type(made))
        here()._end(made)
    assert seen == [EncryptedConnection, EncryptedConnection, EncryptedConnection, Connection]


def test_a_sealed_stream_takes_no_changed_repeated_or_swapped_frame() -> None:
    a, b = socket.socketpair()
    frames: list[bytes] = []
    secret = os.urandom(tcp.SECRET)
    tuned = pytest.MonkeyPatch()
    tuned.setattr(tcp, "tune", lambda _sock: None)
    try:
        sender = EncryptedConnection(a, "b", secret, opener=True)
        for text in (b"first", b"second"):
            sender.send(text)
            frames.append(b.recv(100))
        assert b"first" not in frames[0]
        flipped, last = bytearray(frames[0]), bytearray(frames[0])
        flipped[7] ^= 1
        last[-1] ^= 1
        for stream in ([flipped], [frames[1]], [frames[0], frames[0]], [last]):
            c, d = socket.socketpair()
            receiver = EncryptedConnection(d, "a", secret, opener=False)
            for frame in stream:
                c.sendall(frame)
            with c, d, pytest.raises(ConnectionAbortedError, match="not encrypted with this connection's key"):
                for _ in stream:
                    receiver.recv_into(memoryview(bytearray(5)))
        own = EncryptedConnection(
            b, "a", secret, opener=True
        )  # a frame that is sent back to its sender does not open either
        a.sendall(frames[0])
        with pytest.raises(ConnectionAbortedError):
            own.recv_into(memoryview(bytearray(5)))
    finally:
        tuned.undo()
        a.close()
        b.close()


def test_a_sealed_stream_is_one_of_bytes() -> None:
    a, b = socket.socketpair()
    secret, data = os.urandom(tcp.SECRET), os.urandom(3 << 20)
    with pytest.MonkeyPatch.context() as tuned, a, b:
        tuned.setattr(tcp, "tune", lambda _sock: None)
        sender, receiver = (
            EncryptedConnection(a, "b", secret, opener=True),
            EncryptedConnection(b, "a", secret, opener=False),
        )
        thread = threading.Thread(target=lambda: (sender.send(data[:10], more=True), sender.send(data[10:])))
        thread.start()
        into = memoryview(bytearray(len(data)))
        at = 0
        for size in (1, 4, 100, 1 << 20, 1, (2 << 20) - 106):
            receiver.recv_into(into[at : at + size])
            at += size
        thread.join()
        assert bytes(into[:at]) == data[:at]


# -- between hosts --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::monarch_kernel.rdma.RDMATcpFallbackWarning")
@pytest.mark.parametrize("listens", ["the owner", "who asks"])
def test_whoever_has_an_address_listens(listens: str, elsewhere: Callable[..., None]) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 1 << 20).get()
    assert buffer.backend == "cma"
    if listens == "the owner":
        elsewhere()
        buffer = at_address(buffer, "tcp://127.0.0.1:1")
    else:
        elsewhere("tcp://127.0.0.1:1")
    assert buffer.backend == "tcp"
    into = np.zeros(1 << 20, "i8")
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(1 << 20))
    buffer.write_from(into[::-1]).get()
    buffer.read_into(into).get()
    assert np.array_equal(into, np.arange(1 << 20)[::-1])
    assert keeper.state.call_one().get()[0] == (listens == "the owner")
    assert len(here()._data_ports) == (listens == "who asks")


def test_where_nobody_has_an_address_it_is_said(elsewhere: Callable[..., None]) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    elsewhere()
    assert buffer.backend == "none"
    with pytest.raises(RDMAError, match="tcp: neither the owner's host nor this one has an address"):
        buffer.read_into(bytearray(64)).get()


def test_an_owner_listens_only_where_it_can_be_reached(elsewhere: Callable[..., None], forced: Any) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    elsewhere()
    forced("tcp")
    with pytest.raises(RDMAError, match=r"tcp: 192\.0\.2\.1 is not where its owner can be reached"):
        at_address(buffer, "tcp://192.0.2.1:1").read_into(bytearray(64)).get()


def test_where_a_process_can_listen() -> None:
    here = transfer_service().node.ref

    def at(address: str) -> str:
        return tcp.host_of(msgspec.structs.replace(here, site="another", gateway_address=address), here)

    assert tcp.host_of(here, here) == "127.0.0.1"
    assert at("tcp://10.0.0.2:26600") == "10.0.0.2"
    assert at("tcp://node1:26600") == "node1"
    assert at("tcp://[fd00::2]:26600") == "fd00::2"
    assert at("ipc:///tmp/worker") == at("") == ""


@pytest.mark.parametrize(
    "host, resolved, bound",
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", "0.0.0.0"),  # as Debian has it in /etc/hosts
        ("203.0.113.9", "203.0.113.9", "0.0.0.0"),  # the address that a cloud shows to the outside
    ],
)
def test_the_address_at_which_it_listens(host: str, resolved: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    with tcp._listen(host) as sock:
        assert sock.getsockname()[0] == bound


@pytest.mark.filterwarnings("error::monarch_kernel.rdma.RDMATcpFallbackWarning")
def test_falling_back_to_tcp_is_said_once_and_can_be_ruled_out(elsewhere: Callable[..., None]) -> None:
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    elsewhere("tcp://127.0.0.1:1")
    into = bytearray(64)
    with pytest.warns(RDMATcpFallbackWarning, match=r"moved by TCP.*\(ibverbs: .*allow_tcp_fallback=False"):
        buffer.read_into(into).get()
    buffer.read_into(into).get()  # said once
    try:
        configure(allow_tcp_fallback=False)
        assert buffer.backend == "none" and get_rdma_backend() in ("none", "ibverbs")
        with pytest.raises(RDMAError, match="tcp: turned off by MONARCH_KERNEL_RDMA_TCP_FALLBACK=0"):
            buffer.read_into(into).get()
        configure(backend="tcp")
        buffer.read_into(into).get()  # who asks for it by name gets it
        configure(backend="auto", allow_tcp_fallback=True)
        transfer_service()._warned = False
        buffer.read_into(into).get()
    finally:
        os.environ.pop(environment.RDMA_TCP_FALLBACK.name, None)


def test_a_fork_lets_go_of_the_connections(forced: Callable[[str], None]) -> None:
    forced("tcp")
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    buffer.read_into(bytearray(64)).get()
    (used,) = here()._connections
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os._exit(0 if used.sock.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.read_into(bytearray(64)).get()


def test_without_the_package_that_encrypts_it_is_said(
    forced: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced("tcp")
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", Keeper)
    buffer = keeper.do.call_one("words", 8).get()
    monkeypatch.setattr(tcp, "can_encrypt", lambda: False)
    with pytest.raises(RDMAError, match="tcp: encryption needs the package cryptography"):
        buffer.read_into(bytearray(64)).get()
