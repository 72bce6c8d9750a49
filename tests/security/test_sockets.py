"""Unix sockets: both sides know whose process the other one is before a byte is sent or decoded."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import attach_to_workers, this_host
from monarch_kernel.debugger.terminal import server as console
from monarch_kernel.introspection import Controller, ask_console, controllers
from monarch_kernel.meshes import keep, kept
from monarch_kernel.private_files import listens
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.host.worker_agent import _remove_dead_socket
from tests.conftest import children, wait_until
from tests.otheruser import OtherUser
from tests.workers import PATIENCE, Start

# Listens at a path, answers with a pickle that runs code where it is read, and prints what it was told.
SQUATTER = """
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("ready", flush=True)
while True:
    peer, _ = sock.accept()
    with contextlib.suppress(OSError):
        peer.sendall(struct.pack("<IQ", 5, 40) + b"x" * 45)
    peer.settimeout(20)
    told = b""
    with contextlib.suppress(ConnectionResetError):
        told = peer.recv(100)
    print(len(told), flush=True)
    peer.close()
"""


def test_a_socket_that_another_user_squats_is_not_talked_to(other_user: OtherUser, shared: Path) -> None:
    path = shared / "worker"
    with other_user.running(SQUATTER, path) as squatter:
        whose = rf"process {squatter.pid} of the user with uid {other_user.uid} listens at {path}.*XDG_RUNTIME_DIR"
        with pytest.raises(ConnectionError, match=whose):
            attach_to_workers(workers=[f"ipc://{path}"], timeout=PATIENCE)
        with pytest.raises(ConnectionError, match=whose):
            ask_console(Controller(squatter.pid, "", str(path)))
        assert not listens(str(path))
        assert squatter.stdout is not None
        assert [squatter.stdout.readline() for _ in range(3)] == ["0\n"] * 3  # it was told nothing


def test_a_folder_of_another_user_has_no_controllers_of_ours(other_user: OtherUser, shared: Path) -> None:
    folder = shared / f"monarch-{os.getuid()}-x"
    code = "os.mkdir(os.path.dirname(sys.argv[1]))" + SQUATTER
    with other_user.running(code, folder / "controller-1.sock"):
        assert [found for found in controllers() if str(shared) in found.address] == []


# Connects to what is open to all by mistake, and prints what comes: nothing but the end.
VISITOR = """
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(20)
    sock.connect(sys.argv[1])
    with contextlib.suppress(OSError):
        sock.sendall(struct.pack("<IQ", 5, 40) + b"x" * 45)
    try:
        print(len(sock.recv(100)))
    except ConnectionResetError:
        print(0)
"""


def open_to_all(path: str) -> None:
    os.chmod(path, 0o666)
    os.chmod(os.path.dirname(path), 0o755)


def test_another_user_who_connects_is_refused_before_a_byte(other_user: OtherUser, workers: Start) -> None:
    team = workers(1, "ipc")
    path = team.urls[0].removeprefix("ipc://")
    open_to_all(path)
    for _ in range(3):
        assert other_user.run(VISITOR, path) == "0\n"
    assert team[0].log().count(f"of the user with uid {other_user.uid}") == 1, (
        "said once: the log is not theirs to fill"
    )
    assert "Hello" not in team[0].log()
    assert len(team.attach().spawn_procs({"gpus": 1}).pids()) == 1


def test_the_console_refuses_another_user(other_user: OtherUser, shared: Path) -> None:
    path = console.listen(get_system().node.run_dir)
    try:
        open_to_all(path)
        assert other_user.run(VISITOR, path) == "0\n"
    finally:
        console.close()


# Tries all doors; prints those that open.
BURGLAR = """
given = json.loads(sys.argv[1])
def tried(what, act):
    try:
        act()
    except (PermissionError, ConnectionRefusedError):
        return
    except OSError as e:
        print(what, e)
    else:
        print(what, "is open")
for path in given["sockets"]:
    tried(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
for path in given["folders"]:
    tried(path, lambda: os.listdir(path))
    tried(path, lambda: open(path + "/x", "w"))
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*args):
    if libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
for pid in given["pids"]:
    tried(f"signal {pid}", lambda: os.kill(pid, signal.SIGCONT))
    for name in ("environ", "mem", "maps", "io"):
        tried(f"/proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    tried(f"/proc/{pid}/fd", lambda: os.listdir(f"/proc/{pid}/fd"))
    tried(f"descriptors of {pid}", lambda: syscall(438, os.pidfd_open(pid), 0, 0))
    tried(f"ptrace {pid}", lambda: syscall(101, 16, pid, 0, 0))
for line in open("/proc/net/unix"):
    if "@" in line and "monarch" in line:
        print("an abstract socket, which has no owner:", line)
"""


@pytest.fixture
def kept_mesh(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("MONARCH_KERNEL_KEPT_DIR", raising=False)
    host = keep("m")
    try:
        yield host
    finally:
        pid = kept()[0].pid
        below = {pid, *children(pid)}
        host.down()
        wait_until(lambda: not any(os.path.exists(f"/proc/{each}") for each in below), "the kept mesh has ended")


def test_nothing_of_a_running_session_is_in_reach(other_user: OtherUser, shared: Path, kept_mesh: Any) -> None:
    memory = set(os.listdir("/dev/shm"))
    this_host().spawn_procs({"gpus": 2}, name="here").initialized.get()
    kept_mesh.hosts.spawn_procs({"gpus": 1}, name="m").initialized.get()
    console.listen(get_system().node.run_dir)
    try:
        sockets = [str(path) for path in shared.rglob("*") if stat.S_ISSOCK(path.stat().st_mode)]
        folders = [str(path) for path in shared.rglob("*") if path.is_dir()]
        keeper = kept()[0].pid
        pids = [*children(), keeper, *children(keeper)]
        assert len(sockets) >= 7 and len(folders) >= 6 and len(pids) >= 7
        assert other_user.run(BURGLAR, json.dumps({"sockets": sockets, "folders": folders, "pids": pids})) == ""
    finally:
        console.close()
    assert set(os.listdir("/dev/shm")) <= memory, "shared memory has no name"


def test_a_worker_removes_nothing_but_a_dead_socket_of_its_user(
    tmp_path: Path, other_user: OtherUser, shared: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen", f"ipc://{notes}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0 and not done.stdout
    assert done.stderr == (
        f"monarch-kernel worker: cannot listen at ipc://{notes}: there is a file that is not a socket, and it stays: "
        "name another path\n"
    )
    assert notes.read_text() == "mine"
    other_user.run("socket.socket(socket.AF_UNIX).bind(sys.argv[1])", shared / "theirs")
    with pytest.raises(OSError, match=f"the socket there belongs to the user with uid {other_user.uid}"):
        _remove_dead_socket(str(shared / "theirs"))
    assert (shared / "theirs").exists()
    path = str(tmp_path / "own")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        with pytest.raises(OSError, match="another process listens there"):
            _remove_dead_socket(path)
        assert os.path.exists(path)
    _remove_dead_socket(path)
    assert not os.path.exists(path)
