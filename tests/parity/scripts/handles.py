"""Meshes of hosts, procs and actors: their sizes, parts, ends and errors."""

import asyncio
import pickle

import monarch.actor
from monarch.actor import (
    Actor,
    HostMesh,
    Point,
    ProcMesh,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from report import check

monarch.actor.unhandled_fault_hook = lambda failure: None


class Worker(Actor):
    @endpoint
    def rank(self):
        return current_rank().rank


class Counter(Actor):
    def __init__(self, n=0):
        self.n = n

    @endpoint
    def add(self):
        self.n += 1
        return self.n


host = this_host()
check("host", lambda: (host.sizes, dict(host.extent), len(host), host.size(), isinstance(host, HostMesh)))
procs = host.spawn_procs({"a": 2, "b": 3})
check("sizes at once", lambda: (procs.sizes, repr(procs.extent), len(procs), procs.size(), procs.size("a")))
check("sizes of several", lambda: (procs.size(["a"]), procs.size(("a", "b"))))
check("size of none", lambda: procs.size("z"), KeyError)
check("one", lambda: (host.spawn_procs().sizes, len(host.spawn_procs())))
check("named", lambda: host.spawn_procs({"a": 1}, name="hello").sizes)
check("too few bindings", lambda: host.spawn_procs({"a": 2}, proc_bind=[{}]), ValueError)
check("ready", lambda: (procs.initialized.get(), host.initialized.get()))
check(
    "one of them", lambda: (procs.slice(a=0, b=1).sizes, len(procs.slice(a=0, b=1)), repr(procs.slice(a=0, b=1).extent))
)
check("ranges", lambda: (procs.slice(a=slice(0, 1)).sizes, procs.slice(b=slice(1, None)).sizes))
check("by a point", lambda: procs.slice(**Point(4, procs.extent)).sizes)
check("all", lambda: procs.slice().sizes)
check("beyond", lambda: procs.slice(a=5), IndexError)
check("negative", lambda: procs.slice(a=-1), IndexError)
check("range beyond", lambda: procs.slice(a=slice(0, 5)).sizes)
check("negative range", lambda: procs.slice(b=slice(-2, None)).sizes)
check("empty", lambda: procs.slice(b=slice(1, 1)), ValueError)
check("unknown", lambda: procs.slice(z=1), TypeError)
check("no index", lambda: procs.slice(a="x"), TypeError)
check("split", lambda: (procs.split(b=("c", "d"), d=3).sizes, procs.split(b=("c", "d"), c=3).sizes))
for what, sizes in (("uneven", {"d": 2}), ("unsized", {}), ("extra", {"d": 3, "q": 3})):
    check(f"split {what}", lambda sizes=sizes: procs.split(b=("c", "d"), **sizes), ValueError)
check("split of none", lambda: procs.split(z=("c", "d"), d=3), ValueError)
check("split into a known one", lambda: procs.split(b=("a", "d"), d=3), ValueError)
check("renamed", lambda: (procs.rename(a="z").sizes, procs.rename(a="b", b="a").sizes))
check("renamed to a known one", lambda: procs.rename(a="b"), ValueError)
check("rename of none", lambda: procs.rename(q="b"), ValueError)
check("flat", lambda: (procs.flatten("z").sizes, procs.slice(a=1).flatten("z").sizes))
check("flat with gaps", lambda: procs.slice(b=slice(0, 2)).flatten("z"), ValueError)
workers = procs.spawn("workers", Worker)
check("actors", lambda: (workers.sizes, len(workers), workers.size("b"), workers.initialized.get()))
check("ranks of a slice", lambda: workers.slice(b=1).rank.call().get().values())
check("slices of slices", lambda: workers.slice(b=slice(1, 3)).slice(b=1).slice(a=0).rank.call_one().get())
check("spawned on a slice", lambda: procs.slice(a=1).spawn("x", Worker).rank.call().get().values())
check("spawned on one", lambda: procs.slice(a=1, b=1).spawn("x", Worker).rank.call_one().get())
check("one name", lambda: [procs.spawn("x", Worker).rank.call().get().values() for _ in range(2)])
check(
    "named",
    lambda: [len(procs.spawn(name, Worker).rank.call().get()) for name in ("a b", "a.b", "A", "9x", "a_b", "ü")],
)
check("pickled", lambda: (pickle.loads(pickle.dumps(procs)).sizes, isinstance(procs, ProcMesh)))
check("true", lambda: (bool(workers), isinstance(hash(procs), int), isinstance(hash(workers), int)))
check("equal", lambda: (procs == procs, workers == workers, workers.slice(a=0) == workers.slice(a=0)))
check("nothing", lambda: workers.nothing, AttributeError)


async def within():
    async with host.spawn_procs({"a": 1}) as inner:
        mesh = inner.spawn("inner", Worker)
        values = (await mesh.rank.call()).values()
    try:
        await mesh.rank.call()
    except RuntimeError:
        return values, "stopped"


check("async with", lambda: asyncio.run(within()))
check("controller", lambda: get_or_spawn_controller("counter", Counter, 5).get().add.call_one().get())
check("the same", lambda: get_or_spawn_controller("counter", Counter, 9).get().add.call_one().get())
check("another", lambda: get_or_spawn_controller("another", Counter, n=2).get().add.call_one().get())
check("its sizes", lambda: get_or_spawn_controller("counter", Counter).get().sizes)
check("this proc", lambda: (this_proc().sizes, len(this_proc()), this_proc().spawn("q", Worker).rank.call_one().get()))
check("another interpreter", lambda: host.with_python_executable("/x/y").sizes)
check("a reference cannot end hosts", lambda: pickle.loads(pickle.dumps(host)).shutdown().get(), RuntimeError)
workers.stop("because").get()
check("stopped", lambda: workers.rank.call().get(timeout=60), RuntimeError)
check("stopped twice", lambda: bool(workers.stop().get()))
procs.stop().get()
check("procs stopped twice", lambda: bool(procs.stop().get()))
check("nothing more", lambda: procs.spawn("x", Worker).rank.call().get(timeout=60), RuntimeError)
check("sizes stay", lambda: procs.sizes)
