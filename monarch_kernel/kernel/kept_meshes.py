"""List kept meshes, which outlive kernels; attach to one, and detach from it."""

from __future__ import annotations

import os

from IPython.core.error import UsageError

from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.managed_mesh import recall
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import KeptError, KeptHost, KeptInfo


def kept_by_others() -> list[KeptInfo]:
    """Return the kept meshes of this user that are not attached to this notebook.

    Raises:
        KeptError: their folder belongs to another user.
    """
    here = {host.name for host in tool_runtime().held()}
    return [info for info in tool_runtime().kept() if info.name not in here]


def is_kept(name: str, command: str) -> bool:
    """Return whether this is a kept mesh of this user."""
    try:
        return any(info.name == name for info in tool_runtime().kept())
    except KeptError as error:
        raise UsageError(f"{command}: there is no mesh {name!r} here, and {error}") from None


def attach(session: MeshSession, name: str, force: bool = False) -> KeptHost:
    """Attach to a kept mesh, and make it the mesh in use."""
    label = os.path.basename(os.path.abspath(name)) if os.sep in name else name
    if label in session.proc_meshes():
        raise UsageError(f"%mesh attach: there is a mesh {label!r} here already; stop or detach it first")
    try:
        host = tool_runtime().attach(name, force)
    except (KeptError, ValueError) as error:
        raise UsageError(f"%mesh attach: {error}{_force_hint(error, force)}") from None
    for procs in host.proc_meshes:
        managed = recall(procs)
        if managed is not None:
            session.adopt(managed)
        session.choose(procs.name)
    return host


def detach(session: MeshSession, name: str | None) -> str:
    """Detach from a kept mesh, which keeps running.

    Returns:
        One line for the user.
    """
    procs = session.find(name, "%mesh detach")
    host = tool_runtime().kept_host_of(procs)
    if host is None:
        raise UsageError(
            f"%mesh detach: mesh {procs.name} ends with this kernel; only a mesh that was started with "
            "%mesh up --keep can be detached"
        )
    names = [mesh.name for mesh in host.proc_meshes]
    host.detach()
    for each in names:
        session.let_go(each)
    limit = f" within {_hours(host.idle)}" if host.idle else ""
    return f"mesh {host.name}: detached; %mesh attach {host.name} takes it back{limit}"


def end_elsewhere(name: str, force: bool) -> str:
    """Stop a kept mesh that is not attached to this notebook.

    Returns:
        One line for the user.
    """
    try:
        info = tool_runtime().end_kept(name, force)
    except KeptError as error:
        raise UsageError(f"%mesh down: {error}; --force stops it anyway") from None
    count = sum(mesh.alive for mesh in info.meshes)
    return f"mesh {name}: {count} rank{'s' * (count != 1)} stopped; it was not attached to this notebook"


def _force_hint(error: Exception, forced: bool) -> str:
    return " (--force)" if isinstance(error, KeptError) and error.held and not forced else ""


def _hours(idle: float) -> str:
    return f"{idle / 3600:g} h" if idle >= 3600 else duration(idle)
