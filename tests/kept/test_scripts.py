"""Programs whose meshes stay: what the next program finds."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import SupervisionError
from monarch_kernel.meshes import KeptError, attach, end_kept, held, keep, kept, kept_logs, kept_ranks
from monarch_kernel.output import subscribe
from monarch_kernel.protocol.kept_mesh import FOLDER
from monarch_kernel.protocol.private_files import LOCK, PrivateFolder
from monarch_kernel.workers import client_path
from tests.actor.actors import hook
from tests.conftest import alive, wait_until
from tests.kept.actors import Boss, Counter
from tests.kept.conftest import nothing_kept, processes
from tests.waiting import patience


@pytest.fixture(autouse=True)
def faults() -> Iterator[list[Any]]:
    """Faults that nobody handles, which would end this program."""
    seen: list[Any] = []
    with hook(seen.append):
        yield seen


PREAMBLE = """
import os, signal, sys
from monarch_kernel.meshes import attach, keep, kept
from tests.kept.actors import Boss, Counter
"""
MAKE = """
host = keep("t")
mesh = host.hosts.spawn_procs(per_host={"gpus": 2}, name="t")
counters = mesh.spawn("counters", Counter, 10)
counters.add.call().get()
"""
KILL = "\nsys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n"


def script(code: str, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a program to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        cwd=Path(__file__).parents[2],
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["end", "kill", "detach"])
def test_the_next_program_goes_on(how: str, kept_folder: str) -> None:
    last = {"end": "", "kill": KILL, "detach": "\nhost.detach()\n"}[how]
    script(MAKE + "host.note('loss', 0.5)" + last, status=-9 if how == "kill" else 0)
    wait_until(lambda: kept()[0].held_by == 0, "it is free")
    host = attach(f"{kept_folder}/t")
    assert [mesh.name for mesh in host.proc_meshes] == ["t"]
    assert host.noted("loss") == 0.5 and host.noted("else") is None
    assert list(host.actors("counters").add.call().get().values()) == [12, 12]
    more = host.proc_meshes[0].spawn("more", Counter)
    assert list(more.add.call().get().values()) == [1, 1]
    host.actors("counters").stop().get()
    with pytest.raises(LookupError, match=r"no actors 'counters' on t \(there are: more\)"):
        host.actors("counters")
    host.detach()
    assert held() == []
    again = attach("t")
    assert list(again.actors("more").add.call().get().values()) == [2, 2]
    again.down()
    assert nothing_kept(kept_folder)


def test_what_ranks_own_stays(kept_folder: str) -> None:
    told = script(MAKE + "boss = mesh.slice(gpus=0).spawn('boss', Boss)\nprint(boss.pid.call_one().get())" + KILL, -9)
    nested = int(told.split()[-1])
    wait_until(lambda: kept()[0].held_by == 0, "it is free")
    assert alive(nested)
    host = attach("t")
    boss: Any = host.actors("boss")
    assert boss.pid.call_one().get() == nested
    assert boss.add.call_one().get() == 101
    assert boss.hire.call_one().get() == 201
    mesh = host.proc_meshes[0]
    os.kill(mesh.pids().get(0), signal.SIGKILL)
    wait_until(lambda: not alive(nested), "what the dead rank owned has ended")
    assert mesh.status().get().get(0).state == "dead"
    assert mesh.heal().get()
    assert boss.hire.call_one().get() == 201
    host.down()


def test_a_rank_starts_others_while_nobody_is_there(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script(
        MAKE
        + f"""
from monarch_kernel.actor import Actor, endpoint
class Late(Actor):
    @endpoint
    def start(self, boss):
        import threading, time
        def work():
            while not os.path.exists({str(flag)!r}):
                time.sleep(0.005)
            open({str(flag)!r} + ".done", "w").write(str(boss.hire.call_one().get()))
        threading.Thread(target=work).start()
boss = mesh.slice(gpus=0).spawn("boss", Boss)
mesh.slice(gpus=1).spawn("late", Late).start.call_one(boss).get()
"""
        + KILL,
        -9,
    )
    wait_until(lambda: kept()[0].held_by == 0, "it is free")
    flag.touch()
    done = Path(f"{flag}.done")
    wait_until(lambda: done.exists() and done.read_text() == "201", "a rank has started another")
    attach("t").down()


def test_the_dead_are_dead_and_healed_from_checkpoints(kept_folder: str) -> None:
    script(
        MAKE + "counters.add.call(30).get()\ncounters.checkpoint.call().get()\ncounters.add.call(5).get()" + KILL, -9
    )
    host = attach("t")
    mesh, counters = host.proc_meshes[0], host.actors("counters")
    os.kill(mesh.pids().get(1), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="killed by SIGKILL"):
        for _ in range(100):
            counters.add.call(0).get()
    healed = mesh.heal().get()
    assert healed.restored == ["counters"]
    assert list(counters.add.call(0).get().values()) == [46, 41]
    host.down()


def test_a_policy_holds_for_deaths_without_a_controller() -> None:
    script(
        MAKE.replace('name="t")', 'name="t", restart="on_failure")') + "print(list(mesh.pids().values()))" + KILL, -9
    )
    wait_until(lambda: kept()[0].held_by == 0, "it is free")
    host = attach("t")
    victim = host.proc_meshes[0].pids().get(1)
    host.detach()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: kept()[0].meshes[0].alive == 1, "the keeper has noticed")
    host = attach("t")
    wait_until(lambda: host.proc_meshes[0].pids().get(1) not in (0, victim), "it was restarted")
    wait_until(lambda: kept()[0].meshes[0].alive == 2, "the keeper has noticed")
    wait_until(lambda: _answers(host.actors("counters")) == [11, 10], "its actors are there")
    host.down()


def _answers(counters: Any) -> list[int]:
    try:
        return list(counters.add.call(0).get().values())
    except SupervisionError:
        return []


def test_output_meanwhile_is_bounded(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    env = {"MONARCH_KERNEL_BACKLOG": "20000"}
    script(MAKE + f"counters.slice(gpus=0).write.call_one({str(flag)!r}, 5000).get()" + KILL, -9, env)
    wait_until(lambda: kept()[0].held_by == 0, "it is free")
    flag.touch()
    wait_until(lambda: os.path.exists(f"{flag}.done"), "it is printed")
    heard: list[Any] = []
    end = subscribe(heard.append)
    try:
        host = attach("t")
    finally:
        end()
    text = "".join(one.data for one in heard if one.kind == "text")
    assert {(one.mesh, one.rank) for one in heard if one.kind == "text"} == {("t", 0)}
    assert text.endswith("line 00004999\n") and len(text) < 20000
    assert text.splitlines() == [f"line {number:08}" for number in range(5000 - len(text.splitlines()), 5000)]
    assert sum(host.missed.values()) > 5000 * 14 - 20000
    host.down()


def test_a_dead_keeper_is_no_mesh(kept_folder: str) -> None:
    script(MAKE)
    info = kept()[0]
    family = processes(kept_folder)
    assert len(family) >= 4
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, family)), "its ranks have ended with it")
    wait_until(lambda: not kept(), "its lock is released")  # by the last of its threads
    with pytest.raises(KeptError, match=r"no kept mesh 't' \(there are: none\)"):
        attach("t")
    assert nothing_kept(kept_folder)
    keep("t").down()  # the name is free


def test_another_keeper_takes_its_place(kept_folder: str) -> None:
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 2}, name="t")
    counters: Any = mesh.spawn("counters", Counter, 10)
    counters.add.call(5).get()
    counters.checkpoint.call().get()
    host.note("loss", 0.25)
    os.kill(kept()[0].pid, signal.SIGKILL)
    wait_until(lambda: not host.is_kept, "its end is known")
    wait_until(lambda: not kept(), "its lock is released")  # Linux closes its connections first
    assert len(mesh.slice(gpus=1).heal().get(patience(60)).replaced) == 1
    assert host.is_kept and kept()[0].held_by == os.getpid()
    assert counters.slice(gpus=1).add.call_one().get() == 16
    host.detach()
    # Only a part was healed; the next program heals the rest.
    said = script(
        """
        host = attach("t")
        counters = host.actors("counters")
        print(host.noted("loss"), counters.slice(gpus=1).add.call_one().get())
        print(len(host.proc_meshes[0].heal().get(60).replaced), list(counters.add.call().get().values()))
        host.down()
        """
    )
    assert said.splitlines() == ["0.25 17", "1 [16, 18]"]
    assert nothing_kept(kept_folder)


def test_healing_waits_until_the_dead_keeper_has_released_its_lock(kept_folder: str) -> None:
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 1}, name="t")
    mesh.pids()
    os.kill(kept()[0].pid, signal.SIGKILL)
    wait_until(lambda: not host.is_kept, "its end is known")
    with PrivateFolder.open(f"{kept_folder}/t") as dying:
        wait_until(lambda: dying.take(FOLDER), "this test holds the lock instead")
        libc = ctypes.CDLL(None)
        opened = libc.inotify_init()
        assert libc.inotify_add_watch(opened, f"{dying.path}/{LOCK}".encode(), 0x20) > 0  # IN_OPEN
        healing = mesh.heal()
        try:
            for _ in range(2):  # the second attempt follows one that found the lock held
                wait_until(lambda: healing.done() or select.select([opened], [], [], 0)[0], "the lock is tried")
                assert not healing.done(), healing.exception(0)
                os.read(opened, 16)
        finally:
            os.close(opened)
    assert len(healing.get(patience(60)).replaced) == 1
    host.down()


def test_a_checkpoint_that_is_too_large_is_told(capfd: pytest.CaptureFixture[str], faults: list[Any]) -> None:
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 1}, name="t")
    counters: Any = mesh.spawn("counters", Counter, bytes(65 << 20))
    pid = counters.pid.call_one().get()
    assert len(counters.checkpoint.call_one().get()) == 65 << 20
    seen: list[str] = []

    def told() -> bool:
        seen.append(capfd.readouterr().err)
        return "counters: its checkpoint of 65 MB serves heal()" in "".join(seen)

    wait_until(told, "it is said")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: faults, "its end is known")
    assert mesh.heal().get(patience(60)).restored == ["counters"], "while this controller lives"
    host.down()


def test_nothing_is_kept_of_nothing(kept_folder: str) -> None:
    script("keep('t')")
    wait_until(lambda: nothing_kept(kept_folder), "its folder is gone")
    script(MAKE + "mesh.stop().get()")
    wait_until(lambda: nothing_kept(kept_folder), "its folder is gone")


def test_what_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="'a/b' cannot name a kept mesh"):
        keep("a/b")
    with pytest.raises(KeptError, match="no kept mesh 'none'"):
        attach("none")
    with pytest.raises(KeptError, match="no kept mesh 'none'"):
        end_kept("none")
    host = keep("t")
    with pytest.raises(KeptError, match="a kept mesh 't' already exists"):
        keep("t")
    with pytest.raises(KeptError, match="already attached in this process"):
        attach("t")
    said = script("try:\n    attach('t')\nexcept Exception as e:\n    print(e)")
    assert f"process {os.getpid()}" in said
    end_kept("t")
    with pytest.raises(KeptError, match="mesh 't' was ended"):
        host.detach()


def test_the_one_that_was_taken_from_is_told() -> None:
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 1}, name="t")
    counters: Any = mesh.spawn("counters", Counter)
    boss: Any = mesh.spawn("boss", Boss)
    assert boss.add.call_one().get() == 101
    said = script("host = attach('t', force=True)\nprint(host.actors('boss').add.call_one().get(), os.getpid())")
    total, pid = said.split()
    assert total == "102"
    with pytest.raises(SupervisionError, match=f"taken over by process {pid}"):
        counters.add.call_one().get()
    with pytest.raises(RuntimeError, match="was stopped"):
        mesh.spawn("more", Counter)
    with pytest.raises(KeptError, match=f"taken over by process {pid}"):
        host.detach()
    again = attach("t", force=True)
    assert again.actors("boss").add.call_one().get() == 103  # type: ignore[attr-defined]
    again.down()


def test_placed_ranks_stay_placed(tmp_path: Path, kept_folder: str) -> None:
    """The next program's ranks start in the same folders, as do those that ranks start while there is none."""
    for version in ("client", "first", "second"):
        (tmp_path / version).mkdir()
    (tmp_path / "current").symlink_to("first")
    place = f"""
from monarch_kernel.workers import Placement, place_ranks
host = keep("t")
place_ranks(host.hosts, Placement({{"{tmp_path}/client": "{tmp_path}/current"}})).get()
sys.path.append("{tmp_path}/client")
mesh = host.hosts.spawn_procs(name="t")
mesh.spawn("counters", Counter).add.call().get()
"""
    script(place + KILL, -9)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("second")
    host = attach("t")
    mesh = host.proc_meshes[0]
    os.kill(mesh.pids().item(), signal.SIGKILL)
    wait_until(lambda: bool(mesh.dead()), "the rank is dead")
    mesh.heal().get()
    assert host.actors("counters").path.call_one().get().count(f"{tmp_path}/current") == 1
    sys.path.append(f"{tmp_path}/client")
    try:
        fresh = host.hosts.spawn_procs().spawn("fresh", Counter)
    finally:
        sys.path.remove(f"{tmp_path}/client")
    assert f"{tmp_path}/current" in fresh.path.call_one().get()
    assert client_path(f"{tmp_path}/current/a.py") == f"{tmp_path}/client/a.py"
    os.kill(kept()[0].pid, signal.SIGKILL)  # another host agent takes its place
    wait_until(lambda: not host.is_kept, "its host agent is dead")
    mesh.heal().get()
    assert host.actors("counters").path.call_one().get().count(f"{tmp_path}/current") == 1
    host.down()


def test_seen_from_outside_without_taking_it(kept_folder: str) -> None:
    program = """
import sys
import time
from monarch_kernel.runtime.actor.process import started
from monarch_kernel.meshes import end_kept, kept_logs, kept_ranks, KeptError
ranks = kept_ranks("t")
print([(one.mesh, one.rank, one.state, one.pid > 0, one.rss_bytes > 0) for one in ranks])
print(kept_logs("t", ranks=[1], tail=1))
try:
    end_kept("t")
except KeptError as error:
    print(error.held, error)
else:
    print("ended")
print("no runtime" if "monarch_kernel.runtime.actor.process" in sys.modules and not started() else "a runtime")
"""
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 2}, name="t")
    counters = mesh.spawn("counters", Counter, 10)
    counters.say.call("first\nsecond").get()
    wait_until(lambda: kept_logs("t", tail=1) == {("t", 0): "second\n", ("t", 1): "second\n"}, "the output is kept")
    both = [("t", 0, "alive", True, True), ("t", 1, "alive", True, True)]
    assert script(program).splitlines() == [
        str(both),
        "{('t', 1): 'second\\n'}",
        f"True mesh 't' was not ended: process {os.getpid()} on {os.uname().nodename} holds it",
        "no runtime",
    ]
    assert list(counters.add.call().get().values()) == [11, 11]  # the holder still has it
    os.kill(mesh.pids().get(1), signal.SIGKILL)
    wait_until(lambda: kept_ranks("t")[1].state == "dead", "its agent has seen the death")
    assert kept_ranks("t")[1].cause == "killed by SIGKILL"
    host.detach()
    pids = processes(kept_folder)
    assert script(program).splitlines()[2:] == ["ended", "no runtime"]
    assert nothing_kept(kept_folder)
    wait_until(lambda: not any(map(alive, pids)), "all of it has ended")  # the keeper last, after its answer
    with pytest.raises(KeptError, match="there is no kept mesh 't'"):
        kept_ranks("t")


def test_ended_by_force_from_outside(faults: list[Any], kept_folder: str) -> None:
    host = keep("t")
    mesh = host.hosts.spawn_procs(per_host={"gpus": 1}, name="t")
    mesh.pids()
    script("from monarch_kernel.meshes import end_kept\nend_kept('t', force=True)")
    wait_until(lambda: host.lost != "", "the holder is told")
    assert "was taken over by process" in host.lost
    wait_until(lambda: nothing_kept(kept_folder) and not processes(kept_folder), "all of it is gone")
