"""Announce a prepared rank to this user's programs: its identity and its socket.

All files are in one folder of mode 0700 per user and machine: ``PID-SPACE.json`` and the socket ``PID-SPACE.sock`` of
each rank. SPACE is the PID namespace, because containers may share the folder. Ranks load this module, so it imports
only the standard library and the private folders.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from monarch_kernel.engines.join.identity import RankIdentity
from monarch_kernel.protocol.private_files import NotPrivateError, PrivateFolder, open_way, temporary_folders

#: The maximum length of the path of a Unix socket (bytes).
_LONGEST = 107
#: The length of the path after the temporary folder: ``/monarch-join-UID/PID-SPACE.sock``.
_BEHIND = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Suffix of a job's lock file: reports on its hangs are made one at a time; see ``progress_monitor``.
HANG = ".hang"
#: Suffix of the lock file for the process of this machine that calls a meeting point; see ``GatewayCall``.
MEET = ".meet"
#: Suffixes of the files with the code that an unprepared process runs to be joined, and with its answer;
#: see ``debugger.outside.remote_exec``.
SCRIPT, ANSWER = ".py", ".answer"
#: The maximum length of a displayed command line (characters).
_PROGRAM = 300


class JoinError(RuntimeError):
    """A job cannot be prepared, found or joined. The message names the cause and a remedy."""


@dataclass(frozen=True)
class RankAnnouncement:
    """A prepared rank.

    Attributes:
        name: the name of its job.
        identity: its rank, as its launcher announced it at the start.
        pid: its process id.
        began: when the process began, in clock ticks since boot; it distinguishes processes that reuse this id.
        since: when it was prepared (seconds since 1970).
        host: the name of its machine.
        program: its command line, shortened.
        folder: its working folder.
        python: the version of its Python.
        space: its PID namespace: containers may share the folder.
        socket: the path of its socket; "" in an announcement from another machine.
        meet: the meeting point at which viewers of other machines find it; "" if there is none.
    """

    name: str
    pid: int
    began: int
    since: float
    host: str
    program: str
    folder: str
    python: str
    identity: RankIdentity = field(default_factory=RankIdentity)
    space: int = 0
    socket: str = ""
    meet: str = ""

    @property
    def process(self) -> tuple[object, ...]:
        """A key that is unique for each process and does not change when more becomes known about it."""
        return self.host, self.space, self.pid, self.began, self.since


def check_name(name: str) -> str:
    """Return the name of a job.

    Raises:
        JoinError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise JoinError(
            f"{name!r} is no name of a job to join: use up to 64 letters, digits, dots, underscores and hyphens"
        )
    return name


# -- in a rank ---------------------------------------------------------------------------------------


def join_folder() -> PrivateFolder:
    """Return the folder of this user. It is created if it is missing.

    It is below `/tmp` if possible, even if `TMPDIR` names another folder, because many jobs have their own `TMPDIR`.

    Raises:
        NotPrivateError: no folder is safe from other users.
    """
    why: list[str] = []
    for base in _bases():
        path = os.path.join(base, f"monarch-join-{os.geteuid()}")
        try:
            os.close(open_way(base))
            with suppress(FileExistsError):
                PrivateFolder.make(path).close()
            return PrivateFolder.open(path)
        except OSError as error:
            why.append(str(error))
    raise NotPrivateError(f"no folder is safe to use: {'; '.join(why)}; name one of your own in TMPDIR")


def _bases() -> list[str]:
    found = temporary_folders(_LONGEST - _BEHIND)
    return sorted(found, key=lambda path: path not in ("/tmp", "/var/tmp", "/dev/shm"))


def announce(name: str, identity: RankIdentity, meet: str = "") -> tuple[RankAnnouncement, socket.socket]:
    """Listen for viewers, and write the announcement.

    Args:
        meet: the meeting point at which viewers also find it.

    Returns:
        The announcement and the listening socket, which is non-blocking.

    Raises:
        OSError: the files cannot be created.
    """
    pid, space = os.getpid(), pid_space()
    stem = f"{pid}-{space}"
    with join_folder() as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            folder.discard(f"{stem}.sock")  # left by an earlier process with this id
            path = os.path.join(folder.path, f"{stem}.sock")
            listener.bind(path)
            listener.listen(64)
            program = " ".join(sys.orig_argv)[:_PROGRAM]
            now = RankAnnouncement(
                name,
                pid,
                began_at(pid),
                time.time(),
                socket.gethostname(),
                program,
                os.getcwd(),
                "{}.{}.{}".format(*sys.version_info),
                identity,
                space,
                path,
                meet,
            )
            folder.replace(f"{stem}.json", json.dumps(asdict(now)).encode())
        except BaseException:
            listener.close()
            raise
    return now, listener


def withdraw(announced: RankAnnouncement) -> None:
    """Remove the files of `announce` at the end of the process."""
    with suppress(OSError), PrivateFolder.open(os.path.dirname(announced.socket)) as folder:
        _remove(folder, f"{announced.pid}-{announced.space}")


def meet_file(url: str) -> str:
    """Return the name of the file of a meeting point."""
    return f"{re.sub('[^A-Za-z0-9.-]', '_', url)[-200:]}{MEET}"


def _remove(folder: PrivateFolder, stem: str) -> None:
    folder.discard(f"{stem}.json")
    folder.discard(f"{stem}.sock")


def pid_space() -> int:
    """Return the PID namespace of this process."""
    return os.stat("/proc/self/ns/pid").st_ino


def began_at(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 if there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            found = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if found[0] in (b"Z", b"X") else int(found[19])


# -- in a viewer -------------------------------------------------------------------------------------


def announcements() -> list[RankAnnouncement]:
    """Return the prepared ranks of this user on this machine, oldest first. Files of dead ranks are removed."""
    found: list[RankAnnouncement] = []
    space = pid_space()
    for base in _bases():
        try:
            folder = PrivateFolder.open(os.path.join(base, f"monarch-join-{os.geteuid()}"))
        except OSError:
            continue
        with folder:
            names = folder.names()
            for name in names:
                stem, dot, kind = name.rpartition(".")
                if not dot or kind != "json":
                    continue
                with suppress(OSError, ValueError, TypeError, KeyError):
                    each = announcement_of(json.loads(folder.read(name)))
                    if stem != f"{each.pid}-{each.space}":
                        continue
                    each = replace(each, socket=os.path.join(folder.path, f"{stem}.sock"))
                    if each.space != space or began_at(each.pid) == each.began:
                        found.append(each)
                    else:
                        _remove(folder, stem)
            living = {*(f"{each.name}{HANG}" for each in found), *(meet_file(each.meet) for each in found if each.meet)}
            for name in names:
                if name.endswith((HANG, MEET)) and name not in living:
                    folder.discard(name)
                if name.endswith((SCRIPT, ANSWER)) and _is_dead(name, space):
                    folder.discard(name)
    return sorted(found, key=lambda each: (each.since, each.pid))


def _is_dead(name: str, space: int) -> bool:
    """Return whether the process of a file named ``PID-SPACE.KIND`` is gone."""
    pid, _, of = name.partition(".")[0].partition("-")
    return pid.isdecimal() and of == str(space) and not began_at(int(pid))


def announcement_of(plain: object) -> RankAnnouncement:
    """Decode an announcement from JSON. Fields of later versions are ignored.

    Raises:
        ValueError: the value is not an announcement.
    """
    import msgspec  # only viewers need it

    try:
        return msgspec.convert(plain, RankAnnouncement)
    except msgspec.ValidationError as error:
        raise ValueError(f"no announcement of a rank: {error}") from None
