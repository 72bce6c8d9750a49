"""Bootstrap, construction, stop and cleanup."""

import os
import time

from monarch.actor import Actor, Channel, endpoint, this_host
from report import show


def setup():
    os.environ["PARITY"] = "set up"


class Worker(Actor):
    def __init__(self, port, name):
        self.port = port
        self.name = name
        self.seen = os.environ.get("PARITY")

    @endpoint
    def get(self):
        return self.seen

    def __cleanup__(self, error):
        self.port.send((time.monotonic_ns(), self.name, error is None))


class Owner(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def own(self, procs):
        self.mesh = procs.spawn("owned", Worker, self.port, "owned")
        self.mesh.initialized.get()

    def __cleanup__(self, error):
        self.port.send((time.monotonic_ns(), "owner", error is None))


port, receiver = Channel.open()
procs = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=setup)
mesh = procs.spawn("worker", Worker, port, "worker")
show("initialized", mesh.initialized.get())
show("bootstrap", list(mesh.get.call().get().values()))
mesh.stop().get()
show("cleanup", [receiver.recv().get()[1:] for _ in range(2)])
owner = procs.slice(gpus=0).spawn("owner", Owner, port)
owner.own.call_one(procs.slice(gpus=1)).get()
owner.stop().get()
show("owned first", [name for _, name, _ in sorted(receiver.recv().get() for _ in range(2))])
procs.stop().get()
show("procs stopped")
