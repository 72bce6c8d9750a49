"""Manage the folders of kept meshes.

A kept mesh has a folder ``<tmp>/monarch-kernel-<uid>/kept/NAME`` (mode 0700) with its keeper's socket, log and
description. It is in the temporary folder, because ``XDG_RUNTIME_DIR`` is emptied when its user logs out and differs
between a terminal and a service. A kept mesh must be found on the next day, and from both.
"""

from __future__ import annotations

import os
import re
import time

import msgspec

from monarch_kernel import environment
from monarch_kernel.protocol.kept_mesh import DESCRIPTION, FILES, FOLDER, KeptInfo
from monarch_kernel.protocol.private_files import NotOursError, NotPrivateError, PrivateFolder, temporary_folder

#: The path of a Unix socket has at most 107 bytes.
_LONGEST_BASE = 60


def kept_folder(name: str) -> str:
    """Return the folder of the kept mesh with this name, whether or not it exists.

    Raises:
        ValueError: the name is invalid for a folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
        raise ValueError(f"{name!r} cannot name a kept mesh: use at most 32 letters, digits, _ . or -")
    return os.path.join(_base(), name)


def _base() -> str:
    return environment.KEPT_DIR.get() or os.path.join(
        temporary_folder(_LONGEST_BASE), f"monarch-kernel-{os.getuid()}", "kept"
    )


def open_base() -> PrivateFolder:
    """Return the parent of the folders of kept meshes, created if it does not exist.

    Raises:
        NotPrivateError: another user can write there.
    """
    path = os.path.abspath(_base())
    parent = os.path.dirname(path)
    try:
        for each in (path,) if environment.KEPT_DIR.get() else (parent, path):
            try:
                PrivateFolder.make(each).close()
            except FileExistsError:
                pass
        return PrivateFolder.open(path, visible=True)
    except NotPrivateError as e:
        raise elsewhere(e) from None


def elsewhere(error: NotPrivateError) -> NotPrivateError:
    """Return the same error, with advice on what to do."""
    return NotPrivateError(f"{error}; {environment.KEPT_DIR.name} names another folder for kept meshes")


def make_folder(name: str, release: float = 0.0) -> PrivateFolder:
    """Make the folder of a new kept mesh, and take its lock.

    Args:
        release: how long the former keeper of this name may take to release its lock (seconds). The connections of a
            killed process are closed before its locks are released, so its death may be known before its name is free.

    Raises:
        FileExistsError: a kept mesh of this name exists, or a folder that is not ours.
        NotPrivateError: another user can write to the parent folder.
        OSError: the folder cannot be made.
    """
    path = kept_folder(name)
    open_base().close()
    end = time.monotonic() + release
    while True:
        try:
            folder = PrivateFolder.make(path)
            break
        except FileExistsError:
            try:
                free = remove_if_dead(path)
            except FileNotFoundError:  # another process has just removed it
                continue
            except NotOursError as e:
                raise FileExistsError(f"{e}: choose another name, or move the folder away") from None
            if not free and time.monotonic() >= end:
                raise FileExistsError(f"a kept mesh {name!r} already exists") from None
            if not free:
                time.sleep(0.005)
    folder.claim(FOLDER)
    return folder


def remove_folder(folder: PrivateFolder) -> None:
    """Remove the folder of a kept mesh whose lock this process holds."""
    left = folder.remove(FILES)
    folder.close()
    if left:
        raise NotOursError(f"{folder.path} was not removed: it holds files that are not ours ({', '.join(left)})")


def remove_if_dead(path: str) -> bool:
    """Remove a folder if its keeper is dead; returns whether it removed the folder.

    Raises:
        FileNotFoundError: the folder does not exist.
        NotOursError: it is not the folder of a kept mesh, or holds other files, which are not touched.
        NotPrivateError: it belongs to another user, or other users have access to it.
    """
    folder = PrivateFolder.open(path)
    try:
        if not folder.take(FOLDER):
            return False
        remove_folder(folder)
        return True
    finally:
        folder.close()


def read_description(path: str) -> KeptInfo | None:
    """Return the description of the kept mesh in a folder.

    None if its keeper is dead (the folder is then removed) or has not started yet, or if the folder is not ours.
    """
    try:
        if remove_if_dead(path):
            return None
        with PrivateFolder.open(path) as folder:
            return msgspec.json.decode(folder.read(DESCRIPTION), type=KeptInfo)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def kept() -> list[KeptInfo]:
    """Return the kept meshes of this user on this machine, by name. Does not start the runtime; removes dead meshes.

    Raises:
        NotPrivateError: their parent folder belongs to another user.
    """
    try:
        base = PrivateFolder.open(_base(), visible=True)
    except FileNotFoundError:
        return []
    except NotPrivateError as e:
        raise elsewhere(e) from None
    except OSError:
        return []
    with base:
        found = (read_description(os.path.join(base.path, name)) for name in base.names())
        return [info for info in found if info is not None]
