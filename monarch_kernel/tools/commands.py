"""Manage the job of a folder with the names of ``monarch.tools.commands``; the code is in ``launchers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.cli.monarch import main
from monarch_kernel.job import DEFAULT_JOB_PATH, load_current_job
from monarch_kernel.launchers.current_job import FOLDER as MONARCH_DIR
from monarch_kernel.launchers.current_job import apply_current_job
from monarch_kernel.launchers.current_job import create as context_create
from monarch_kernel.launchers.current_job import remove as context_rm
from monarch_kernel.launchers.current_job import use as context_use

__all__ = [
    "DEFAULT_JOB_PATH",
    "MONARCH_DIR",
    "apply_job",
    "context_create",
    "context_ls",
    "context_rm",
    "context_use",
    "debug",
    "exec_on_job",
    "load_current_job",
    "shell_on_job",
]


def apply_job(module_path: str | None = None) -> None:
    """Apply the job at ``MODULE.NAME``, or the job of this folder, and wait for its hosts.

    Raises:
        FileNotFoundError, ValueError: the job does not exist.
        LaunchError: its hosts are not available.
    """
    apply_current_job(module_path)


def context_ls() -> None:
    """Print all contexts, the active one with a star."""
    main(["context", "ls"])


def debug(host: str = "localhost", port: int | None = None) -> None:
    """Open the debugger of a program that runs on this machine, in this terminal."""
    main(["debug", "--host", host])


def exec_on_job(
    cmd: Sequence[str],
    run_all: bool = False,
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: Sequence[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
    script: str | None = None,
    per_host: Mapping[str, int] | None = None,
) -> int:
    """Run a command on hosts of the job of this folder, like ``monarch exec``. Return the highest exit code.

    Args:
        cmd: the words of the command.
        run_all: run it on all hosts of all meshes; by default on the first host.
        mesh_name: run it on all hosts of this mesh.
        point_str: run it at these coordinates of the first mesh: ``hosts=1,gpus=3``.
        env: variables, as ``NAME=VALUE``.
        workdir: the working folder there.
        kill: end the job afterwards.
        script: a file with a script for bash, instead of a command.
        per_host: run this many processes on each host, as in ``{"gpus": 4}``.
    """
    line = ["exec", *_options(mesh=mesh_name, point=point_str, workdir=workdir, script=script), *_env(env)]
    line += [f"--per-host={name}={size}" for name, size in (per_host or {}).items()]
    line += [option for option, wanted in (("--all", run_all), ("--kill", kill)) if wanted]
    return main([*line, *(["--", *cmd] if cmd else [])])


def shell_on_job(
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: Sequence[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
) -> int:
    """Open a shell on a host of the job of this folder, like ``monarch shell``. Return its exit code."""
    line = ["shell", *_options(mesh=mesh_name, point=point_str, workdir=workdir), *_env(env)]
    return main([*line, *(["--kill"] if kill else [])])


def _options(**given: str | None) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _env(env: Sequence[str] | None) -> list[str]:
    return [f"--env={each}" for each in env or ()]
