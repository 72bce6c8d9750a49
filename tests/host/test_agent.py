"""The host agent with real ranks: starting, output, exits and their causes, stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from monarch_kernel.protocol.messages import Launch, OutputChunk
from monarch_kernel.protocol.refs import DeathKind
from monarch_kernel.runtime.host.fork_requests import load_env
from monarch_kernel.runtime.node.node import CAUSE_GRACE
from tests.conftest import alive, wait_until

from .conftest import DEADLINE, Host


def test_ranks_start_and_tell_their_pids(host: Host) -> None:
    names = host.spawn(4)
    pids = [host.started[n] for n in names]
    assert len(set(pids)) == 4
    states = host.status(names)
    assert [s.state for s in states] == ["alive"] * 4
    assert [s.pid for s in states] == pids
    assert all(s.rss_bytes > 1_000_000 and s.uptime_s >= 0 for s in states)
    assert host.status(["nobody"])[0].cause == "unknown to the host agent"


def test_a_rank_is_a_clean_process(host: Host) -> None:
    (name,) = host.spawn()

    def look() -> None:
        import os
        import signal
        import sys
        import threading

        assert os.getsid(0) == os.getpid()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        assert os.read(0, 1) == b""
        assert not hasattr(sys.modules["__main__"], "__file__")
        assert "PYTHONPATH" not in os.environ or "host" not in os.environ["PYTHONPATH"]
        names = {t.name for t in threading.enumerate()}
        assert names <= {"MainThread", "monarch-poller", "monarch-output"}, names
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass
        # Nothing of the agent's or the fork server's: neither the lock of the run folder nor its log.
        assert not [link for link in links if "lock" in link or "agent" in link or "pidfd" in link], links

    host.call(name, look)


def test_env_cwd_and_seeds(host: Host, tmp_path: Path) -> None:
    names = host.spawn(2, env={"COLOUR": "blau", "TZ": "UTC"}, cwd=str(tmp_path), preload=["numpy"])

    def look() -> None:
        import os
        import random

        import numpy

        print(os.environ["COLOUR"], os.getcwd(), random.random(), numpy.random.rand())

    for name in names:
        host.call(name, look)
    host.wait(lambda: all(host.text(n).endswith("\n") for n in names))
    first, second = (host.text(n).split() for n in names)
    assert first[:2] == second[:2] == ["blau", str(tmp_path)]
    assert first[2] != second[2]
    assert first[3] != second[3]


@pytest.mark.parametrize(
    ("code", "cause", "status"),
    [
        ("os._exit(3)", "exited with code 3", 3),
        ("os._exit(0)", "exited with code 0", 0),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL", -9),
        ("os.kill(os.getpid(), 15)", "killed by SIGTERM", -15),
        ("signal.raise_signal(signal.SIGABRT)", "aborted (SIGABRT)", -6),
        ("ctypes.string_at(0)", "segmentation fault (SIGSEGV)", -11),
    ],
)
def test_the_cause_of_an_exit(host: Host, code: str, cause: str, status: int) -> None:
    (name,) = host.spawn()

    def die(code: str = code) -> None:
        import ctypes
        import os
        import signal
        import time

        print("last words", flush=True)
        exec(code, {"os": os, "signal": signal, "ctypes": ctypes})
        time.sleep(600)

    answer = host.run(name, lambda: die())
    told = host.exit_of(name)
    assert (told.cause, told.status, told.expected) == (cause, status, False)
    assert told.pid == host.started[name]
    host.wait(lambda: name in host.ended)
    assert "last words\n" in host.text(name)
    host.wait(lambda: answer.done)
    assert answer.death.cause == cause
    assert host.status([name])[0].state == "dead"


def test_all_output_of_a_dying_rank_arrives_before_its_end_marker(host: Host) -> None:
    (name,) = host.spawn()

    def shout() -> None:
        import os
        import sys

        for i in range(30_000):
            print("line", i)
            if i % 1000 == 0:
                os.write(2, b"C stderr\n")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)

    host.run(name, shout)
    host.wait(lambda: name in host.ended)
    text = host.text(name)
    assert [line for line in text.splitlines() if line.startswith("line")] == [f"line {i}" for i in range(30_000)]
    assert text.count("C stderr\n") == 30
    kept = host.logs([name])[0]
    assert b"line 29999" in kept.stdout
    assert kept.stderr == b"C stderr\n" * 30


def test_a_grandchild_that_holds_the_pipes_delays_nothing_and_goes_with_its_rank(host: Host) -> None:
    (name,) = host.spawn()

    def spawn() -> None:
        import os
        import subprocess

        a = subprocess.Popen(["sleep", "600"])
        b = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(a.pid, b.pid, flush=True)
        os._exit(5)

    host.run(name, spawn)
    assert host.exit_of(name).cause == "exited with code 5"
    host.wait(lambda: name in host.ended)
    same_group, other_session = map(int, host.text(name).split())
    # Its own group dies with the rank; what went to another session, with the agent (checked by the fixture).
    wait_until(lambda: not alive(same_group), "the one in the rank's group has gone")
    assert psutil.Process(other_session).ppid() == host.agent.pid


def test_kill_is_answered_when_they_are_gone(host: Host) -> None:
    names = host.spawn(3)
    answer = host.kill(names[:2], "no longer needed")
    host.wait(lambda: answer.done)
    assert all(not psutil.pid_exists(host.started[n]) for n in names[:2])
    told = host.exit_of(names[0])
    assert told.cause == "killed by SIGKILL on request: no longer needed"
    assert host.status(names)[2].state == "alive"


def test_stop_lets_ranks_end_by_themselves_and_kills_those_that_do_not(host: Host) -> None:
    names = host.spawn(3)

    def stuck() -> None:
        import signal
        import threading

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stuck")
        threading.Event().wait()

    host.run(names[2], stuck)
    host.wait(lambda: host.text(names[2]))
    answer = host.stop(names, grace=0.5)
    host.wait(lambda: answer.done)
    told = [host.exit_of(n) for n in names]
    assert [t.expected for t in told] == [True] * 3
    assert [t.status for t in told] == [0, 0, -9]
    assert told[0].cause == "stopped: test over"
    assert "did not stop within 0.5 s" in told[2].cause
    assert host.ended == set(names)
    assert {s.state for s in host.status(names)} == {"stopped"}
    # A second request for the same is answered as well.
    again = host.stop(names)
    host.wait(lambda: again.done)


def _fork_server(host: Host) -> psutil.Process:
    """Whoever reaps ranks: while it stands still, they have ended and no agent knows how."""
    return next(p for p in psutil.Process(host.agent.pid).children() if p.name().startswith("monarch-forks"))


def test_an_end_that_was_asked_for_is_no_loss_however_late_the_news_of_it(host: Host) -> None:
    """Of hundreds of ranks that end at once, the connections are gone long before an agent has reaped the last one."""
    names = host.spawn(4)
    for name in names:
        host.call(name, lambda: None)  # so there is a connection to each
    server = _fork_server(host)
    server.suspend()
    try:
        answer = host.stop(names)
        host.wait(lambda: all(host.node.links[n].closed for n in names), "their connections end")
        late = threading.Event()
        host.node.poller.call_later(3 * CAUSE_GRACE, late.set)
        assert late.wait(DEADLINE)
        assert not host.deaths, "guessed, while the agent knew better"
    finally:
        server.resume()
    host.wait(lambda: answer.done)
    assert {(host.deaths[n].kind, host.deaths[n].cause) for n in names} == {(DeathKind.STOPPED, "stopped: test over")}


def test_the_cause_of_a_death_is_waited_for_while_the_kernel_takes_the_process_down(host: Host) -> None:
    (name,) = host.spawn()
    host.call(name, lambda: None)
    server = _fork_server(host)
    server.suspend()
    try:
        os.kill(host.started[name], signal.SIGKILL)
        late = threading.Event()
        host.node.poller.call_later(3 * CAUSE_GRACE, late.set)
        assert late.wait(DEADLINE)
        assert not host.deaths
    finally:
        server.resume()
    host.wait(lambda: host.deaths)
    assert (host.deaths[name].what, host.deaths[name].cause) == ("proc", "killed by SIGKILL")


def test_a_rank_that_closes_its_connections_and_lives_on_is_lost(host: Host) -> None:
    (name,) = host.spawn()

    def close_all() -> None:
        import os
        import threading

        os.closerange(3, 1000)
        threading.Event().wait()

    host.run(name, close_all)
    host.wait(lambda: host.deaths)
    assert (host.deaths[name].kind, host.deaths[name].cause) == (DeathKind.UNREACHABLE, "its connection was closed")
    host.kill([name])


def test_a_rank_may_be_stopped_while_it_starts(host: Host) -> None:
    names = host.spawn(4, wait=False)
    answer = host.stop(names, grace=30)
    host.wait(lambda: answer.done)
    assert all(host.exit_of(n).expected for n in names)
    names = host.spawn(4, wait=False)
    answer = host.kill(names, "changed my mind")
    host.wait(lambda: answer.done)
    assert all(host.exit_of(n).status == -9 for n in names)


def test_a_working_directory_that_is_gone(host: Host) -> None:
    (name,) = host.spawn(cwd="/nonexistent/folder")
    assert host.exit_of(name).cause == "could not be started: its working directory /nonexistent/folder is gone"
    assert host.exit_of(name).death().kind is DeathKind.NOT_STARTED


def test_loader_variables_start_an_interpreter_of_its_own(host: Host) -> None:
    (name,) = host.spawn(env={"PYTHONHASHSEED": "7", "EXTRA": "x"})

    def look() -> None:
        import os

        assert os.environ["EXTRA"] == "x"
        print(hash("monarch"))

    host.call(name, look)
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('monarch'))"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    host.wait(lambda: host.text(name))
    assert host.text(name) == expected


def test_an_interpreter_of_its_own_finds_the_users_modules(host: Host, tmp_path: Path) -> None:
    (tmp_path / "of_the_user.py").write_text("value = 5\n")
    path = [*sys.path, str(tmp_path)]
    (name,) = host.spawn(env={"PYTHONUTF8": "1"}, sys_path=path, cwd=str(tmp_path.parent))

    def look() -> None:
        import of_the_user

        assert of_the_user.value == 5

    host.call(name, look)


def test_an_owner_that_does_not_read_makes_ranks_wait_and_loses_nothing(host: Host) -> None:
    (name,) = host.spawn()
    read_on = threading.Event()
    take = host.node.handlers[OutputChunk]

    def slow(*args: object) -> None:
        read_on.wait()
        take(*args)

    host.node.handlers[OutputChunk] = slow

    def shout() -> None:
        import os

        os.write(2, b"begin")
        line = b"x" * 99 + b"\n"
        for _ in range(600):
            os.write(1, line * 1000)
        os._exit(0)

    host.run(name, shout)
    process = psutil.Process(host.started[name])
    agent = psutil.Process(host.agent.pid)
    # It writes 60 MB. Wait until it has come to rest in the middle.
    seen = -1.0
    while (used := sum(process.cpu_times()[:2]) + sum(agent.cpu_times()[:2])) != seen:
        seen = used
        read_on.wait(0.3)
    assert process.is_running()
    assert agent.memory_info().rss < 200e6
    read_on.set()
    host.wait(lambda: name in host.ended)
    assert sum(len(data) for stream, data in host.chunks[name] if stream == 1) == 60_000_000


def test_a_command_of_ones_own_and_one_that_does_not_exist(host: Host) -> None:
    good, bad = host.spawn(
        2,
        per_proc=[
            Launch([sys.executable, "-X", "dev"], {"MINE": "1"}),
            Launch(["/no/such/python"], {}),
        ],
    )
    assert "cannot execute /no/such/python: No such file" in host.exit_of(bad).cause

    def look() -> None:
        import os
        import sys

        assert sys.flags.dev_mode
        assert os.environ["MINE"] == "1"

    host.call(good, look)


def test_an_environment_of_its_own(host: Host) -> None:
    (name,) = host.spawn(env={"ONLY": "this", "PATH": os.environ["PATH"]}, per_proc=[Launch(None, {}, False)])

    def look() -> None:
        import os

        extra = set(os.environ) - {
            "ONLY",
            "PATH",
            "MONARCH_KERNEL_RUN",
            "MONARCH_KERNEL_AGENT",
            "LC_CTYPE",
            "PYTHONPATH",
        }
        if extra:
            raise RuntimeError(f"more than was given: {extra}")

    host.call(name, look)


@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["server", "template"])
def test_what_runs_async_actors_is_loaded_once_for_those_that_need_it(host: Host, preload: list[str]) -> None:
    def without() -> None:
        import sys

        assert "monarch_kernel.runtime.actor.execution.async_instance" not in sys.modules

    def with_it() -> None:
        import gc
        import sys

        assert "monarch_kernel.runtime.actor.execution.async_instance" in sys.modules
        assert not any(found is sys.modules["asyncio"] for found in gc.get_objects())  # frozen, so shared with others

    (before,) = host.spawn(preload=preload)
    (after,) = host.spawn(preload=preload, asyncio=True)
    (later,) = host.spawn(preload=preload)
    host.call(before, without)
    host.call(after, with_it)
    host.call(later, with_it)


def test_a_template_shares_what_it_has_loaded(host: Host) -> None:
    names = host.spawn(2, preload=["decimal", "sqlite3"], env={"OMP_NUM_THREADS": "1"})

    def look() -> None:
        import os
        import sys

        assert "sqlite3" in sys.modules
        assert os.environ["OMP_NUM_THREADS"] == "1"

    for name in names:
        host.call(name, look)
    # Other modules or other numbers of threads: other templates; the oldest ones retire without harm.
    more = [host.spawn(1, preload=["decimal"], env={"OMP_NUM_THREADS": str(n)})[0] for n in range(2, 6)]
    assert {s.state for s in host.status([*names, *more])} == {"alive"}
    answer = host.stop([*names, *more])
    host.wait(lambda: answer.done)
    assert all(host.exit_of(n).cause == "stopped: test over" for n in (*names, *more))


def test_a_template_of_more_modules_is_forked_from_one_that_has_loaded_some_of_them(host: Host) -> None:
    def template_of(rank: str) -> psutil.Process:
        found = psutil.Process(host.started[rank]).parent()
        assert found is not None and found.name() == "monarch-templat"
        return found

    (few,) = host.spawn(preload=["decimal"])
    (more,) = host.spawn(preload=["sqlite3", "decimal"])
    (other,) = host.spawn(preload=["sqlite3"])

    def look() -> None:
        import sys

        assert {"decimal", "sqlite3"} <= sys.modules.keys()

    host.call(more, look)
    first, second = template_of(few), template_of(more)
    assert second.parent() == first
    assert template_of(other).parent() == first.parent()  # a template with modules that were not asked for is none
    # It goes on when the first one retires.
    host.stop([few])
    host.exit_of(few)
    host.spawn(preload=["wave"])  # one template too many
    (again,) = host.spawn(preload=["sqlite3", "decimal"])
    assert template_of(again).parent() == first
    host.call(again, look)
    first.kill()
    assert host.exit_of(more).cause == host.exit_of(again).cause == "killed by SIGKILL"
    assert host.status([other])[0].state == "alive"


def test_variables_that_libraries_read_when_they_are_imported_make_a_template_of_their_own() -> None:
    given: dict[str, str | None] = {"HF_HOME": "/data/hf", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    assert load_env(given) == {"HF_HOME": "/data/hf", "OMP_NUM_THREADS": "1"}


def test_a_module_that_cannot_be_preloaded(host: Host) -> None:
    (name,) = host.spawn(preload=["no_such_module_anywhere"])
    assert host.exit_of(name).cause == (
        "could not be started: cannot preload no_such_module_anywhere: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert host.exit_of(name).death().kind is DeathKind.PRELOAD_FAILED


def test_a_module_that_breaks_under_fork_is_left_to_each_rank(host: Host, tmp_path: Path) -> None:
    with open(f"{tmp_path}/threaded_on_import.py", "w") as file:
        file.write("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    (name,) = host.spawn(preload=["threaded_on_import"], sys_path=[str(tmp_path), *sys.path])

    def look() -> None:
        import sys

        assert "threaded_on_import" not in sys.modules
        import threaded_on_import

        assert threaded_on_import.threading

    host.call(name, look)


def test_a_template_that_dies_takes_its_ranks_and_says_so(host: Host) -> None:
    plain = host.spawn(1)
    names = host.spawn(2, preload=["decimal"])
    template = psutil.Process(host.started[names[0]]).parent()
    assert template is not None
    assert template.name() == "monarch-templat"
    template.kill()
    assert {host.exit_of(n).cause for n in names} == {"killed by SIGKILL"}
    assert host.status(plain)[0].state == "alive"
    assert host.spawn(1, preload=["decimal"])[0] in host.started


def test_a_hundred_kilobytes_of_environment(host: Host) -> None:
    (name,) = host.spawn(env={f"KEY{i}": "v" * 1000 for i in range(100)})

    def look() -> None:
        import os

        assert os.environ["KEY99"] == "v" * 1000

    host.call(name, look)


def test_a_forked_rank_shares_its_memory(host: Host) -> None:
    names = host.spawn(8)
    private = []
    for name in names:
        maps = psutil.Process(host.started[name]).memory_full_info()
        private.append(maps.uss)
    assert max(private) < 10e6, private


def test_the_agent_ends_on_sigterm_with_everything(host: Host) -> None:
    names = host.spawn(2)
    below = [psutil.Process(host.started[n]) for n in names]
    os.kill(host.agent.pid, signal.SIGTERM)
    _gone, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    host.wait(lambda: host.agent.ref.id in host.deaths)
    assert host.deaths[host.agent.ref.id].what == "agent"
    host.wait(lambda: all(n in host.deaths for n in names))
