"""Tensors on a mesh: the active mesh, functions of the ranks, endpoints, borrows and drops, what may not be mixed."""

import warnings

import torch
from monarch import (
    Stream,
    call_on_shard_and_fetch,
    coalescing,
    fetch_shard,
    get_active_mesh,
    get_active_stream,
    inspect,
    no_mesh,
    remote,
)
from monarch.actor import Actor, endpoint, this_host
from monarch.cached_remote_function import remote_autograd_function
from monarch.common._coalescing import compile as compiled
from monarch.config import configure
from monarch.mesh_controller import RemoteException
from monarch.opaque_module import OpaqueModule
from monarch.opaque_object import OpaqueObject, opaque_method
from monarch.python_local_mesh import python_local_mesh
from report import raises, show

warnings.simplefilter("ignore")  # that calling a mesh is deprecated there
configure(host_spawn_ready_timeout="2m", mesh_proc_spawn_max_idle="2m", actor_spawn_max_idle="2m")


class Scorer(Actor):
    def __init__(self):
        self.seen = 0

    @endpoint(propagate="inspect")
    def note(self, x):
        self.seen += float(x.sum())

    @endpoint(propagate=lambda x: x.sum(0))
    def summed(self, x):
        return x.sum(0)

    @endpoint
    def total(self, x, y=0):
        return float((x + y).sum()) + self.seen


class Counter:
    def __init__(self, start):
        self.count = start

    def add(self, t):
        self.count += 1
        return t + self.count

    def get(self):
        return self.count


class CounterRef(OpaqueObject):
    @opaque_method
    def add(self, t):
        return t + 1


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


@remote(propagate="inspect")
def fill(x, value):
    x.fill_(value)


@remote(propagate=lambda x: x)
def fails(x):
    raise ValueError("in a function of the ranks")


@remote(propagate=lambda x: x)
def sets_device(x):
    torch.cuda.set_device(7)
    return x


@remote
def nested(x):
    return {"twice": x * 2, "pair": (x, 3)}


def first_line_with(words, attempt):
    """The word of these that the error's text has."""
    try:
        attempt()
    except Exception as e:
        return [word for word in words if word in str(e)]
    return None


def linear():
    return OpaqueModule("torch.nn.Linear", 3, 2)


def out(module, x):
    return module(x, propagator=lambda self, x: x.new_empty(len(x), 2))


procs = this_host().spawn_procs({"gpus": 2})
scorers = procs.spawn("scorers", Scorer)
one = this_host().spawn_procs({"gpus": 1})
others = one.spawn("others", Scorer)
local, place = torch.ones(3), torch.tensor(1)

with procs.activate():
    mesh = get_active_mesh()
    show("mesh", mesh.names, mesh.size(), mesh.size("gpus"), mesh.sizes, len(mesh), torch.ones(1).mesh is mesh)
    show("rank", [inspect(mesh.rank("gpus"), gpus=k) for k in range(2)], inspect(mesh.rank(("gpus",)), gpus=1))
    show("ranks", {name: inspect(t, gpus=1) for name, t in mesh.ranks.items()})
    show("parts", mesh(gpus=1).names, mesh(gpus=1).size(), mesh(gpus=slice(0, 1)).names, mesh.slice(gpus=0).names)
    show("renamed", mesh.rename(gpus="g").names, mesh.flatten("all").names, mesh.split(gpus=("a", "b"), b=2).names)
    show("groups", mesh.process_group("gpus").size(), mesh.process_group(("gpus",)).size())
    raises("no such dimension", KeyError, lambda: mesh.rank("hosts"))
    raises("no such size", KeyError, lambda: mesh.size("hosts"))
    raises("no such coordinate", IndexError, lambda: mesh(gpus=7))
    raises("no such part", TypeError, lambda: mesh(hosts=0))
    with mesh(gpus=1).activate():
        show("part active", inspect(torch.ones(2) * 3))

    x = torch.ones(2, 3)
    show("inspect", remote(lambda x: x + 1, propagate="inspect")(x), fill(x, 4.0), inspect(x).tolist())
    show("by name", inspect(remote("torch.neg", propagate=lambda x: x)(x)).tolist())
    show("of builtins", call_on_shard_and_fetch(remote("builtins.len"), x, shard={"gpus": 1}).get())
    show("cached", inspect(nested(x), gpus=1)["pair"][1], inspect(nested(x)["twice"].sum()))
    show("endpoints", scorers.note.rref(x), inspect(scorers.summed.rref(x)), scorers.total.call(x).get().item(gpus=1))
    show("numbers", scorers.total.call(x.sum(), y=1).get().item(gpus=0))
    show("local ones", scorers.total.call(x[0], local).get().item(gpus=0))
    raises("a number elsewhere", ValueError, lambda: others.total.call(x.sum()).get())
    raises("a tensor elsewhere", ValueError, lambda: others.total.call_one(x).get())

    t = torch.ones(3)
    raises("add", TypeError, lambda: torch.add(t, local))
    raises("+", TypeError, lambda: t + local)
    raises("reflected", TypeError, lambda: local - t)
    raises("matmul", TypeError, lambda: t @ local)
    raises("in place", TypeError, lambda: t.add_(local))
    raises("into a local one", TypeError, lambda: local.copy_(t))
    raises("indices", TypeError, lambda: t[torch.tensor([0, 1])] + t[local.long()])
    raises("stack", TypeError, lambda: torch.stack([t, local]))
    raises("a function of torch", TypeError, lambda: torch.nn.functional.linear(t, local))
    raises("a function", TypeError, lambda: remote(lambda a, b: a, propagate=lambda a, b: a)(t, local))
    show("operation", first_line_with(["add.Tensor", "add"], lambda: torch.add(t, local))[-1:])
    with no_mesh.activate():
        show("no mesh", local + 1, inspect(t + t))
    show("a local number as index", inspect(t[place]))
    show("shapes", first_line_with(["broadcast"], lambda: t + torch.ones(4)))

    other = Stream("other")

    def borrowed(mutable=False):
        t = torch.ones(3)
        return t, *other.borrow(t, mutable=mutable)

    t, b, borrow = borrowed()
    with other.activate():
        r = b + 1
    raises("written while lent", TypeError, lambda: t.add_(1))
    show("lent where", first_line_with(["Traceback of borrow"], lambda: t.add_(1)))
    with other.activate():
        raises("written, to be read", TypeError, lambda: b.add_(1))
    borrow.drop()
    borrow.drop()
    t.add_(5)
    show("written after drop", inspect(t))
    with other.activate():
        show("read before", inspect(r))
        raises("used after drop", TypeError, lambda: torch.add(b, 1))

    t, b, borrow = borrowed(mutable=True)
    raises("read while written", TypeError, lambda: torch.add(t, 1))
    raises("lent twice", TypeError, lambda: torch.add(t, b))
    with other.activate():
        b.mul_(3)
    borrow.drop()
    show("written by the other", inspect(t))

    t, b, borrow = borrowed()
    part = t[1:]
    raises("view written while lent", TypeError, lambda: part.add_(1))
    with other.activate():
        r = b + 1
    borrow.drop()
    with other.activate():
        show("dropped where", first_line_with(["is dropped at"], lambda: torch.add(b, 1)))

    t, b, borrow = borrowed(mutable=True)
    t.drop()
    with other.activate():
        b.mul_(3)
        show("lender dropped", t.dropped, inspect(b))
    borrow.drop()
    t, b, borrow = borrowed()
    t.drop()
    with other.activate():
        raises("lender dropped, written", TypeError, lambda: b.mul_(3))
    borrow.drop()
    t, b, borrow = borrowed()
    del b
    raises("borrowed one deleted", TypeError, lambda: t.add_(1))
    borrow.drop()
    t, b, borrow = borrowed()
    b2, borrow2 = other.borrow(t)
    borrow.drop()
    raises("lent to two", TypeError, lambda: t.add_(1))
    borrow2.drop()
    show("given back by both", inspect(t.add_(1)))

    t = torch.ones(3)
    view = t[1:]
    t.drop()
    t.drop()
    show("dropped", t.dropped, view.dropped)
    raises("a dropped one", TypeError, lambda: torch.add(t, 1))
    raises("a dropped one, by an operator", TypeError, lambda: t + 1)
    raises("a view of it", TypeError, lambda: inspect(view))
    show("where", first_line_with(["is dropped at"], lambda: inspect(t)))

    def in_a_block(t):
        with coalescing():
            return torch.add(t, 1)

    raises("dropped, in a block", TypeError, lambda: in_a_block(t))
    with coalescing():
        t = torch.ones(3)
        b, borrow = other.borrow(t, mutable=True)
        with other.activate():
            b.add_(1)
        borrow.drop()
        t.add_(1)
    show("borrowed in a block", inspect(t))

    @compiled(verify=False)
    def write(x):
        x.add_(1)
        return x * 2

    show("recorded", inspect(write(t)), inspect(write(t)))
    b, borrow = other.borrow(t)
    raises("recorded write while lent", TypeError, lambda: write(t))
    borrow.drop()
    b, borrow = other.borrow(t, mutable=True)
    raises("recorded read while written", TypeError, lambda: write(t))
    borrow.drop()
    show("recorded again", inspect(write(t)))
    t.drop()
    raises("recorded, dropped", TypeError, lambda: write(t))

    t = torch.ones(3)
    raises("recorded raise", ZeroDivisionError, lambda: compiled(lambda x: x * (1 // 0))(t))
    show("stream", get_active_stream() is t.stream, fetch_shard(t, gpus=1).get())

    module = linear()
    weight, bias = module.parameters()
    show("parameters", tuple(weight.shape), tuple(bias.shape), weight.requires_grad, type(module.parameters()))
    x = torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        out(module, x).sum().backward()
    show("gradients", inspect(weight.grad).tolist(), inspect(bias.grad).tolist(), tuple(x.grad.shape))
    with torch.no_grad():
        weight.zero_()
        bias.fill_(0.5)
        torch.optim.SGD([bias], lr=0.125).step()
        show("trained", inspect(out(module, x.detach())).tolist())
    counter = CounterRef(Counter, 3)
    show("object", inspect(counter.add(t)).tolist(), counter.call_method_on_shard_and_fetch("get").get())
    show("autograd", remote_autograd_function(Squared).__name__, remote_autograd_function(Squared, "mine").__name__)
show("outside", inspect(t + 1), inspect(torch.ones_like(t)))
raises("no active mesh", ValueError, get_active_mesh)
here = python_local_mesh(gpus=2)
with here.activate():
    show("here", get_active_mesh().names, inspect(torch.ones(2), shard={"host": 0, "gpu": 1}))
with one.activate():
    mesh = get_active_mesh()
    inspect(torch.ones(1))
mesh.exit()
show("actors after exit", others.total.call_one(torch.zeros(1)).get())
with procs.activate():
    raises("failure", RemoteException, lambda: inspect(fails(x)))
    show("device", first_line_with(["torch.cuda.set_device(7)"], lambda: inspect(sets_device(x))))
    with coalescing():
        failed = fails(t)
    raises("failed in a block", RemoteException, lambda: inspect(failed))

    @compiled(verify=False)
    def failing(x):
        return fails(x) + 1

    for _ in range(2):
        raises("recorded failure", RemoteException, lambda: inspect(failing(t)))
    raises("a wrong input", RemoteException, lambda: inspect(out(module, torch.ones(4, 7)).detach()))
