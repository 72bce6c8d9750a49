"""What libraries on top of Monarch do with meshes: names of their own on them, one collector for all, buffers."""

import asyncio
import math
import os
from dataclasses import dataclass
from typing import Any

from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import (
    Actor,
    ActorError,
    context,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from report import show


class Collector:
    """Of each rank its own, found by whoever records in that process."""

    one = None

    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one

    def __init__(self):
        self.values = getattr(self, "values", [])


class Fetcher(Actor):
    def __init__(self, logger, name):
        self.central, self.name = logger, name

    @endpoint
    async def flush(self):
        values = Collector().values
        taken = list(values)
        values.clear()
        return self.name, taken


class Logger(Actor):
    def __init__(self):
        self.fetchers = {}

    def checked(self, mode):
        return mode.upper()

    @endpoint
    async def register(self, fetcher, key):
        self.fetchers[key] = fetcher

    @endpoint
    async def forget(self, key):
        return self.fetchers.pop(key, None) is not None

    @endpoint
    async def has(self, key):
        return key in self.fetchers

    @endpoint
    async def flush(self):
        found = await asyncio.gather(*(f.flush.call() for f in self.fetchers.values()), return_exceptions=True)
        return sorted(value for mesh in found for _, value in mesh.items())


class Base(Actor):
    def __init__(self):
        self._rank = current_rank().rank
        self._size = math.prod(current_size().values())
        self._proc_mesh = None
        super().__init__()

    @endpoint
    async def setup(self):
        return None

    @classmethod
    async def launch(cls, name, *args):
        procs = this_host().spawn_procs(per_host={"procs": 2}, name=name)
        mesh = procs.spawn(cls.__name__, cls, *args)
        mesh._proc_mesh = procs
        await mesh.setup.call()
        return mesh

    @classmethod
    async def close(cls, mesh):
        await mesh._proc_mesh.stop()


class Counter(Base):
    def __init__(self, start):
        super().__init__()
        self.count = start

    @endpoint
    async def setup(self):
        os.environ["SET_UP"] = str(self._rank)

    @endpoint
    async def add(self, n):
        self.count += n
        Collector().values.append(self.count)
        return self.count

    @endpoint
    async def about(self):
        actor = context().actor_instance.actor_id.actor_name.lower()
        return actor, self._rank, self._size, os.environ["SET_UP"], self._proc_mesh

    @endpoint
    async def fail(self):
        raise RuntimeError("asked to")


@dataclass
class Buffer(Base):
    store: dict[str, Any]
    size: int = 2

    def __post_init__(self):
        self.added = 0

    @endpoint
    async def items(self):
        return sorted(self.store.items())

    @endpoint
    async def put(self, value):
        self.added += 1
        self.store[f"{self.added:02}"] = value

    @endpoint
    async def _length(self):
        return len(self.store)

    @endpoint
    async def sample(self):
        taken = sorted(self.store)[: self.size]
        return [self.store.pop(key) for key in taken] if len(taken) == self.size else None


async def register(logger, procs, name):
    fetcher = procs.spawn("fetcher", Fetcher, logger, name)
    procs._uid = name
    procs._fetcher = fetcher
    await logger.register.call_one(fetcher, name)


async def main():
    logger = await get_or_spawn_controller("logger", Logger)
    show("a class without a mesh:", Logger().checked("x"))
    await register(logger, this_proc(), "client")
    meshes = await asyncio.gather(*(Counter.launch(f"Counter_{n}", 10 * n) for n in range(2)))
    for n, mesh in enumerate(meshes):
        mesh._proc_mesh._host, mesh._proc_mesh._gpu_ids = this_host(), [n]
        await register(logger, mesh._proc_mesh, f"Counter_{n}")
    show("kinds:", [isinstance(mesh, ActorMesh) for mesh in meshes])
    show("about:", [[v for _, v in (await mesh.about.call()).items()] for mesh in meshes])
    show("own names:", [(m._proc_mesh._uid, m._proc_mesh._gpu_ids, hasattr(m._proc_mesh, "_none")) for m in meshes])
    for mesh in meshes:
        await mesh.add.call(1)
        await mesh.add.call(2)
    show("flushed:", await logger.flush.call_one())
    show("flushed again:", await logger.flush.call_one())
    try:
        await meshes[0].fail.call()
    except ActorError as e:
        show("failed:", (type(e.exception).__name__, str(e.exception)))
    show("goes on:", [v for _, v in (await meshes[0].add.call(0)).items()])
    known = {mesh._proc_mesh: n for n, mesh in enumerate(meshes)}
    show("keys:", [known[mesh._proc_mesh] for mesh in meshes])
    show("forgotten:", await logger.forget.call_one(meshes[0]._proc_mesh._uid))
    show("has:", [await logger.has.call_one(mesh._proc_mesh._uid) for mesh in meshes])
    await Counter.close(meshes[0])
    try:
        await meshes[0].add.call(1)
    except RuntimeError:
        show("closed:", True)
    show("the other:", [v for _, v in (await meshes[1].add.call(1)).items()])

    buffer = this_host().spawn_procs(per_host={"procs": 1}).spawn("buffer", Buffer, store={}, size=2)
    await buffer.setup.call()
    for value in "abc":
        await buffer.put.call_one(value)
    show("length:", await buffer._length.call_one())
    show("items:", await buffer.items.call_one())
    show("samples:", [await buffer.sample.call_one() for _ in range(2)])


if __name__ == "__main__":
    asyncio.run(main())
