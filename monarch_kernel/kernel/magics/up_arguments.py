"""Check the arguments of `%mesh up`: name, dimensions, options of processes and providers, environments."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator, Sequence

from monarch_kernel import programs
from monarch_kernel.job import EngineJob
from monarch_kernel.kernel.magics.arguments import Arguments, check_name
from monarch_kernel.kernel.provider_up import AskedJob
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.host_request import AskedHosts, add_provider_options, ask, given_options, job_ids, nearest
from monarch_kernel.launchers.listing import id_of

#: More processes than this on one host are rejected as a mistake.
MOST_PROCS = 1024
#: The dimension of `--procs N`.
DEFAULT_DIM = "gpus"
DEFAULT_NAME = "m"
#: The lifetime of a kept mesh without a kernel (hours).
DEFAULT_IDLE = 12


#: Options that require `--on`.
_AMOUNTS = ("hosts", "gpus", "cpus", "memory", "walltime", "python", "key_file", "timeout")


_FLAGS = ("all_devices", "trust", "no_wait")


#: The time limit of an interpreter for importing what a rank needs (seconds).
_TIMEOUT = 60.0


#: What a rank imports before it can report missing packages.
_NEEDED = "monarch_kernel.actor"


def up_arguments(
    command: str, words: Sequence[str], procs: int | None, usual: int | None = None
) -> tuple[str, dict[str, int]]:
    """Parse the name and dimensions of `up [NAME] --procs N | dim=size ...`; without dimensions, `usual` processes."""
    names = [word for word in words if "=" not in word]
    dims = dict(_dimension(command, word) for word in words if "=" in word)
    if len(names) > 1:
        hint = f"; did you mean --procs {names[-1]}?" if names[-1].isdigit() else ""
        raise usage_error(command, f"give one name, not {' and '.join(map(repr, names))}{hint}")
    if names and names[0].isdigit():
        raise usage_error(command, f"{names[0]!r} is no name; for that many processes write --procs {names[0]}")
    name = check_name(command, names[0]) if names else DEFAULT_NAME
    if len(dims) != sum("=" in word for word in words):
        raise usage_error(command, f"a dimension is given twice in {' '.join(words)!r}")
    if procs is not None and dims:
        raise usage_error(command, "give either --procs or dimensions, not both")
    if procs is not None:
        dims = {DEFAULT_DIM: _size(command, "--procs", procs)}
    if not dims and usual is not None:
        dims = {DEFAULT_DIM: usual}
    if not dims:
        raise usage_error(command, f"say how many processes: --procs 4, or dimensions such as {DEFAULT_DIM}=4")
    total = 1
    for size in dims.values():
        total *= size
    if total > MOST_PROCS:
        raise usage_error(command, f"{total} processes are too many for one host; at most {MOST_PROCS} are started")
    return name, dims


def _dimension(command: str, word: str) -> tuple[str, int]:
    label, _, size = word.partition("=")
    if not label.isidentifier():
        raise usage_error(command, f"{label!r} cannot name a dimension; write for example {DEFAULT_DIM}=4")
    try:
        return label, _size(command, label, int(size))
    except ValueError:
        raise usage_error(command, f"{label} must be a whole number of at least 1, not {size!r}") from None


def _size(command: str, what: str, size: int) -> int:
    if size < 1:
        raise usage_error(command, f"{what} must be at least 1, not {size}")
    return size


def idle_argument(command: str, hours: float | None, keep: bool) -> float:
    """Return the seconds of `--idle HOURS`."""
    if hours is not None and not keep:
        raise usage_error(command, "--idle applies to kept meshes only; add --keep")
    if hours is None:
        return DEFAULT_IDLE * 3600
    if not hours > 0:
        raise usage_error(command, f"--idle takes a number of hours above 0, not {hours:g}")
    return hours * 3600


def env_arguments(command: str, items: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the variables of repeated `--env K=V`, and the environment of `--env NAME`."""
    env: dict[str, str] = {}
    names: list[str] = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals and item:
            names.append(item)
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            env[key] = value
        else:
            raise usage_error(command, f"--env takes VARIABLE=VALUE, or the name of an environment, not {item!r}")
    if len(names) > 1:
        raise usage_error(command, f"ranks run in one environment, not in {' and '.join(names)}")
    return env, "".join(names)


def provider_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the options of the provider or profile on the line."""
    for at, word in enumerate(words):
        on = word.removeprefix("--on=") if word.startswith("--on=") else ""
        on = words[at + 1] if word == "--on" and at + 1 < len(words) else on
        if on:
            add_provider_options(parser, on)
            return


def check_no_provider(found: Arguments) -> None:
    """Raise UsageError if a line without a provider has options for hosts."""
    given = [name for name in _AMOUNTS if getattr(found, name) is not None]
    given += [name for name in _FLAGS if getattr(found, name)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise usage_error(found.magic, f"{option} is for hosts of an engine; add --on ENGINE, such as --on ssh")


def asked_hosts(found: Arguments) -> AskedHosts | AskedJob:
    """Return the request of a line with `--on`.

    Raises:
        UsageError: there is no such provider, profile or job, or it does not accept these options.
    """
    if found.keep:
        raise usage_error(
            found.magic, "--keep is for meshes of this host; hosts of an engine stay for their idle time (--idle)"
        )
    if found.idle is not None and not found.idle > 0:
        raise usage_error(found.magic, f"--idle takes a number of hours above 0, not {found.idle:g}")
    variables, _environment = env_arguments(found.magic, found.env)
    given = {name: getattr(found, name) for name in (*_AMOUNTS, "procs")}
    given |= {"env": variables, "idle": None if found.idle is None else found.idle * 3600}
    try:
        if (job := id_of(found.on, job_ids())) is not None:
            said = [name for name in _AMOUNTS if given[name] is not None]
            if said:
                raise usage_error(found.magic, f"job {job} exists, so --{said[0]} cannot be chosen any more")
            return AskedJob(EngineJob.find(job))
        return ask(found.on, given, given_options(found), trust=found.trust, how="--trust")
    except LaunchError as error:
        raise usage_error(found.magic, str(error)) from None


def environment_prefix(command: str, name: str) -> str:
    """Return the folder of an environment.

    Args:
        command: the command, for errors.
        name: the name of a conda environment, or the path of an environment or of a uv project.

    Raises:
        UsageError: there is no such environment; the message lists similar names.
    """
    from workspace_sync.environment import environment
    from workspace_sync.model.errors import ScanError

    known = dict(_conda_environments())
    path = known.get(name, name)
    if path is name and os.sep not in name and not os.path.isdir(name):
        listed = f"; conda has {', '.join(sorted(known))}" if known else ""
        raise usage_error(
            command, f"there is no environment {name!r}{nearest(name, known)}: give its name, or its path{listed}"
        )
    try:
        found = environment(path)
    except ScanError as error:
        raise usage_error(command, str(error)) from None
    if not os.access(found.python, os.X_OK):
        raise usage_error(command, f"environment {found.prefix} has no Python: install one into it")
    return found.prefix


def check_for_ranks(command: str, prefix: str) -> None:
    """Raise UsageError if ranks cannot run in an environment."""
    python = os.path.join(prefix, "bin", "python")
    try:
        done = programs.run(
            [python, "-c", f"import {_NEEDED}"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env=_as_ranks(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise usage_error(command, f"{python} cannot be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        raise usage_error(
            command, f"ranks cannot run in {prefix}: {last}; install monarch_kernel there ({python} -m pip install ...)"
        )


def _as_ranks() -> dict[str, str]:
    """Return the environment variables of a rank: a checkout of this package is on its import path."""
    root = programs.ROOT
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))}


def _conda_environments() -> Iterator[tuple[str, str]]:
    """Yield the names and folders of environments that conda and compatible tools have made for this user."""
    folders: list[str] = []
    for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
        folders += filter(None, os.environ.get(variable, "").split(os.pathsep))
    for variable in ("CONDA_PREFIX", "MAMBA_ROOT_PREFIX", "CONDA_ROOT"):
        if prefix := os.environ.get(variable):
            folders += [os.path.join(prefix, "envs"), os.path.dirname(prefix)]
    for folder in folders:
        if os.path.isdir(folder):
            for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                if os.path.isdir(os.path.join(entry.path, "conda-meta")):
                    yield entry.name, entry.path
    try:
        with open(os.path.expanduser("~/.conda/environments.txt"), encoding="utf-8") as file:
            listed = file.read().splitlines()
    except OSError:
        return
    for path in listed:  # the first environment of each is the base
        if os.path.isdir(os.path.join(path, "conda-meta")):
            yield os.path.basename(path), path
