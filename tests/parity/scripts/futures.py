"""Futures, and awaiting."""

import asyncio

from monarch.actor import Actor, ActorError, Channel, endpoint, this_host
from report import raises, show


class Worker(Actor):
    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def boom(self):
        raise ValueError("boom")

    @endpoint
    def gated(self, gate):
        port, receiver = Channel.open()
        gate.send(port)
        return receiver.recv().get()


mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("worker", Worker)
one = mesh.slice(gpus=0)
future = one.echo.call_one([1])
show("repeatable", future.get(), future.get() is future.get(), future.result(), future.exception())
failed = one.boom.call_one()
show("exception", isinstance(failed.exception(), ActorError), "ValueError: boom" in str(failed.exception()))
gate, gates = Channel.open()
call = one.gated.call_one(gate)
port = gates.recv().get()
raises("sending a future", TypeError, lambda: one.echo.call_one(call))
raises("timeout", TimeoutError, lambda: call.get(timeout=0.05))
port.send("late")
show("after the timeout", call.get())


async def main():
    values = await asyncio.gather(*(follow(mesh.echo.call(i)) for i in range(50)))
    show("awaits", [list(v.values()) for v in values] == [[i, i] for i in range(50)])
    show("as_asyncio", await one.echo.call_one(3).as_asyncio())
    again = one.echo.call_one(4)
    show("await twice", await again, await again)
    try:
        await one.boom.call_one()
    except Exception as e:
        show("await failure", "ValueError: boom" in str(e))


async def follow(future):
    return await future


asyncio.run(main())
