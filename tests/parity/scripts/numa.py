"""Procs that are bound to NUMA nodes."""

import os

from monarch.actor import Actor, endpoint, this_host
from report import show


class Worker(Actor):
    @endpoint
    def bound(self):
        with open("/proc/self/status") as status:
            memory = next(line for line in status if line.startswith("Mems_allowed_list"))
        return os.sched_getaffinity(0), memory.split()[1]


with open("/sys/devices/system/node/node0/cpulist") as file:
    ends = [part.split("-") for part in file.read().split(",")]
node = {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)} & os.sched_getaffinity(0)
some = str(min(node))
for wanted, bind in (
    (node, {"cpunodebind": "0"}),
    (os.sched_getaffinity(0), {"cpunodebind": "all"}),
    (node, {"cpunodebind": "0", "membind": "0"}),
    (node, {"cpunodebind": "0", "cpus": some}),
    ({min(node)}, {"cpunodebind": "0", "physcpubind": some}),
    (os.sched_getaffinity(0), {"membind": "0", "cpus": some}),
):
    cpus, memory = this_host().spawn_procs({"n": 1}, proc_bind=[bind]).spawn("worker", Worker).bound.call_one().get(60)
    show("bound", *bind, cpus == wanted, memory)
