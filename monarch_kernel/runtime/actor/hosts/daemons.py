"""Workers that outlive whoever starts them, and the folders of those that keep a mesh.

A kept mesh has a folder ``<tmp>/monarch-kernel-<uid>/kept/NAME`` (mode 0700) with its keeper's socket, log and
description. It is in the temporary folder and not in ``XDG_RUNTIME_DIR``: that is emptied when its user logs out, and
differs between a terminal and a service, but a kept mesh is to be found the next day and from everywhere.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

import monarch_kernel
from monarch_kernel.protocol.kept_mesh import DESCRIPTION, FILES, FOLDER, KeptInfo
from monarch_kernel.protocol.private_files import NotOursError, NotPrivateError, PrivateFolder, temporary_folder
from monarch_kernel.runtime.node import coredumps

#: Where kept meshes have their folders, instead of the temporary folder.
FOLDER_VARIABLE = "MONARCH_KERNEL_KEPT_DIR"

#: How long a worker may take to start (seconds).
START_TIMEOUT = 60.0
#: How long the last process that uses a folder may take to end (seconds).
END_TIMEOUT = 10.0
#: The path of a Unix socket has at most 107 bytes.
_LONGEST_BASE = 60
_LONGEST_JOB_BASE = 40
#: What the folder of a job calls itself, and the files in it: all that is ever removed from one.
_JOB = "job"
_JOB_FILES = ("*.sock", "*.log")


def start_daemon(
    folder: PrivateFolder,
    listen: str,
    log: str,
    *,
    name: str = "",
    keep: bool = False,
    idle: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """Start a worker that is nobody's child, and wait until it listens.

    Args:
        folder: where its socket and log are. The worker holds the folder's lock, too, for as long as it lives.
        listen: the name of its socket.
        log: the name of the file that gets what it says.
        name: what the host is called.
        keep: whether it keeps a mesh, and describes that in the folder.
        idle: seconds without a controller after which it ends; 0: never.
        env: more environment variables, for its ranks, too.

    Returns:
        Its URL.

    Raises:
        OSError: its log cannot be written.
        RuntimeError: it could not start; says why, as far as it has said so.
    """
    address = f"ipc://{folder.path}/{listen}"
    # This very package, wherever it came from, and whatever lies in the working directory.
    root = os.path.dirname(os.path.dirname(os.path.abspath(monarch_kernel.__file__)))
    start = f"import sys; sys.path.insert(0, {root!r}); from monarch_kernel.__main__ import main; sys.exit(main())"
    output = folder.open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    read, write = os.pipe()
    command = [sys.executable, "-P", "-c", start, "worker", "--listen", address]
    command += ["--idle", str(idle), "--ready", str(write), "--lock", str(folder.lock_fd)]
    for option, value in (("--name", name), ("--keep", folder.path if keep else "")):
        if value:
            command += [option, value]
    try:
        with coredumps.users_limit():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write, folder.lock_fd),
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
        url = said.decode(errors="replace")
        if url != address:
            why = url or _last_words(folder, log, output)
            raise RuntimeError(f"the worker at {address} could not start: {why}")
        return url
    finally:
        for fd in (read, write, output):
            if fd >= 0:
                os.close(fd)


def _last_words(folder: PrivateFolder, log: str, output: int) -> str:
    """What a worker that could not start has said in its log, or why it could not say anything."""
    said = folder.read(log)[-2000:].decode(errors="replace").strip()
    if said:
        return said
    try:
        os.write(output, b"it has said nothing\n")
    except OSError as e:
        return f"{os.path.join(folder.path, log)} cannot be written: {e.strerror}"
    return "it has said nothing"


# -- folders of kept meshes -----------------------------------------------------------------------


def kept_folder(name: str) -> str:
    """The folder of the kept mesh of that name, whether it is there or not.

    Raises:
        ValueError: the name cannot be a folder's.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
        raise ValueError(f"{name!r} cannot name a kept mesh: use at most 32 letters, digits, _ . or -")
    return os.path.join(_base(), name)


def _base() -> str:
    return os.environ.get(FOLDER_VARIABLE) or os.path.join(
        temporary_folder(_LONGEST_BASE), f"monarch-kernel-{os.getuid()}", "kept"
    )


def _open_base() -> PrivateFolder:
    """The folder with the folders of kept meshes, made if it is not there.

    Raises:
        NotPrivateError: another user could write there.
    """
    path = os.path.abspath(_base())
    parent = os.path.dirname(path)
    try:
        for each in (path,) if os.environ.get(FOLDER_VARIABLE) else (parent, path):
            try:
                PrivateFolder.make(each).close()
            except FileExistsError:
                pass
        return PrivateFolder.open(path, visible=True)
    except NotPrivateError as e:
        raise elsewhere(e) from None


def elsewhere(error: NotPrivateError) -> NotPrivateError:
    """The same error, with what can be done about it."""
    return NotPrivateError(f"{error}; {FOLDER_VARIABLE} names another folder for kept meshes")


def make_folder(name: str) -> PrivateFolder:
    """Make the folder of a new kept mesh, and hold its lock.

    Raises:
        FileExistsError: there is a mesh of that name, or a folder that is none of ours.
        NotPrivateError: another user could write where the folder is to be.
        OSError: it cannot be made.
    """
    path = kept_folder(name)
    _open_base().close()
    try:
        folder = PrivateFolder.make(path)
    except FileExistsError:
        try:
            free = remove_if_dead(path)
        except NotOursError as e:
            raise FileExistsError(f"{e}, so it stays: choose another name, or move it away") from None
        if not free:
            raise FileExistsError(f"there is a kept mesh {name!r} already") from None
        folder = PrivateFolder.make(path)
    folder.claim(FOLDER)
    return folder


def remove_folder(folder: PrivateFolder) -> None:
    """Remove the folder of a kept mesh whose lock this process holds."""
    left = folder.remove(FILES)
    folder.close()
    if left:
        raise NotOursError(f"{folder.path} holds what is not ours ({', '.join(left)}), so it stays")


def remove_if_dead(path: str) -> bool:
    """Remove a folder whose keeper is dead; whether it was.

    Raises:
        FileNotFoundError: there is no such folder.
        NotOursError: it is not a kept mesh's, or holds more than that. What is not ours is not touched.
        NotPrivateError: it is another user's, or open to others.
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
    """What is kept in a folder; None if its keeper is dead (then the folder goes), or has not begun yet.

    Also None if the folder is none of ours.
    """
    try:
        if remove_if_dead(path):
            return None
        with PrivateFolder.open(path) as folder:
            return msgspec.json.decode(folder.read(DESCRIPTION), type=KeptInfo)
    except (OSError, msgspec.DecodeError):
        return None


def kept() -> list[KeptInfo]:
    """The kept meshes of this user on this machine, by name. Does not start the runtime; cleans up after dead ones.

    Raises:
        NotPrivateError: the folder that they would be in is another user's.
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


# -- folders of jobs ------------------------------------------------------------------------------


def make_job_folder() -> PrivateFolder:
    """Make a folder for daemons of this machine, and hold its lock, which they inherit.

    Raises:
        OSError: it cannot be made.
    """
    base = temporary_folder(_LONGEST_JOB_BASE)
    folder = PrivateFolder.make(os.path.join(base, f"monarch-job-{os.getuid()}-{os.urandom(5).hex()}"))
    folder.claim(_JOB)
    return folder


def remove_job_folder(path: str) -> None:
    """Remove the folder of a job when the last daemon in it has ended, for which it waits.

    Raises:
        OSError: it stays, as it is none of ours, holds what is not ours, or is in use; says which.
    """
    try:
        folder = PrivateFolder.open(path)
    except FileNotFoundError:
        return
    with folder:
        end = time.monotonic() + END_TIMEOUT
        while not folder.take(_JOB):
            if time.monotonic() > end:
                raise OSError(f"{path} stays, as a host of the job has not ended within {END_TIMEOUT:g} s")
            time.sleep(0.005)
        left = folder.remove(_JOB_FILES)
    if left:
        raise NotOursError(f"{path} holds what is not ours ({', '.join(left)}), so it stays")
