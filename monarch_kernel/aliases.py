"""Alias ``monarch`` to this package, so that code written for Monarch runs unchanged.

Only names that exist in this package are aliased. Any other ``monarch.X`` raises an ``ImportError`` with an
explanation. Existing programs also import names from Monarch's private modules; ``_PRIVATE`` maps these modules to
modules of this package. Monarch's public modules that have no file here are made from ``_PUBLIC``, under both packages:
``monarch_kernel.fetch`` and ``monarch.fetch``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from monarch_kernel import environment

#: Set in the environment of ranks whose controller has enabled the alias.
VARIABLE = environment.IMPORTS

_ALIAS = "monarch"
_OURS = "monarch_kernel"


#: Monarch's private modules and alias modules, each with the modules of this package that define its names.
#: "module:theirs=ours" renames one name.
_PRIVATE: dict[str, tuple[str, ...]] = {
    "actor.concurrent": ("actor",),
    "actor_mesh": ("actor",),
    "common.future": ("actor",),
    "common.invocation": ("exceptions", "tensor"),
    "common.selection": ("",),
    "distributed_telemetry": ("watch",),
    "distributed_telemetry.profiler": ("watch.tracing:profile=profile",),
    "proc_mesh": ("actor",),
    "simulator.interface": ("tensor:Simulator=SimulatorInterface",),
    "simulator.simulator": ("tensor",),
    "tensor_engine": ("tensor",),
    "tools.cli": ("cli.monarch",),
    "_src.actor.actor_mesh": (
        "actor",
        "runtime.actor.context:_context=running",
        "runtime.actor.execution.instance:Instance=Instance",
    ),
    "_src.actor.bootstrap": ("actor",),
    "_src.actor.concurrent": ("actor",),
    "_src.actor.config": ("config",),
    "_src.actor.debugger.debug_controller": ("actor",),
    "_src.actor.endpoint": (
        "actor",
        "runtime.actor.definition:EndpointProperty=EndpointProperty",
        "runtime.actor.calls.endpoint:NotAnEndpoint=PlainMethod",
    ),
    "_src.actor.future": ("actor",),
    "_src.actor.host_mesh": ("actor",),
    "_src.actor.logging": ("runtime.actor.output:flush_all_proc_mesh_logs=flush_default",),
    "_src.actor.mock": ("runtime.actor.mocks",),
    "_src.actor.proc_mesh": ("actor",),
    "_src.actor.returns_future": ("actor",),
    "_src.actor.shape": ("actor", "", "runtime.mesh.shape:MeshTrait=MeshTrait"),
    "_src.actor.supervision": ("actor",),
    "_src.actor.telemetry": ("actor",),
    "_src.gather_mount.gather_mount": ("gather_mount",),
    "_src.job.host_mesh": ("job",),
    "_src.job.job": ("launchers.ssh:SSHJob=monarch_ssh_job", "job"),
    "_src.job.job_components": ("job",),
    "_src.job.job_state": ("job",),
    "_src.job.kubernetes": (
        "job.kubernetes",
        "launchers.kubernetes.job:_WORKER_BOOTSTRAP_SCRIPT=WORKER_BOOTSTRAP_SCRIPT",
    ),
    "_src.job.port_forward": ("job",),
    "_src.job.process": ("job",),
    "_src.job.service_identity": ("job",),
    "_src.job.shell": ("job",),
    "_src.job.slurm": ("job",),
    "_src.job.spmd": ("job.spmd",),
    "_src.job.telemetry_config": ("job",),
    "_src.rdma.rdma": ("rdma",),
    "_src.spmd": ("spmd",),
    "_src.spmd.actor": ("spmd",),
    "_src.tools.commands": ("tools.commands",),
    "_rust_bindings.monarch_hyperactor.actor": ("actor",),
    "_rust_bindings.monarch_hyperactor.actor_mesh": ("actor",),
    "_rust_bindings.monarch_hyperactor.bootstrap": ("actor",),
    "_rust_bindings.monarch_hyperactor.channel": ("actor",),
    "_rust_bindings.monarch_hyperactor.config": ("config",),
    "_rust_bindings.monarch_hyperactor.context": (
        "actor",
        "runtime.actor.execution.instance:Instance=Instance",
    ),
    "_rust_bindings.monarch_hyperactor.host_mesh": ("actor",),
    "_rust_bindings.monarch_hyperactor.logging": ("runtime.actor.output",),
    "_rust_bindings.monarch_hyperactor.mailbox": ("actor",),
    "_rust_bindings.monarch_hyperactor.proc": ("actor", "runtime.actor.ids:ActorAddr=ActorId"),
    "_rust_bindings.monarch_hyperactor.proc_mesh": ("actor",),
    "_rust_bindings.monarch_hyperactor.selection": ("",),
    "_rust_bindings.monarch_hyperactor.shape": (
        "actor",
        "",
        ":Slice=NDSlice",
        "runtime.mesh.shape:Region=Region",
    ),
    "_rust_bindings.monarch_hyperactor.supervision": ("actor",),
    "_rust_bindings.monarch_hyperactor.value_mesh": ("actor",),
}


_RANDOMNESS = "runtime.tensor.api.randomness"
_PROFILING = "runtime.tensor.api.profiling"
#: Monarch's public modules that have no file in this package. For each, the names by the module that defines them.
#: "theirs=ours" renames one. Type checkers find the names in ``monarch_kernel.tensor``.
_PUBLIC: dict[str, dict[str, str]] = {
    "builtins": {
        _PROFILING: "log_remote set_logging_level_remote",
        _RANDOMNESS: "set_manual_seed_remote=seed_by_index",
    },
    "builtins.log": {_PROFILING: "log_remote set_logging_level_remote"},
    "builtins.random": {
        _RANDOMNESS: "get_rng_state_remote=get_rng_state random_seed_remote=random_seed seed_remote=random_seed "
        "set_manual_seed_remote=seed_by_index set_rng_state_remote=set_rng_state"
    },
    "cached_remote_function": {"tensor": "RemoteAutogradFunction remote_autograd_function"},
    "common": {},
    "common._coalescing": {"tensor": "coalescing compile"},
    "common.borrows": {"tensor": "Borrow"},
    "common.device_mesh": {"tensor": "RemoteProcessGroup get_active_mesh no_mesh slice_mesh to_mesh"},
    "common.opaque_ref": {"tensor": "OpaqueRef"},
    "common.pipe": {"tensor": "Pipe create_pipe remote_generator"},
    "common.process_group": {"tensor": "RemoteProcessGroup"},
    "common.remote": {"tensor": "call_on_shard_and_fetch remote"},
    "common.stream": {"tensor": "Stream get_active_stream"},
    "common.tensor": {"tensor": "Tensor reduce reduce_"},
    "exceptions": {
        "actor": "ActorError SupervisionError",
        "tensor": "DeviceMeshError MixedTensorsError RemoteException",
    },
    "fetch": {"tensor": "call_on_shard_and_fetch fetch_shard inspect show"},
    "gather_mount": {"workspace_sync.mounts": "GatherMount MountError gather_mount"},
    "gradient": {"tensor": "GradientGenerator"},
    "gradient_generator": {"tensor": "GradientGenerator grad_function grad_generator gradient_execution_order"},
    "memory": {_PROFILING: "dump_memory_snapshot record_memory_history"},
    "mesh_controller": {"tensor": "RemoteException"},
    "opaque_module": {"tensor": "OpaqueModule"},
    "opaque_object": {"tensor": "OpaqueObject OpaqueRef opaque_method"},
    "profiler": {_PROFILING: "Schedule profile record_function"},
    "python_local_mesh": {"tensor": "python_local_mesh"},
    "remotemount": {"workspace_sync.mounts": "MountError MountHandler remotemount"},
    "simulator": {"tensor": "Simulator SimulatorInterface set_meta"},
    "simulator.config": {"tensor": "set_meta"},
    "timer": {
        _PROFILING: "ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms "
        "get_latest_timer_measurement"
    },
    "tools.config.environment": {"workspace_sync.model.workspace": "CondaEnvironment"},
    "tools.config.workspace": {"workspace_sync.model.workspace": "CondaEnvironment Workspace"},
}


def origins_of(fullname: str) -> dict[str, tuple[str, str]]:
    """Return for each name of a module of ``_PUBLIC`` the module that defines it, and its name there; else nothing."""
    origins: dict[str, tuple[str, str]] = {}
    for owner, names in _PUBLIC.get(fullname.removeprefix(_OURS + "."), {}).items():
        for name in names.split():
            theirs, _, ours = name.partition("=")
            origins[theirs] = (owner if owner.startswith("workspace_sync") else f"{_OURS}.{owner}", ours or theirs)
    return origins


class PublicLoader:
    """Loads a module of ``_PUBLIC``. The module loads the module that defines a name when the name is first used."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the creation of the module to the import system."""

    def exec_module(self, module: types.ModuleType) -> None:
        path = module.__name__
        origins = origins_of(path)

        def load(name: str) -> object:
            if f"{path}.{name}".removeprefix(_OURS + ".") in _PUBLIC:
                return importlib.import_module(f"{path}.{name}")
            if name not in origins:
                raise AttributeError(f"module {path!r} has no attribute {name!r}")
            owner, ours = origins[name]
            value = getattr(importlib.import_module(owner), ours)
            setattr(module, name, value)
            return value

        module.__doc__ = f"Names that Monarch has in {path.replace(_OURS, _ALIAS, 1)}."
        module.__dict__.update(__all__=sorted(origins), __getattr__=load)


def public_module(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module of ``_PUBLIC``, or None if the table has no such module."""
    path = fullname.removeprefix(_OURS + ".")
    if path not in _PUBLIC:
        return None
    loader: Any = PublicLoader()  # not derived from importlib.abc, which takes milliseconds to import
    is_package = any(other.startswith(path + ".") for other in _PUBLIC)
    return importlib.machinery.ModuleSpec(fullname, loader, is_package=is_package)


class _PrivateModule(types.ModuleType):
    """A stand-in for one of Monarch's private modules. It loads the names listed in ``_PRIVATE`` on first access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for place in _PRIVATE.get(self.__name__.removeprefix(_ALIAS + "."), ()):
            module, _, renamed = place.partition(":")
            theirs, _, ours = renamed.partition("=")
            if renamed and theirs != name:
                continue
            found = importlib.import_module(f"{_OURS}.{module}" if module else _OURS)
            wanted = ours or name
            if renamed or not wanted.startswith("_"):
                try:
                    return getattr(found, wanted)
                except AttributeError:
                    continue
        raise AttributeError(f"{self.__name__} has no {name!r} in {_OURS}")


def _is_private(name: str) -> bool:
    """Return whether ``_PRIVATE`` has this module, or a submodule of it. The name has no leading ``monarch.``."""
    return name in _PRIVATE or (name.startswith("_") and any(known.startswith(name + ".") for known in _PRIVATE))


class _Finder:
    """Resolves ``monarch`` and ``monarch.X`` to the module objects ``monarch_kernel`` and ``monarch_kernel.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(_ALIAS + "."):
            return None
        ours = _OURS + fullname[len(_ALIAS) :]
        loader: Any = self  # not derived from importlib.abc, which takes milliseconds to import
        if _is_private(fullname[len(_ALIAS) + 1 :]):
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        from importlib.util import find_spec

        try:
            if find_spec(ours) is None:
                return None
        except ModuleNotFoundError:  # its message names monarch_kernel, but the program imports monarch
            return None
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=fullname == _ALIAS)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if _is_private(spec.name[len(_ALIAS) + 1 :]):
            return _PrivateModule(spec.name)
        module = importlib.import_module(_OURS + spec.name[len(_ALIAS) :])
        # The import system is about to overwrite these attributes; an alias must not rename the aliased module.
        self._saved = (module.__spec__, getattr(module, "__loader__", None), module.__package__)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if not isinstance(module, _PrivateModule):
            module.__spec__, module.__loader__, module.__package__ = self._saved


_finder: _Finder | None = None


def enable_monarch_imports(prefer_installed: bool = False) -> bool:
    """Make ``import monarch`` (and ``monarch.actor``, ...) import this package.

    Args:
        prefer_installed: do nothing if the real ``monarch`` is installed.

    Returns:
        Whether ``monarch`` is this package now.

    Raises:
        RuntimeError: the real Monarch has already been imported.
    """
    global _finder
    loaded = sys.modules.get(_ALIAS)
    if loaded is not None and loaded is not sys.modules.get(_OURS):
        if prefer_installed:
            return False
        raise RuntimeError(
            "the real monarch has been imported in this process: call enable_monarch_imports() before anything "
            "imports it"
        )
    if _finder is not None:
        return True
    if prefer_installed:
        from importlib.util import find_spec  # imported here because loading it takes a rank a millisecond

        if find_spec(_ALIAS) is not None:
            return False
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    return True


def enabled() -> bool:
    """Return whether ``monarch`` is this package in this process."""
    return _finder is not None


def disable_monarch_imports() -> None:
    """Undo ``enable_monarch_imports``."""
    global _finder
    if _finder is not None:
        sys.meta_path.remove(_finder)
        _finder = None
        ours = {name for name in sys.modules if name.partition(".")[0] == _ALIAS}
        for name in ours:
            del sys.modules[name]
