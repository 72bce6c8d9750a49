"""The end of a controller, a new beginning in the same process, forks, and what happens to output."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import config
from monarch_kernel.actor import (
    Actor,
    Channel,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_kernel.meshes import list_proc_meshes
from tests.actor.actors import PATIENCE, Basic, Cleaned, Parent, started
from tests.actor.conftest import Procs
from tests.conftest import alive, children, wait_until


@pytest.mark.own_runtime
def test_shutdown_and_a_new_start(procs: Procs) -> None:
    before = children()
    for i in range(2):
        world = procs(2)
        mesh = world.spawn("basic", Basic)
        assert list(mesh.echo.call(i).get().values()) == [i, i]
        assert this_host() is this_host()
        assert children() > before
        assert shutdown_context().get() is None
        assert children() == before
        assert list_proc_meshes() == []
        with pytest.raises(SupervisionError, match="shut"):
            mesh.echo.call(1).get(PATIENCE)
    assert shutdown_context().get() is None  # there is nothing to shut down: fine


@pytest.mark.own_runtime
def test_shutdown_can_be_awaited(procs: Procs) -> None:
    async def main() -> None:
        mesh = await procs(1).spawn("basic", Basic)
        assert await mesh.echo.call_one(1) == 1
        await shutdown_context()
        again = await procs(1).spawn("basic", Basic)
        assert await again.echo.call_one(2) == 2

    asyncio.run(main())


@pytest.mark.own_runtime
def test_shutdown_cleans_actors_up(procs: Procs) -> None:
    world = procs(1)
    port, receiver = Channel.open()
    mesh = world.spawn("remote", Cleaned, port, "remote")
    local = this_proc().spawn("local", Cleaned, port, "local")
    assert mesh.ping.call_one().get() == "remote"
    assert local.ping.call_one().get() == "local"
    seen: list[Any] = []
    for future in [receiver.recv(), receiver.recv()]:
        future.add_done_callback(lambda f: seen.append(f.get()))
    shutdown_context().get()
    assert sorted(seen) == [("local", None), ("remote", None)]


@pytest.mark.own_runtime
def test_shutdown_fails_pending_calls(procs: Procs) -> None:
    mesh = procs(1).spawn("basic", Basic)
    pending = started(mesh)
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(pending.exception(PATIENCE)))
    thread.start()
    shutdown_context(host_timeout=0.2).get()
    thread.join(PATIENCE)
    assert isinstance(errors[0], SupervisionError)


@pytest.mark.own_runtime
def test_a_fork_of_the_controller_cannot_use_its_meshes(two: Any) -> None:
    two.echo.call(1).get()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            this_host()
            text = "no error"
        except RuntimeError as e:
            text = str(e)
        except BaseException as e:
            text = repr(e)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert said.startswith("this process was forked from one that runs monarch_kernel")
    # The parent goes on.
    assert list(two.echo.call(1).get().values()) == [1, 1]


@pytest.mark.own_runtime
def test_a_call_in_a_fork_is_refused_too(two: Any) -> None:
    two.echo.call(1).get()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            two.echo.call(1).get(5)
            text = "no error"
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert said.startswith("RuntimeError: this process was forked")
    assert list(two.echo.call(1).get().values()) == [1, 1]


@pytest.mark.own_runtime
def test_a_forked_worker_that_survives_its_rank_does_not_hide_the_death(procs: Procs, faults: Any) -> None:
    class Forks(Actor):
        @endpoint
        def fork(self) -> int:
            pid = os.fork()
            if pid == 0:
                os.setsid()  # out of reach of a kill of the rank's process group
                threading.Event().wait(600)
            return pid

        @endpoint
        def pid(self) -> int:
            return os.getpid()

        @endpoint
        def wait(self, port: Any) -> None:
            port.send(None)
            threading.Event().wait()

    world = procs(2)
    mesh = world.spawn("forks", Forks)
    rank = mesh.slice(gpus=1)
    worker = rank.fork.call_one().get()
    other = world.slice(gpus=0).spawn("asks", Parent)
    port, receiver = Channel.open()
    waiting = other.call.call_one(rank, "wait", port)
    receiver.recv().get(PATIENCE)
    os.kill(world.pids()[1], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        waiting.get(PATIENCE)
    with pytest.raises(SupervisionError):
        rank.pid.call_one().get(PATIENCE)
    # It left the rank's session on purpose, and goes with the host agent at the latest.
    shutdown_context().get()
    wait_until(lambda: not alive(worker), "the worker is gone, too")


@pytest.mark.own_runtime
def test_a_process_started_by_a_rank_is_no_trouble(procs: Procs) -> None:
    class Runs(Actor):
        @endpoint
        def run(self) -> str:
            import subprocess

            return subprocess.run(["echo", "from a child"], capture_output=True, text=True, check=True).stdout

        @endpoint
        def fork(self) -> int:
            pid = os.fork()
            if pid == 0:
                os._exit(5)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        @endpoint
        def pool(self) -> list[int]:
            import multiprocessing

            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, [-1, -2])

    mesh = procs(2).spawn("runs", Runs)
    assert list(mesh.run.call().get(PATIENCE).values()) == ["from a child\n"] * 2
    assert list(mesh.fork.call().get(PATIENCE).values()) == [5, 5]
    assert list(mesh.pool.call().get(PATIENCE).values()) == [[1, 2]] * 2


@pytest.mark.own_runtime
def test_controllers_do_not_survive_a_shutdown() -> None:
    class Counter(Actor):
        def __init__(self) -> None:
            self.n = 0

        @endpoint
        def add(self) -> int:
            self.n += 1
            return self.n

    for _ in range(2):
        assert get_or_spawn_controller("counter", Counter).get(PATIENCE).add.call_one().get() == 1
        shutdown_context().get()


@pytest.mark.own_runtime
def test_the_runtime_may_start_in_any_thread(procs: Procs) -> None:
    results: list[Any] = []

    def work() -> None:
        results.append(list(procs(2).spawn("basic", Basic).echo.call("thread").get(PATIENCE).values()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert results == [["thread", "thread"]]
    assert procs(1).spawn("basic", Basic).echo.call_one("main").get() == "main"


# -- output ---------------------------------------------------------------------------------------------


class Prints(Actor):
    @endpoint
    def say(self, text: str, stream: int = 1) -> None:
        import sys

        print(text, file=sys.stdout if stream == 1 else sys.stderr)

    @endpoint
    def write(self, text: str) -> None:
        os.write(1, text.encode())

    @endpoint
    def log(self, text: str) -> None:
        self.logger.warning("warning %s", text)


class Seen:
    """What capfd has seen so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.out = self.err = ""

    def wait(self, *wanted: str) -> None:
        def arrived() -> bool:
            out, err = self._capfd.readouterr()
            self.out += out
            self.err += err
            return all(text in self.out + self.err for text in wanted)

        wait_until(arrived, f"{wanted} in the output")


@pytest.fixture
def seen(capfd: pytest.CaptureFixture[str]) -> Seen:
    return Seen(capfd)


def test_output_of_ranks_reaches_the_script(procs: Procs, seen: Seen) -> None:
    mesh = procs(2).spawn("prints", Prints)
    mesh.say.call("hello").get()
    mesh.slice(gpus=0).say.call_one("trouble", 2).get()
    mesh.slice(gpus=1).write.call_one("from C\n").get()
    seen.wait("trouble\n", "from C\n")
    assert seen.out.count("hello\n") == 2
    assert seen.err == "trouble\n"


def test_logging_option_prefixes_lines(procs: Procs, seen: Seen) -> None:
    world = procs(2)
    world.logging_option(stream_to_client=True).get(PATIENCE)
    mesh = world.spawn("prints", Prints)
    mesh.say.call("hello").get()
    seen.wait("[0] hello\n", "[1] hello\n")
    seen.out = ""
    with config.configured(prefix_with_rank=False):
        world.logging_option(stream_to_client=True).get(PATIENCE)
    mesh.say.call("bare").get()
    seen.wait("bare\nbare\n")
    assert "[" not in seen.out


def test_logging_option_aggregates_equal_lines(procs: Procs, seen: Seen) -> None:
    world = procs(2)
    world.logging_option(stream_to_client=True, aggregate_window_sec=1).get(PATIENCE)
    mesh = world.spawn("prints", Prints)
    mesh.say.call("same").get()
    mesh.slice(gpus=1).say.call_one("different").get()
    seen.wait("[0-1] same\n", "[1] different\n")
    assert seen.out.count("same") == 1


def test_held_lines_are_shown_when_the_window_changes(procs: Procs, seen: Seen) -> None:
    slow, quick = procs(2), procs(1)
    slow.logging_option(stream_to_client=True, aggregate_window_sec=3600).get(PATIENCE)
    quick.logging_option(stream_to_client=True, aggregate_window_sec=1).get(PATIENCE)
    slow.spawn("prints", Prints).say.call("held").get()
    quick.spawn("prints", Prints).say.call("of the other mesh").get()
    seen.wait("[0] of the other mesh\n")  # its own window is over
    assert "held" not in seen.out
    slow.logging_option(stream_to_client=True).get(PATIENCE)
    seen.wait("[0-1] held\n")


def test_the_level_of_the_loggers(procs: Procs, seen: Seen) -> None:
    world = procs(1)
    mesh = world.spawn("prints", Prints)
    mesh.log.call_one("one").get()
    seen.wait("warning one")
    world.logging_option(level=logging.ERROR).get(PATIENCE)
    mesh.log.call_one("two").get()
    mesh.say.call_one("done", 2).get()
    seen.wait("done")
    assert "two" not in seen.out + seen.err


class Finalized(Actor):
    """Writes into a file when it, what it holds, and its process are finalized."""

    def __init__(self, path: str, in_cycle: bool) -> None:
        self.path = path
        self.me = self if in_cycle else None
        atexit.register(self.note, path, "exit handler")

    @staticmethod
    def note(path: str, what: str) -> None:
        with open(path, "a") as file:
            file.write(what + "\n")

    def __del__(self) -> None:
        self.note(self.path, "actor")

    @endpoint
    def ping(self) -> None: ...


@pytest.mark.parametrize("in_cycle", [False, True])
def test_an_orderly_stop_runs_finalizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cycle: bool) -> None:
    """Those of the rank, and not those of a template that it was forked from."""
    path = tmp_path / "seen"
    source = "import atexit, os, weakref\nclass C: pass\nc = C()\ndef note():\n    open(os.environ['MK_SEEN'], 'a')"
    source += ".write('template\\n')\natexit.register(note)\nweakref.finalize(c, note)\n"
    (tmp_path / "mk_preloaded.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    world = this_host().spawn_procs(env={"MK_SEEN": str(path)}, preload=["mk_preloaded"])
    world.spawn("finalized", Finalized, str(path), in_cycle).ping.call_one().get(PATIENCE)
    world.stop().get(PATIENCE)
    assert path.read_text().splitlines() == ["actor", "exit handler"]
