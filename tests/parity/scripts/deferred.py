"""Deferred functions, spans and identifiers."""

import asyncio
import contextvars
import inspect

from monarch.actor import Actor, ProcId, Uid, current_rank, endpoint, returns_future, span, this_host, traced
from report import raises, show

log = []


@returns_future
async def add(x):
    log.append(x)
    await asyncio.sleep(0)
    return x + 1


@returns_future
async def boom():
    raise ValueError("boom")


@returns_future
async def slow():
    await asyncio.sleep(60)


class Worker(Actor):
    @endpoint
    async def work(self):
        @returns_future
        async def inner(x):
            return x, current_rank().rank

        return await inner(3)


future = add(1)
show("nothing has begun", log)
show("get", future.get(), future.get(), future.result(), log)
show("function", add.__name__, inspect.iscoroutinefunction(add), inspect.signature(add))
raises("get fails", ValueError, lambda: boom().get())
show("exception", repr(boom().exception()), add(2).exception())
raises("wrong arguments", TypeError, lambda: add())
raises("no async function", TypeError, lambda: returns_future(lambda: 3))
late = slow()
raises("timeout", TimeoutError, lambda: late.get(timeout=0.05))
raises("after the timeout", TimeoutError, lambda: late.get())


async def main():
    variable = contextvars.ContextVar("variable")
    loop = asyncio.get_running_loop()

    @returns_future
    async def look():
        return variable.get(), asyncio.get_running_loop() is loop

    variable.set(1)
    future = look()
    variable.set(2)
    show("in a loop", await future, await future, await asyncio.gather(add(5), add(6)))
    try:
        await boom()
    except ValueError as e:
        show("await fails", e)


asyncio.run(main())
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("worker", Worker)
show("in actors", list(mesh.work.call().get().values()))


@traced(name="other")
async def later():
    return 3


def fails():
    with span("block"):
        raise KeyError("k")


show("traced", traced(len)("abc"), asyncio.run(later()), inspect.iscoroutinefunction(later), later.__name__)
raises("span", KeyError, fails)
raises("span without a name", TypeError, lambda: span(3))

for uid in (
    *(Uid.instance_from_value(7), Uid.instance_from_value(7, "x"), Uid.instance_from_value(2**64 - 1)),
    *(Uid.from_string("a-b"), Uid.from_string("a<11118>")),
):
    show("uid", uid, uid.label, uid.instance_value, uid.is_instance, uid.is_singleton)
show("equal", Uid.from_string("x<8>") == Uid.from_string("<8>"), Uid.from_string("x") == Uid.from_string("y"))
show("new", Uid.instance("y").label, Uid.anonymous().is_instance, Uid.instance() == Uid.instance())
proc = ProcId.from_string("x<8>")
show("proc", proc, proc.label, proc.uid, proc == ProcId(Uid.from_string("x<8>")), proc == proc.uid)
for text in ("", "A", "1a", "a.b", "a b", "a<", "a<>", "a<0>", "a<8>b", "abc-", "aB", "a" * 64):
    raises(f"no uid {text}", ValueError, lambda text=text: Uid.from_string(text))
raises("no proc id", ValueError, lambda: ProcId.from_string("!"))
raises("a proc id of a string", TypeError, lambda: ProcId("x"))
