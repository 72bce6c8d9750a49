"""A key that was revoked while nobody was connected, so that nobody has looked at the list since."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import Keys, allow_list, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import read_key_file
from monarch_kernel.runtime.node.tcp import channel
from monarch_kernel.runtime.node.tcp.dial import OUR_KEY, split
from tests.conftest import wait_until
from tests.node.tcpside import Side, header

LONG = 60.0


@pytest.fixture
def mallory(tmp_path: Path, keys: Keys) -> Keys:
    """A key that the team's trusts, and that trusts it."""
    make_key_file(tmp_path / "mallory.key", "mallory")
    theirs = load_keys(tmp_path / "mallory.key")
    add_key(keys.allow, read_key_file(theirs.path).public)
    add_key(theirs.allow, read_key_file(keys.path).public)
    return load_keys(tmp_path / "mallory.key")


def is_still(path: str) -> None:
    """Wait until a list has been as it is for as long as an editor may take."""
    wait_until(lambda: time.time() - os.stat(path).st_ctime > allow_list.SETTLE, "the list is still")


@pytest.mark.parametrize("how", ["line", "file", "folder"])
def test_nothing_of_its_holder_is_taken(
    sides: Callable[..., Side], key_file: Path, keys: Keys, mallory: Keys, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "lists"
    folder.mkdir()
    listed = str(folder / "team.allow")
    os.rename(keys.allow, listed)
    worker = sides(load_keys(key_file, listed))
    url = worker.listen()
    if how == "line":
        revoke_keys(listed, "mallory")
        is_still(listed)
    else:
        os.unlink(listed)
        if how == "folder":
            os.rmdir(folder)
        is_still(str(tmp_path if how == "folder" else folder))
    side = sides(mallory)
    link = side.dial(url, LONG)
    link.send(header("run this"), b"code")
    side.wait(lambda: side.ended, "the refusal")
    assert link.ended.startswith(OUR_KEY)
    assert not worker.links and not worker.got


@pytest.mark.parametrize("proved", [False, True], ids=["before-the-proof", "after-the-proof"])
def test_who_has_begun_to_connect_before(
    sides: Callable[..., Side], key_file: Path, keys: Keys, mallory: Keys, proved: bool
) -> None:
    worker = sides(load_keys(key_file))
    came, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = mallory.client_context().wrap_bio(came, out)
    with socket.create_connection(split(worker.listen())) as sock:
        sock.settimeout(LONG)

        def receive() -> bool:
            try:
                data = sock.recv(65536)
            except ConnectionResetError:
                return False
            came.write(data)
            return bool(data)

        def handshake() -> bool:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

        while not handshake():
            sock.sendall(out.read())
            assert receive()
        if proved:
            sock.sendall(out.read())  # and now the worker knows whose key it is
            assert receive()
        revoke_keys(keys.allow, "mallory")
        is_still(keys.allow)
        tls.write(channel.accept(False))
        sock.sendall(out.read())
        while receive():
            pass
    assert not worker.links and not worker.got


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_file_system_whose_clock_differs(key_file: Path, keys: Keys, mallory: Keys, hours: int) -> None:
    """It says of each change that it was long ago, or will be; nobody is let in for that."""
    worker = load_keys(key_file)
    certificate = read_key_file(mallory.path).public.certificate
    assert worker.admitted(certificate) == "mallory"
    revoke_keys(keys.allow, "mallory")
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allow_list.time, "time", lambda: real() + hours * 3600)
        assert worker.admitted(certificate) is None
