"""Who does not have the key gets nothing, and both sides are told; and why a connection did not come about."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.runtime.node import curve
from monarch_kernel.runtime.node.poller import Poller
from tests.conftest import wait_until
from tests.node.curveside import Side, echoing, free_port, header

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
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def one_line(caplog: pytest.LogCaptureFixture, reason: str, surely: bool = False) -> None:
    """There is one line in the log, which tells whom and why.

    Args:
        surely: the client was there for long enough for its address to be known.
    """
    wait_until(lambda: refusals(caplog), "a line in the log")
    assert len(refusals(caplog)) == 1
    where = r"127\.0\.0\.1:\d+" if surely else r"(127\.0\.0\.1:\d+|a client that has gone already)"
    assert re.fullmatch(
        rf"refused a connection from {where} to tcp://127\.0\.0\.1:\d+: ({reason})", refusals(caplog)[0]
    )


def test_another_key_file(
    sides: Callable[..., Side], worker: Side, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_key_file(tmp_path / "other.key")
    stranger = sides(load_keys(tmp_path / "other.key"))
    link = stranger.dial(worker.listeners[0].url, PLENTY)
    link.send(header("let me in"), b"please")
    stranger.wait(lambda: stranger.ended, "the refusal")
    assert link.ended.startswith("refused: the key of this process is not the worker's")
    assert link.closed and link.queued == 0 and not stranger.got
    one_line(caplog, "its key is not this worker's")


@contextmanager
def raw_client(port: int, keys: tuple[bytes, bytes, bytes] | None) -> Iterator[zmq.Socket[bytes]]:
    """A bare ZeroMQ client that speaks at once."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = keys
        sock.connect(f"tcp://127.0.0.1:{port}")
        sock.send(header("let me in"))
        yield sock
    context.term()


def test_who_knows_only_the_public_key(worker: Side, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    with raw_client(port_of(worker), (keys.public, *zmq.curve_keypair())):
        one_line(caplog, "it has not the key of this worker's team", surely=True)


def test_a_client_without_curve_does_not_fill_the_log(worker: Side, caplog: pytest.LogCaptureFixture) -> None:
    with raw_client(port_of(worker), None):
        one_line(caplog, "it does not use CURVE|it hung up")
    for _ in range(20):
        with raw_client(port_of(worker), None) as again, again.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            assert monitor.poll(20_000)
            again.disable_monitor()
    # For either of two reasons, depending on who hangs up first, with its address or too late for that.
    assert len(refusals(caplog)) <= 4


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3, b"\xff" * 500, bytes(200), os.urandom(5000)]
)
def test_garbage(worker: Side, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(worker))) as sock:
        sock.sendall(said)
        wait_until(lambda: refusals(caplog), "a line in the log")
    one_line(caplog, ".*")


def test_garbage_after_a_right_beginning(worker: Side, caplog: pytest.LogCaptureFixture) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", port_of(worker))) as sock:
        sock.sendall(greeting + b"\x04\xc8\x05HELLO\x01\x00" + os.urandom(192))
        one_line(caplog, "its key is not this worker's|it broke the protocol|it does not speak this protocol")


def test_silence(
    sides: Callable[..., Side], worker: Side, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_TIME", 300)
    impatient = sides()
    impatient.listen()
    with socket.create_connection(("127.0.0.1", port_of(impatient))) as sock:
        assert sock.recv(100)  # its greeting; then nothing, and the end
        one_line(caplog, "it said nothing for 0 s", surely=True)


def test_who_hangs_up(worker: Side, caplog: pytest.LogCaptureFixture) -> None:
    socket.create_connection(("127.0.0.1", port_of(worker))).close()
    one_line(caplog, "it hung up")


# -- what a dial says -------------------------------------------------------------------------------


def test_nobody_listens(sides: Callable[..., Side]) -> None:
    ours = sides()
    link = ours.dial(f"tcp://127.0.0.1:{free_port()}", 0.3)
    link.send(header("hello"), b"x" * 100)
    ours.wait(lambda: ours.ended, "the end")
    assert link.ended == "nobody listens there within 0.3 s" and link.queued == 0


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
        link = ours.dial(url, PLENTY)
        ours.wait(lambda: ours.ended, "the end")
    assert link.ended.startswith("refused: ")


def test_a_proxy_whose_backend_comes_later(sides: Callable[..., Side], worker: Side) -> None:
    """It hangs up once, as one that cannot reach the worker yet."""
    ours = sides()
    link: Any = None
    with server(lambda sock: sock.recv(10)) as url:
        link = ours.dial(url, PLENTY)
        wait_until(lambda: link._carrier._hung_up, "it has hung up")
    theirs = sides()
    theirs.react = echoing
    theirs.listen(url)
    ours.echo(link, b"there you are")


def test_a_zeromq_server_without_curve(sides: Callable[..., Side]) -> None:
    ours = sides()
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        link = ours.dial(f"tcp://127.0.0.1:{port}", PLENTY)
        ours.wait(lambda: ours.ended, "the end")
    context.term()
    assert re.search(r"^refused: .* is no worker", link.ended)


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
    with pytest.raises(ValueError, match=r"is no address of a worker: it must look like tcp://host:26600"):
        side.dial(url)
    with pytest.raises(ValueError, match=r"is no address of a worker"):
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
        curve.dial(poller, "tcp://127.0.0.1:1234", keys, print, print, 1)
    with pytest.raises(ValueError, match="MONARCH_KERNEL_HEARTBEAT_TIMEOUT"):
        curve.CurveListener(poller, "tcp://127.0.0.1:0", keys, print, print, print)
    poller.close()
