"""Failures that the owner handles, and those that a call raises."""

import monarch.actor
from monarch.actor import Actor, Channel, endpoint, this_host
from report import show


class Mortal(Actor):
    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def fail(self):
        raise ValueError("nobody asked")


class Owner(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def own(self):
        self.procs = this_host().spawn_procs(per_host={"gpus": 2})
        self.mesh = self.procs.spawn("mortal", Mortal)
        self.mesh.initialized.get()
        return self.mesh

    @endpoint
    def ping(self):
        return "alive"

    def __supervise__(self, failure):
        self.port.send("nobody asked" in failure.report())
        return True


monarch.actor.unhandled_fault_hook = lambda failure: None
port, receiver = Channel.open()
owner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Owner, port)
mesh = owner.own.call_one().get()
mesh.slice(gpus=1).fail.broadcast()
show("told", receiver.recv().get())
show("owner", owner.ping.call_one().get())
show("healthy", mesh.slice(gpus=0).echo.call_one(1).get())
try:
    mesh.slice(gpus=1).echo.call_one(1).get()
except Exception as e:
    show("dead", type(e).__name__, "nobody asked" in str(e))
