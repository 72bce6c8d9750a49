"""How endpoints are declared and called, and what their failures are."""

import asyncio
import functools
import inspect
import pickle

from monarch.actor import Actor, ActorError, as_endpoint, endpoint, this_host, this_proc
from report import check, show


class Base(Actor):
    @endpoint
    def base(self):
        return "base"

    @endpoint
    def over(self):
        return "base's"


def plus_one(function):
    @functools.wraps(function)
    def more(self, *args):
        return function(self, *args) + 1

    return more


class Worker(Base):
    kind = "kind"

    def __init__(self, a=1, *args, b=2, **kwargs):
        self.given = a, args, b, kwargs
        self.log = []

    @endpoint
    def over(self):
        return "worker's"

    @endpoint
    def arguments(self, a, /, b=2, *c, d=4, **e):
        "What they are."
        return a, b, c, d, e

    @endpoint
    def state(self):
        return self.given

    @endpoint
    def own(self):
        return self.helper(1), self.kind, Worker.base._method(self), isinstance(self, Actor), self.logger.name != ""

    @endpoint(instrument=False)
    def plain(self):
        return 1

    @endpoint
    def appends(self, x):
        x.append(1)
        return x

    @endpoint
    def note(self, x):
        self.log.append(x)

    @endpoint
    def noted(self):
        return self.log

    @endpoint
    @plus_one
    def decorated(self, x):
        return x

    lambda_ = endpoint(lambda self: 4)

    def helper(self, x):
        return x * 2

    def helper_with_port(self, port, x):
        port.send(x * 3)

    @endpoint
    def asks(self, other):
        return other.base.call_one().get()

    @endpoint
    def returns(self, x):
        return x

    @endpoint
    def loop(self):
        async def seven():
            return 7

        return asyncio.run(seven())

    @endpoint
    def chained(self):
        try:
            raise KeyError("a")
        except KeyError as e:
            raise ValueError("b") from e

    @endpoint
    def noted_error(self):
        error = ValueError("n")
        error.add_note("a note")
        raise error

    @endpoint
    def nested(self, other):
        return other.chained.call_one().get()

    @endpoint
    def unpicklable(self):
        return (x for x in "abc")


class Async(Actor):
    @endpoint
    async def helped(self):
        return await self.helper(), self.sync_helper()

    async def helper(self):
        return 2

    def sync_helper(self):
        return 3


procs = this_host().spawn_procs({"n": 2})
workers = procs.spawn("workers", Worker, 5, 6, b=7, c=8)
one, other = workers.slice(n=0), workers.slice(n=1)
check("constructed", lambda: one.state.call_one().get())
check("inherited", lambda: (one.base.call_one().get(), one.over.call_one().get()))
check("arguments", lambda: one.arguments.call_one(1, 2, 3, d=5, z=6).get())
check("defaults", lambda: one.arguments.call_one(1).get())
check("positional only", lambda: one.arguments.call_one(a=1), TypeError)
check("own members", lambda: one.own.call_one().get())
check("not instrumented", lambda: one.plain.call_one().get())
given = []
check("copies", lambda: (one.appends.call_one(given).get(), given))
check("copies here", lambda: (this_proc().spawn("here", Worker).appends.call_one(given).get(), given))
for i in range(50):
    workers.note.broadcast(i)
check("in order", lambda: [log == list(range(50)) for log in workers.noted.call().get().values()])
check("decorated", lambda: workers.decorated.call(1).get().values())
check("lambda", lambda: workers.lambda_.call().get().values())
check("asks", lambda: one.asks.call_one(other).get())
check("a mesh travels", lambda: one.returns.call_one(workers).get().base.call().get().values())
check("a loop of its own", lambda: workers.loop.call().get().values())
check("not marked", lambda: workers.helper(3), RuntimeError)
check("as_endpoint", lambda: as_endpoint(workers.helper).call(4).get().values())
check("with a port", lambda: as_endpoint(workers.helper_with_port, explicit_response_port=True).call(4).get().values())
check("of a function", lambda: as_endpoint(len), ValueError)
check("called like a method", lambda: workers.base(), TypeError)
check("call_one of two", lambda: workers.base.call_one(), ValueError)
check("chosen", lambda: workers.base.choose().get())
check("streamed", lambda: [future.get() for future in workers.base.stream()])
check("broadcast", lambda: workers.note.broadcast(1))
for verb in ("call", "call_one", "choose", "stream", "broadcast"):
    check(f"wrong arguments, {verb}", lambda verb=verb: getattr(one.note, verb)(), TypeError)
check("on the class", lambda: list(inspect.signature(Worker.arguments._method).parameters))
check("its text", lambda: Worker.arguments._method.__doc__)
check("without a mesh", lambda: (Worker().helper(2), Worker().base._method(Worker())))
helped = procs.spawn("helped", Async)
check("async", lambda: helped.helped.call().get().values())
check("as_endpoint, async", lambda: as_endpoint(helped.helper).call().get().values())
check("as_endpoint, sync", lambda: as_endpoint(helped.sync_helper).call().get().values())


def failure(name, *args):
    try:
        getattr(one, name).call_one(*args).get()
    except ActorError as e:
        inner = e.exception
        inner = inner if not isinstance(inner, ActorError) else inner.exception
        return type(inner).__name__, str(inner)


for name in ("chained", "noted_error"):
    check(name, lambda name=name: failure(name))
check("nested", lambda: failure("nested", other))
check("an unpicklable answer", lambda: failure("unpicklable")[0])
try:
    one.chained.call_one().get()
except ActorError as e:
    texts = "Actor call workers.chained failed", "KeyError: 'a'", "ValueError: b"
    show("its text:", [text in str(e) for text in texts], isinstance(pickle.loads(pickle.dumps(e)), ActorError))
check("made", lambda: (type(ActorError(ValueError("x"))) is ActorError, ActorError(ValueError("x"), "m").message))
check("alive", lambda: workers.base.call().get().values())


def fails():
    raise ValueError("setup")


broken = this_host().spawn_procs({"n": 1}, bootstrap=fails)
try:
    broken.initialized.get()
except Exception as e:
    show("a failed bootstrap:", type(e) is ActorError, e.exception)


class MixedCleanup(Actor):
    @endpoint
    async def f(self): ...

    def __cleanup__(self, error): ...


class AsyncCleanup(Actor):
    @endpoint
    def f(self): ...

    async def __cleanup__(self, error): ...


class AsyncSupervise(Actor):
    @endpoint
    def f(self): ...

    async def __supervise__(self, failure): ...


for cls in (MixedCleanup, AsyncCleanup, AsyncSupervise):
    check(cls.__name__, lambda cls=cls: procs.spawn("x", cls), ValueError)
check("an unknown option", lambda: endpoint(foo=1), TypeError)
