"""monarch_kernel: a Jupyter kernel that drives and debugs a cluster as if it were one machine.

The actor API is in ``monarch_kernel.actor``; ``%load_ext monarch_kernel`` adds the ``%mesh`` magics to any IPython.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch_kernel._version import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from monarch_kernel.actor import Future
    from monarch_kernel.actor import Future as ActorFuture
    from monarch_kernel.config import (
        clear_runtime_config,
        configure,
        configured,
        get_global_config,
        get_runtime_config,
    )
    from monarch_kernel.distributed import distribute, module_to_mesh
    from monarch_kernel.runtime.mesh import Extent, NDSlice, Selection, Shape
    from monarch_kernel.tensor import (
        OpaqueRef,
        RemoteProcessGroup,
        Simulator,
        Stream,
        Tensor,
        call_on_shard_and_fetch,
        coalescing,
        compile,  # noqa: A004  # Monarch's name
        fetch_shard,
        function_resolvers,
        get_active_mesh,
        get_active_stream,
        grad_function,
        grad_generator,
        inspect,
        no_mesh,
        reduce,
        reduce_,
        remote,
        set_meta,
        show,
        slice_mesh,
        to_mesh,
        world_mesh,
    )

__all__ = [
    "ActorFuture",
    "Extent",
    "Future",
    "NDSlice",
    "OpaqueRef",
    "RemoteProcessGroup",
    "Selection",
    "Shape",
    "Simulator",
    "Stream",
    "Tensor",
    "__version__",
    "call_on_shard_and_fetch",
    "clear_runtime_config",
    "coalescing",
    "compile",
    "configure",
    "configured",
    "distribute",
    "enable_monarch_imports",
    "fetch_shard",
    "function_resolvers",
    "get_active_mesh",
    "get_active_stream",
    "get_global_config",
    "get_mesh",
    "get_runtime_config",
    "grad_function",
    "grad_generator",
    "heal_mesh",
    "inspect",
    "load_ipython_extension",
    "module_to_mesh",
    "no_mesh",
    "reduce",
    "reduce_",
    "remote",
    "set_meta",
    "show",
    "slice_mesh",
    "to_mesh",
    "unload_ipython_extension",
    "world_mesh",
]


#: Names that Monarch's package also exports, most of them of its tensors. They are loaded on first use to keep
#: ``import monarch_kernel`` fast. The functions below are found before this table is.
_LOADED_AT_FIRST_USE = {
    **dict.fromkeys(__all__, "monarch_kernel.tensor"),
    **dict.fromkeys(("Extent", "NDSlice", "Selection", "Shape"), "monarch_kernel.runtime.mesh"),
    **dict.fromkeys(("ActorFuture", "Future"), "monarch_kernel.actor"),
    **dict.fromkeys(
        ("clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"),
        "monarch_kernel.config",
    ),
    **dict.fromkeys(("distribute", "module_to_mesh"), "monarch_kernel.distributed"),
}
#: Modules that are available as attributes after ``import monarch_kernel``, as in Monarch's package.
_MODULES = frozenset({"builtins", "distributed", "exceptions", "timer"})
#: How names of modules in the table of ``monarch_kernel.aliases`` begin.
_WITHOUT_FILE = tuple(
    f"monarch_kernel.{name}"
    for name in (
        *("builtins", "cached_remote_function", "common", "exceptions", "fetch", "gather_mount", "gradient", "memory"),
        *("mesh_controller", "opaque_", "profiler", "python_local_mesh", "remotemount", "simulator", "timer", "tools"),
    )
)


class _MonarchModules:
    """Finds Monarch's public modules that have no file in this package: the table is in ``monarch_kernel.aliases``."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the module's spec."""
        if not fullname.startswith(_WITHOUT_FILE):
            return None
        from monarch_kernel.aliases import public_module

        return public_module(fullname)


# Before the finder of files: a folder without files, as an update leaves one with __pycache__, is a module to that.
sys.meta_path.insert(0, _MonarchModules)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LOADED_AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LOADED_AT_FIRST_USE[name]), name.removeprefix("Actor"))


def enable_monarch_imports(prefer_installed: bool = False) -> bool:
    """Make ``import monarch`` import this package. See ``monarch_kernel.aliases``."""
    from monarch_kernel.aliases import enable_monarch_imports as enable

    return enable(prefer_installed)


def get_mesh(name: str) -> Any:
    """Return the newest proc mesh, or the joined job, with this name. ``%mesh ls`` lists the names."""
    from monarch_kernel.engines import tool_runtime

    return tool_runtime().get_mesh(name)


def heal_mesh(mesh: Any, hosts: Any = None, timeout: float = 60.0) -> Any:
    """Replace the dead procs of a proc mesh, an actor mesh or a ``distributed.Mesh``. The mesh is usable at once."""
    from monarch_kernel.actor import heal_mesh as heal

    return heal(mesh, hosts, timeout)


def load_ipython_extension(ip: Any) -> None:
    """Register the ``%mesh`` and ``%%mesh`` magics (``%load_ext monarch_kernel``)."""
    from monarch_kernel.kernel.extension import load

    load(ip)


def unload_ipython_extension(ip: Any) -> None:
    """Remove the magics (``%unload_ext monarch_kernel``)."""
    from monarch_kernel.kernel.extension import unload

    unload(ip)
