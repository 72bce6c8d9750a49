"""What running code learns of itself, and of whom it was called with."""

import asyncio

from monarch.actor import (
    Actor,
    Extent,
    Point,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)
from report import check


class Worker(Actor):
    def __init__(self):
        here = context()
        self.at_start = dict(here.actor_instance.rank), dict(here.message_rank), here.actor_instance.name

    @endpoint
    def started(self):
        return self.at_start

    @endpoint
    def ranks(self):
        here = context()
        spawned, called = here.actor_instance.rank, here.message_rank
        return dict(called), called.rank, dict(spawned), spawned.rank, current_size(), dict(current_rank())

    @endpoint
    def parts(self):
        instance = context().actor_instance
        actor_id = instance.actor_id
        return instance.name, instance.proc.sizes, instance.proc_mesh.sizes, actor_id.actor_name.partition("-")[0]

    @endpoint
    def named(self):
        return current_actor_name() == str(context().actor_instance.actor_id)

    @endpoint
    def spawns_beside_itself(self):
        self.sibling = context().actor_instance.proc.spawn("sibling", Sibling)
        return self.sibling

    @endpoint
    def places(self):
        return this_host().sizes, this_proc().sizes, this_host().spawn_procs({"z": 2}).sizes


class Sibling(Actor):
    @endpoint
    def who(self):
        return context().actor_instance.name, dict(context().actor_instance.rank), current_rank().rank


class Tasks(Actor):
    @endpoint
    async def ranks(self):
        async def rank():
            return context().actor_instance.name, current_rank().rank

        return await asyncio.create_task(rank()), await asyncio.to_thread(lambda: current_rank().rank)


outside = context()
check("client", lambda: (outside.message_rank.rank, dict(outside.message_rank), outside.message_rank.extent))
check("client's rank", lambda: (outside.actor_instance.rank.rank, dict(outside.actor_instance.rank)))
check("client's name", lambda: (outside.actor_instance.name, outside.actor_instance.proc.sizes))
check("the same", lambda: (context() is context(), context().actor_instance is outside.actor_instance))
check("outside", lambda: (current_rank().rank, current_size()))
procs = this_host().spawn_procs({"a": 2, "b": 2})
workers = procs.spawn("workers", Worker)
check("at the start", lambda: workers.started.call().get().values())
check("all", lambda: workers.ranks.call().get().values())
check("a slice", lambda: workers.slice(a=1).ranks.call().get().values())
check("one", lambda: workers.slice(a=1, b=0).ranks.call_one().get())
check("flat", lambda: workers.flatten("z").ranks.call().get().values())
check("renamed", lambda: workers.rename(a="q").ranks.call().get().values()[3])
check("split", lambda: workers.split(b=("c", "d"), d=2).ranks.call().get().values()[3])
check("parts", lambda: workers.parts.call().get().values()[3])
check("named", lambda: workers.named.call().get().values())
sibling = workers.slice(a=0, b=1).spawns_beside_itself.call_one().get()
check("sibling", lambda: (sibling.sizes, sibling.who.call_one().get()))
check("places", lambda: workers.slice(a=0, b=0).places.call_one().get())
check("tasks", lambda: procs.spawn("tasks", Tasks).ranks.call().get().values())
point = Point(3, Extent(["a", "b"], [2, 2]))
check("point", lambda: (repr(point), dict(point), dict(**point), len(point), "a" in point, point["a"]))
check("point's parts", lambda: (list(point.items()), list(point.values()), point.size("b"), point.rank))
check("equal", lambda: (point == Point(3, Extent(["a", "b"], [2, 2])), point == Point(2, Extent(["a", "b"], [2, 2]))))
check("no such dimension", lambda: point["z"], ValueError)
check("no such size", lambda: point.size("z"), ValueError)
extent = Extent(["a", "b"], [2, 3])
check("extent", lambda: (repr(extent), extent.nelements, list(extent.keys()), extent["a"], dict(extent)))
check("extent's parts", lambda: (extent.labels, extent.sizes, len(extent), "a" in extent))
check("no such label", lambda: extent["z"], ValueError)
check("labels and sizes", lambda: Extent(["a"], [2, 3]), ValueError)
