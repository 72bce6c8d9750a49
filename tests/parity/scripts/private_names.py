"""What real programs take from Monarch's private modules and attributes."""

import importlib
import inspect
import pickle

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor import actor_mesh
from monarch._src.actor.mock import patch_actor
from monarch.actor import Actor, context, endpoint, get_or_spawn_controller, this_host
from report import show

NAMES = (
    "_src.actor.actor_mesh:ActorMesh",
    "_src.actor.actor_mesh:current_rank",
    "_src.actor.actor_mesh:_context",
    "_src.actor.actor_mesh:Port",
    "_src.actor.actor_mesh:Instance",
    "_src.actor.actor_mesh:context",
    "_src.actor.endpoint:EndpointProperty",
    "_src.actor.endpoint:endpoint",
    "_src.actor.shape:Extent",
    "_src.actor.shape:MeshTrait",
    "_src.actor.shape:NDSlice",
    "_src.actor.bootstrap:attach_to_workers",
    "_src.actor.host_mesh:this_host",
    "_src.actor.host_mesh:HostMesh",
    "_src.actor.proc_mesh:ProcMesh",
    "_src.actor.proc_mesh:get_or_spawn_controller",
    "_src.actor.future:Future",
    "_src.actor.mock:patch_actor",
    "_src.actor.mock:patch_tensor_engine",
    "_src.actor.supervision:unhandled_fault_hook",
    "_src.actor.debugger.debug_controller:debug_controller",
    "_src.job.job:JobState",
    "_src.job.job:JobTrait",
    "_src.job.job:LocalJob",
    "_src.job.job:SSHJob",
    "_src.job.process:ProcessJob",
    "_src.job.slurm:SlurmJob",
    "_src.job.kubernetes:_WORKER_BOOTSTRAP_SCRIPT",
    "_src.tools.commands:load_current_job",
    "_src.rdma.rdma:RDMABuffer",
    "_src.spmd.actor:SPMDActor",
    "_rust_bindings.monarch_hyperactor.actor_mesh:__name__",
    "_rust_bindings.monarch_hyperactor.channel:ChannelTransport",
    "_rust_bindings.monarch_hyperactor.config:configure",
    "_rust_bindings.monarch_hyperactor.host_mesh:BootstrapCommand",
    "_rust_bindings.monarch_hyperactor.shape:Shape",
    "_rust_bindings.monarch_hyperactor.shape:Slice",
    "_rust_bindings.monarch_hyperactor.shape:Region",
    "_rust_bindings.monarch_hyperactor.logging:LoggingMeshClient",
    "_rust_bindings.monarch_hyperactor.proc:ProcId",
    "_rust_bindings.monarch_hyperactor.supervision:MeshFailure",
)
for name in NAMES:
    module, _, attribute = name.partition(":")
    show(name, hasattr(importlib.import_module("monarch." + module), attribute))
show("the same class", importlib.import_module("monarch._src.actor.host_mesh").this_host is this_host)
try:
    importlib.import_module("monarch._src.nothing")
except ImportError:
    show("no such module")
show("SupervisionError is a RuntimeError", issubclass(SupervisionError, RuntimeError))


class Big(Actor):
    @endpoint
    def who(self):
        return "big"

    @endpoint
    def add(self, a, *, b=2):
        return a + b

    @endpoint
    def me(self):
        actor_id = context().actor_instance.actor_id
        back = pickle.loads(pickle.dumps(str(actor_id)))
        return actor_id.actor_name, bool(actor_id.proc_id), bool(actor_id.pid), back == str(actor_id)

    @endpoint
    def runs(self):
        from monarch._src.actor import actor_mesh

        return actor_mesh._context.get().actor_instance.name


class Small(Actor):
    @endpoint
    def who(self):
        return "small"


class Nest(Actor):
    @endpoint
    def spawn(self):
        return context().actor_instance.proc.spawn("inner", Big).who.call_one().get()


show("signature", inspect.signature(Big.add._method), "return a + b" in inspect.getsource(Big().add._method))
show("without a mesh", Big.add._method(Big(), 1, b=3))

show("no context yet", actor_mesh._context.get())
procs = this_host().spawn_procs({"x": 2, "y": 1})
show("a context", actor_mesh._context.get() is not None, actor_mesh._context.get() is context())
big = procs.spawn("big", Big)
show("running", list(big.runs.call().get().values()))
show("ids", list(big.me.call().get().values()), context().actor_instance.actor_id.actor_name)
for mesh in (procs, big, this_host(), procs.slice(x=1)):
    shape = mesh._ndslice
    show(type(mesh).__name__, list(mesh._labels), shape.offset, list(shape.sizes), list(shape.strides))
show("proc mesh", big._proc_mesh.sizes, big.slice(x=0)._proc_mesh.sizes, this_host().is_fake_in_process)

one = procs.slice(x=0, y=0)
nest = one.spawn("nest", Nest)
with patch_actor(Big, Small) as mock:
    show("patched", mock is Small, one.spawn("a", Big).who.call_one().get(), nest.spawn.call_one().get())
    fresh = this_host().spawn_procs({"n": 1}).spawn("nest", Nest)
    show("in new procs", fresh.spawn.call_one().get())
    show("controller", get_or_spawn_controller("one", Big).get().who.call_one().get())
show("not patched", one.spawn("b", Big).who.call_one().get(), fresh.spawn.call_one().get())


@patch_actor(Big, Small)
def spawned():
    return one.spawn("c", Big).who.call_one().get()


show("decorated", spawned(), one.spawn("d", Big).who.call_one().get())
big._proc_mesh.stop().get()
show("stopped")
