"""Environments that `%mesh up --env` can name, and what it takes to run ranks in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

from monarch_kernel import programs
from monarch_kernel.kernel.usage_errors import nearest, usage_error

#: How long an interpreter may take to import what a rank needs (seconds).
_PATIENCE = 60.0
#: What a rank imports before it can say that something is missing.
_NEEDED = "monarch_kernel.actor"


def environment_prefix(command: str, name: str) -> str:
    """The folder of an environment.

    Args:
        command: for errors.
        name: of an environment of conda, or the path of an environment or of a uv project.

    Raises:
        UsageError: there is none; the message lists similar names.
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
            [python, "-c", f"import {_NEEDED}"], capture_output=True, text=True, timeout=_PATIENCE, env=_as_ranks()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise usage_error(command, f"{python} cannot be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        raise usage_error(
            command, f"ranks cannot run in {prefix}: {last}; install monarch_kernel there ({python} -m pip install ...)"
        )


def _as_ranks() -> dict[str, str]:
    """The environment variables of such a rank: a checkout of this package is on its import path."""
    import monarch_kernel

    root = os.path.dirname(os.path.dirname(os.path.abspath(monarch_kernel.__file__)))
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))}


def _conda_environments() -> Iterator[tuple[str, str]]:
    """The names and folders of environments that conda and its relatives have made for this user."""
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
