"""Workers that outlive whoever starts them, and the folders of those that keep a mesh.

A kept mesh has a folder ``<tmp>/monarch-kernel-<uid>/kept/NAME`` (mode 0700) with its keeper's socket, log and
description. It is in the temporary folder and not in ``XDG_RUNTIME_DIR``: that is emptied when its user logs out, and
differs between a terminal and a service, but a kept mesh is to be found the next day and from everywhere.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

import monarch_kernel
from monarch_kernel.protocol.keeping import KeptInfo
from monarch_kernel.runtime.node.link import connect_unix

#: Where kept meshes have their folders, instead of the temporary folder.
FOLDER_VARIABLE = "MONARCH_KERNEL_KEPT_DIR"
SOCKET = "socket"
DESCRIPTION = "mesh.json"
LOG = "worker.log"

#: How long a worker may take to start (seconds).
START_TIMEOUT = 60.0
#: A folder without a socket is being made if it is not older than this (seconds), else it is what a death has left.
_START_AGE = START_TIMEOUT
#: The path of a Unix socket has at most 107 bytes.
_LONGEST_BASE = 60


def start_daemon(
    address: str,
    log: str,
    *,
    name: str = "",
    keep: str = "",
    idle: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """Start a worker that is nobody's child, and wait until it listens.

    Args:
        address: where it listens, as for ``monarch-kernel worker``.
        log: the file that gets what it says.
        name: what the host is called.
        keep: the folder of the mesh that it is to keep.
        idle: seconds without a controller after which it ends; 0: never.
        env: more environment variables, for its ranks, too.

    Returns:
        Its URL.

    Raises:
        RuntimeError: it could not start; says why, as far as it has said so.
    """
    read, write = os.pipe()
    # This very package, wherever it came from, and whatever lies in the working directory.
    root = os.path.dirname(os.path.dirname(os.path.abspath(monarch_kernel.__file__)))
    start = f"import sys; sys.path.insert(0, {root!r}); from monarch_kernel.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, "worker", "--listen", address]
    command += ["--idle", str(idle), "--ready", str(write)]
    for option, value in (("--name", name), ("--keep", keep)):
        if value:
            command += [option, value]
    try:
        with open(log, "ab") as output:
            os.fchmod(output.fileno(), 0o600)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        os.close(write)
        write = -1
        process.wait(START_TIMEOUT)  # it has forked the worker
        said = b""
        end = time.monotonic() + START_TIMEOUT
        while select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = os.read(read, 4096)
            if not piece:
                break
            said += piece
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    if not said:
        with open(log, "rb") as file:
            why = file.read()[-2000:].decode(errors="replace").strip() or "it has said nothing"
        raise RuntimeError(f"the worker at {address} could not start: {why}")
    return said.decode()


# -- folders ------------------------------------------------------------------------------------


def kept_folder(name: str) -> str:
    """The folder of the kept mesh of that name, whether it is there or not.

    Raises:
        ValueError: the name cannot be a folder's.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
        raise ValueError(f"{name!r} cannot name a kept mesh: use at most 32 letters, digits, _ . or -")
    return os.path.join(_base(), name)


def _base() -> str:
    base = os.environ.get(FOLDER_VARIABLE)
    if base:
        return base
    import tempfile

    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST_BASE:
        base = "/tmp"
    return os.path.join(base, f"monarch-kernel-{os.getuid()}", "kept")


def make_folder(name: str) -> str:
    """Make the folder of a new kept mesh.

    Raises:
        FileExistsError: there is a mesh of that name.
        PermissionError: somebody else could write where the folder is to be.
    """
    path = kept_folder(name)
    base = os.path.dirname(path)
    for each in (base,) if os.environ.get(FOLDER_VARIABLE) else (os.path.dirname(base), base):
        os.makedirs(each, 0o700, exist_ok=True)
        found = os.lstat(each)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"{each} is not a folder that only you can write to: remove it, or name another in {FOLDER_VARIABLE}"
            )
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not remove_if_dead(path):
            raise FileExistsError(f"there is a kept mesh {name!r} already") from None
        os.mkdir(path, 0o700)
    return path


def remove_if_dead(path: str) -> bool:
    """Remove a folder whose keeper is dead; whether it was."""
    if not os.path.isdir(path):
        return False
    age = time.time() - os.stat(path).st_mtime
    try:
        connect_unix(os.path.join(path, SOCKET)).close()
    except ConnectionRefusedError:
        pass
    except FileNotFoundError:
        if age < _START_AGE and not os.path.exists(os.path.join(path, DESCRIPTION)):
            return False
    except OSError:
        return False
    else:
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True


def read_description(path: str) -> KeptInfo | None:
    """What is kept in a folder; None if its keeper is dead (then the folder goes), or has not begun yet."""
    if remove_if_dead(path):
        return None
    try:
        with open(os.path.join(path, DESCRIPTION), "rb") as file:
            return msgspec.json.decode(file.read(), type=KeptInfo)
    except (OSError, msgspec.DecodeError):
        return None


def kept() -> list[KeptInfo]:
    """The kept meshes of this user on this machine, by name. Does not start the runtime; cleans up after dead ones."""
    base = _base()
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return []
    found = (read_description(os.path.join(base, name)) for name in names)
    return [info for info in found if info is not None]
