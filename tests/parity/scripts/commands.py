"""How procs are started: commands, their environment, and bindings, here and on the host of a worker."""

import os
import subprocess
import sys
import tempfile

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import Actor, attach_to_workers, default_bootstrap_cmd, endpoint, this_host
from report import check, show

monarch.actor.unhandled_fault_hook = lambda failure: None
os.environ |= {"CONTROLLER": "its", "SHARED": "controller's"}
MODULE = ["-m", "monarch._src.actor.bootstrap_main"]


class Worker(Actor):
    @endpoint
    def variables(self, *names):
        return [os.environ.get(name) for name in names]

    @endpoint
    def cpus(self):
        return sorted(os.sched_getaffinity(0))

    @endpoint
    def beside(self, *names):
        here = this_host()
        colored = here.spawn_procs({"m": 1}, bootstrap_command=default_bootstrap_cmd().with_env({"COLOR": "red"}))
        return [variables(procs, *names) for procs in (here.spawn_procs({"m": 1}), colored)]


def variables(procs, *names):
    return procs.spawn("worker", Worker).variables.call(*names).get(timeout=60).values()


host = this_host()
command = default_bootstrap_cmd()
check("parts", lambda: [type(part) for part in (command.program, command.args, command.env)])
green = command.with_env({"COLOR": "green"})
check("with_env", lambda: (green.env["COLOR"], "COLOR" in command.env, green.program == command.program))
check("more", lambda: sorted(green.with_env({"COLOR": "red", "SIZE": "2"}).env.items() - command.env.items()))
check("no string", lambda: command.with_env({"COLOR": 1}), TypeError)
changed = default_bootstrap_cmd()
changed.env = {**changed.env, "COLOR": "blue"}
check("changed", lambda: variables(host.spawn_procs({"n": 1}, bootstrap_command=changed), "COLOR"))
check("uniform", lambda: variables(host.spawn_procs({"n": 2}, bootstrap_command=green), "COLOR"))
check("the hosts stay", lambda: variables(host.spawn_procs({"n": 1}), "COLOR"))


def each(point):
    return command.with_env({"COLOR": f"{point['n']} {point.rank} {point.extent}"})


check("for each", lambda: variables(host.spawn_procs({"n": 2}, bootstrap_command=each), "COLOR"))
named = BootstrapCommand(program=sys.executable, arg0=None, args=MODULE, env={"COLOR": "by name"})
check("named", lambda: variables(host.spawn_procs({"n": 1}, bootstrap_command=named), "COLOR", "CONTROLLER"))
bare = {"COLOR": "bare", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
bare = BootstrapCommand(program=sys.executable, arg0=None, args=MODULE, env=bare, inherit_env=False)
check("bare", lambda: variables(host.spawn_procs({"n": 1}, bootstrap_command=bare), "COLOR", "CONTROLLER"))

cpus = sorted(os.sched_getaffinity(0))
first, others = {cpus[0]}, set(cpus[1:])
for what, wanted, bind in (
    ("a CPU", first, {"physcpubind": str(cpus[0])}),
    ("by taskset", first, {"cpus": str(cpus[0])}),
    ("by both", first, {"physcpubind": str(cpus[0]), "cpus": "0-9999"}),
    ("all", {*cpus}, {"physcpubind": "all"}),
    ("the first", first, {"physcpubind": "+0"}),
    ("the others", others, {"physcpubind": f"!{cpus[0]}"}),
):
    bound = host.spawn_procs({"n": 1}, proc_bind=[bind]).spawn("worker", Worker).cpus.call_one()
    show("bound to", what, {*bound.get(timeout=60)} == wanted)

with tempfile.TemporaryDirectory() as folder:
    address = f"ipc://{folder}/worker"
    env = {**os.environ, "HOST": "its", "SHARED": "host's"}
    del env["CONTROLLER"]
    code = f"from monarch.actor import *; run_worker_loop_forever(address={address!r}, ca='trust_all_connections')"
    if "monarch_kernel" in sys.modules:
        code = f"import monarch_kernel; monarch_kernel.enable_monarch_imports(); {code}"
    worker = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
        names = "COLOR", "CONTROLLER", "HOST", "SHARED"
        check("hosts", lambda: hosts.sizes)
        for what, chosen in (("named", named), ("green", green), ("each", lambda point: green)):
            show(f"there, {what}:", variables(hosts.spawn_procs({"n": 1}, bootstrap_command=chosen), *names))
        check("overlap", lambda: hosts.spawn_procs({"hosts": 1}), ValueError)
        check("a slice cannot end hosts", lambda: hosts.slice(hosts=0).shutdown().get(), RuntimeError)
        check("stopped", lambda: bool(hosts.stop().get()))
        again = attach_to_workers(ca="trust_all_connections", workers=[address])
        check("used again", lambda: variables(again.spawn_procs({"n": 1}, bootstrap_command=named), *names))
        check("ended", lambda: bool(again.shutdown().get()))
        check("the worker ends", lambda: worker.wait(timeout=60))
    finally:
        worker.kill()
        worker.wait()
