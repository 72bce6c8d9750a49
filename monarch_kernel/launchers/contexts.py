"""Manage the contexts of a folder: each has a current job, and one context is active.

The files of the active context are in ``.monarch``, where every program looks for them. Those of other contexts are in
``.monarch/contexts/NAME``, and ``use`` exchanges them.
"""

from __future__ import annotations

import os
from contextlib import suppress

from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.current_job import SPEC_PATH, job_of_file
from monarch_kernel.launchers.job import CACHED_PATH
from monarch_kernel.private_files import read_own_file, write_own_file

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
