"""Track the connections of ``torch.distributed`` process groups in this process, and end waits in collectives.

When one rank of a call raises, others may wait for it in a collective. Gloo has no function that ends such a wait. A
rank therefore records the connections that its groups open, whether user code, DeviceMesh or this package creates them.
To release a rank, the runtime shuts these connections down as if the peers had done so, and the collective raises.
Shutdown works even if a child process (a DataLoader worker) has inherited the connection; closing does not.

This module never imports torch, and costs nothing until the program imports it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

import msgspec

from monarch_kernel import programs
from monarch_kernel.loading import after_import
from monarch_kernel.protocol.faults import capture, encode_fault
from monarch_kernel.thread_frames import current_frames, without_last_frames

C10D = "torch.distributed.distributed_c10d"
#: How long a thread must wait in a collective, without using processor time, before it is released (seconds).
STILL = 0.3
#: The same if waiting uses processor time (NCCL), or if the failed ranks may not be in the group.
STILL_UNSURE = 3.0
#: How often a thread is sampled, at first and later (seconds).
LOOK, LOOK_LATER = 0.05, 0.25

#: How long the connections of groups must be idle to count as quiet, and the time limit for that (seconds).
QUIET, SETTLING = 0.02, 0.5
#: The position of the acknowledged and received bytes in Linux's ``struct tcp_info``.
_TCP_BYTES = slice(120, 136)

_TORCH = f"{os.sep}torch{os.sep}"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_RUNTIME = os.path.join(programs.PACKAGE, "runtime", "")
_LOADER = f"{_TORCH}utils{os.sep}data{os.sep}"
#: Methods that wait for work started earlier: methods of `Work`, and methods that copy results from a GPU.
WAITING = frozenset({"wait", "result", "synchronize", "item", "tolist", "cpu", "numpy", "value"})
#: Error messages that mean that another rank is gone, or did not join.
_OF_PEER = (
    r"closed by peer|reset by peer|broken pipe|read error|write error|timed? ?out|remote process|aborted|socketstart"
    r"|connection refused|connection was likely closed|failed to recv|failed to send"
)


# -- connections ------------------------------------------------------------------------------------


class Opened:
    """The network connections opened while a process group was made, by inode."""

    def __init__(self) -> None:
        self._before = sockets()
        self._own: frozenset[int] | None = None  # None while the group is being made
        self.ended = False

    def close(self) -> None:
        """Record the connections of the group, which is complete now."""
        self._own = sockets() - self._before

    def inodes(self) -> frozenset[int]:
        """Return the inodes of the connections that belong, or belonged, to the group."""
        return self._own if self._own is not None else sockets() - self._before

    def shut_down(self) -> None:
        """Shut the connections down as if the peers had done so: collectives in progress raise at both ends."""
        self.ended = True
        for connection in _connections(self.inodes()):
            with suppress(OSError):  # it has been closed meanwhile
                connection.shutdown(socket.SHUT_RD)


_lock = threading.Lock()
_opened: list[Opened] = []
_endings = 0  # how often this process shut all connections down
_meeting: set[int] = set()  # threads that wait for other ranks to join, outside torch


@contextmanager
def opening() -> Generator[Opened]:
    """Assign connections opened inside this block to a process group."""
    found = Opened()
    with _lock:
        living = sockets()
        # Leftovers of groups that were shut down (a wrapped model keeps its group alive) do not affect the new group.
        _opened[:] = [each for each in _opened if not each.ended and each.inodes() & living]
        _opened.append(found)
    try:
        yield found
    finally:
        try:
            found.close()
        except KeyboardInterrupt:  # otherwise connections that other code opens later would count as the group's
            found.close()
            raise


def shut_down_all() -> None:
    """End every collective in progress in this process, in any group. The groups are unusable afterwards."""
    global _endings
    with _lock:
        groups = list(_opened)
    _endings += 1
    for each in groups:
        each.shut_down()
    c10d = sys.modules.get(C10D)
    if c10d is None:
        return
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if backend == "gloo":
            continue
        with suppress(Exception):  # not every backend supports it, and an aborted one refuses
            group.abort()


def settle(limit: float = SETTLING) -> None:
    """Wait until the connections of all groups are quiet: no data is in transit, and no thread is about to send.

    When a connection ends, Gloo drops messages that are only partly sent or received, and their receivers wait forever.
    Ranks that wait for a rank that is gone eventually become quiet.

    Args:
        limit: the time limit (seconds).
    """
    with _lock:
        groups = frozenset[int]().union(*(each.inodes() for each in _opened))
    deadline = time.monotonic() + limit
    before: tuple[int, int] | None = None
    since = 0.0
    while (now := time.monotonic()) < deadline:
        carried = _carried(groups)
        if carried is None or carried != before:
            before, since = carried, now
        elif now - since >= QUIET:
            return
        time.sleep(QUIET / 4)


def _carried(inodes: frozenset[int]) -> tuple[int, int] | None:
    """Count the bytes that these connections have sent and received.

    None if some are under way, or another thread runs.
    """
    sent = received = 0
    for connection in _connections(inodes):
        with suppress(OSError):  # it has been closed meanwhile
            for queue in (termios.FIONREAD, termios.TIOCOUTQ):
                if fcntl.ioctl(connection, queue, bytes(4)) != bytes(4):
                    return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES.stop)[_TCP_BYTES]
            acked, got = struct.unpack("QQ", info) if len(info) == 16 else (0, 0)
            sent, received = sent + acked, received + got
    own = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):
        if int(task) != own:
            with suppress(OSError), open(f"/proc/self/task/{task}/stat", "rb", buffering=0) as file:
                if file.read().rpartition(b")")[2].split(None, 1)[0] == b"R":
                    return None
    return sent, received


def endings() -> int:
    """Count how often the connections of all groups have been shut down in this process."""
    return _endings


@contextmanager
def waiting() -> Generator[Callable[[], None]]:
    """Mark the calling thread as waiting for other ranks. Its loop calls the yielded check, which raises on release."""
    thread, began = threading.get_ident(), _endings

    def check() -> None:
        if _endings != began:
            raise RuntimeError("aborted: the process group was not made, as other ranks did not join")

    _meeting.add(thread)
    try:
        yield check
    finally:
        _meeting.discard(thread)


def are_broken() -> bool:
    """Return whether the connections of a process group that still exists were shut down."""
    if not in_process_group():
        return False
    with _lock:
        return any(each.ended for each in _opened)


def in_process_group() -> bool:
    """Return whether this process is in a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _descriptors() -> dict[int, int]:
    """Return the descriptors of all sockets of this process, by inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                # The lowest: a higher one may be a copy that another thread of the runtime holds for a moment.
                found[status.st_ino] = min(int(name), found.get(status.st_ino, int(name)))
    return found


def sockets() -> frozenset[int]:
    """Return the inodes of all sockets of this process."""
    return frozenset(_descriptors())


def _connections(inodes: frozenset[int]) -> Iterator[socket.socket]:
    """Yield the network connections among these sockets of this process, each open until the next is requested."""
    for inode, fd in _descriptors().items():
        if inode not in inodes:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as held:
            # The descriptor may have been closed and reused for another file before it was duplicated.
            if os.fstat(held.fileno()).st_ino != inode or held.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # Skip listeners: shutting one down would raise an unrelated error in accept().
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield held


# -- recording what torch opens ---------------------------------------------------------------------

#: How the ranks of a group find each other if the program specifies no other way. It takes torch's ``rendezvous`` and
#: its arguments, and yields the same as ``rendezvous``. The package that runs programs on ranks sets it.
find_others: Callable[..., Iterator[object]] | None = None


def install() -> None:
    """Record the connections of process groups, as soon as torch.distributed is imported."""
    after_import(C10D, _watch)


_kept: list[object] | None = None


@contextmanager
def keeping_groups() -> Generator[None]:
    """Keep the process groups that are made meanwhile until the end of the block.

    If a model of DDP has the last reference to one, the interpreter's lock is held while the group's threads end, which
    may wait for that lock: the process would stand still for ever.
    """
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        _kept = before


def _watch(c10d: Any) -> None:
    """Wrap two private functions that every way to make a group calls; other versions of PyTorch may lack them."""
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is not None and not hasattr(make, "__wrapped__"):

        @functools.wraps(make)
        def watched(*args: object, **kwargs: object) -> object:
            with opening():
                made = make(*args, **kwargs)
            if _kept is not None:
                _kept.append(made)
            return made

        c10d._new_process_group_helper = watched
    meet = getattr(c10d, "rendezvous", None)
    if meet is not None and not hasattr(meet, "__wrapped__"):

        @functools.wraps(meet)
        def watched_meeting(*args: object, **kwargs: object) -> Iterator[object]:
            others = find_others(meet, *args, **kwargs) if find_others is not None else meet(*args, **kwargs)
            while True:
                with opening():
                    try:
                        found = next(others)
                    except StopIteration:
                        return
                yield found

        c10d.rendezvous = watched_meeting


# -- waits ------------------------------------------------------------------------------------------


class _Stand:
    """The position of a thread that may wait in a collective, to be compared with a later one."""

    def __init__(self, frame: FrameType | None = None, cpu: int = 0) -> None:
        self._frame = frame
        self._at = frame.f_lasti if frame is not None else -1
        self._cpu = cpu

    def is_at(self, other: _Stand | None, *, idle: bool) -> bool:
        """Return whether the thread has stayed at that position; with ``idle``, also without using processor time."""
        same = other is not None and other._frame is self._frame and other._at == self._at
        return same and (not idle or other is None or other._cpu == self._cpu)


_MEETING = _Stand()


def _stand(thread: int) -> _Stand | None:
    """Return the position of a thread that may wait in a collective; None if it does something else."""
    frame = current_frames().get(thread)
    if frame is None:
        return None
    if thread in _meeting:
        return _MEETING
    innermost = frame
    file = innermost.f_code.co_filename
    outer: FrameType | None = frame
    while outer is not None:
        if _LOADER in outer.f_code.co_filename:
            return None
        outer = outer.f_back
    if _TORCH in file or called_method(innermost) in WAITING:
        return _Stand(innermost, _processor_time(thread))
    return None


def _processor_time(thread: int) -> int:
    """Return the processor time of a thread of this process, in nanoseconds if available; -1 if unknown."""
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
    if native is None:
        return -1
    with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{native}/schedstat") as schedstat:
        return int(schedstat.read().split()[0])
    with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{native}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return -1


def called_method(frame: FrameType) -> str:
    """Return the name of the method that a frame is calling now; "" if it is not calling a method."""
    return _calls(frame.f_code).get(frame.f_lasti, "")


_methods: dict[CodeType, dict[int, str]] = {}


def _calls(code: CodeType) -> dict[int, str]:
    """Return the names of the methods that this code calls, by the offset of the call."""
    known = _methods.get(code)
    if known is None:
        import dis

        known = {}
        loaded: dict[tuple[int | None, int | None], str] = {}
        for each in dis.get_instructions(code):
            at = each.positions
            start = (at.lineno, at.col_offset) if at is not None else (None, None)
            if each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
                loaded[start] = str(each.argval)
            elif each.opname.startswith("CALL") and start in loaded:
                known[each.offset] = loaded[start]
        if len(_methods) > 256:
            _methods.clear()
        _methods[code] = known
    return known


_watched: set[object] = set()


def release(
    key: object, thread: Callable[[], int], runs: Callable[[], bool], failed: frozenset[int] | None = None
) -> None:
    """Release a thread from collectives that other ranks will never join, until the endpoint it runs has ended.

    A computing thread is not disturbed until it waits.

    Args:
        key: identifies what the thread runs; further requests with the same key are ignored.
        thread: returns its identifier; 0 before it starts.
        runs: whether the endpoint still runs, or will run; called often.
        failed: the ranks of torch.distributed that will not join, as far as known; None if a user interrupted the
            endpoint, so that it is to wait for no rank.
    """
    if "torch.distributed" not in sys.modules:
        return
    with _lock:
        if key in _watched:
            return
        _watched.add(key)

    def watch() -> None:
        try:
            _release(thread, runs, failed)
        finally:
            with _lock:
                _watched.discard(key)

    threading.Thread(target=watch, name="monarch-release", daemon=True).start()


def _release(thread: Callable[[], int], runs: Callable[[], bool], failed: frozenset[int] | None) -> None:
    began = since = time.monotonic()
    before: _Stand | None = None
    while runs():
        now = time.monotonic()
        stand = _stand(thread())
        computes, apart = _doubts(failed)
        if stand is None or not stand.is_at(before, idle=not computes):
            before, since = stand, now
        elif now - since >= (STILL_UNSURE if computes or apart else STILL):
            if runs():
                shut_down_all()
            since = now  # the endpoint may catch the error and wait again
        time.sleep(LOOK if now - began < 10 else LOOK_LATER)


def _doubts(failed: frozenset[int] | None) -> tuple[bool, bool]:
    """Return whether waiting uses processor time here, and whether some group does not include the failed ranks."""
    c10d = sys.modules.get(C10D)
    if c10d is None:
        return False, False
    try:
        world = c10d._world
        computes = any(backend != "gloo" for backend, _ in list(world.pg_map.values()))
        groups = [set(ranks) for ranks in list(world.pg_group_ranks.values())]
        largest = max(map(len, groups), default=0)
        apart = failed is not None and any(len(ranks) < largest and not ranks & failed for ranks in groups)
    except Exception:  # a group is being made at this moment, or the version of PyTorch differs
        return False, False
    return computes, apart


def failed_by_peer(error: BaseException) -> bool:
    """Return whether a rank failed only because another rank was gone or did not join, or because it was released.

    An error created from such an error has an attribute `of_peer`.
    """
    if getattr(error, "of_peer", False) is True:
        return True
    at = error.__traceback__
    of_torch = type(error).__module__.startswith("torch")
    while at is not None and not of_torch:
        of_torch = _TORCH in at.tb_frame.f_code.co_filename
        at = at.tb_next
    if not of_torch and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return False
    return re.search(_OF_PEER, said_first(error), re.IGNORECASE) is not None


def said_first(error: BaseException) -> str:
    """Strip torch's additions from a message: the source line in front, and advice after the first sentence."""
    first = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[/[^\]]*\] ", "", first).partition(". This is typically")[0]


def interrupt_first(error: BaseException) -> None:
    """Make an interrupt that ended a wait in a collective show its own text first, and torch's error as a note.

    No signal ends such a wait. Torch raises because the connections of the group were shut down, and the interrupt is
    then raised within torch, while it handles that error.
    """
    waited = error.__context__
    while waited is not None and not failed_by_peer(waited):
        waited = waited.__context__
    if not isinstance(error, KeyboardInterrupt) or waited is None or error.__suppress_context__:
        return
    error.__suppress_context__ = True
    # Without the address, equal texts of many ranks are shown once.
    said = re.sub(r" \[[^ ]*\]:\d+$", "", said_first(waited).rstrip("."))
    error.add_note(f"It ended a wait in torch.distributed ({said}).")

    def hides(file: str) -> bool:
        return _TORCH in file or file.startswith((_RUNTIME, _LIBRARY))  # the signal handler is part of the runtime

    error.__traceback__ = without_last_frames(error.__traceback__, hides, least=1)


def fault_body(error: BaseException) -> bytes:
    """Return the body of an ERROR reply."""
    interrupt_first(error)
    fault = capture(error)
    return encode_fault(msgspec.structs.replace(fault, of_peer=True) if failed_by_peer(error) else fault)
