"""What raises what."""

from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint, this_host
from report import raises, show


class Worker(Actor):
    @endpoint
    def boom(self, message):
        raise ValueError(message)

    @endpoint
    def fine(self):
        return 1


class Mixed(Actor):
    @endpoint
    def a(self):
        pass

    @endpoint
    async def b(self):
        pass


class Named(Actor):
    @endpoint
    def slice(self):
        pass


class Plain:
    pass


class Needs(Actor):
    def __init__(self, x):
        self.x = x

    @endpoint
    def get(self):
        return self.x


procs = this_host().spawn_procs(per_host={"gpus": 2})
mesh = procs.spawn("worker", Worker)
try:
    mesh.boom.call("one").get()
except ActorError as e:
    show("call", type(e.exception).__name__, str(e.exception), "ValueError: one" in str(e))
try:
    mesh.slice(gpus=1).boom.call_one("two").get()
except ActorError as e:
    show("call_one", type(e.exception).__name__, str(e.exception), str(e).startswith("Actor call worker.boom failed"))
show("survives", list(mesh.fine.call().get().values()))
failed = 0
for future in mesh.boom.stream("three"):
    try:
        future.get()
    except ActorError:
        failed += 1
show("stream", failed)


def sync_concurrent():
    class Bad(Actor):
        @concurrent_endpoint
        def f(self):
            pass


def stacked():
    class Bad(Actor):
        @concurrent_endpoint
        @endpoint
        async def f(self):
            pass


for what, kind, attempt in (
    ("mixed", ValueError, lambda: procs.spawn("x", Mixed)),
    ("reserved name", ValueError, lambda: procs.spawn("x", Named)),
    ("no actor", ValueError, lambda: procs.spawn("x", Plain)),
    ("constructor", TypeError, lambda: procs.spawn("x", Needs)),
    ("sync concurrent", ValueError, sync_concurrent),
    ("stacked", ValueError, stacked),
    ("unpicklable", TypeError, lambda: mesh.boom.call(x for x in "abc")),
    ("no such endpoint", AttributeError, lambda: mesh.missing),
):
    raises(what, kind, attempt)
show("fine after all", list(mesh.fine.call().get().values()))
