"""What owners and callers are told of a process that died."""

import os
import threading
import time

from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import Actor, endpoint, this_host
from report import show


class Worker(Actor):
    @endpoint
    def die(self):
        os._exit(3)


class Owner(Actor):
    def __init__(self):
        self.seen = []

    def __supervise__(self, failure):
        self.seen.append((isinstance(failure, MeshFailure), failure.mesh_name, failure.report()))
        return True

    @endpoint
    def go(self):
        self.workers = this_host().spawn_procs({"n": 2}).spawn("workers", Worker)
        try:
            self.workers.slice(n=1).die.call().get()
        except RuntimeError as e:
            return isinstance(e, SupervisionError), str(e)

    @endpoint
    def reports(self):
        return self.seen


owner = this_host().spawn_procs({"h": 1}).spawn("owner", Owner)
raised, text = owner.go.call_one().get()
show("raised", raised, "Endpoint call workers.die() failed" in text, "have failed" in text)
end = time.monotonic() + 60
waiting = threading.Event()
while time.monotonic() < end:
    seen = [each for each in owner.reports.call_one().get() if each[1].startswith("workers")]
    if seen:
        break
    waiting.wait(0.1)
for failure, name, report in seen:
    show("told", failure, name.partition("-")[0], "workers{'n': 1/2}> and all its descendants have failed" in report)
