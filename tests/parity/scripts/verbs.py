"""The verbs on a mesh and on its slices."""

import operator

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    as_endpoint,
    current_rank,
    current_size,
    endpoint,
    send,
    this_host,
)
from report import raises, show


class Worker(Actor):
    def __init__(self, start):
        self.n = start

    @endpoint
    def add(self, x, scale=1):
        self.n += x * scale
        return self.n

    @endpoint
    def rank(self):
        return current_rank().rank

    @endpoint
    def place(self):
        return dict(current_rank()), current_size()

    def plain(self, x):
        return x * 2


procs = this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2})
mesh = procs.spawn("worker", Worker, 10)
show("call", list(mesh.add.call(1).get().values()))
show("call kwargs", list(mesh.add.call(1, scale=5).get().values()))
show("items", [(p.rank, dict(p), v) for p, v in mesh.rank.call().get().items()])
show("slice", list(mesh.slice(hosts=1).rank.call().get().extent.labels))
show("slice values", list(mesh.slice(hosts=1).add.call(100).get().values()))
show("untouched", list(mesh.slice(hosts=0).add.call(0).get().values()))
show("call_one", mesh.slice(hosts=0, gpus=1).add.call_one(7).get())
show("place", list(mesh.slice(gpus=1).place.call().get().values()))
show("choose", mesh.rank.choose().get() in range(4))
show("stream", sorted(f.get() for f in mesh.rank.stream()))
show("broadcast", mesh.add.broadcast(1000))
show("after broadcast", list(mesh.add.call(0).get().values()))
show("accumulator", Accumulator(mesh.rank, 100, operator.add).accumulate().get())
show("as_endpoint", list(as_endpoint(mesh.plain).call(4).get().values()))
port, receiver = Channel.open()
send(mesh.rank, (), {}, port)
show("send", sorted(receiver.recv().get() for _ in range(4)))
port, receiver = Channel.open_ranked()
send(mesh.slice(gpus=1).rank, (), {}, port)
show("send ranked", sorted(receiver.recv().get() for _ in range(2)))
for what, kind, attempt in (
    ("call_one on four", ValueError, lambda: mesh.add.call_one(1)),
    ("missing argument", TypeError, lambda: mesh.add.call()),
    ("too many", TypeError, lambda: mesh.add.call(1, 2, 3)),
    ("unknown keyword", TypeError, lambda: mesh.add.call(1, wrong=2)),
    ("not an endpoint", RuntimeError, lambda: mesh.plain(3)),
    ("as_endpoint of something else", ValueError, lambda: as_endpoint(print)),
):
    raises(what, kind, attempt)
