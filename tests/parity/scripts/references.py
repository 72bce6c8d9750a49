"""Meshes that travel, actors that own actors, and singletons."""

import os
import pickle

from monarch.actor import Actor, context, current_rank, endpoint, get_or_spawn_controller, this_host, this_proc
from report import show


class Worker(Actor):
    def __init__(self, tag="plain"):
        self.tag = tag

    @endpoint
    def get(self):
        return self.tag, current_rank().rank, context().actor_instance.rank.rank

    @endpoint
    def pid(self):
        return os.getpid()


class User(Actor):
    @endpoint
    def use(self, mesh):
        return list(mesh.get.call().get().values())

    @endpoint
    def spawn_on(self, procs):
        self.mesh = procs.spawn("made", Worker, "made by user")
        self.mesh.initialized.get()
        return self.mesh

    @endpoint
    def spawn_procs(self):
        self.procs = this_host().spawn_procs(per_host={"x": 2})
        self.deep = self.procs.spawn("deep", Worker, "deep")
        self.deep.initialized.get()
        return self.deep

    @endpoint
    def count(self, name):
        return get_or_spawn_controller(name, Counter).get().add.call_one().get()


class Counter(Actor):
    def __init__(self):
        self.n = 0

    @endpoint
    def add(self):
        self.n += 1
        return self.n


procs = this_host().spawn_procs(per_host={"gpus": 3})
mesh = procs.spawn("worker", Worker)
user = this_host().spawn_procs(per_host={"gpus": 1}).spawn("user", User)
show("mesh", user.use.call_one(mesh).get())
show("slice", user.use.call_one(mesh.slice(gpus=slice(1, 3))).get())
show("pickled", list(pickle.loads(pickle.dumps(mesh.slice(gpus=2))).get.call().get().values()))
made = user.spawn_on.call_one(procs.slice(gpus=slice(0, 2))).get()
show("made elsewhere", list(made.get.call().get().values()))
show("same procs", list(made.pid.call().get().values()) == list(mesh.slice(gpus=slice(0, 2)).pid.call().get().values()))
deep = user.spawn_procs.call_one().get()
show("procs of an actor", list(deep.get.call().get().values()), deep.sizes)
show("controller", get_or_spawn_controller("counter", Counter).get().add.call_one().get())
show("the same from a rank", user.count.call_one("counter").get())
show("another", user.count.call_one("another").get())
local = this_proc().spawn("local", Worker, "here")
show("this_proc", local.get.call_one().get(), local.pid.call_one().get() == os.getpid())
