"""Who may talk to a worker: those who have the team's key and speak its version. Others are told why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import HostMesh
from monarch_kernel.protocol.keys import make_key_file
from monarch_kernel.protocol.messages import WIRE_VERSION
from tests import attacks
from tests.network.actors import Remote
from tests.network.cluster import PORT, Cluster, Controller, ProgramFailed, Worker
from tests.network.conftest import network
from tests.waiting import patience


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts: a worker on one; the other is for workers that are not as they should be."""
    with network("controller", "host0", "spare") as made:
        cluster = Cluster(made, tmp_path_factory.mktemp("guard"))
        yield cluster
        cluster.close()


@pytest.fixture(autouse=True)
def still_serves(cluster: Cluster) -> Iterator[None]:
    """Whoever was refused, the worker goes on, and serves the next one."""
    yield
    cluster.spare.crash()
    controller = cluster.control()
    assert controller.run(host_names) == ["host0"]
    controller.finish()


def host_names(hosts: HostMesh) -> list[str]:
    return list(hosts.spawn_procs().spawn("remote", Remote).host.call().get(patience(30)).values())


def refused(controller: Controller) -> ProgramFailed:
    with pytest.raises(ProgramFailed) as caught:
        controller.run(host_names)
    return caught.value


def test_another_key(cluster: Cluster, tmp_path: Path) -> None:
    make_key_file(tmp_path / "other.key")
    error = refused(cluster.control(key_file=tmp_path / "other.key"))
    assert cluster.urls[0] in error.text
    assert "key" in error.text
    assert cluster.network["controller"].address in cluster.workers["host0"].wait_for_log("refused")


def test_no_key_named(cluster: Cluster) -> None:
    """Then this user's own is used, which is not the team's."""
    host = cluster.network["controller"]
    error = refused(Controller(host, cluster.urls, None, cluster.folder))
    assert cluster.urls[0] in error.text
    assert "key" in error.text
    host.crash()


def test_a_key_that_others_can_read(cluster: Cluster, tmp_path: Path) -> None:
    open_key = tmp_path / "open.key"
    open_key.write_bytes(cluster.key_file.read_bytes())
    open_key.chmod(0o644)
    error = refused(cluster.control(key_file=open_key))
    assert str(open_key) in error.text
    assert "chmod 600" in error.text


def test_a_worker_without_a_key_does_not_start(cluster: Cluster) -> None:
    options = ["--listen", f"tcp://{cluster.spare.address}:{PORT}", "--key-file", "/nonexistent/key"]
    process = cluster.spare.start([sys.executable, "-m", "monarch_kernel", "worker", *options])
    code, out, err = process.communicate()
    assert code != 0
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "monarch-kernel keys" in err


@pytest.mark.parametrize(
    ("module", "attribute", "theirs", "ours"),
    [
        ("monarch_kernel.protocol.messages", "WIRE_VERSION = module.OLDEST_WIRE", 4711, f"wire version {WIRE_VERSION}"),
        (
            "monarch_kernel.runtime.node.routing",
            "PYTHON",
            "3.99",
            f"Python {sys.version_info[0]}.{sys.version_info[1]}",
        ),
    ],
)
def test_another_version(
    cluster: Cluster, tmp_path: Path, module: str, attribute: str, theirs: int | str, ours: str
) -> None:
    """Of the wire, or of Python: both sides say which each has."""
    path = tmp_path / "sitecustomize.py"
    path.write_text(f"import {module} as module\nmodule.{attribute} = {theirs!r}\n")
    spare = cluster.spare
    worker = Worker(spare, cluster.key_file, cluster.folder, {"PYTHONPATH": str(tmp_path)})
    worker.wait_for_log("listens at")
    error = refused(cluster.control([worker.url]))
    assert str(theirs) in error.text
    assert ours in error.text
    assert "spare" in error.text
    log = worker.wait_for_log(str(theirs))
    assert ours in log
    assert "controller" in log


def test_nobody_listens(cluster: Cluster) -> None:
    url = f"tcp://{cluster.spare.address}:{PORT}"
    controller = cluster.control([])
    with pytest.raises(ProgramFailed) as caught:
        controller.run(attach_in_vain, url)
    assert url in caught.value.text


def attach_in_vain(url: str) -> None:
    from monarch_kernel.actor import attach_to_workers

    attach_to_workers(ca="trust_all_connections", workers=[url], timeout=2.0).initialized.get(patience(30))


GARBAGE = {
    "noise": bytes(range(256)) * 256,
    "http": b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    # What links began with until wire version 4, with security and without.
    "an older version": attacks.ZMTP_CURVE,
    "null mechanism": attacks.ZMTP_NULL,
    "a wrong hello": attacks.wrong_hello(),
    "a giant hello": attacks.GIANT_HELLO,
}

STRANGER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
peer.sendall(sys.stdin.buffer.read())
got = b""
try:
    while data := peer.recv(1 << 16):
        got += data
except ConnectionResetError:
    pass
print(len(got))
"""


@pytest.mark.parametrize("said", GARBAGE)
def test_a_stranger_is_hung_up_on(cluster: Cluster, said: str) -> None:
    """Whatever it sends: it gets no more than an alert of TLS, and the worker's log tells of it."""
    worker, home = cluster.workers["host0"], cluster.network["controller"]
    worker.wait_until_listening()
    stranger = home.start([sys.executable, "-c", STRANGER, worker.host.address, str(PORT)])
    os.write(stranger.stdin.fileno(), GARBAGE[said])
    code, out, err = stranger.communicate()
    assert (code, err) == (0, "")
    assert int(out) < 100
    worker.wait_for_log(f"refused - - {home.address}")


def test_strangers_who_say_nothing_keep_nobody_out(cluster: Cluster) -> None:
    worker, home = cluster.workers["host0"], cluster.network["controller"]
    worker.wait_until_listening()
    many = "import socket, sys; peers = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(50)]"
    stranger = home.start(
        [sys.executable, "-c", f"{many}\nprint('up', flush=True)\ninput()", worker.host.address, str(PORT)]
    )
    assert stranger.stdout.readline() == "up\n"
    controller = cluster.control()
    assert controller.run(host_names) == ["host0"]
    controller.finish()
    stranger.kill()
