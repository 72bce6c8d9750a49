"""Build fork-server requests from a request to start procs: environment, command, working directory, import path."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import all_suffixes

import msgspec

from monarch_kernel import programs
from monarch_kernel.protocol.messages import ProcRef, ProcSpec, RankConfig, SpawnProcs
from monarch_kernel.protocol.placement import Placement, is_below
from monarch_kernel.runtime.host import forkserver

#: The entry point of a forked rank, as text: the host package does not depend on ranks.
RANK_ENTRY = "monarch_kernel.runtime.rank.main:main"
#: The module of async actors, as text for the same reason. It and its imports are a fifth of what a rank may need.
ASYNC_ACTORS = "monarch_kernel.runtime.actor.execution.async_instance"
#: The module that loads the actor API, which most actors import; as text for the same reason.
ACTOR_API = "monarch_kernel.runtime.rank.actor_api"
#: The entry point of a rank in its own interpreter.
RANK_MODULE = "monarch_kernel.runtime.rank"

#: Libraries read these once, at load time, so a template is created with them.
_LOAD_TIME = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HF_"),
)
#: Read when a process first uses a GPU, so ranks with devices of their own are forked from one template.
_AT_FIRST_USE = "CUDA_VISIBLE_DEVICES"
#: The loader and the interpreter read these at startup, so such ranks need their own interpreter.
_EXEC_TIME = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "ASAN_", "LC_")


def placed(message: SpawnProcs, placement: Placement) -> SpawnProcs:
    """Return a request to start procs with this host's folders in place of the controller's.

    Folders of the placement that this host does not have (the controller's virtual environment, for example) stay
    unchanged. A missing working directory is replaced by its nearest existing parent.
    """

    def on_host(path: str) -> str:
        there = placement.on_host(path)
        return there if there is not None and os.path.exists(there) else path

    here = message.cwd
    while (cwd := placement.on_host(here)) is not None and not os.path.isdir(cwd) and here != "/":
        here = os.path.dirname(here)
    return msgspec.structs.replace(
        message,
        cwd=cwd or message.cwd,
        sys_path=[entry and on_host(entry) for entry in message.sys_path],
        env={**message.env, **placement.env},
    )


def is_placed(modules: list[str], sys_path: list[str], placement: Placement) -> bool:
    """Return whether one of these modules is in a folder of the placement, whose content may change."""
    folders = [entry for entry in sys_path if any(is_below(entry, f) for f in placement.folders.values())]
    paths = [os.path.join(folder, name.partition(".")[0]) for folder in folders for name in modules]
    return any(os.path.exists(path + suffix) for path in paths for suffix in ("", *all_suffixes()))


def fork_request(
    message: SpawnProcs,
    index: int,
    ref: ProcRef,
    run_dir: str,
    cwd: str,
    sys_path: list[str],
    kept: bool = False,
    placement: Placement | None = None,
) -> forkserver.Fork:
    """Return the fork server's request to start one of the procs.

    Args:
        kept: whether the proc outlives its controller.
        placement: how the controller's ranks start here.

    Raises:
        OSError: this host lacks the CPUs or NUMA nodes that the proc is bound to.
    """
    spec: ProcSpec = message.procs[index]
    launch = message.per_proc[index] if message.per_proc else None
    inherit = launch is None or launch.inherit_env
    env = message.env if launch is None else {**message.env, **launch.env}
    argv = _argv(_command(launch and launch.argv, placement), env, inherit)
    if argv is not None:
        env = _with_package(env, inherit)
        if placement is not None and argv[0] == placement.python:
            argv, env = _activated(argv, env, inherit)
    cpus, memory = _bound(message.binds[index]) if message.binds else ([], [])
    config = RankConfig(
        ref=ref,
        agent=ref.agent_ref(),
        owner=message.owner,
        root=message.root,
        mesh=message.mesh,
        rank=spec.rank,
        labels=message.labels,
        sizes=message.sizes,
        run_dir=run_dir,
        sys_path=sys_path,
        kept=kept,
        launch=launch,
        cpus=cpus,
        memory=memory,
        placement=placement,
    )
    return forkserver.Fork(
        proc=spec.id,
        config=msgspec.msgpack.encode(config),
        env=env,
        cwd=cwd,
        sys_path=sys_path,
        argv=argv,
        clean_env=not inherit,
        asyncio=message.asyncio,
    )


def load_env(env: dict[str, str | None]) -> dict[str, str | None]:
    """Return the variables of an environment that libraries read at load time."""
    return {key: value for key, value in env.items() if key.startswith(_LOAD_TIME) and key != _AT_FIRST_USE}


def _command(command: list[str] | None, placement: Placement | None) -> list[str] | None:
    """Return the command of another interpreter, as it is on this host.

    None if the program and the placement name none.
    """
    if placement is None:
        return command
    if command is None:
        return [placement.python] if placement.python else None
    there = placement.on_host(command[0])
    return [there, *command[1:]] if there is not None and os.path.exists(there) else command


def _argv(command: list[str] | None, env: dict[str, str | None], inherit: bool) -> list[str] | None:
    """Return the command to execute for a rank; None if it can be forked."""
    if command is None:
        if inherit and "LANG" not in env and not any(key.startswith(_EXEC_TIME) for key in env):
            return None
        command = [sys.executable]
    return [*command, "-m", RANK_MODULE, "{fd}"]


def _activated(argv: list[str], env: dict[str, str | None], inherit: bool) -> tuple[list[str], dict[str, str | None]]:
    """Return a command of an environment's interpreter, with the programs and variables of the active environment."""
    programs = os.path.dirname(argv[0])
    prefix = os.path.dirname(programs)
    path = env.get("PATH", os.environ.get("PATH", "") if inherit else "")
    env = {**_state_variables(prefix), **env, "PATH": os.pathsep.join(filter(None, (programs, path or os.defpath)))}
    scripts = os.path.join(prefix, "etc", "conda", "activate.d")
    if os.path.isdir(scripts):
        argv = [shutil.which("bash") or "/bin/sh", "-c", _ACTIVATE, scripts, *argv]
    return argv, env


#: Runs the scripts of a folder ($0) as conda does, and then the command.
_ACTIVATE = 'for script in "$0"/*.sh; do [ -r "$script" ] && . "$script" >/dev/null; done; exec "$@"'


def _state_variables(prefix: str) -> dict[str, str | None]:
    """Return the variables that ``conda env config vars set`` has set."""
    try:
        with open(os.path.join(prefix, "conda-meta", "state"), "rb") as file:
            state = json.load(file)
        return {str(name): str(value) for name, value in state["env_vars"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _with_package(env: dict[str, str | None], inherit: bool) -> dict[str, str | None]:
    """``env``, extended so that another interpreter finds this package if it is a checkout and not installed."""
    root = programs.ROOT
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return env
    path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "") if inherit else "")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (path, root)))}


def _bound(bind: Mapping[str, str]) -> tuple[list[int], list[int]]:
    """Return the CPUs and the NUMA nodes of memory that a proc may use; none: all.

    Raises:
        OSError: this host lacks one of them.
    """
    usable = os.sched_getaffinity(0)
    cpus: set[int] = set()
    if "physcpubind" in bind or not bind.keys() & {"cpunodebind", "membind"}:  # as numactl, and taskset without it
        cpus = _chosen(bind.get("physcpubind") or bind.get("cpus") or "", usable)
    elif "cpunodebind" in bind:
        for node in sorted(_chosen(bind["cpunodebind"], _nodes())):
            cpus |= _numbers(_of_node(node, "cpulist"))
        cpus &= usable
    if missing := cpus - usable:
        have = ",".join(map(str, sorted(usable)))
        raise OSError(f"this host has no CPU {min(missing)} to bind it to (it may use {have})")
    memory = _chosen(bind["membind"], _nodes()) if "membind" in bind else set[int]()
    for node in sorted(memory):
        _of_node(node, "meminfo")
    return sorted(cpus), sorted(memory)


def _nodes() -> set[int]:
    """Return the NUMA nodes of this host."""
    try:
        with open("/sys/devices/system/node/online") as found:
            return _numbers(found.read().strip())
    except FileNotFoundError:
        return set()


def _of_node(node: int, file: str) -> str:
    """Read a file of the kernel about a NUMA node."""
    try:
        with open(f"/sys/devices/system/node/node{node}/{file}") as found:
            return found.read().strip()
    except FileNotFoundError:
        raise OSError(f"this host has no NUMA node {node} to bind it to") from None


def _chosen(text: str, usable: set[int]) -> set[int]:
    """Parse a list of numbers like numactl: "all", "+0-1" counts the permitted ones, "!0" selects all others."""
    if text == "all":
        return usable
    found = _numbers(text.lstrip("!+"))
    if text.startswith("!"):
        return usable - found
    if text.startswith("+"):
        ordered = dict(enumerate(sorted(usable)))
        return {ordered.get(number, number) for number in found}
    return found


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
