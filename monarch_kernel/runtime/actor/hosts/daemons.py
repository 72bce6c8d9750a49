"""Start workers that outlive this process, and manage the folders of a job's workers."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping

from monarch_kernel import programs
from monarch_kernel.protocol.announcement import WorkerAnnouncement, find_announcement
from monarch_kernel.protocol.private_files import NotOursError, PrivateFolder, temporary_folder
from monarch_kernel.runtime.node import coredumps

#: How long a worker may take to start (seconds).
START_TIMEOUT = 60.0
#: How long the last process in a folder may take to end (seconds).
END_TIMEOUT = 10.0
_LONGEST_JOB_BASE = 40
#: The kind of a job's folder, and its files: no other file is ever removed from it.
_JOB = "job"
_JOB_FOLDER = "monarch-job-"
_JOB_FILES = ("*.sock", "*.log", "*.json", "*.json.*.new")


def start_daemon(
    folder: PrivateFolder,
    listen: str,
    log: str,
    *,
    name: str = "",
    keep: bool = False,
    idle: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> WorkerAnnouncement:
    """Start a worker that is not a child of this process, and wait until it listens.

    Args:
        folder: the folder of its socket and log. The worker also holds the folder's lock while it lives.
        listen: the name of its socket.
        log: the name of its log file.
        name: the name of the host.
        keep: whether it keeps a mesh, and writes a description of it into the folder.
        idle: seconds without a controller after which it ends; 0: no limit.
        env: further environment variables, also for its ranks.

    Returns:
        Its announcement, which includes its URL.

    Raises:
        OSError: its log cannot be written.
        RuntimeError: it could not start; the message quotes its log.
    """
    address = f"ipc://{folder.path}/{listen}"
    output = folder.open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    read, write = os.pipe()
    command = [*programs.own_command(), "worker", "--listen", address]
    command += ["--idle", str(idle), "--announce", str(write), "--background", "--lock", str(folder.lock_fd)]
    for option, value in (("--name", name), ("--keep", folder.path if keep else "")):
        if value:
            command += [option, value]
    try:
        with coredumps.users_limit():
            process = programs.start(
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
        process.wait(START_TIMEOUT)  # it ends once it has forked the worker
        said = b""
        end = time.monotonic() + START_TIMEOUT
        while select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = os.read(read, 4096)
            if not piece:
                break
            said += piece
        found = find_announcement(said)
        if found is None or found.url != address:
            why = found.error if found is not None else _last_words(folder, log, output)
            raise RuntimeError(f"the worker at {address} could not start: {why}")
        return found
    finally:
        for fd in (read, write, output):
            if fd >= 0:
                os.close(fd)


def _last_words(folder: PrivateFolder, log: str, output: int) -> str:
    """Read the end of the log of a worker that could not start, or explain why there is none."""
    said = folder.read(log)[-2000:].decode(errors="replace").strip()
    if said:
        return said
    try:
        os.write(output, b"it wrote no output\n")
    except OSError as e:
        return f"{os.path.join(folder.path, log)} cannot be written: {e.strerror}"
    return "it wrote no output"


# -- folders of jobs ------------------------------------------------------------------------------


def make_job_folder() -> PrivateFolder:
    """Make a folder for daemons of this machine, and take its lock, which they inherit.

    Raises:
        OSError: the folder cannot be made.
    """
    base = temporary_folder(_LONGEST_JOB_BASE)
    folder = PrivateFolder.make(os.path.join(base, f"{_JOB_FOLDER}{os.getuid()}-{os.urandom(5).hex()}"))
    folder.claim(_JOB)
    return folder


def is_job_folder(path: str) -> bool:
    """Return whether the name of a path is that of a folder made by ``make_job_folder`` for this user."""
    return os.path.basename(path).startswith(f"{_JOB_FOLDER}{os.getuid()}-")


def remove_job_folder(path: str) -> None:
    """Wait for the last daemon in a job's folder to end, and remove the folder.

    Raises:
        OSError: the folder was not removed, because it or a file in it is not ours, or it is in use.
    """
    try:
        folder = PrivateFolder.open(path)
    except FileNotFoundError:
        return
    with folder:
        end = time.monotonic() + END_TIMEOUT
        while not folder.take(_JOB):
            if time.monotonic() > end:
                raise OSError(f"{path} was not removed: a host of the job did not end within {END_TIMEOUT:g} s")
            time.sleep(0.005)
        left = folder.remove(_JOB_FILES)
    if left:
        raise NotOursError(f"{path} was not removed: it holds files that are not ours ({', '.join(left)})")
