"""One run of a cell on ranks: send it, wait for it, interrupt it, and collect its result."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from monarch_kernel.actor import ActorError, ActorMesh, Future, SupervisionError, ValueMesh
from monarch_kernel.debugger.controller.common_point import LIMIT, CommonPoint
from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.debugger.controller.query import Answers, ask
from monarch_kernel.introspection import begin_record, finish_operations, trace_records
from monarch_kernel.kernel.call_progress import HangMonitor
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.cell_values import RankValues, cell_values
from monarch_kernel.kernel.interrupts.interrupt_relay import ESCALATION_WINDOW, get_relay
from monarch_kernel.kernel.managed_mesh import ManagedMesh, MeshPart
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.cell_errors import CellFailure, FileLabel, MeshCellError, cell_error
from monarch_kernel.kernel.output.cell_output import CellOutput, OutputRouter
from monarch_kernel.kernel.output.publisher import Source
from monarch_kernel.kernel.progress import CodeLocation, Progress
from monarch_kernel.kernel.rank.cell_locations import BEGIN, waits
from monarch_kernel.kernel.rank.executor import CellExecutor, CellReply
from monarch_kernel.kernel.rank.monitor import Interrupted, Whereabouts
from monarch_kernel.kernel.rank.name_lookup import look_up, variables
from monarch_kernel.kernel.usage_errors import check_drives, replacing
from monarch_kernel.meshes import kept_host_of, name_ranks
from monarch_kernel.protocol.faults import capture
from monarch_kernel.protocol.refs import DeathKind

#: The time for ranks to agree on a step (seconds). Slower ranks are ignored.
AGREE_TIMEOUT = 2.0
#: How often the wait updates the progress line (seconds).
TICK = 0.1
#: How long to wait for the output that a rank wrote before its reply (seconds). Only a busy machine needs it.
OUTPUT_GRACE = 20.0
#: How long to wait for the output of a rank that died (seconds).
DEATH_GRACE = 0.25
_MOST_NAMES = 8
#: The hang is analysed after this many consecutive samples (one a second) that show a rank waiting.
STUCK = 3


class HeldInterrupts:
    """Defers interrupts while a cell is sent to its ranks.

    Between `hold` and `release`, SIGINT is only recorded. `deliver` then passes it to the previous handler.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._handler: Any = None
        self._holds = False

    def hold(self) -> None:
        """Record interrupts from now on. No effect outside the main thread, where none arrive."""
        if threading.current_thread() is threading.main_thread():
            self._holds = True
            self._handler = signal.signal(signal.SIGINT, lambda number, frame: self._noted.append((number, frame)))

    def release(self) -> None:
        """Restore the previous handler. May be called again."""
        if self._holds:
            self._holds = False
            signal.signal(signal.SIGINT, self._handler)

    def deliver(self) -> None:
        """Pass the oldest recorded interrupt to the previous handler, which may raise KeyboardInterrupt."""
        if self._noted:
            noted = self._noted.pop(0)
            if callable(self._handler):
                self._handler(*noted)


class CellRun:
    """A cell that runs on some ranks of a mesh. The magic creates and starts it; one thread waits for it.

    Args:
        managed: the mesh.
        ranks: the selected ranks, sorted.
        cell: the cell to run.
        output: shows its output.
        router: schedules updates of the output.
        file_label: labels a file in tracebacks; None means its path is used.
        replays: the cell has run before, on predecessors of these ranks.
        ended: called when the cell has ended on all ranks.
    """

    def __init__(
        self,
        managed: ManagedMesh,
        ranks: Sequence[int],
        cell: Cell,
        output: CellOutput,
        router: OutputRouter,
        file_label: FileLabel,
        ended: Callable[[CellRun], object],
        replays: bool = False,
    ) -> None:
        self.managed = managed
        self.ranks = tuple(ranks)
        self.cell = cell
        self.replies: dict[int, CellReply] = {}
        self.failures: dict[int, CellFailure] = {}
        self.interrupted = False
        self._interrupted_at = 0.0
        self.detached = False
        self._output = output
        self._router = router
        self._file_label = file_label
        self._replays = replays
        self._ended = ended
        self._started = time.monotonic()
        self._progress = Progress(self.ranks, self._started)
        self._hang = HangMonitor(lambda: hang(managed.procs), self._started)
        self._samples: deque[Future[Whereabouts | None]] = deque()
        self._stuck: dict[int, int] = {}
        self._broken = False
        self._meetings: set[int] = set()
        self._pending: deque[tuple[MeshPart[ActorMesh[CellExecutor]], Future[CellReply]]] = deque()
        self._note_text = ""
        self._held = HeldInterrupts()
        self._interrupts: deque[Future[Interrupted]] = deque()
        self._begun: set[int] = set()
        self._dropped: set[int] = set()
        self._end_record: Callable[[int], None] = lambda _mark: None

    # -- the wait ------------------------------------------------------------------------------

    def start(self, then_wait: bool = True) -> None:
        """Send the cell. Interrupts are held until `wait`, so that the cell is never sent to only some of the ranks.

        Args:
            then_wait: this thread calls `wait` next; interrupts stay held until then.
        """
        check_drives(self.managed.procs, "%%mesh")
        finish_operations(self.managed.procs)  # on tensors that the cell may have
        self._held.hold()
        name = self._file_label(self.cell.filename) or self.cell.filename
        self._end_record = begin_record(trace_records.CALL, name, call=self.cell.id, size=len(self.ranks))
        try:
            for part in self.managed.executors(self.ranks):
                for slot in part.mesh.run.stream(self.cell):
                    self._pending.append((part, slot))
        except BaseException:
            self._held.release()
            raise
        if self.cell.place is not None and self.cell.place.step:
            # A rank that begins to wait after this point has passed would run the cell at a later point.
            point = self.cell.place.step
            comes = self._ask(waits, point, ranks=self.ranks, timeout=BEGIN + AGREE_TIMEOUT).values
            ranks = [rank for rank in self.ranks if comes.get(rank, True)]
            meeting = CommonPoint(self._ask, point, ranks, self._note_apart, lambda: not self._progress.waiting)
            meeting.begin(LIMIT + AGREE_TIMEOUT)
        if not then_wait:
            self._held.release()

    def _note_apart(self, why: str) -> None:
        self._output.show_text("stderr", f"{why}\n")

    def _ask(
        self, function: Callable[..., object], *args: Any, ranks: Iterable[int], timeout: float = AGREE_TIMEOUT
    ) -> Answers:
        """Call a function in ranks of the cell, on threads of their debug agents."""
        return ask(self.managed.procs, function, *args, ranks=ranks, timeout=timeout)

    def wait(self, pressed: Callable[[], None]) -> None:
        """Wait until every rank has finished, failed or died, and show progress meanwhile.

        Args:
            pressed: called for each KeyboardInterrupt. The wait continues, since interrupted ranks still reply.
        """
        finished = self.detached = False
        presses = 0
        while not finished and not self.detached:
            try:
                self._held.release()
                if presses:
                    presses -= 1
                    pressed()
                self._held.deliver()
                finished = self._step()
            except KeyboardInterrupt:
                self._note_press()
                presses += 1

    @property
    def waiting(self) -> set[int]:
        """The ranks on which the cell has not ended yet."""
        return set(self._progress.waiting)

    def detach(self) -> None:
        """Make `wait` return early. Its caller sees `detached` and leaves the wait to another thread."""
        self.detached = True

    def _step(self) -> bool:
        if self._pending and self._progress.waiting:
            part, slot = self._pending[0]
            try:
                error = slot.exception(TICK)
            except TimeoutError:
                self._tick()
                return False
            self._settle(part, slot, error)
            self._pending.popleft()
            self._tick()
            return False
        self._end_record(0)
        self._drain()
        if self.cell.place is None and not self._replays and self.replies:
            self.managed.note_ran(self.cell, self.replies)
        self._note_text = " ".join(filter(None, (self._remark(), self._of_new_ranks())))
        self._output.progress("")
        self._output.notice("")
        self._output.finish()
        self._output.show(final=True)
        self._ended(self)
        return True

    def _settle(
        self, part: MeshPart[ActorMesh[CellExecutor]], slot: Future[CellReply], error: BaseException | None
    ) -> None:
        if error is None:
            reply = slot.get()
            if reply.rank in self._dropped:
                return
            self._broken |= reply.broken
            self._meetings.add(reply.meetings)
            if reply.fault is None:
                self.replies[reply.rank] = reply
                self._progress.done(reply.rank)
            else:
                place = self._whereabouts(reply.rank)
                self._fail(CellFailure(reply.rank, *place, fault=reply.fault))
            return
        failures = getattr(error, "failures", None) or []
        if isinstance(error, SupervisionError):
            for failure in failures:
                death = failure.death
                cause = death.cause if death is not None else str(error)
                failed = CellFailure(part.ranks[failure.rank], failure.host, failure.pid, death=cause)
                self._fail(failed, goes_on=death is not None and death.kind is DeathKind.LEFT)
            return
        for failure in failures:
            fault = failure.fault or capture(error)
            self._fail(CellFailure(part.ranks[failure.rank], failure.host, failure.pid, fault=fault))
        if not failures:
            raise error

    def _fail(self, failed: CellFailure, goes_on: bool = False) -> None:
        first = not self.failures and not goes_on
        self.failures[failed.rank] = failed
        self._progress.fail(failed.rank, "released" if failed.of_peer and not first else failed.line)
        if first:  # otherwise the other ranks would wait for this one in their next collective
            for part in self.managed.monitors(sorted(self._progress.waiting)):
                part.mesh.release_cell.stream(self.cell.id, (failed.rank,))

    def _tick(self) -> None:
        now = time.monotonic()
        while self._samples and self._samples[0].done():
            self._note(self._samples.popleft())
        while self._interrupts and self._interrupts[0].done():
            self._note_interrupted(self._interrupts.popleft())
        if self._progress.is_due(now):
            self._samples = deque(self.managed.monitor.where.stream())
        self._progress.silent = self.managed.procs.unresponsive()
        line = self._progress.line(now)
        if line and self.interrupted:
            line += " · interrupted"
            if now - self._interrupted_at < ESCALATION_WINDOW:
                line += f"; interrupt again within {ESCALATION_WINDOW:g} s to kill ranks that do not respond"
        if line and (said := self._why_still(now)):
            line += f"\n{said}"
        if self._output.progress(line):
            self._router.touch(self._output)

    def _why_still(self, now: float) -> str:
        """Return the verdict on a hang, once nothing has moved for a while."""
        dist = self.managed.options is not None and self.managed.options.dist
        waits = any(self._stuck.get(rank, 0) >= STUCK for rank in self._progress.waiting)
        return self._hang.tick(self._progress.standing(), bool(dist or waits or self._progress.silent), now)

    def _note(self, slot: Future[Whereabouts | None]) -> None:
        if slot.exception() is not None:
            return
        told = slot.get()
        if told is None or told.endpoint:  # an endpoint runs on a separate thread
            return
        if told.cell != self.cell.id:
            if not self._has_begun(told.rank):
                which = self._file_label(told.cell_file) or "a cell of another notebook"
                self._progress.behind(told.rank, f"{which} since {time.strftime('%X', time.localtime(told.since))}")
        else:
            self._begun.add(told.rank)
            label = self._file_label(told.file)
            name = label.removeprefix("Cell ") if label else told.file.rpartition("/")[2]
            self._progress.at({told.rank: CodeLocation(name, told.line, told.function)})
            self._stuck[told.rank] = self._stuck.get(told.rank, 0) + 1 if told.waits else 0

    def _note_interrupted(self, slot: Future[Interrupted]) -> None:
        """Handle a rank's reply to an interrupt: the rank has dropped the cell if it had not begun there."""
        if slot.exception() is not None:
            return
        told = slot.get()
        if told.begun:
            self._begun.add(told.rank)
        elif told.rank in self._progress.waiting:
            self._dropped.add(told.rank)
            self._progress.done(told.rank)
            said = capture(KeyboardInterrupt("the cell had not begun here, and was dropped"))
            self.failures[told.rank] = CellFailure(told.rank, *self._whereabouts(told.rank), fault=said)

    def _has_begun(self, rank: int) -> bool:
        return rank in self._begun or self._output.has_begun(Source(self.managed.name, rank))

    def _rejoin(self) -> str:
        """Replace a process group that an error has broken, if `%mesh up --dist` created it.

        Returns:
            A sentence for the user.
        """
        managed = self.managed
        try:
            managed.rejoin()
        except (ActorError, SupervisionError, TimeoutError):
            return f"The process group was shut down and could not be recreated; %mesh heal {managed.name} retries."
        if managed.options is None or not managed.options.dist:
            return "The process group was shut down: call init_process_group() again, then wrap models again."
        return (
            "The process group was shut down and replaced by a new one; wrap models in DistributedDataParallel or "
            "fully_shard again."
        )

    def _remark(self) -> str:
        if not self.managed.is_alive:  # stopped on purpose while the cell ran
            return ""
        if any(failed.fault is None for failed in self.failures.values()):
            return f"{replacing(self.managed.name)}."
        return self._rejoin() if self._broken or (self.failures and len(self._meetings) > 1) else ""

    def _of_new_ranks(self) -> str:
        """Explain names that only some ranks lack: these ranks are new and have not run earlier cells."""
        lack = [rank for rank, each in self.failures.items() if each.fault and each.fault.qualname == "NameError"]
        new = sorted(rank for rank in lack if self.managed.missed(rank))
        if not new or not self.managed.is_alive:
            return ""
        old = next((rank for rank in range(self.managed.extent.nelements) if not self.managed.missed(rank)), None)
        names: dict[int, list[str]] = {}
        if old is not None:
            asked = (new[0], old)
            names = ask(self.managed.procs, look_up, variables, (), ranks=asked, timeout=AGREE_TIMEOUT).values
        missing = sorted(set(names.get(old or 0) or ()) - set(names.get(new[0]) or ()))
        listed = ", ".join(missing[:_MOST_NAMES]) + (
            f" and {len(missing) - _MOST_NAMES} more" * (len(missing) > _MOST_NAMES)
        )
        which = f", such as those that define {listed}" if missing else ""
        one = len(new) == 1
        return (
            f"{name_ranks(new, limit=6).capitalize()} {'is' if one else 'are'} new: cells before the heal have not run "
            f"there{which}. %mesh heal {self.managed.name} --replay runs them again there."
        )

    def _drain(self) -> None:
        """Wait for the output that ranks wrote before they replied."""
        name = self.managed.name
        alive = [Source(name, rank) for rank in self.ranks if not self._is_dead(rank) and rank not in self._dropped]
        dead = [Source(name, rank) for rank in self.ranks if self._is_dead(rank)]
        now = time.monotonic()
        self._wait_for(alive, now + OUTPUT_GRACE)
        self._wait_for([one for one in dead if self._output.has_begun(one)], now + DEATH_GRACE)

    def _wait_for(self, sources: Iterable[Source], deadline: float) -> None:
        missing = self._output.missing(sources)
        pause = 0.0005
        while missing and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
            missing = self._output.missing(missing)

    def _is_dead(self, rank: int) -> bool:
        failed = self.failures.get(rank)
        return failed is not None and failed.fault is None

    def _whereabouts(self, rank: int) -> tuple[str, int]:
        return self._router.whereabouts(Source(self.managed.name, rank))

    # -- results -------------------------------------------------------------------------

    def error(self) -> MeshCellError | None:
        """One error for all ranks that failed; None if none did."""
        if not self.failures:
            return None
        failures = [self.failures[rank] for rank in sorted(self.failures)]
        note = self._note_text
        return cell_error(
            self.managed.name,
            self.managed.extent,
            self.ranks,
            failures,
            RankValues(self.replies),
            interrupted=self.interrupted,
            file_label=self._file_label,
            note=note,
        )

    def value(self) -> ValueMesh[Any] | None:
        """The values of the cell's last expression; None if there is no such expression, or if every value is None."""
        return cell_values(self.managed.shape(self.ranks), [self.replies[rank] for rank in self.ranks])

    def show_error(self, error: MeshCellError) -> None:
        """Show the error in the output of a cell that runs in the background."""
        self._output.show_text("stderr", "\n".join(error._render_traceback_()) + "\n")

    # -- as a target of interrupts ---------------------------------------------------------------

    @property
    def outlives_kernel(self) -> bool:
        """Whether the cell continues after this kernel has ended."""
        return kept_host_of(self.managed.procs) is not None

    def describe(self) -> str:
        """See `InterruptTarget`."""
        return f"mesh '{self.managed.name}'"

    def interrupt(self) -> object:
        """See `InterruptTarget`."""
        self._note_press()
        for part in self.managed.monitors(sorted(self._progress.waiting)):
            self._interrupts += part.mesh.interrupt_cell.stream(self.cell.id)
        return self._interrupts

    def _note_press(self) -> None:
        self.interrupted = True
        self._interrupted_at = time.monotonic()

    def drop(self, ranks: Iterable[int]) -> None:
        """Cancel the cell on those of `ranks` where it has not begun. The caller interrupts it where it runs."""
        waiting = sorted(self.waiting & set(ranks))
        if waiting:
            self._note_press()
        for part in self.managed.monitors(waiting):
            self._interrupts += part.mesh.drop_cell.stream(self.cell.id)

    def unanswered(self) -> Iterable[int]:
        """See `InterruptTarget`. A rank that has not begun the cell runs other work, which must survive."""
        return sorted(rank for rank in self._progress.waiting if self._has_begun(rank))

    def kill(self, ranks: Sequence[int]) -> object:
        """See `InterruptTarget`."""
        parts = self.managed.procs_at(sorted(ranks))
        return [part.mesh.kill(reason="it did not answer an interrupt") for part in parts]


# Run cells in the foreground or background; the handle of a background cell.


class MeshCell:
    """The handle of a cell that runs in the background, such as one started with `--no-wait`."""

    def __init__(self, run: CellRun, done: threading.Event) -> None:
        self._run = run
        self._done = done

    def done(self) -> bool:
        """Return whether all ranks have finished, failed or died."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> ValueMesh[Any] | None:
        """Wait for the cell. Return its value, or raise its error."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the cell is still running on mesh {self._run.managed.name} after {timeout} s")
        error = self._run.error()
        if error is not None:
            raise error
        return self._run.value()

    get = result

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell on all ranks that still run it."""
        self._run.interrupt()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._run.failures else "done"
        return f"<cell on mesh {self._run.managed.name}, {state}>"


def run_here(notebook: Notebook, run: CellRun) -> None:
    """Run a cell and wait for it in the running cell of the notebook. Interrupts reach its ranks."""
    relay = get_relay()

    def pressed() -> None:
        if not relay.connected:  # in a plain ipykernel or IPython, the interrupt reaches only this code
            relay.press(run.cell.id)

    with relay.active(run), notebook.stops.runs(run):
        run.start()
        run.wait(pressed)
        if run.interrupted:  # the ranks have answered; another interrupt would hit the display of their error
            relay.retrying = False


def run_again(notebook: Notebook, managed: ManagedMesh, ranks: Sequence[int], cell: Cell) -> None:
    """Run a cell again on these ranks, after their predecessors have run it.

    Raises:
        MeshCellError: it failed.
    """
    cell = notebook.again(cell)
    expected = [Source(managed.name, rank) for rank in ranks]
    output = notebook.router.open(cell.id, notebook.output(expected=expected))
    run = CellRun(
        managed,
        ranks,
        cell,
        output,
        notebook.router,
        notebook.file_label,
        notebook.watched.cell_ended,
        replays=True,
    )
    run_here(notebook, run)
    error = run.error()
    if error is not None:
        error.colours = notebook.colours
        raise error


def run_in_background(run: CellRun) -> MeshCell:
    """Start a cell without making the notebook wait for it."""
    get_relay().add(run, background=True)
    run.start(then_wait=False)
    return wait_in_background(run)


def wait_in_background(run: CellRun) -> MeshCell:
    """Wait for a running cell on a separate thread, so that the notebook can continue."""
    relay = get_relay()
    done = threading.Event()

    def wait() -> None:
        try:
            run.wait(lambda: None)
            error = run.error()
            if error is not None:
                run.show_error(error)
        finally:
            relay.remove(run)
            done.set()

    relay.remove(run)
    relay.add(run, background=True)
    threading.Thread(target=wait, name="monarch-cell", daemon=True).start()
    return MeshCell(run, done)
