"""The actor API: hosts, procs and actors as meshes, with the names and semantics of ``monarch.actor``.

This module holds names only; ``monarch_kernel.runtime.actor`` has the code.
"""

from monarch_kernel.loading import NoCollection, load_msgspec

with NoCollection():
    load_msgspec()
    from monarch_kernel import config
    from monarch_kernel.runtime.actor.calls.endpoint import Accumulator, Endpoint, as_endpoint, send
    from monarch_kernel.runtime.actor.context import (
        Context,
        context,
        current_actor_name,
        current_rank,
        current_size,
    )
    from monarch_kernel.runtime.actor.deferred_future import returns_future
    from monarch_kernel.runtime.actor.definition import Actor, concurrent_endpoint, endpoint
    from monarch_kernel.runtime.actor.errors import ActorError, MeshFailure, SupervisionError
    from monarch_kernel.runtime.actor.healing.heal_mesh import heal_mesh
    from monarch_kernel.runtime.actor.healing.healed import Healed, HealError, Replacement
    from monarch_kernel.runtime.actor.hosts.attachment import (
        attach,
        attach_to_workers,
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
        start_worker_loop_forever,
    )
    from monarch_kernel.runtime.actor.hosts.bootstrap_command import BootstrapCommand, default_bootstrap_cmd
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, local_proc_mesh, proc_mesh, this_host, this_proc
    from monarch_kernel.runtime.actor.ids import ProcId, Uid
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.mesh_registry import shutdown_context
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.actor.meshes.singletons import get_or_spawn_controller
    from monarch_kernel.runtime.actor.meshes.tool_methods import debug_controller
    from monarch_kernel.runtime.actor.ports.port import Port
    from monarch_kernel.runtime.actor.ports.receiver import Channel, PortReceiver
    from monarch_kernel.runtime.actor.telemetry import get_meter, span, traced
    from monarch_kernel.runtime.actor.transports import ChannelTransport, enable_transport
    from monarch_kernel.runtime.actor.unhandled_fault import default_hook as unhandled_fault_hook
    from monarch_kernel.runtime.mesh.shape import Extent, Point
    from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
    from monarch_kernel.runtime.node.future import Future
    from monarch_kernel.runtime.supervision import RestartPolicy

#: Makes ``import monarch.actor.concurrent`` consult the table in ``aliases``.
__path__: list[str] = []

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HealError",
    "Healed",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "Replacement",
    "RestartPolicy",
    "SupervisionError",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "heal_mesh",
    "local_proc_mesh",
    "proc_mesh",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]
