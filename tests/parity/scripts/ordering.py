"""Order of messages, and one at a time."""

import asyncio

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host
from report import show


class Notes(Actor):
    def __init__(self):
        self.notes = []

    @endpoint
    def note(self, x):
        self.notes.append(x)

    @endpoint
    def get(self):
        return self.notes


class Steps(Actor):
    def __init__(self):
        self.notes = []

    @endpoint
    async def step(self, name):
        self.notes.append(f"start {name}")
        await asyncio.sleep(0.01)
        self.notes.append(f"end {name}")

    @endpoint
    async def get(self):
        return self.notes


class Together(Actor):
    def __init__(self):
        self.go = asyncio.Event()
        self.inside = 0

    @concurrent_endpoint
    async def wait(self):
        self.inside += 1
        await self.go.wait()
        return "went"

    @endpoint
    async def count(self):
        return self.inside

    @endpoint
    async def open(self):
        self.go.set()


procs = this_host().spawn_procs(per_host={"gpus": 2})
notes = procs.spawn("notes", Notes)
for i in range(200):
    notes.note.broadcast(i)
    if i % 50 == 0:
        notes.note.call("call")
expected = [x for i in range(200) for x in ([i, "call"] if i % 50 == 0 else [i])]
show("ordered", [got == expected for got in notes.get.call().get().values()])
steps = procs.spawn("steps", Steps)
calls = [steps.step.call(c) for c in "abc"]
[call.get() for call in calls]
show("async one at a time", next(iter(steps.get.call().get().values())))
together = procs.spawn("together", Together)
calls = [together.wait.call() for _ in range(3)]
while list(together.count.call().get().values()) != [3, 3]:
    pass
together.open.call().get()
show("concurrent", [list(call.get().values()) for call in calls])
