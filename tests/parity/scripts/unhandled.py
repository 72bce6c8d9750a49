"""A failure that no actor handles, and whose hook fails, interrupts the main thread."""

import threading

import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from report import show


class Worker(Actor):
    @endpoint
    def fails(self):
        raise ValueError("fails")


def hook(failure):
    show("hook", "fails" in failure.report())
    raise RuntimeError("cannot handle it")


monarch.actor.unhandled_fault_hook = hook
this_host().spawn_procs({"n": 1}).spawn("worker", Worker).fails.broadcast()
try:
    threading.Event().wait(60)
except KeyboardInterrupt:
    show("interrupted")
