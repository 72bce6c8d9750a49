"""``monarch-kernel worker`` as a command: what it prints and refuses, whom it serves, and what is left of whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_kernel.protocol.worker_addresses import AddressError, dial_address, worker_address
from tests.conftest import alive, children, wait_until
from tests.ports import free_port
from tests.workers import PATIENCE, Team, shared_key, team

TRANSPORTS = ("ipc", "tcp")


@pytest.fixture(params=TRANSPORTS)
def one(request: pytest.FixtureRequest) -> Iterator[Team]:
    """A team of one worker."""
    with team(request.param) as made:
        made.start()
        yield made


@pytest.fixture(params=TRANSPORTS, scope="module")
def standing(request: pytest.FixtureRequest) -> Iterator[Team]:
    """A team of one worker that serves one test after the other."""
    with team(request.param) as made:
        made.start()
        yield made


# -- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("tcp://node1:26600", ("", "tcp://node1:26600", None)),
        ("tcp://10.0.0.1:0", ("", "tcp://10.0.0.1:0", None)),
        ("tcp://[::1]:26600", ("", "tcp://[::1]:26600", None)),
        ("ipc:///tmp/w.sock", ("", "ipc:///tmp/w.sock", None)),
        ("tcp://node1:26600@tcp://0.0.0.0:26600", ("", "tcp://0.0.0.0:26600", "tcp://node1:26600")),
        ("tcp://outside:80@tcp://*:26600", ("", "tcp://0.0.0.0:26600", "tcp://outside:80")),
        ("first@tcp://node1:26600", ("first", "tcp://node1:26600", None)),
        ("first@tcp://node1:1@tcp://0.0.0.0:1", ("first", "tcp://0.0.0.0:1", "tcp://node1:1")),
    ],
)
def test_addresses(text: str, expected: tuple[str, str, str | None]) -> None:
    assert tuple(worker_address(text)) == expected
    if not text.endswith(":0"):
        assert dial_address(text) == expected[2] or expected[1]


@pytest.mark.parametrize(
    "text, why",
    [
        ("node1:26600", "write tcp://HOST:PORT or ipc:///PATH"),
        ("tcp://node1", "write tcp://HOST:PORT or ipc:///PATH"),
        ("tcp://node1:99999", "is not a worker address"),
        ("udp://node1:1", "is not a worker address"),
        ("ipc://@abstract", "the path of a socket's file"),
        ("ipc://", "the path of a socket's file"),
        ("ipc:///" + "x" * 200, "at most 107 bytes"),
        ("tcp://0.0.0.0:26600", "write tcp://NAME:26600@tcp://0.0.0.0:26600"),
        ("tcp://*:26600", "write tcp://NAME:26600@"),
        ("tcp://0.0.0.0:1@tcp://0.0.0.0:1", "other hosts cannot connect to"),
        ("tcp://node1:0@tcp://0.0.0.0:0", "port 0 cannot be advertised"),
        ("tcp://node1:1@ipc:///tmp/w", "cannot be advertised"),
        ("@tcp://node1:1", "no name before the @"),
    ],
)
def test_addresses_that_cannot_be_meant(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why.replace("*", r"\*")):
        worker_address(text)


def test_addresses_to_connect_to() -> None:
    assert dial_address("tcp://node1:5@tcp://0.0.0.0:6") == "tcp://node1:5"
    assert dial_address("w@ipc:///tmp/w") == "ipc:///tmp/w"
    assert dial_address("ipc://folder/w") == f"ipc://{os.getcwd()}/folder/w"
    for text in ("tcp://0.0.0.0:1", "tcp://node1:0", "node1"):
        with pytest.raises(AddressError):
            dial_address(text)


# -- the command ------------------------------------------------------------------------------


def _refused(*options: str, env: dict[str, str] | None = None) -> str:
    """What a worker that cannot start says."""
    command = [sys.executable, "-m", "monarch_kernel", "worker", *options]
    environment = {k: v for k, v in os.environ.items() if k != "MONARCH_KERNEL_KEY_FILE"} | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_it_prints(one: Team) -> None:
    worker = one[0]
    assert worker.said.startswith("monarch-kernel worker node0 listens at ")
    assert worker.url.startswith(f"{one.transport}://")
    assert not worker.url.endswith(":0")


def test_an_address_of_its_own_to_advertise() -> None:
    port = free_port()
    with team("tcp") as made:
        worker = made.start(f"tcp://localhost:{port}@tcp://*:{port}")
        assert worker.url == f"tcp://localhost:{port}"
        with _script(made, "print(*pids)") as script:
            assert script.stdout is not None
            assert script.stdout.readline()
            script.wait(PATIENCE)


def test_what_it_refuses(tmp_path: Path) -> None:
    assert "write tcp://NAME:1@tcp://0.0.0.0:1" in _refused("--listen", "tcp://0.0.0.0:1")
    no_folder = {"XDG_CONFIG_HOME": "/proc/none"}
    assert "monarch-kernel keys FILE" in _refused("--listen", "tcp://127.0.0.1:0", env=no_folder)
    missing = str(tmp_path / "none")
    assert f"no allow-list {missing}" in _refused("--listen", "tcp://127.0.0.1:0", "--allow", missing)
    assert "are for tcp://" in _refused("--listen", f"ipc://{tmp_path}/socket", "--audit", f"{tmp_path}/audit")
    assert missing in _refused("--listen", "tcp://127.0.0.1:0", "--key-file", missing)
    assert missing in _refused("--listen", "tcp://127.0.0.1:0", env={"MONARCH_KERNEL_KEY_FILE": missing})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = _refused("--listen", f"tcp://127.0.0.1:{port}", "--key-file", shared_key())
    assert f"{port}" in said and "in use" in said
    said = _refused("--listen", f"ipc://{tmp_path}/no/such/folder")
    assert "no/such/folder" in said


def test_a_path_in_use_and_one_left_behind(tmp_path: Path) -> None:
    with team("ipc") as made:
        first = made.start()
        assert first.url in _refused("--listen", first.url)
        # What a killed worker has left does not stand in the way of the next.
        first.end(signal.SIGKILL)
        assert made.start(first.url).url == first.url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_with_all_its_ranks(one: Team, number: int) -> None:
    with _script(one, "wait()", check=False) as script:
        ranks = _pids(script)
        assert ranks == one[0].ranks()
        assert one[0].end(number) == 0
        assert not any(map(alive, ranks))
        script.kill()


def test_nothing_is_left_of_a_killed_worker(one: Team) -> None:
    with _script(one, "wait()", check=False) as script:
        ranks = _pids(script)
        assert one[0].end(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not any(map(alive, ranks)), "its ranks are gone")
        script.kill()


# -- controllers ------------------------------------------------------------------------------


_PROGRAM = """
import os, signal, sys, time
from monarch_kernel.actor import attach_to_workers, shutdown_context
from tests.actor.remote_actors import Remote

def wait():
    print(*pids, flush=True)
    sys.stdin.read()

hosts = attach_to_workers(workers={urls!r}, key_file={key!r})
world = hosts.spawn_procs(per_host={{"gpus": 2}})
remote = world.spawn("remote", Remote)
pids = list(remote.pid.call().get(30).values())
"""


@contextmanager
def _script(made: Team, body: str, check: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A controller of its own that has two ranks on each worker, and then runs ``body``."""
    program = _PROGRAM.format(urls=made.urls, key=made.key_file) + textwrap.dedent(body)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
            if check:
                assert process.wait(PATIENCE) == 0, process.stderr.read() if process.stderr else ""
        finally:
            family = {process.pid, *children(process.pid)}
            process.kill()
            wait_until(lambda: not any(map(alive, family - {process.pid})), "the script's processes are gone")


def _pids(script: subprocess.Popen[str]) -> set[int]:
    assert script.stdout is not None
    line = script.stdout.readline()
    assert line, script.stderr.read() if script.stderr else ""
    return set(map(int, line.split()))


@pytest.mark.parametrize(
    "how",
    [
        "pass",
        "shutdown_context().get()",
        "sys.exit(0)",
        "os._exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "hosts.stop().get()",
        "world.stop().get()",
    ],
)
def test_nothing_is_left_of_a_controller_that_ends(standing: Team, how: str) -> None:
    worker = standing[0]  # it stays, and serves the next one
    with _script(standing, f"print(*pids, flush=True)\nsys.stdin.readline()\n{how}", check=False) as script:
        ranks = _pids(script)
        assert len(ranks) == 2 and ranks == worker.ranks()
        assert script.stdin is not None
        script.stdin.close()
        script.wait(PATIENCE)
        wait_until(lambda: not any(map(alive, ranks)), "its ranks are gone")
        worker.wait_idle()
    wait_until(lambda: len(children(worker.pid)) == 1, "only the fork server is left, no template with its modules")


def test_two_controllers_at_once(one: Team) -> None:
    with _script(one, "wait()", check=False) as first, _script(one, "wait()") as second:
        mine, theirs = _pids(first), _pids(second)
        assert one[0].ranks() == mine | theirs
        first.kill()
        wait_until(lambda: one[0].ranks() == theirs, "the ranks of the first are gone")
        assert second.stdin is not None
        second.stdin.close()
        second.wait(PATIENCE)
    one[0].wait_idle()


def test_one_controller_ends_the_worker_of_another(one: Team) -> None:
    body = """
        import monarch_kernel.actor
        from tests.actor.actors import Basic, started
        monarch_kernel.actor.unhandled_fault_hook = lambda failure: None
        pending = started(world.spawn("basic", Basic))
        wait()
        try:
            pending.get(30)
        except Exception as e:
            print(type(e).__name__, str(e).splitlines()[0], flush=True)
    """
    with _script(one, body) as second:
        _pids(second)
        with _script(one, "hosts.shutdown().get(30)") as first:
            first.wait(PATIENCE)
        assert one[0].process.wait(PATIENCE) == 0
        assert second.stdin is not None and second.stdout is not None
        second.stdin.close()
        assert "SupervisionError" in (said := second.stdout.readline())
        assert "host node0" in said
        second.wait(PATIENCE)


def test_a_child_of_the_controller_does_not_keep_its_ranks_alive(one: Team) -> None:
    body = """
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(*pids, child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with _script(one, body, check=False) as script:
        *ranks, child = (int(word) for word in script.stdout.readline().split()) if script.stdout else []
        script.wait(PATIENCE)
        try:
            wait_until(lambda: not any(map(alive, ranks)), "its ranks are gone")
        finally:
            os.kill(child, signal.SIGKILL)


def test_another_key_gets_nothing(tmp_path: Path) -> None:
    from monarch_kernel.protocol.keys import make_key_file

    other = str(tmp_path / "other")
    make_key_file(other)
    environment = {k: v for k, v in os.environ.items() if k != "MONARCH_KERNEL_KEY_FILE"}
    with team("tcp") as made:
        worker = made.start()
        program = f"""
from monarch_kernel.actor import attach_to_workers, shutdown_context
for key in ({other!r}, None):
    try:
        attach_to_workers(workers={made.urls!r}, key_file=key, timeout=5, ca="trust_all_connections")
    except Exception as e:
        print(type(e).__name__, e, flush=True)
        if key:
            attach_to_workers(workers={made.urls!r}, key_file={made.key_file!r})  # the right one, then
        shutdown_context().get()
"""
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        refused = done.stdout.splitlines()
        assert len(refused) == 2  # the second time with this user's own
        for said in refused:
            assert said.startswith(f"ConnectionError cannot attach to the worker: {worker.url}")
            assert "key" in said
        assert "refused" in worker.log()


# -- from Python ------------------------------------------------------------------------------


@contextmanager
def _python(program: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            family = children(process.pid)
            process.kill()
            wait_until(lambda: not any(map(alive, family)), "the worker is gone with who started it")


@pytest.mark.parametrize(
    "name, after", [("run_worker_loop_forever", ""), ("run_worker_loop_until_shutdown", "after\n")]
)
def test_a_worker_loop_ends_when_a_controller_shuts_it_down(name: str, after: str, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/w"
    program = f"""
from monarch_kernel import actor
actor.{name}(ca="trust_all_connections", address={url!r})
print("after")
"""
    with _python(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[-1] == url
        shut = f"""
from monarch_kernel.actor import attach_to_workers
hosts = attach_to_workers(workers=[{url!r}])
hosts.spawn_procs().initialized.get()
hosts.shutdown().get()
"""
        subprocess.run([sys.executable, "-c", shut], check=True, timeout=PATIENCE)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_worker_loop_ends_with_its_process(number: int, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/w"
    program = f"from monarch_kernel.actor import run_worker_loop_forever as run; run(address={url!r})"
    with _python(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        below = children(process.pid)
        process.send_signal(number)
        process.wait(PATIENCE)
        wait_until(lambda: not any(map(alive, below)), "the worker is gone")


def test_workers_beside_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_kernel.actor import attach_to_workers, start_worker_loop_forever
    from tests.actor.actors import Basic

    monkeypatch.chdir(tmp_path)
    started = [start_worker_loop_forever(address=f"ipc://{n}") for n in range(2)]
    started.append(start_worker_loop_forever(address="far@tcp://127.0.0.1:0", key_file=shared_key()))
    hosts = attach_to_workers(workers=["ipc://0", *started[1:]], key_file=shared_key())
    assert "far" in repr(hosts)
    basic = hosts.spawn_procs().spawn("basic", Basic)
    assert len(set(basic.pid.call().get(PATIENCE).values())) == 3
    assert started[1].url.get(PATIENCE) == f"ipc://{tmp_path}/1"
    assert not any(worker.done() for worker in started)
    hosts.shutdown().get(PATIENCE)
    assert [worker.get(PATIENCE) for worker in started] == [None] * 3
    broken = start_worker_loop_forever(address=f"ipc://{tmp_path}/no/such/folder")
    with pytest.raises(RuntimeError, match="could not start"):
        broken.get(PATIENCE)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")  # where no key of this user's own can be made
    with pytest.raises(ValueError, match="monarch-kernel keys FILE"):
        start_worker_loop_forever(address="tcp://127.0.0.1:0", ca="trust_all_connections")
