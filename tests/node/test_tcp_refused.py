"""Who does not have the key gets nothing, and both sides are told; and why a connection did not come about."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import read_key_file
from monarch_kernel.runtime.node import tcp
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import listener
from monarch_kernel.runtime.node.tcp.dial import OUR_KEY, THEIR_KEY
from monarch_kernel.runtime.node.tcp.link import REVOKED
from tests import attacks
from tests.conftest import wait_until
from tests.node.tcpside import Side, echoing, header
from tests.ports import free_port

#: What a dial has time for; nothing below takes as long.
PLENTY = 60.0


@pytest.fixture
def worker(sides: Callable[..., Side]) -> Side:
    """A side that listens and echoes, with a link that must stay unharmed."""
    side = sides()
    side.react = echoing
    side.listen()
    return side


@pytest.fixture(autouse=True)
def friend(sides: Callable[..., Side], worker: Side) -> Iterator[None]:
    """One with the right key works before, and after all that strangers do."""
    side = sides()
    link = side.dial(worker.listeners[0].url)
    side.echo(link, b"before")
    yield
    side.echo(link, b"after")
    side.echo(side.dial(worker.listeners[0].url), b"another")
    assert {body for _, _, _, body in worker.got} == {b"before", b"after", b"another"}
    assert len(worker.links) == 2 and not worker.ended


def port_of(side: Side) -> int:
    return int(side.listeners[0].url.rsplit(":", 1)[1])


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def one_line(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """There is one line in the log, which tells whom and why."""
    wait_until(lambda: refusals(caplog), "a line in the log")
    assert refusals(caplog) == [f"refused - - 127.0.0.1: {reason}"]


@pytest.fixture
def stranger_keys(tmp_path: Path) -> Keys:
    make_key_file(tmp_path / "stranger.key", "stranger")
    return load_keys(tmp_path / "stranger.key")


def allow(keys: Keys, other: Keys) -> None:
    """Let ``keys`` trust another one, too."""
    add_key(keys.allow, read_key_file(other.path).public)
    keys.refresh()


def test_another_key_file(
    sides: Callable[..., Side], worker: Side, stranger_keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = sides(stranger_keys)
    link = stranger.dial(worker.listeners[0].url, PLENTY)
    link.send(header("let me in"), b"please")
    stranger.wait(lambda: stranger.ended, "the refusal")
    assert link.ended.startswith(THEIR_KEY) and stranger_keys.path in link.ended
    assert link.closed and link.queued == 0 and not stranger.got
    one_line(caplog, "it does not trust this worker's key")


def test_who_trusts_the_worker_is_not_trusted_for_that(
    sides: Callable[..., Side], worker: Side, keys: Keys, stranger_keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    allow(stranger_keys, keys)
    stranger = sides(stranger_keys)
    link = stranger.dial(worker.listeners[0].url, PLENTY)
    link.send(header("let me in"), b"please")
    stranger.wait(lambda: stranger.ended, "the refusal")
    assert link.ended.startswith(OUR_KEY) and stranger_keys.path in link.ended
    assert link.closed and link.queued == 0 and not stranger.got
    one_line(caplog, "its key is not one that this worker trusts")


def test_two_that_trust_each_other_until_one_is_revoked(
    sides: Callable[..., Side], worker: Side, keys: Keys, stranger_keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    allow(stranger_keys, keys)
    allow(keys, stranger_keys)
    theirs = sides(keys)
    theirs.react = echoing
    url = theirs.listen()
    stranger = sides(stranger_keys)
    link = stranger.dial(url, PLENTY)
    stranger.echo(link, b"a friend")
    assert theirs.links[0].name == "stranger" and theirs.links[0].certificate == link_certificate(stranger_keys)
    assert f"connected stranger {stranger_keys.fingerprint[:16]} {theirs.links[0].where}" in caplog.messages
    revoke_keys(keys.allow, "stranger")
    stranger.wait(lambda: stranger.ended, "the end of the link")
    assert link.ended == f"the other side gave it up: {REVOKED}"
    theirs.wait(lambda: theirs.ended, "the end of the link")
    assert theirs.ended[0].ended == REVOKED
    again = stranger.dial(url, PLENTY)
    stranger.wait(lambda: again in stranger.ended, "the refusal")
    assert again.ended.startswith(OUR_KEY)


def link_certificate(keys: Keys) -> bytes:
    return read_key_file(keys.path).public.certificate


GARBAGE = {
    "http": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3, "it does not speak TLS"),
    "zeros": (bytes(200), "it does not speak TLS"),
    "CURVE": (attacks.ZMTP_CURVE, "it speaks ZeroMQ, as older versions"),
    "NULL": (attacks.ZMTP_NULL, "it speaks ZeroMQ, as older versions"),
    "a giant record": (b"\x16\x03\x01\xff\xff" + bytes(70_000), "it broke the protocol"),
    "a giant hello": (attacks.GIANT_HELLO, "it broke the protocol"),
    "a hello of noise": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(507), "it broke the protocol"),
    "data before a hello": (b"\x17\x03\x03\x00\x20" + bytes(32), "it does not speak TLS"),
}


@pytest.mark.parametrize("said", GARBAGE)
def test_garbage(worker: Side, caplog: pytest.LogCaptureFixture, said: str) -> None:
    data, why = GARBAGE[said]
    with socket.create_connection(("127.0.0.1", port_of(worker)), PLENTY) as sock:
        sock.sendall(data)
        got = attacks.hang_up_of(sock)
    assert len(got) < 100  # an alert, at most
    wait_until(lambda: refusals(caplog), "a line in the log")
    assert len(refusals(caplog)) == 1 and refusals(caplog)[0].startswith(f"refused - - 127.0.0.1: {why}")


@pytest.mark.parametrize(
    ("version", "why"), [("TLSv1_2", "it does not speak TLS 1.3"), ("TLSv1_3", "it has shown no key")]
)
def test_tls_that_is_not_ours(worker: Side, caplog: pytest.LogCaptureFixture, version: str, why: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion[version]
    with (
        socket.create_connection(("127.0.0.1", port_of(worker)), PLENTY) as sock,
        pytest.raises(ssl.SSLError),
        context.wrap_socket(sock) as wrapped,
    ):
        wrapped.sendall(b"let me in")
        assert not wrapped.recv(1)
    one_line(caplog, why)


def test_a_friend_that_does_not_greet(worker: Side, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    with (
        socket.create_connection(("127.0.0.1", port_of(worker)), PLENTY) as sock,
        keys.client_context().wrap_socket(sock) as wrapped,
    ):
        wrapped.sendall(b"good morning")
        assert wrapped.recv(4) == b"mkl\n"
        attacks.hang_up_of(wrapped)
    one_line(caplog, "it broke the protocol")


@pytest.mark.parametrize(
    ("said", "why"), [(b"", "it said nothing for 0.3 s"), (b"\x16\x03\x01", "it did not prove its key within 0.3 s")]
)
def test_silence(
    sides: Callable[..., Side], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, said: bytes, why: str
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIME", 0.3)
    impatient = sides()
    impatient.listen()
    with socket.create_connection(("127.0.0.1", port_of(impatient)), PLENTY) as sock:
        sock.sendall(said)
        attacks.hang_up_of(sock)
        one_line(caplog, why)


def test_who_hangs_up(worker: Side, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        socket.create_connection(("127.0.0.1", port_of(worker))).close()
    one_line(caplog, "it hung up")


# -- what a dial says -------------------------------------------------------------------------------


def test_nobody_listens(sides: Callable[..., Side]) -> None:
    ours = sides()
    link = ours.dial(f"tcp://127.0.0.1:{free_port()}", 0.3)
    link.send(header("hello"), b"x" * 100)
    ours.wait(lambda: ours.ended, "the end")
    assert link.ended == "no process listens there within 0.3 s" and link.queued == 0


def test_a_host_that_does_not_answer(sides: Callable[..., Side]) -> None:
    ours = sides()
    with socket.create_server(("127.0.0.1", 0)) as server:  # which accepts nobody
        link = ours.dial(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0.3)
        ours.wait(lambda: ours.ended, "the end")
    assert link.ended == "no answer within 0.3 s"


def test_a_name_that_nobody_knows(sides: Callable[..., Side]) -> None:
    ours = sides()
    link = ours.dial("tcp://no-such-host.invalid:1234", 1)
    ours.wait(lambda: ours.ended, "the end")
    assert re.fullmatch(
        r"the name no-such-host\.invalid is not known \(.*\) within 1 s|no answer within 1 s", link.ended
    )


@contextmanager
def server(answer: Callable[[socket.socket], Any]) -> Iterator[str]:
    """A TCP server that does this with everyone who connects."""

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            with sock:
                answer(sock)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_of_another_kind(sides: Callable[..., Side]) -> None:
    ours = sides()
    with server(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 5)) as url:
        link = ours.dial(url, PLENTY)
        ours.wait(lambda: ours.ended, "the end")
    assert link.ended.startswith("refused: ")


def test_a_server_that_hangs_up(sides: Callable[..., Side]) -> None:
    ours = sides()
    with server(lambda sock: sock.recv(10)) as url:
        link: Any = ours.dial(url, 1.0)
        ours.wait(lambda: ours.ended, "the end")
    assert link.ended.startswith("refused: it has hung up each time") and link._maker.hung_up > 1


def test_a_proxy_whose_backend_comes_later(sides: Callable[..., Side], worker: Side) -> None:
    """It hangs up once, as one that cannot reach the worker yet."""
    ours = sides()
    link: Any = None
    with server(lambda sock: sock.recv(10)) as url:
        link = ours.dial(url, PLENTY)
        wait_until(lambda: link._maker.hung_up, "it has hung up")
    theirs = sides()
    theirs.react = echoing
    theirs.listen(url)
    ours.echo(link, b"there you are")


def test_a_worker_of_an_older_version(sides: Callable[..., Side]) -> None:
    ours = sides()
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        link = ours.dial(f"tcp://127.0.0.1:{port}", PLENTY)
        ours.wait(lambda: ours.ended, "the end")
    context.term()
    assert link.ended.startswith("refused: what listens there speaks ZeroMQ, as workers of older versions")


def test_a_dial_that_is_given_up(sides: Callable[..., Side]) -> None:
    ours = sides()
    for url in (f"tcp://127.0.0.1:{free_port()}", f"tcp://localhost:{free_port()}"):
        link = ours.dial(url, PLENTY)
        link.close()
        assert ours.ended[-1] is link and link.ended == "it was closed here"


# -- addresses --------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("listen", "reach"),
    [
        ("tcp://127.0.0.1:*", "127.0.0.1"),
        ("tcp://localhost:0", "localhost"),
        ("tcp://*:0", "127.0.0.1"),
        ("tcp://0.0.0.0:0", "localhost"),
        ("tcp://[::1]:0", "[::1]"),
        ("tcp://[::1]:0", "localhost"),
        ("tcp://[::]:0", "127.0.0.1"),
    ],
)
def test_addresses(sides: Callable[..., Side], listen: str, reach: str) -> None:
    if "[" in listen and not has_ipv6():
        pytest.skip("no IPv6 here")
    if listen == "tcp://[::1]:0" and reach == "localhost" and not localhost_is_v6():
        pytest.skip("localhost has no IPv6 address here")
    ours, theirs = sides(), sides()
    theirs.react = echoing
    url = theirs.listen(listen)
    assert re.fullmatch(r"tcp://(127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\]):[1-9]\d*", url)
    link = ours.dial(f"tcp://{reach}:{port_of(theirs)}")
    ours.echo(link, b"hello")
    assert link.where == f"{reach}:{port_of(theirs)}"


def localhost_is_v6() -> bool:
    return any(found[0] == socket.AF_INET6 for found in socket.getaddrinfo("localhost", 1))


@pytest.mark.parametrize("url", ["", "tcp://", "tcp://host", "ipc:///tmp/x", "tcp://host:99999", "tcp://::1:80"])
def test_what_is_no_address(sides: Callable[..., Side], url: str) -> None:
    side = sides()
    with pytest.raises(ValueError, match=r"is not a worker address: it must look like tcp://host:26600"):
        side.dial(url)
    with pytest.raises(ValueError, match=r"is not a worker address"):
        side.listen(url)


def test_what_cannot_be_dialled(sides: Callable[..., Side]) -> None:
    with pytest.raises(ValueError, match="needs a port"):
        sides().dial("tcp://127.0.0.1:0")


def test_where_it_cannot_listen(sides: Callable[..., Side], worker: Side) -> None:
    url = worker.listeners[0].url
    with pytest.raises(OSError, match=f"cannot listen at {url}: Address already in use"):
        sides().listen(url)
    with pytest.raises(OSError, match=r"cannot listen at tcp://192\.0\.2\.1:1234: Cannot assign requested address"):
        sides().listen("tcp://192.0.2.1:1234")


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "1e9"])
def test_a_heartbeat_that_is_no_time(keys: Keys, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_HEARTBEAT_TIMEOUT", value)
    poller = Poller(background=False)
    with pytest.raises(ValueError, match="MONARCH_KERNEL_HEARTBEAT_TIMEOUT"):
        tcp.dial(poller, "tcp://127.0.0.1:1234", keys, print, print, 1)
    with pytest.raises(ValueError, match="MONARCH_KERNEL_HEARTBEAT_TIMEOUT"):
        tcp.Listener(poller, "tcp://127.0.0.1:0", keys, print, print, print, Audit(poller))
    poller.close()
