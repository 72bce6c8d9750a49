"""One key per person and per worker, with real processes: who is let in, who was, and the key that a user just has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import SETTLE, add_key, revoke_keys
from tests.conftest import alive, wait_until
from tests.workers import PATIENCE, Worker

PROGRAM = """
import sys
from monarch_kernel.actor import attach_to_workers
from tests.actor.remote_actors import Remote

url, key = sys.argv[1:]
remote = None
for line in sys.stdin:
    try:
        if line == "attach\\n":
            hosts = attach_to_workers(workers=[url], key_file=key or None, timeout=20)
            remote = hosts.spawn_procs().spawn("remote", Remote)
        if line == "hang\\n":
            remote.open.call().get(30)
            print("hangs", flush=True)
            remote.received.call(1).get()
        print(*remote.pid.call().get(30).values(), flush=True)
    except Exception as e:
        print(type(e).__name__, str(e).replace(chr(10), " "), flush=True)
"""


class Controller:
    """A script that does what it is told, line by line."""

    def __init__(self, url: str, key_file: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, key_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def tell(self, line: str) -> str:
        """What it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> str:
        """What it has put out on stderr."""
        try:
            return self.process.communicate(timeout=PATIENCE)[1]
        finally:
            self.process.kill()


@pytest.fixture
def begun() -> Iterator[list[Controller | Worker]]:
    """What ends with the test."""
    made: list[Controller | Worker] = []
    yield made
    for one in reversed(made):
        one.end()


def trust(keys: Keys, *others: Keys) -> None:
    for other in others:
        add_key(keys.allow, other._identity.public)


def test_a_revoked_person_is_out_and_the_others_stay(tmp_path: Path, begun: list[Controller | Worker]) -> None:
    keys: dict[str, Keys] = {}
    for name in ("alice", "bob", "mallory", "cluster"):
        make_key_file(tmp_path / name, name)
        keys[name] = load_keys(tmp_path / name)
    trust(keys["cluster"], keys["alice"], keys["bob"])
    for name in ("alice", "bob", "mallory"):
        trust(keys[name], keys["cluster"])
    audit = tmp_path / "audit.log"
    worker = Worker(
        "tcp://127.0.0.1:0", "node0", tmp_path, "--key-file", str(tmp_path / "cluster"), "--audit", str(audit)
    )
    begun.append(worker)
    alice, bob, mallory = (Controller(worker.url, str(tmp_path / name)) for name in ("alice", "bob", "mallory"))
    begun += [alice, bob, mallory]
    rank = int(alice.tell("attach"))
    other = bob.tell("attach")
    assert mallory.tell("attach").startswith(f"ConnectionError cannot attach to the worker: {worker.url}: refused")

    assert alice.tell("hang") == "hangs"
    revoke_keys(keys["cluster"].allow, "alice")
    said = alice.hear()
    assert said.startswith(("SupervisionError", "ActorError")), said
    wait_until(lambda: not alive(rank), "her rank is gone")
    assert bob.tell("pid") == other
    assert alice.tell("attach").startswith(f"ConnectionError cannot attach to the worker: {worker.url}: refused")

    trust(keys["cluster"], keys["alice"])
    assert int(alice.tell("attach")) != rank
    assert bob.tell("pid") == other
    lines = [line.split(" ", 1)[1] for line in audit.read_text().splitlines()]
    short = {name: each.fingerprint[:16] for name, each in keys.items()}
    for what in (f"connected alice {short['alice']} 127.0.0.1:", f"connected bob {short['bob']} 127.0.0.1:"):
        assert any(line.startswith(what) for line in lines), lines
    assert any(line.startswith(f"ended alice {short['alice']} 127.0.0.1:") for line in lines), lines
    assert any(line.startswith("refused - - 127.0.0.1: ") for line in lines), lines
    assert not any(line.startswith(("ended bob", "connected mallory")) for line in lines), lines
    assert all(line in worker.log() for line in lines)


def test_a_person_who_was_revoked_while_nobody_was_there(tmp_path: Path, begun: list[Controller | Worker]) -> None:
    for name in ("alice", "cluster"):
        make_key_file(tmp_path / name, name)
    alice, cluster = load_keys(tmp_path / "alice"), load_keys(tmp_path / "cluster")
    trust(alice, cluster)
    trust(cluster, alice)
    worker = Worker("tcp://127.0.0.1:0", "node0", tmp_path, "--key-file", cluster.path)
    begun.append(worker)
    controller = Controller(worker.url, alice.path)
    begun.append(controller)
    revoke_keys(cluster.allow, "alice")
    wait_until(lambda: time.time() - os.stat(cluster.allow).st_ctime > SETTLE, "the list is still")
    assert controller.tell("attach").startswith(f"ConnectionError cannot attach to the worker: {worker.url}: refused")
    assert not worker.ranks() and "connected alice" not in worker.log()


MONARCH = """
from monarch_kernel.actor import Actor, attach_to_workers, endpoint, shutdown_context, start_worker_loop_forever

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

if __name__ == "__main__":
    workers = [start_worker_loop_forever(address="tcp://127.0.0.1:0", ca="trust_all_connections") for _ in range(2)]
    hosts = attach_to_workers(workers=workers, ca="trust_all_connections")
    echo = hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
    print(*echo.echo.call(1).get(30).values())
    shutdown_context().get()
"""


def test_a_program_of_monarch_says_nothing_of_keys(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"} | {"HOME": str(tmp_path)}
    (tmp_path / "program.py").write_text(MONARCH)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env)
    assert (done.stdout, done.stderr) == ("1 1\n", "")
    assert os.listdir(tmp_path / ".config" / "monarch_kernel") == ["key"]


def test_a_host_with_another_home_is_told_which_file_to_copy(tmp_path: Path, begun: list[Controller | Worker]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    worker = Worker("tcp://127.0.0.1:0", "node0", tmp_path, env={"XDG_CONFIG_HOME": str(there)})
    begun.append(worker)
    controller = Controller(worker.url, "", {"XDG_CONFIG_HOME": str(here)})
    begun.append(controller)
    said = controller.tell("attach")
    assert said.startswith(f"ConnectionError cannot attach to the worker: {worker.url}: refused")
    assert f"'scp -p {here}/monarch_kernel/key 127.0.0.1:{here}/monarch_kernel/key'" in said
    # As it says:
    worker.end(signal.SIGTERM)
    begun.remove(worker)
    (there / "monarch_kernel" / "key").write_bytes((here / "monarch_kernel" / "key").read_bytes())
    again = Worker(worker.url, "node1", tmp_path, env={"XDG_CONFIG_HOME": str(there)})
    begun.insert(0, again)
    assert controller.tell("attach").isdigit()
