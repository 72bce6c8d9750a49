"""The test hosts themselves: apart from each other but for the wire, breakable, and gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import alive, wait_until
from tests.network.conftest import network
from tests.network.hosts import PREFIX, ROOT, Host, Network, Process
from tests.waiting import patience

SERVER = """
import socket, threading
def echo(peer):
    while data := peer.recv(1 << 16):
        peer.sendall(data)
listener = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    threading.Thread(target=echo, args=listener.accept()[:1]).start()
"""

#: For every line that it reads: that line to the server and back, or what went wrong, within half a second.
CLIENT = """
import socket, sys
peer = None
for line in sys.stdin:
    try:
        peer = peer or socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))
        peer.sendall(line.encode())
        print(peer.makefile().readline(), end="", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network("one", "two", "three") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_runs_on(net: Network) -> Iterator[None]:
    yield
    for host in net.hosts:
        host.crash()


def serve(host: Host) -> None:
    server = host.start([sys.executable, "-c", SERVER])
    assert server.stdout.readline() == "up\n"


def client(host: Host, to: Host, patience: float = 20.0) -> Process:
    return host.start([sys.executable, "-c", CLIENT, to.address, str(patience)])


def ask(client: Process, line: str = "hello") -> str:
    client.stdin.write(line + "\n")
    client.stdin.flush()
    return client.stdout.readline().rstrip("\n")


def test_a_host_has_a_name_an_address_and_a_folder_of_its_own(net: Network) -> None:
    program = "import socket, tempfile; print(socket.gethostname(), tempfile.mkdtemp(prefix='mine-'))"
    seen = [host.run(sys.executable, "-c", program).split() for host in net.hosts]
    assert [name for name, _ in seen] == ["one", "two", "three"]
    assert socket.gethostname() not in {"one", "two", "three"}
    for host, (_, folder) in zip(net.hosts, seen):
        assert host.files() == [os.path.basename(folder)]
        host.run("rmdir", folder)
        assert host.address in host.ip("-brief", "address")
    assert os.listdir(net.folder) == []


def test_a_program_runs_as_leader_of_its_group_with_pipes(net: Network) -> None:
    program = "import os, sys; print(os.getpid() == os.getpgrp() == os.getsid(0)); sys.exit(int(input()))"
    process = net["one"].start([sys.executable, "-c", program])
    pid = process.pid
    assert net["one"].pids() == {pid}
    assert process.communicate("7\n") == (7, "True\n", "")
    process = net["one"].start(["sleep", "600"])
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_only_the_wire_joins_hosts(net: Network) -> None:
    """No process, socket, file or shared memory of one is there on another, nor is the machine's own network."""
    listen = f"""
import socket
unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
unix.bind({net.folder!r} + "/socket"), abstract.bind("\\0mkt")
unix.listen(), abstract.listen(), open("/dev/shm/mkt", "x")
print("up", flush=True)
input()
"""
    assert net["one"].start([sys.executable, "-c", listen]).stdout.readline() == "up\n"
    look = f"""
import json, os, socket
def connects(where):
    with socket.socket(socket.AF_UNIX) as unix:
        return unix.connect_ex(where) == 0
links = sorted(name for _, name in socket.if_nameindex())
pids = sum(name.isdigit() for name in os.listdir("/proc"))
sockets = [connects({net.folder!r} + "/socket"), connects("\\0mkt")]
print(json.dumps([sockets, os.listdir("/dev/shm"), pids, [name for name in links if name in ("lo", "eth0")] == links]))
"""
    seen = {name: json.loads(net[name].run(sys.executable, "-c", look)) for name in ("one", "two")}
    assert seen["one"] == [[True, True], ["mkt"], 3, True]  # process 1, who listens, and who looks
    assert seen["two"] == [[False, False], [], 2, True]
    net["one"].run("rm", "/dev/shm/mkt", f"{net.folder}/socket")


def test_hosts_talk_to_each_other(net: Network) -> None:
    serve(net["two"])
    before = [net.traffic(host) for host in net.hosts]
    assert ask(client(net["one"], net["two"]), "x" * 100_000) == "x" * 100_000
    moved = [net.traffic(host) - was for host, was in zip(net.hosts, before)]
    assert moved[0] > 200_000
    assert moved[1] > 200_000
    assert moved[2] < 10_000


def test_a_cut_host_is_silent_until_it_is_mended(net: Network) -> None:
    serve(net["two"])
    quick, patient = client(net["one"], net["two"], 0.3), client(net["one"], net["two"])
    assert [ask(quick), ask(patient)] == ["hello", "hello"]
    net.cut(net["two"])
    assert ask(quick) == "TimeoutError"  # not ConnectionResetError
    patient.stdin.write("late\n")
    patient.stdin.flush()
    net.mend(net["two"])
    assert patient.stdout.readline() == "late\n"


def test_a_partition_is_between_two_hosts_only(net: Network) -> None:
    serve(net["two"])
    serve(net["three"])
    first, second, third = (client(net["one"], net[name], 0.3) for name in ("two", "three", "two"))
    assert [ask(first), ask(second)] == ["hello", "hello"]
    net.part(net["one"], net["two"])
    assert ask(first) == "TimeoutError"
    assert ask(second) == "hello"
    assert ask(third) == "TimeoutError"  # a new connection
    net.heal(net["one"], net["two"])
    assert ask(client(net["one"], net["two"])) == "hello"


def test_a_slow_wire(net: Network) -> None:
    serve(net["two"])
    peer = client(net["one"], net["two"])
    assert ask(peer) == "hello"
    with net.slow(net["two"], delay=0.03, jitter=0.01, loss=0.01):
        start = time.monotonic()
        assert ask(peer) == "hello"
        assert time.monotonic() - start > 0.03
        assert ask(peer, "x" * 1_000_000) == "x" * 1_000_000
        assert ask(client(net["one"], net["two"])) == "hello"  # a new connection
    assert ask(peer) == "hello"


def test_a_host_that_vanishes_takes_everything_along_and_tells_nobody(net: Network) -> None:
    serve(net["two"])
    peer = client(net["one"], net["two"], 0.3)
    assert ask(peer) == "hello"
    stray = net["two"].start(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!; trap '' TERM HUP; sleep 600"])
    stray.stdout.readline()
    net.vanish(net["two"])
    assert net["two"].pids() == set()
    assert ask(peer) == "TimeoutError"
    net.mend(net["two"])
    serve(net["two"])  # it is back
    assert ask(client(net["one"], net["two"])) == "hello"


RUN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.network.hosts import make_network
network = make_network(["one", "two"])
for host in network.hosts:
    host.start(["sh", "-c", "trap '' TERM HUP INT; sleep 600 & setsid sleep 600"])
slow = network.slow(network["one"], 0.01)
slow.__enter__()
print(network.folder, *(host.pid for host in network.hosts), *(min(host.pids()) for host in network.hosts), flush=True)
"""


@pytest.mark.parametrize("end", ["sys.exit()", "raise RuntimeError", "input()"])
def test_nothing_is_left_however_the_tests_end(end: str, tmp_path: Path) -> None:
    """Also not after SIGKILL, but for an empty folder that the next network removes."""
    script = subprocess.Popen(
        [sys.executable, "-c", f"{RUN}\n{end}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with script:
        assert script.stdout is not None
        folder, *pids = script.stdout.readline().split()
        assert len(pids) == 4
        if end == "input()":
            script.kill()
        script.wait(patience(20))
    wait_until(lambda: not any(alive(int(pid)) for pid in pids), "all processes of the hosts have ended")
    assert Path(folder).name.startswith(f"{PREFIX}{script.pid}-")
    with network("one"):
        assert not Path(folder).exists()
