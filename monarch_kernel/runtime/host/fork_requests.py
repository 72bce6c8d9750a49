"""Builds fork-server requests from a request to start procs: environment, command, working directory, import path."""

from __future__ import annotations

import os
import sys

import msgspec

import monarch_kernel
from monarch_kernel.protocol.messages import ProcRef, ProcSpec, RankConfig, SpawnProcs
from monarch_kernel.runtime.host import forkserver

#: The entry point of a forked rank; named, not imported: the host package does not depend on ranks.
RANK_ENTRY = "monarch_kernel.runtime.rank.main:main"
#: The same for a rank in its own interpreter.
RANK_MODULE = "monarch_kernel.runtime.rank"

#: Libraries read these once, at load time, so a template is created with them.
_LOAD_TIME = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_"),
)
#: The loader and the interpreter read these at startup, so such ranks need their own interpreter.
_EXEC_TIME = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "ASAN_", "LC_")


def fork_request(
    message: SpawnProcs, index: int, ref: ProcRef, run_dir: str, cwd: str, sys_path: list[str], kept: bool = False
) -> forkserver.Fork:
    """The fork server's request to start one of the procs.

    Args:
        kept: the proc outlives its controller.
    """
    spec: ProcSpec = message.procs[index]
    launch = message.per_proc[index] if message.per_proc else None
    inherit = launch is None or launch.inherit_env
    env = message.env if launch is None else {**message.env, **launch.env}
    argv = _argv(launch and launch.argv, env, inherit)
    if argv is not None:
        env = _with_package(env, inherit)
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
        cpus=message.cpus[index] if message.cpus else "",
    )
    return forkserver.Fork(
        proc=spec.id,
        config=msgspec.msgpack.encode(config),
        env=env,
        cwd=cwd,
        sys_path=sys_path,
        argv=argv,
        clean_env=not inherit,
    )


def load_env(env: dict[str, str | None]) -> dict[str, str | None]:
    """The variables of an environment that libraries read at load time."""
    return {key: value for key, value in env.items() if key.startswith(_LOAD_TIME)}


def _argv(command: list[str] | None, env: dict[str, str | None], inherit: bool) -> list[str] | None:
    """The command to execute for a rank; None if it can be forked."""
    if command is None:
        if inherit and "LANG" not in env and not any(key.startswith(_EXEC_TIME) for key in env):
            return None
        command = [sys.executable]
    return [*command, "-m", RANK_MODULE, "{fd}"]


def _with_package(env: dict[str, str | None], inherit: bool) -> dict[str, str | None]:
    """``env``, extended so that another interpreter finds this package if it is a checkout and not installed."""
    root = package_root()
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return env
    path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "") if inherit else "")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (path, root)))}


def package_root() -> str:
    """The folder that this package is imported from."""
    return os.path.dirname(os.path.dirname(os.path.abspath(monarch_kernel.__file__)))
