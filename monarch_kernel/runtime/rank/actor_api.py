"""Load the parts of the actor API that ranks have not loaded yet, because the modules of most actors import it.

Fork servers import this module once the first ranks are started.
"""

# pyright: reportUnusedImport=false
import monarch_kernel.runtime.actor.deferred_future
import monarch_kernel.runtime.actor.healing.heal_mesh
import monarch_kernel.runtime.actor.hosts.attachment
import monarch_kernel.runtime.actor.hosts.bootstrap_command
import monarch_kernel.runtime.actor.hosts.host_mesh
import monarch_kernel.runtime.actor.ids
import monarch_kernel.runtime.actor.meshes.mesh_registry
import monarch_kernel.runtime.actor.meshes.singletons
import monarch_kernel.runtime.actor.meshes.tool_methods
import monarch_kernel.runtime.actor.ports.receiver
import monarch_kernel.runtime.actor.settings
import monarch_kernel.runtime.actor.telemetry
import monarch_kernel.runtime.actor.transports
import monarch_kernel.runtime.actor.unhandled_fault
import monarch_kernel.runtime.transfer.backend_settings  # noqa: F401
