"""Concurrent endpoints, tasks of actors, and the threads and loops in which their code runs."""

import asyncio
import queue
import threading
from functools import partial

import monarch.actor
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from report import check

faults = queue.Queue()
monarch.actor.unhandled_fault_hook = faults.put


def runs_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Gate(Actor):
    def __init__(self, port=None):
        self.ready, self.opened = asyncio.Event(), asyncio.Event()
        self.log = []
        self.port = port

    @concurrent_endpoint
    async def wait(self, x):
        self.log.append(f"start {x}")
        self.ready.set()
        await self.opened.wait()
        self.log.append(f"end {x}")
        return x

    @endpoint
    async def open(self):
        await self.ready.wait()
        self.opened.set()

    @endpoint
    async def steps(self):
        return self.log

    @concurrent_endpoint
    async def fails(self):
        raise ValueError("fails")

    @concurrent_endpoint(explicit_response_port=True)
    async def answers(self, port):
        await asyncio.sleep(0)
        port.send(current_rank().rank)

    @concurrent_endpoint(explicit_response_port=True)
    async def fails_at_once(self, port):
        raise ValueError("at once")

    @concurrent_endpoint(explicit_response_port=True)
    async def fails_late(self, port):
        port.send("answered")
        raise ValueError("late")

    @concurrent_endpoint
    async def forever(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    @endpoint
    async def begins(self):
        async def background():
            try:
                await asyncio.Event().wait()
            finally:
                self.port.send("a task ended")

        self.task = asyncio.create_task(background())

    async def __cleanup__(self, error):
        if self.port:
            self.port.send(("cleanup", self.log, runs_loop()))


class Manual(Actor):
    @endpoint(explicit_response_port=True)
    async def later(self, port):
        async def answer():
            await asyncio.sleep(0)
            port.send("later")

        asyncio.create_task(answer())  # noqa: RUF006  # as the documentation has it

    @endpoint
    async def slow(self, port):
        port.send("in")
        for _ in range(20):
            await asyncio.sleep(0)
        port.send("out")

    @endpoint
    async def quick(self, port):
        port.send("quick")

    @endpoint
    async def awaits(self, other):
        return await other.answers.call_one()

    @endpoint
    async def elsewhere(self):
        return await asyncio.to_thread(runs_loop), await asyncio.get_running_loop().run_in_executor(None, lambda: 3)


class Sync(Actor):
    def __init__(self, port):
        self.port = port
        self.places = []
        self.note("__init__")

    def note(self, where):
        self.places.append((where, threading.get_ident(), runs_loop()))

    @endpoint
    def look(self):
        self.note("endpoint")

    @endpoint
    def own(self):
        self.mesh = context().actor_instance.proc.spawn("dies", Dies)
        self.mesh.dies.broadcast()

    def __supervise__(self, failure):
        self.note("__supervise__")
        self.port.send("supervised")
        return True

    def __cleanup__(self, error):
        self.note("__cleanup__")
        self.port.send([(where, thread == self.places[0][1], loop) for where, thread, loop in self.places])


class Async(Sync):
    @endpoint
    async def look(self):
        self.note("endpoint")

    @endpoint
    async def own(self):
        self.mesh = context().actor_instance.proc.spawn("dies", Dies)
        self.mesh.dies.broadcast()

    async def __supervise__(self, failure):
        return super().__supervise__(failure)

    async def __cleanup__(self, error):
        super().__cleanup__(error)


class Dies(Actor):
    @endpoint
    def dies(self):
        raise ValueError("dies")


class Deleted(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def f(self): ...

    def __del__(self):
        self.port.send(("__del__", runs_loop()))


class Forever(Actor):
    def __init__(self, port):
        self.child = context().actor_instance.proc.spawn("quick", Quick)
        port.send(self.child)
        threading.Event().wait()

    @endpoint
    def f(self): ...


class Quick(Actor):
    @endpoint
    def f(self):
        return "quick"


class RunsForever(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def run(self):
        self.port.send("runs")
        threading.Event().wait()


class Starts(Actor):
    def __init__(self, port):
        self.runs = context().actor_instance.proc.spawn("runs", RunsForever, port)
        self.runs.run.broadcast()

    @endpoint
    def f(self):
        return "started"


def take(receiver, count=1):
    return [receiver.recv().get(timeout=60) for _ in range(count)]


procs = this_host().spawn_procs({"n": 2})
port, receiver = Channel.open()
gates = procs.spawn("gates", Gate, port)
gate = gates.slice(n=0)
waiting = [gate.wait.call_one(i) for i in range(3)]
gate.open.call_one().get()
check("waited", lambda: [future.get(timeout=60) for future in waiting])
check("steps", lambda: gate.steps.call_one().get())
check("fails", lambda: gate.fails.call_one().get(), ActorError)
check("explicit", lambda: gates.answers.call().get().values())
gates.forever.broadcast()
check("went on", lambda: len(gates.steps.call().get()))
gates.stop().get()
check("cancelled before the cleanup", lambda: sorted((where, log[-1], loop) for where, log, loop in take(receiver, 2)))
begins = this_host().spawn_procs({"n": 1}).spawn("begins", Gate, port)
begins.begins.call_one().get()
begins.stop().get()
check("tasks end after the cleanup", lambda: [message[0] for message in take(receiver, 2)])
for name in ("fails_at_once", "fails_late"):
    failing = getattr(this_host().spawn_procs({"n": 1}).spawn(name, Gate), name).call_one()
    check(name, partial(failing.get, timeout=60), RuntimeError)
    check("a fault", lambda: "late" in (text := faults.get(timeout=60).report()) or "at once" in text)
manual = procs.spawn("manual", Manual)
check("a task answers", lambda: manual.later.call().get().values())
manual.slice(n=0).slow.broadcast(port)
manual.slice(n=0).quick.broadcast(port)
check("one at a time", lambda: take(receiver, 3))
others = procs.spawn("others", Gate)
check("awaits", lambda: manual.awaits.call(others.slice(n=1)).get().values())
check("other threads", lambda: manual.elsewhere.call().get().values())
for cls in (Sync, Async):
    actor = this_host().spawn_procs({"n": 1}).spawn("actor", cls, port)
    actor.look.call().get()
    actor.own.call().get()
    check("supervised", lambda: take(receiver))
    actor.stop().get()
    check(f"{cls.__name__} runs in one place", lambda: take(receiver))
here = this_proc().spawn("here", Sync, port)
here.look.call().get()
here.stop().get()
check("so does one in this process", lambda: take(receiver))
deleted = this_host().spawn_procs({"n": 2})
deleted.spawn("deleted", Deleted, port).f.call().get()
deleted.stop().get()
check("deleted", lambda: take(receiver, 2))
busy = this_host().spawn_procs({"n": 2})
forever = busy.spawn("forever", Forever, port)
check(
    "children of one that is never ready", lambda: [child.f.call_one().get(timeout=60) for child in take(receiver, 2)]
)
check("neighbours", lambda: busy.spawn("quick", Quick).f.call().get(timeout=60).values())
check("starts one that never ends", lambda: busy.spawn("starts", Starts, port).f.call().get(timeout=60).values())
check("which runs", lambda: take(receiver, 2))
check("never ready", lambda: forever.f.call().get(timeout=0.1))
