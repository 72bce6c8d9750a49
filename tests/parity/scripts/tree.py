"""The supervision tree: who is told of which failure, and what becomes of it."""

import os
import queue
import sys

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import Actor, ActorError, Channel, context, endpoint, this_host, this_proc
from report import check, show

faults = queue.Queue()
monarch.actor.unhandled_fault_hook = faults.put


class Leaf(Actor):
    def __init__(self, port=None):
        self.port = port

    @endpoint
    def ok(self):
        return "ok"

    @endpoint
    def fails(self):
        raise ValueError("leaf failed")

    @endpoint
    def exits(self):
        sys.exit(2)

    @endpoint
    def stops(self):
        context().actor_instance.stop("done")

    @endpoint
    def aborts(self):
        context().actor_instance.abort("leaf failed")

    @endpoint
    def dies(self):
        os._exit(3)

    @endpoint(explicit_response_port=True)
    def fails_explicitly(self, port):
        raise ValueError("leaf failed")

    def __cleanup__(self, error):
        if self.port:
            self.port.send(("leaf ends", error is None, "leaf failed" in str(error)))


class Owner(Actor):
    def __init__(self, handled, port):
        self.handled = handled
        self.port = port

    @endpoint
    def own(self, *args):
        self.leaf = context().actor_instance.proc.spawn("leaf", Leaf, *args)
        self.leaf.initialized.get()
        return self.leaf

    @endpoint
    def own_procs(self):
        self.leaf = this_host().spawn_procs({"n": 2}).spawn("leaf", Leaf)
        self.leaf.initialized.get()
        return self.leaf

    @endpoint
    def ping(self):
        return "pong"

    @endpoint
    def asks(self, name):
        try:
            getattr(self.leaf, name).call().get()
        except ActorError as e:
            return "ActorError", str(e.exception)
        except SupervisionError:
            return "SupervisionError"

    def __supervise__(self, failure):
        told = failure.mesh_name.partition("-")[0], isinstance(failure, MeshFailure), "leaf failed" in failure.report()
        self.port.send(("supervised", *told, "leaf failed" in str(failure)))
        if self.handled == "raises":
            raise RuntimeError("owner failed")
        return self.handled

    def __cleanup__(self, error):
        self.port.send(("owner ends", error is None))


class Grandparent(Owner):
    @endpoint
    def own(self):
        self.child = context().actor_instance.proc.spawn("child", Owner, False, self.port)
        self.child.own.call_one().get()
        return self.child

    @endpoint
    def own_anew(self):
        self.leaf = this_host().spawn_procs({"n": 1}).spawn("leaf", Leaf)
        return self.leaf.ok.call_one().get()


class Async(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    async def own(self):
        self.leaf = context().actor_instance.proc.spawn("leaf", Leaf)
        self.leaf.fails.broadcast()

    @endpoint
    async def ping(self):
        return "pong"

    async def __supervise__(self, failure):
        self.port.send(("supervised", await self.leaf.initialized))
        return True


def world(handled):
    port, receiver = Channel.open()
    return this_host().spawn_procs({"n": 1}).spawn("owner", Owner, handled, port), port, receiver


def told(receiver, count=1):
    return sorted(receiver.recv().get(timeout=60) for _ in range(count))


def fault():
    return isinstance(faults.get(timeout=60), MeshFailure)  # Monarch's may name no mesh, and tell of several


owner, port, receiver = world(True)
leaf = owner.own.call_one().get()
check("a caller is told", lambda: owner.asks.call_one("fails").get())
check("and nothing else", lambda: (leaf.ok.call_one().get(), owner.ping.call_one().get()))
leaf.fails.broadcast()
check("the owner is told", lambda: told(receiver))
check("and lives", lambda: owner.ping.call_one().get())
check("the leaf does not", lambda: leaf.ok.call_one().get(timeout=60), SupervisionError)
owner, port, receiver = world(None)
owner.own.call_one(port).get().fails.broadcast()
check("not handled", lambda: told(receiver, 3))
check("the root is told", fault)
check("the owner is dead", lambda: owner.ping.call_one().get(timeout=60), SupervisionError)
owner, port, receiver = world("raises")
owner.own.call_one().get().fails.broadcast()
check("raised", lambda: told(receiver, 2))
check("the root is told of both", fault)
for name in ("exits", "fails_explicitly", "aborts"):
    owner, port, receiver = world(True)
    leaf = owner.own.call_one().get()
    getattr(leaf, name).broadcast()
    show(f"{name}:", told(receiver)[0][:3])
    show("the owner lives:", repr(owner.ping.call_one().get(timeout=60)))
owner, port, receiver = world(True)
leaf = owner.own.call_one().get()
check("a call of one that exits", lambda: owner.asks.call_one("exits").get(timeout=60))
owner, port, receiver = world(True)
leaf = owner.own.call_one(port).get()
check("stops itself", lambda: leaf.stops.call_one().get(timeout=60))
check("in order", lambda: told(receiver))
check("is stopped", lambda: leaf.ok.call_one().get(timeout=60), SupervisionError)
owner, port, receiver = world(True)
leaf = owner.own.call_one(port).get()
owner.stop().get()
check("stopped with its owner", lambda: [receiver.recv().get(timeout=60) for _ in range(2)])
procs = this_host().spawn_procs({"n": 2})
mesh = procs.spawn("leaf", Leaf)
mesh.slice(n=1).fails.broadcast()
check("the client owns", fault)
check("the other one", lambda: mesh.slice(n=0).ok.call_one().get(timeout=60))
check("both", lambda: mesh.ok.call().get(timeout=60), SupervisionError)
check("new procs", lambda: this_host().spawn_procs({"n": 1}).spawn("leaf", Leaf).ok.call_one().get(timeout=60))
owner, port, receiver = world(True)
leaf = owner.own_procs.call_one().get()
leaf.slice(n=1).dies.broadcast()
while (failure := receiver.recv().get(timeout=60))[1] == "logger":  # of Monarch's own actors there
    pass
check("a dead process", lambda: failure[:3])
check("its neighbour", lambda: leaf.slice(n=0).ok.call_one().get(timeout=60))
port, receiver = Channel.open()
above = this_host().spawn_procs({"n": 1}).spawn("above", Grandparent, True, port)
below = above.own.call_one().get()
below.asks.call_one("ok").get()
below.asks.broadcast("nothing")
check("up the tree", lambda: [receiver.recv().get(timeout=60)[:2] for _ in range(2)])
check("and no further", lambda: above.ping.call_one().get())
check("the child is dead", lambda: below.ping.call_one().get(timeout=60), SupervisionError)
check("another one", lambda: above.own_anew.call_one().get(timeout=60))
port, receiver = Channel.open()
here = this_proc().spawn("owner", Owner, True, port)
here.own.call_one().get().fails.broadcast()
check("in this process", lambda: told(receiver))
check("which goes on", lambda: here.ping.call_one().get())
awaits = this_host().spawn_procs({"n": 1}).spawn("awaits", Async, port)
awaits.own.call_one().get()
check("awaits in its hook", lambda: told(receiver))
check("and goes on", lambda: awaits.ping.call_one().get())
