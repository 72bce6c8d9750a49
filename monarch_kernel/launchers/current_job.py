"""Manage the job of this folder: the location of its definition, and commands and shells on its hosts.

The names are those of ``monarch.job``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType

from monarch_kernel.actor import Future, HostMesh, returns_future
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.job import CACHED_PATH, Job, job_load
from monarch_kernel.private_files import read_own_file, write_own_file

#: The file of ``set_current_job``, beside the state of the job.
SPEC_PATH = os.path.join(os.path.dirname(CACHED_PATH), "spec")
_NAME = "job"


def set_current_job(module_path: str) -> None:
    """Make the job defined at ``MODULE.NAME`` (or ``FILE.py:NAME``) the job of this folder."""
    os.makedirs(os.path.dirname(SPEC_PATH), exist_ok=True)
    write_own_file(SPEC_PATH, module_path.encode())


def load_current_job() -> Job:
    """Create a new object of the job of this folder. Its ``state()`` finds the hosts of an equal job.

    Raises:
        FileNotFoundError: ``set_current_job`` was not called in this folder.
        PermissionError: another user wrote its file, or could have written it.
        ValueError: the module, file or name does not exist, or is not a job.
    """
    try:
        spec = read_own_file(SPEC_PATH).decode()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this folder has no current job ({SPEC_PATH} is missing): call set_current_job('MODULE.NAME')"
        ) from None
    return defined_job(spec)


def apply_current_job(module_path: str | None = None) -> EngineJob:
    """Apply the job of this folder if it is not active, wait for its hosts, and return it.

    Args:
        module_path: first make this the job of the folder; see ``set_current_job``.

    Raises:
        FileNotFoundError, PermissionError, ValueError: as ``load_current_job``.
        LaunchError: its hosts are not available, or end with the program that requests them.
    """
    if module_path is not None:
        defined_job(module_path)
        set_current_job(module_path)
    job = load_current_job()
    if not isinstance(job, EngineJob):
        raise LaunchError(
            f"the hosts of a {type(job).__name__} end with the program that applies it: name a job of an engine, such "
            "as ProcessJob or SlurmJob"
        )
    new = job.find_or_apply()
    try:
        job.wait()
    except BaseException:
        if new:
            job.kill()
        raise
    return job


def applied_job() -> Job:
    """Return the job of this folder as it was applied.

    Raises:
        LaunchError: it was not applied, or its hosts are gone.
        PermissionError, ValueError: as ``load_current_job``.
    """
    try:
        job = job_of_file(CACHED_PATH)
    except FileNotFoundError:
        job = None
    if job is None or not job.active:
        raise LaunchError("the job of this folder is not active: apply it first (monarch apply MODULE.NAME)")
    return job


def job_of_file(path: str) -> Job:
    """Load the job that a file describes. Its class may come from the program that defines the job of this folder.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError, ValueError: as ``load_current_job``.
    """
    with contextlib.suppress(FileNotFoundError):
        load_current_job()
    return job_load(path)


def hosts_from_config(name: str) -> HostMesh:
    """Return the hosts called ``name`` of the job of this folder. Apply the job if it is not active.

    Raises:
        AttributeError: the job has no hosts of that name.
        FileNotFoundError, PermissionError, ValueError: as ``load_current_job``.
    """
    return getattr(load_current_job().state(), name)


def defined_job(spec: str) -> Job:
    """Return the job defined at ``MODULE.NAME`` or ``FILE.py:NAME``, or the result of a function there.

    Raises:
        ValueError: the module, file or name does not exist, or is not a job.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like python -m
    file, _, name = spec.partition(":")
    if file.endswith(".py"):
        module, name = _imported_file(file), name or _NAME
    else:
        where, _, name = spec.replace(":", ".").rpartition(".")
        try:
            module = importlib.import_module(where)
        except (ModuleNotFoundError, ValueError) as e:
            if isinstance(e, ModuleNotFoundError) and e.name != where.partition(".")[0]:
                raise  # the module exists, but one of its imports does not
            raise ValueError(f"there is no module {where!r}: name a job as MODULE.NAME, or as FILE.py:NAME") from None
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ValueError(f"{module.__file__} defines no {name!r}: name the job in it") from None
    if callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, Job):
        raise ValueError(f"{spec}, a {type(found).__name__}, is no job: name a job of an engine, such as SlurmJob")
    return found


def _imported_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exec_command(
    host_mesh: HostMesh,
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Run a command on hosts. The future resolves to the highest exit code.

    Args:
        cmd: the words of the command; no shell interprets them.
        env: variables to set for it.
        workdir: its working folder on the hosts.
        output_dir: a local folder for the output of each process, in a file ``RANK.log``; None prints the output.
        rank: run it on this host only.
        point: run it only on hosts with these coordinates.
        per_host: run this many processes on each host, as in ``{"gpus": 4}``.

    Raises:
        IndexError: the rank does not exist.
    """
    if rank is not None and not 0 <= rank < len(host_mesh):
        raise IndexError(f"rank {rank} is out of range for {len(host_mesh)} hosts")
    hosts = range(len(host_mesh)) if rank is None else [rank]
    if host_mesh.extent.labels != ["hosts"]:
        host_mesh = host_mesh.flatten("hosts")
    return _exec(host_mesh, list(hosts), list(cmd), dict(env or {}), workdir, output_dir, dict(point or {}), per_host)


@returns_future
async def _exec(
    host_mesh: HostMesh,
    hosts: list[int],
    cmd: list[str],
    env: dict[str, str],
    workdir: str | None,
    output_dir: str | None,
    point: dict[str, int],
    per_host: Mapping[str, int] | None,
) -> int:
    import asyncio

    from monarch_kernel.launchers.remote_command import CommandCoordinates, HostCommand, run_command

    def wrote(place: CommandCoordinates, data: bytes) -> None:
        if output_dir is None:
            sys.stdout.write(data.decode("utf-8", "replace"))
        else:
            with open(os.path.join(output_dir, f"{place.rank}.log"), "ab") as file:
                file.write(data)

    if output_dir is not None:
        os.makedirs(output_dir, exist_ok=True)
    command = HostCommand(cmd, env, workdir)
    ends = await asyncio.to_thread(run_command, host_mesh, hosts, command, dict(per_host or {}), point, wrote)
    return max((code for _place, code in ends), default=0)


def shell(host_mesh_singleton: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Run an interactive shell on the only host of a mesh, in this terminal. Return its exit code.

    Raises:
        ValueError: the mesh has several hosts.
    """
    if len(host_mesh_singleton) != 1:
        raise ValueError(f"shell() needs one host, and the mesh has {len(host_mesh_singleton)}: slice it")
    from monarch_kernel.launchers.remote_shell import run_shell

    return run_shell(host_mesh_singleton, 0, dict(env or {}), workdir)


# Manage the contexts of a folder: each has a current job, and one context is active.
#
# The files of the active context are in ``.monarch``, where every program looks for them. Those of other contexts are
# in ``.monarch/contexts/NAME``, and ``use`` exchanges them.

FOLDER = os.path.dirname(CACHED_PATH)
DEFAULT = "default"
_ACTIVE = os.path.join(FOLDER, "context")
_FILES = (CACHED_PATH, SPEC_PATH)


def active() -> str:
    """Return the name of the active context.

    Raises:
        PermissionError: another user wrote the file with that name, or could have written it.
    """
    try:
        return read_own_file(_ACTIVE).decode()
    except FileNotFoundError:
        return DEFAULT


def names() -> list[str]:
    """Return all contexts of this folder."""
    try:
        others = os.listdir(os.path.join(FOLDER, "contexts"))
    except FileNotFoundError:
        others = []
    return sorted({*others, active(), DEFAULT})


def create(name: str) -> None:
    """Create a context, which has no job yet.

    Raises:
        LaunchError: the context exists, or the name is invalid.
    """
    if not name.replace("-", "_").isidentifier():
        raise LaunchError(f"{name!r} cannot name a context: use letters, digits, - and _")
    if name in names():
        raise LaunchError(f"the context {name} is there already")
    os.makedirs(_place(name))


def use(name: str) -> None:
    """Activate a context.

    Raises:
        LaunchError: the context does not exist.
    """
    before = active()
    _check(name)
    if name == before:
        return
    os.makedirs(_place(before), exist_ok=True)
    os.makedirs(_place(name), exist_ok=True)
    for file in _FILES:
        for source, target in ((file, _kept(before, file)), (_kept(name, file), file)):
            with suppress(FileNotFoundError):
                os.replace(source, target)
    write_own_file(_ACTIVE, name.encode())


def end(name: str | None = None) -> None:
    """End the job of a context, by default of the active one. Does nothing if it has none.

    Raises:
        LaunchError: the context does not exist, or the provider did not end the job.
    """
    name = name or active()
    _check(name)
    file = CACHED_PATH if name == active() else _kept(name, CACHED_PATH)
    with suppress(FileNotFoundError):
        job_of_file(file).kill()
        os.unlink(file)


def remove(name: str) -> None:
    """End the job of a context, and remove the context.

    Raises:
        LaunchError: the context does not exist, or is active.
    """
    _check(name)
    if name == active():
        raise LaunchError(f"the context {name} is active: use another one first")
    end(name)
    with suppress(FileNotFoundError):
        os.unlink(_kept(name, SPEC_PATH))
    with suppress(FileNotFoundError):
        os.rmdir(_place(name))


def _check(name: str) -> None:
    if name not in (known := names()):
        raise LaunchError(f"there is no context {name} (there are {', '.join(known)})")


def _place(name: str) -> str:
    return os.path.join(FOLDER, "contexts", name)


def _kept(name: str, file: str) -> str:
    return os.path.join(_place(name), os.path.basename(file))
