"""Accept viewers in a rank that another program's launcher has started, with one sleeping thread.

Each such rank loads this module, so all its imports are from the standard library or as small. Everything else is
loaded when a viewer enters.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement, announce, check_name, withdraw
from monarch_kernel.engines.join.frame_loop import FrameLink, FrameLoop
from monarch_kernel.engines.join.holding import Holding
from monarch_kernel.engines.join.identity import RankIdentity, identity, present_dimensions, present_identity
from monarch_kernel.protocol.socket_peers import is_ours, peer_of

if TYPE_CHECKING:
    from monarch_kernel.engines.join.joined_process import JoinedProcess
    from monarch_kernel.engines.join.progress_monitor import HangPlan, ProgressMonitor

#: How many faults of tools are kept for the next viewer.
_KEPT_FAULTS = 20

_door: JoinListener | None = None
_lock = threading.Lock()


class JoinListener:
    """Accepts viewers in this process.

    Args:
        name: the name of the job.
        told: the identity of this rank from its launcher.
        hold: how long a failed program is held for viewers (seconds).
        plan: what to do when the job makes no progress; None: do not monitor that.
        meet: the URL of the meeting point at which viewers of other machines find this process; "": none.
    """

    def __init__(
        self, name: str, told: RankIdentity, hold: float = 0.0, plan: HangPlan | None = None, meet: str = ""
    ) -> None:
        self.name = name
        self.faults: list[str] = []
        self.fault_count = 0
        self._told = told
        self._guest: JoinedProcess | None = None
        self._announced, listener = announce(name, told, meet)
        how = f"%mesh join {name} and %mesh pm in a notebook look at it, and it ends when the notebook leaves"
        self.holding = Holding(hold, how)
        if hold:
            self.holding.install()
        self._loop = FrameLoop("monarch-join", self.note)
        self._loop.listen(listener, self._on_link)
        self._watch: ProgressMonitor | None = None
        if plan is not None:
            from monarch_kernel.engines.join.progress_monitor import ProgressMonitor

            self._watch = ProgressMonitor(name, plan, told.local_rank, self.holding.arm, self._waits_for_person)
            self._loop.call_every(self._watch.period, self._watch.look)
        if meet:
            from monarch_kernel.engines.join.helper_process import CALL_PERIOD, GatewayCall

            self._loop.call_every(CALL_PERIOD, GatewayCall(meet).look)
        self._loop.start()
        os.register_at_fork(after_in_child=self._in_child)

    @property
    def announced(self) -> RankAnnouncement:
        """Return what viewers read about this process."""
        return self._announced

    def note(self, error: BaseException) -> None:
        """Store a fault of the tools. It is reported to viewers, and never reaches the program. Thread-safe."""
        text = f"{type(error).__name__}: {error}"
        self.fault_count += 1
        self.faults = [*self.faults[1 - _KEPT_FAULTS :], text]
        if self._guest is not None:
            self._guest.tell_fault(self.fault_count, text)

    def _in_child(self) -> None:
        """Close everything in a forked child, such as a DataLoader worker: viewers cannot enter it."""
        self._loop.forget()
        if self._guest is not None:
            self._guest.forget()

    def _waits_for_person(self) -> bool:
        """Return whether this rank makes no progress because a user inspects it, or is about to."""
        return bool(self.holding.held) or (self._guest is not None and self._guest.stands())

    # -- on the thread of the loop -------------------------------------------------------------------

    def _on_link(self, link: FrameLink, sock: socket.socket) -> None:
        if not is_ours(peer_of(sock)[1]):  # the mode of the folder already excludes other users
            sock.close()
            return
        link.on_frame = self._on_hello

    def _on_hello(self, link: FrameLink, frame: bytes) -> None:
        """Send the identity of this rank, before a viewer decides to enter."""
        json.loads(frame)
        now = present_identity(self._told)
        answer: dict[str, object] = asdict(self._announced)
        answer["identity"] = asdict(now)
        answer["dims"] = present_dimensions(now)
        answer["version"] = __version__
        answer["faults"] = self.faults
        answer["held"], answer["held_until"] = self.holding.held, self.holding.until
        answer["fault_count"] = self.fault_count
        if self._watch is not None:
            answer["moved"], answer["issued"] = self._watch.moved, self._watch.issued
        link.send(json.dumps(answer).encode())
        link.on_frame = self._on_first

    def _on_first(self, link: FrameLink, frame: bytes) -> None:
        """Let a viewer's tools enter.

        The first viewer loads them; this thread does not wait, and its messages are queued.
        """
        try:
            if self._guest is None:
                link.send(_entered(frame))
                from monarch_kernel.engines.join.joined_process import JoinedProcess

                self._guest = JoinedProcess(self)
            self._guest.admit(link, frame)
        except BaseException as error:
            self.note(error)
            link.on_frame = _drop
            why = f"the tools of monarch_kernel {__version__} cannot be loaded there: {type(error).__name__}: {error}"
            link.send(json.dumps({"refused": why}).encode())

    def close(self) -> None:
        """Accept no more viewers, at the end of the process."""
        withdraw(self._announced)
        self._loop.close(0.5)


def _entered(first: bytes) -> bytes:
    """Answer a viewer's first message before loading the tools, which takes much longer."""
    from monarch_kernel.engines.hosted import wire

    message, _ = wire.unpack(first)
    if not isinstance(message, wire.EnterRank):
        raise ValueError(f"a viewer began with a {type(message).__name__}")
    return wire.pack(wire.RankEntered(socket.gethostname(), os.getpid()))


def _drop(_link: FrameLink, _frame: bytes) -> None:
    """Ignore messages of a viewer that was refused."""


def prepare(
    name: str = "",
    *,
    rank: int = -1,
    world: int = 0,
    local_rank: int = -1,
    hold_on_error: float | None = None,
    on_hang: str | None = None,
    hang_after: float | None = None,
    reports: str | None = None,
    meet: str | None = None,
) -> RankAnnouncement | None:
    """Let viewers of the same user join this process, from now on until it ends (docs/join.md).

    Args:
        name: the name of the job; the same on all ranks. By default ``MONARCH_KERNEL_JOIN``, or the name of the
            program.
        rank, world, local_rank: the identity of this rank, if the environment of its launcher does not define it.
        hold_on_error: how long the process stays, with its frames, after an uncaught exception until a viewer has
            inspected it (seconds). By default ``MONARCH_KERNEL_JOIN_HOLD``, or 0.
        on_hang: ``"dump"``: write a report when the job makes no progress; the job continues to wait. ``"hold"``: in
            addition, hold ranks that fail later, for example when their collectives time out. ``""``: do not monitor
            progress. By default ``MONARCH_KERNEL_JOIN_ON_HANG``.
        hang_after: the time without progress that counts as a hang (seconds). By default
            ``MONARCH_KERNEL_JOIN_HANG_AFTER``, or 300.
        reports: the folder for reports; by default ``MONARCH_KERNEL_JOIN_REPORTS``, or ``NAME-reports``.
        meet: the address of a meeting point, ``host:port``, at which viewers of other machines find the ranks of this
            machine; by default ``MONARCH_KERNEL_JOIN_MEET``, or none.

    Returns:
        The announcement; None in a child process of a prepared rank, such as a DataLoader worker.

    Raises:
        ValueError: ``on_hang``, ``hang_after`` or ``meet`` is not valid.
        JoinError: the name is invalid, this process is prepared under another name, or its socket cannot be created.
    """
    global _door
    told = identity()
    if rank >= 0:
        told = RankIdentity(rank, world or told.world, local_rank, told.launch, told.restarts)
    name = check_name(name or environment.JOIN.get() or _program_name())
    hold = environment.JOIN_HOLD.get() if hold_on_error is None else hold_on_error
    plan = _hang_plan(name, on_hang, hang_after, reports)
    point = environment.JOIN_MEET.get() if meet is None else environment.JOIN_MEET.parse(meet)
    with _lock:
        if _door is not None and _door.announced.pid == os.getpid():
            if _door.name != name:
                raise JoinError(f"this process can be joined as {_door.name!r} already, and not as {name!r}, too")
            return _door.announced
        if _is_child(name, told, given=rank >= 0):
            return None
        try:
            _door = JoinListener(name, told, hold, plan, point)
        except OSError as error:
            raise JoinError(f"this process cannot be joined: {error}") from error
        os.environ[environment.JOIN_RANK] = f"{os.getpid()} {_mark(name, told)}"
        atexit.register(_door.close)
        return _door.announced


def _hang_plan(name: str, on_hang: str | None, after: float | None, folder: str | None) -> HangPlan | None:
    on_hang = environment.JOIN_ON_HANG.get() if on_hang is None else environment.JOIN_ON_HANG.parse(on_hang)
    if not on_hang:
        return None
    from monarch_kernel.engines.join.progress_monitor import HangPlan

    after = environment.JOIN_HANG_AFTER.get() if after is None else environment.JOIN_HANG_AFTER.parse(str(after))
    where = folder or environment.JOIN_REPORTS.get() or f"{name}-reports"
    return HangPlan(on_hang, after, os.path.abspath(where))


def _mark(name: str, told: RankIdentity) -> str:
    return f"{name}/{told.launch}/{told.restarts}/{told.rank}/{told.world}"


def _is_child(name: str, told: RankIdentity, given: bool) -> bool:
    """Return whether this process is a child of a rank, such as a DataLoader worker, and not a rank itself.

    A rank leaves a mark in the environment, which its children inherit. If a launcher has the mark, its ranks are told
    apart by their variables.

    Args:
        given: whether the program itself has passed its rank.
    """
    pid, _, mark = os.environ.get(environment.JOIN_RANK, "").partition(" ")
    if not mark or pid == str(os.getpid()):  # no mark, or this process has replaced its program by exec
        return False
    if mark == _mark(name, told):
        return True
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None and not given:
        return True  # its parent may have learned more since it began
    same = mark.split("/")[-2:] == [str(told.rank), str(told.world)]
    if same and told.rank >= 0 and pid == str(os.getppid()) and not given:
        return True  # its parent has set torchrun's variables itself, like Accelerate under mpirun
    # A child of rank 0 of Lightning.
    return mark == _mark(name, RankIdentity()) and told.rank == 0 and "RANK" not in os.environ


def _program_name() -> str:
    stem = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0]
    kept = "".join(each if each.isalnum() or each in "._-" else "-" for each in stem).lstrip("._-")
    return "ray" if kept == "default_worker" else kept[:64] or "job"


def ray_worker() -> None:
    """Prepare a Ray worker: a ``worker_process_setup_hook`` for workers of Train and plain actors.

    The job's name is ``MONARCH_KERNEL_JOIN`` in the ``env_vars`` of the runtime environment, or ``ray``.
    """
    os.environ.pop(environment.JOIN_RANK, None)  # inherited from the program that started Ray, which is not a rank
    prepare_or_warn()


def prepare_or_warn() -> None:
    """Call `prepare`. If it fails, print a warning to standard error, and let the program continue."""
    try:
        prepare()
    except JoinError as error:
        print(f"warning: {error}", file=sys.stderr)
    except Exception as error:  # no error of this package may fail the program
        print(f"warning: this process cannot be joined: {type(error).__name__}: {error}", file=sys.stderr)
