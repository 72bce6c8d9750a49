"""Meshes that outlive kernels: which there are, taking one over, and letting go of it."""

from __future__ import annotations

import os

from IPython.core.error import UsageError

from monarch_kernel import meshes
from monarch_kernel.display.quantities import duration
from monarch_kernel.kernel.managed_mesh import recall
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import KeptError, KeptHost, KeptInfo, end_kept, held, kept, kept_host_of


def kept_by_others() -> list[KeptInfo]:
    """The kept meshes of this user that this notebook does not hold.

    Raises:
        KeptError: the folder that they would be in is another user's.
    """
    here = {host.name for host in held()}
    return [info for info in kept() if info.name not in here]


def is_kept(name: str, command: str) -> bool:
    """Whether this is a kept mesh of this user."""
    try:
        return any(info.name == name for info in kept())
    except KeptError as error:
        raise UsageError(f"{command}: there is no mesh {name!r} here, and {error}") from None


def attach(session: MeshSession, name: str, force: bool = False) -> KeptHost:
    """Take over a kept mesh, and use it."""
    label = os.path.basename(os.path.abspath(name)) if os.sep in name else name
    if label in session.proc_meshes():
        raise UsageError(f"%mesh attach: there is a mesh {label!r} here already; end or detach it first")
    try:
        host = meshes.attach(name, force)
    except (KeptError, ValueError) as error:
        raise UsageError(f"%mesh attach: {error}{'' if force else _hint(str(error))}") from None
    for procs in host.proc_meshes:
        managed = recall(procs)
        if managed is not None:
            session.adopt(managed)
        session.choose(procs.name)
    return host


def detach(session: MeshSession, name: str | None) -> str:
    """Let go of a kept mesh, without ending it.

    Returns:
        One line that says what was let go.
    """
    procs = session.find(name, "%mesh detach")
    host = kept_host_of(procs)
    if host is None:
        raise UsageError(
            f"%mesh detach: mesh {procs.name} would end with this kernel; only what %mesh up --keep has started "
            "can be let go"
        )
    names = [mesh.name for mesh in host.proc_meshes]
    host.detach()
    for each in names:
        session.let_go(each)
    limit = f" within {_hours(host.idle)}" if host.idle else ""
    return f"mesh {host.name}: let go; %mesh attach {host.name} finds it again{limit}"


def end_elsewhere(name: str, force: bool) -> str:
    """End a kept mesh that this notebook does not hold; what was stopped, in one line."""
    try:
        info = end_kept(name, force)
    except KeptError as error:
        raise UsageError(f"%mesh down: {error}; --force ends it nevertheless") from None
    count = sum(mesh.alive for mesh in info.meshes)
    return f"mesh {name}: {count} rank{'s' * (count != 1)} stopped; no kernel here had it"


def _hint(error: str) -> str:
    return " (--force)" if "by force" in error else ""


def _hours(idle: float) -> str:
    return f"{idle / 3600:g} h" if idle >= 3600 else duration(idle)
