"""Channels, `send`, explicit response ports, and awaiting what arrives."""

import asyncio
import gc
import pickle
import threading

import monarch.actor
from monarch.actor import Actor, ActorError, Channel, Port, PortReceiver, current_rank, endpoint, send, this_host
from report import check

monarch.actor.unhandled_fault_hook = lambda failure: None


class Worker(Actor):
    def __init__(self):
        self.port, self.receiver = Channel.open()

    @endpoint
    def echo(self, x, *, y=0):
        return x + y

    @endpoint
    def boom(self):
        raise ValueError("boom")

    @endpoint
    def feed(self, port, n):
        for i in range(n):
            port.send((current_rank().rank, i))

    @endpoint
    def sends_error(self, port):
        port.exception(KeyError("k"))

    @endpoint(explicit_response_port=True)
    def answers(self, port, x):
        assert isinstance(port, Port)
        port.send(x)

    @endpoint(explicit_response_port=True)
    def fails(self, port):
        port.exception(ValueError("polite"))

    @endpoint(explicit_response_port=True)
    def answers_from_a_thread(self, port):
        threading.Thread(target=port.send, args=("thread",)).start()

    @endpoint
    def own_port(self):
        return self.port

    @endpoint
    def received(self):
        return self.receiver.recv().get()


class Listens(Actor):
    def __init__(self):
        self.port, self.receiver = Channel.open()
        self.log = []

    @endpoint
    async def start(self):
        async def listen():
            while True:
                self.log.append(await self.receiver.recv())

        asyncio.create_task(listen())  # noqa: RUF006  # what is tried: nothing else holds it
        return self.port

    @endpoint
    async def heard(self):
        gc.collect()
        return self.log


procs = this_host().spawn_procs({"n": 3})
workers = procs.spawn("workers", Worker)
one = workers.slice(n=1)


def received(count, send, ranked=False, once=False):
    """What a new channel receives when its port is given to a function; errors by their class."""
    port, receiver = (Channel.open_ranked if ranked else Channel.open)(once=once)
    send(port)
    return [answer_of(receiver) for _ in range(count)]


def answer_of(receiver):
    try:
        return receiver.recv().get(timeout=30)
    except ActorError as e:
        return "ActorError", str(e.exception)
    except Exception as e:
        return type(e).__name__, str(e)


check("order", lambda: received(10, lambda port: [port.send(i) for i in range(10)]))
check("sending returns", lambda: Channel.open()[0].send(1))
check("a function", lambda: received(1, lambda port: port.send(lambda: 7))[0]())
check("unpicklable", lambda: Channel.open()[0].send(threading.Lock()))
check("an exception", lambda: received(1, lambda port: port.exception(ValueError("x"))))
check("another's exception", lambda: received(1, lambda port: one.sends_error.call_one(port).get()))
check("once", lambda: received(1, lambda port: port.send(1), once=True))
check("once, twice sent", lambda: received(1, lambda port: [port.send(i) for i in range(2)], once=True), RuntimeError)


def read_twice():
    port, receiver = Channel.open(once=True)
    port.send(1)
    return receiver.recv().get(timeout=30), receiver.recv().get(timeout=30)


check("once, twice read", read_twice, ValueError)


def late():
    port, receiver = Channel.open()
    future = receiver.recv()
    check("nothing yet", lambda: future.get(timeout=0.01))
    port.send("late")
    return future.get(timeout=30), future.get()


check("after a timeout", late)


def claims():
    port, receiver = Channel.open()
    first, second = receiver.recv(), receiver.recv()
    port.send(1)
    port.send(2)
    return second.get(timeout=30), first.get(timeout=30)


check("in the order of waits", claims)
check("fed by all", lambda: sorted(received(9, lambda port: workers.feed.call(port, 3).get())))
check("of one sender in order", lambda: received(5, lambda port: one.feed.call_one(port, 5).get()))
check("send", lambda: received(3, lambda port: send(workers.echo, (5,), {"y": 1}, port=port)))
check("send to a slice", lambda: received(2, lambda p: send(workers.slice(n=slice(1, 3)).echo, (5,), {}, p)))
check("send, chosen", lambda: received(1, lambda p: send(workers.echo, (5,), {}, p, selection="choose")))
check("send, failing", lambda: received(3, lambda port: send(workers.boom, (), {}, port=port)))
check("send, explicit", lambda: received(1, lambda port: send(one.answers, (5,), {}, port=port)))
check("send, ranked", lambda: sorted(received(3, lambda port: send(workers.echo, (5,), {}, port), ranked=True)))
check("send without a port", lambda: send(workers.echo, (5,), {}))
check("wrong selection", lambda: send(workers.echo, (5,), {}, selection="some"))
check("wrong arguments", lambda: send(workers.echo, (1, 2, 3), {}))
check("explicit", lambda: workers.answers.call(4).get().values())
check("explicit, failing", lambda: one.fails.call_one().get(), ValueError)
check("explicit, in a thread", lambda: workers.answers_from_a_thread.call().get().values())
one.own_port.call_one().get().send("to the actor")
check("an actor's port", lambda: one.received.call_one().get())
check("a receiver stays", lambda: pickle.dumps(Channel.open()[1]))
check("undeliverable", lambda: Channel.open()[0].return_undeliverable)
check("generic", lambda: len({Channel[int], Port[int], PortReceiver[int]}))
listens = procs.spawn("listens", Listens).slice(n=0)
port = listens.start.call_one().get()
for i in range(2):
    check("collected", lambda: len(listens.heard.call_one().get()))
    port.send(i)
    while len(listens.heard.call_one().get()) == i:
        pass
check("heard by a task", lambda: listens.heard.call_one().get())


async def awaited():
    port, receiver = Channel.open()
    log = []

    async def listen():
        log.append(await receiver.recv())
        done.set()

    done = asyncio.Event()
    asyncio.ensure_future(listen())  # noqa: RUF006  # the same
    await asyncio.sleep(0)
    gc.collect()
    port.send("a")
    await done.wait()
    port.send("b")
    return log, await receiver.recv()


check("awaited", lambda: asyncio.run(awaited()))
check("no event loop", lambda: one.echo.call_one(1).as_asyncio(), RuntimeError)
