"""Whole scripts in processes of their own: how they end, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.actor.conftest import Script
from tests.conftest import alive, wait_until
from tests.waiting import patience

Start = Callable[[str], Script]

HEAD = """
import os, signal, sys, time
from monarch_kernel.actor import *

class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def fail(self):
        raise ValueError("nobody asked")

    @endpoint
    def busy(self, port):
        port.send(1)
        n = 0
        while True:
            n += 1

    @endpoint
    def sleep(self, port):
        port.send(1)
        time.sleep(600)

def compute():
    n = 0
    while True:
        n += 1

def started(mesh, endpoint):
    port, receiver = Channel.open()
    call = endpoint.call(port)
    for _ in range(len(mesh)):
        receiver.recv().get(30)
    return call
"""


def test_a_script_that_ends_normally(script: Start) -> None:
    run = script(
        HEAD
        + """
if __name__ == "__main__":
    mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
    print(list(mesh.echo.call(5).get().values()))
"""
    )
    assert run.finish() == (0, "[5, 5]\n", "")


def test_later_ranks_find_the_actor_api_loaded(script: Start) -> None:
    run = script(
        HEAD
        + """
class Looking(Actor):
    @endpoint
    def loaded(self):
        return "monarch_kernel.runtime.actor.hosts.host_mesh" in sys.modules

def loaded():
    procs = this_host().spawn_procs()
    found = procs.spawn("l", Looking).loaded.call_one().get()
    procs.stop().get()
    return found

print(loaded())
end = time.monotonic() + 30
while not loaded() and time.monotonic() < end:
    pass
print(loaded())
"""
    )
    assert run.finish() == (0, "False\nTrue\n", "")


def test_a_script_that_raises(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.echo.call(1).get()
raise KeyError("mine")
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (1, "")
    assert err.startswith("Traceback") and err.endswith("KeyError: 'mine'\n")


def test_a_script_with_busy_ranks_ends(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
started(mesh, mesh.busy)
print("end")
"""
    )
    assert run.finish() == (0, "end\n", "")


def test_a_script_whose_error_is_uncaught_shows_the_remote_traceback(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.fail.call().get()
"""
    )
    code, _, err = run.finish()
    assert code == 1
    assert "Actor call w.fail failed on all 2 ranks." in err
    assert "Traceback of where the remote call failed (most recent call last):" in err
    assert 'raise ValueError("nobody asked")' in err
    assert err.count("ValueError: nobody asked") == 1


def test_asyncio_run_with_many_awaits(script: Start) -> None:
    run = script(
        HEAD
        + """
import asyncio

async def one(mesh, i):
    values = await mesh.echo.call(i)
    return sum(values.values())

async def main():
    world = await this_host().spawn_procs(per_host={"gpus": 3})
    mesh = await world.spawn("w", Worker)
    totals = await asyncio.gather(*(one(mesh, i) for i in range(200)))
    print(totals == [3 * i for i in range(200)])
    try:
        await mesh.fail.call()
    except ValueError as e:
        print(type(e).__name__)

asyncio.run(main())
"""
    )
    assert run.finish() == (0, "True\nActorError[ValueError]\n", "")


# -- faults ---------------------------------------------------------------------------------------------


def test_an_unobserved_fault_ends_the_script(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.echo.call(1).get()
mesh.slice(gpus=1).fail.broadcast()
print("before", flush=True)
time.sleep(60)
print("never")
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (1, "before\n")
    assert err.startswith("Unhandled monarch error on the root actor, hostname=")
    assert "Mesh 'w' lost rank 1 of 2 (gpus=1) on host" in err
    assert 'raise ValueError("nobody asked")' in err
    assert "Traceback (most recent call last):\n  File" not in err.split("nobody asked", 1)[0]


def test_the_report_of_a_fault_that_went_up_the_tree(script: Start) -> None:
    ran = script(
        """
        import time
        from monarch_kernel.actor import Actor, endpoint, this_host
        class Worker(Actor):
            @endpoint
            def work(self):
                raise ValueError("bad weather")
        class Boss(Actor):
            @endpoint
            def begin(self):
                self.workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
                self.workers.slice(gpus=1).work.broadcast()
        boss = this_host().spawn_procs(per_host={"hosts": 1}).spawn("boss", Boss)
        boss.begin.broadcast()
        time.sleep(60)
        """
    )
    code, out, err = ran.finish()
    assert (code, out) == (1, "")
    # What failed for the root, what had failed for that, whose each was, and where it began.
    assert "Mesh 'boss' lost rank 0 of 1 (hosts=0) on host" in err
    assert re.search(r"Mesh 'boss' was owned by the controller \(host .+, pid \d+\)", err)
    assert "Mesh 'workers' lost rank 1 of 2 (gpus=1) on host" in err
    assert re.search(r"Mesh 'workers' was owned by actor 'boss', rank 0 \(hosts=0\), host .+, pid \d+", err)
    assert 'raise ValueError("bad weather")' in err
    assert ", in work" in err


@pytest.mark.parametrize(
    "wait",
    ["compute()", "time.sleep(60)", "import threading; threading.Event().wait()", "r.recv().get()"],
)
def test_an_unobserved_fault_ends_the_script_wherever_it_is(script: Start, wait: str) -> None:
    run = script(
        HEAD
        + f"""
mesh = this_host().spawn_procs(per_host={{"gpus": 2}}).spawn("w", Worker)
p, r = Channel.open()
mesh.echo.call(1).get()
mesh.slice(gpus=1).die.broadcast()
try:
    {wait}
finally:
    print("finally")
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (1, "finally\n"), err
    assert "Mesh 'w' lost rank 1 of 2 (gpus=1)" in err
    assert "killed by SIGKILL" in err


def test_a_fault_that_a_call_has_raised_is_that_calls_business(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
try:
    mesh.slice(gpus=1).die.call_one().get()
except SupervisionError as e:
    print("caught", e.ranks)
time.sleep(0.5)   # longer than a fault waits to be seen
print(mesh.slice(gpus=0).echo.call_one("goes on").get())
"""
    )
    assert run.finish() == (0, "caught (0,)\ngoes on\n", "")


def test_an_init_error_that_was_seen_is_no_fault(script: Start) -> None:
    run = script(
        HEAD
        + """
class Broken(Actor):
    def __init__(self):
        raise ValueError("cannot be made")
    @endpoint
    def get(self): ...

world = this_host().spawn_procs(per_host={"gpus": 2})
try:
    world.spawn("broken", Broken).initialized.get()
except ActorError:
    print("seen")
time.sleep(0.5)
print(list(world.spawn("w", Worker).echo.call(1).get().values()))
world.spawn("broken", Broken)
time.sleep(60)
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (1, "seen\n[1, 1]\n")
    assert "Mesh 'broken' lost rank" in err and "cannot be made" in err


def test_an_uncaught_supervision_error_is_shown_once(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.die.call().get()
"""
    )
    code, _, err = run.finish()
    assert code == 1
    assert "SupervisionError: Endpoint call w.die() failed: rank" in err
    assert "Unhandled monarch error" not in err


def test_the_hook_can_be_replaced(script: Start) -> None:
    run = script(
        HEAD
        + """
import threading
import monarch_kernel.actor as actor
told = threading.Event()

def hook(failure):
    print("hook", failure.mesh, failure.ranks)
    told.set()

actor.unhandled_fault_hook = hook
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.slice(gpus=1).die.broadcast()
told.wait(30)
print(mesh.slice(gpus=0).echo.call_one("goes on").get())
"""
    )
    assert run.finish() == (0, "hook w (1,)\ngoes on\n", "")


def test_a_hook_that_exits(script: Start) -> None:
    run = script(
        HEAD
        + """
import monarch_kernel.actor as actor

def hook(failure):
    sys.exit(7)

actor.unhandled_fault_hook = hook
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.slice(gpus=1).die.broadcast()
time.sleep(60)
"""
    )
    assert run.finish()[0] == 7


def test_a_fault_is_a_keyboard_interrupt_as_in_monarch(script: Start) -> None:
    run = script(
        HEAD
        + """
import monarch_kernel.actor as actor

def hook(failure):
    print("hook")
    raise ValueError("the hook failed")

def wait_for_a_fault(**options):
    mesh = this_host().spawn_procs(per_host={"gpus": 1}).spawn("w", Worker)
    mesh.die.broadcast()
    try:
        time.sleep(60)
    except KeyboardInterrupt as e:
        print("interrupted", e.code)

wait_for_a_fault()
actor.unhandled_fault_hook = hook
wait_for_a_fault()
actor.unhandled_fault_hook = lambda failure: sys.exit(7)
wait_for_a_fault()
raise SystemExit(9)
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (9, "interrupted 1\nhook\ninterrupted 1\ninterrupted 7\n")
    assert err.count("Unhandled monarch error on the root actor") == 3 and "ValueError: the hook failed" in err


# -- interrupts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["get", "await", "recv", "stream"])
def test_ctrl_c_while_waiting(script: Start, how: str) -> None:
    wait = {
        "get": "pending.get()",
        "await": "asyncio.run(wait())",
        "recv": "Channel.open()[1].recv().get()",
        "stream": "[f.get() for f in mesh.echo.stream(1)]",
    }[how]
    run = script(
        HEAD
        + f"""
import asyncio
world = this_host().spawn_procs(per_host={{"gpus": 2}})
mesh = world.spawn("w", Worker)
pending = started(mesh, mesh.sleep)
port, _ = Channel.open()

async def wait():
    return await pending

print("waiting", flush=True)
for _ in range(2):
    try:
        {wait}
        print("no interrupt")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
# The ranks had nothing to do with that.
print(pending.done())
world.interrupt().get()
print(type(pending.exception(30)).__name__, list(mesh.echo.call(1).get().values()))
"""
    )
    assert run.line() == "waiting"
    for _ in range(2):
        # It may not be in the wait yet: what matters is that it gets out of it.
        wait_until(lambda: _sleeps(run.process.pid), "the script waits")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.line() == "interrupted"
    code, out, err = run.finish()
    assert (code, out) == (0, "False\nActorError [1, 1]\n"), err


def _sleeps(pid: int) -> bool:
    with open(f"/proc/{pid}/wchan") as file:
        waits = file.read()
    with open(f"/proc/{pid}/stat") as file:
        return "poll" in waits or file.read().rsplit(")", 1)[1].split()[0] == "S"


def test_ctrl_c_in_a_terminal_leaves_the_ranks_alone(script: Start) -> None:
    # A terminal sends SIGINT to the whole process group of the script.
    run = script(
        HEAD
        + """
os.setpgid(0, 0)
world = this_host().spawn_procs(per_host={"gpus": 2})
mesh = world.spawn("w", Worker)
pending = started(mesh, mesh.sleep)
try:
    print("waiting", flush=True)
    pending.get()
except KeyboardInterrupt:
    print("interrupted", pending.done())
world.kill().get()
"""
    )
    assert run.line() == "waiting"
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish() == (0, "interrupted False\n", "")


def test_ctrl_c_that_is_not_caught(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
mesh.echo.call(1).get()
print("waiting", flush=True)
Channel.open()[1].recv().get()
"""
    )
    assert run.line() == "waiting"
    os.kill(run.process.pid, signal.SIGINT)
    code, _, err = run.finish()
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


# -- violent ends ---------------------------------------------------------------------------------------

BUSY = """
world = this_host().spawn_procs(per_host={"gpus": 3})
mesh = world.spawn("w", Worker)
mesh.echo.call(bytes(10_000_000)).get()
started(mesh.slice(gpus=0), mesh.slice(gpus=0).busy)
started(mesh.slice(gpus=1), mesh.slice(gpus=1).sleep)
from monarch_kernel.runtime.actor.process import get_system
print(get_system().agent_process.pid, *world.pids().values(), flush=True)
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_a_script_that_is_killed(script: Start, sig: int) -> None:
    run = script(HEAD + BUSY + "time.sleep(600)\n")
    pids = [int(pid) for pid in run.line().split()]
    assert all(alive(pid) for pid in pids)
    assert os.listdir(run.folder)
    os.kill(run.process.pid, sig)
    run.process.wait(patience(30))
    run.check_gone()
    wait_until(lambda: not any(alive(pid) for pid in pids), "its processes are gone")


def test_nothing_is_left_when_ranks_do_not_react(script: Start) -> None:
    run = script(HEAD + BUSY + "time.sleep(600)\n")
    pids = [int(pid) for pid in run.line().split()]
    os.kill(pids[2], signal.SIGSTOP)
    run.kill()
    run.check_gone()
    wait_until(lambda: not any(alive(pid) for pid in pids), "its processes are gone")


def test_nothing_is_left_of_a_script_that_dies_at_once(script: Start) -> None:
    run = script(HEAD + "this_host().spawn_procs(per_host={'gpus': 3}).spawn('w', Worker)\nos._exit(3)\n")
    assert run.finish()[0] == 3
    run.check_gone()


def test_the_agent_is_killed_and_the_script_goes_on(script: Start) -> None:
    run = script(
        HEAD
        + """
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
pending = started(mesh, mesh.sleep)
from monarch_kernel.runtime.actor.process import get_system
os.kill(get_system().agent_process.pid, signal.SIGKILL)
try:
    pending.get()
except SupervisionError as e:
    print("agent" in str(e), e.ranks)
again = this_host().spawn_procs(per_host={"gpus": 2}).spawn("w", Worker)
print(list(again.echo.call(1).get().values()))
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (0, "True (0, 1)\n[1, 1]\n"), err


def test_agent_and_script_are_killed_at_the_same_time(script: Start) -> None:
    run = script(HEAD + BUSY + "time.sleep(600)\n")
    pids = [int(pid) for pid in run.line().split()]
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(patience(30))
    run.check_gone()


def test_output_at_the_very_end_is_shown(script: Start) -> None:
    run = script(
        """
from monarch_kernel.actor import *

class Prints(Actor):
    @endpoint
    def say(self):
        print("said by a rank")
    def __cleanup__(self, error):
        print("said at the end")

mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("p", Prints)
mesh.say.call().get()
"""
    )
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["said at the end"] * 2 + ["said by a rank"] * 2


def test_what_ranks_print_stands_between_what_the_script_prints(script: Start) -> None:
    run = script(
        """
from monarch_kernel.actor import *

class Prints(Actor):
    @endpoint
    def say(self, n):
        print("rank", n)

mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("p", Prints)
for n in range(20):
    print("script", n, flush=True)
    mesh.say.call(n).get()
"""
    )
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert out.splitlines() == [line for n in range(20) for line in (f"script {n}", f"rank {n}", f"rank {n}")]
