"""Show a progress line below an ordinary cell that waits for actor calls or maps, and a verdict if it hangs.

One thread, started with the first mesh, checks running cells a few times a second. A short cell only pays for
recording its start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_kernel.actor import Future, ProcMesh
from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import Awaited, awaited_here
from monarch_kernel.kernel.output.cell_errors import FileLabel
from monarch_kernel.kernel.output.cell_output import CellOutput, OutputRouter
from monarch_kernel.kernel.progress import PERIOD, QUIET, CodeLocation, Progress
from monarch_kernel.kernel.rank.monitor import Whereabouts
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import on_change

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict
    from monarch_kernel.kernel.notebook import Notebook
    from monarch_kernel.pool import Mapping as PoolMapping

# Show the verdict of `monarch_kernel.debug.hang` below a cell's progress line when nothing has moved for a while.

#: A verdict is shown when nothing has moved for this long (seconds).
STILL = 10.0
#: The first analysis runs this long before that; a verdict is shown once two analyses agree on it (seconds).
AHEAD = 2.0
#: While a verdict is shown and nothing moves, the analysis is repeated this often (seconds).
AGAIN = 10.0


class HangMonitor:
    """Detects that a cell makes no progress, runs the analysis on a separate thread, and decides what to show.

    It reads no clock itself.

    Args:
        look: returns a verdict; may take seconds.
        now: when the cell started, on the same clock as the later ``now`` arguments.
    """

    def __init__(self, look: Callable[[], Verdict], now: float) -> None:
        self._look = look
        self._seen: object = None
        self._since = now
        self._due = now + STILL - AHEAD
        self._found: list[Verdict | None] = []
        self._looking = False
        self._before = ""
        self.text = ""

    def tick(self, seen: object, suspect: bool, now: float) -> str:
        """Return what to show now: a sentence, or "".

        Args:
            seen: a value that changes whenever the cell makes progress.
            suspect: whether there is a sign that ranks wait for others; otherwise no rank is queried.
        """
        if seen != self._seen:
            self._seen, self._since, self._due = seen, now, now + STILL - AHEAD
            self.text = self._before = ""
            self._found = []  # an analysis in flight concerns the state before
            self._looking = False
        elif self._found:
            self._take(self._found.pop(), now)
        elif not self._looking and suspect and now >= self._due:
            self._begin(self._found)
        return self.text if now - self._since >= STILL else ""

    def _take(self, found: Verdict | None, now: float) -> None:
        self._looking = False
        said = found.sentence if found is not None and is_worth_telling(found) else ""
        if said == self._before:
            self.text = said
            self._due = now + AGAIN
        else:
            self._before = said
            self._due = now + AHEAD / 2

    def _begin(self, found: list[Verdict | None]) -> None:
        self._looking = True

        def run() -> None:
            try:
                found.append(self._look())
            except Exception:  # the mesh was stopped meanwhile; the cell itself reports that
                found.append(None)

        threading.Thread(target=run, name="hang-verdict", daemon=True).start()


def is_worth_telling(found: Verdict) -> bool:
    """Return whether ranks wait for others. Ranks that a debugger has stopped are shown elsewhere."""
    from monarch_kernel.debugger.controller.hang.verdict import NOTHING, PAUSED

    return found.kind not in (NOTHING, PAUSED)


#: How often running cells are checked (seconds).
TICK = 0.25
#: The pause after a check is at least this many times its duration, because thousands of calls may be pending.
SHARE = 20.0
#: A call is shown once it has been pending for this long, so that a loop of short calls shows nothing (seconds).
LONG = 0.5
#: Ranks that have not reported their location are asked again after this long (seconds).
UNANSWERED = 5.0

_MOST = 3

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """One running cell.

    Attributes:
        key: the cell's key.
        began: when the cell began.
        before: the number of waiters of each call when the cell began, such as tasks of earlier cells.
        first: when each call was first seen.
        output: shows the progress line; None until there is one.
        watch: detects that nothing moves.
        concerned: the meshes whose ranks the cell waits for.
        ended: whether the cell has ended, after which the line must not be set.
        lock: orders updates of the line and the end of the cell.
    """

    key: str
    began: float
    before: dict[int, int]
    first: dict[int, float] = field(default_factory=dict[int, float])
    output: CellOutput | None = None
    watch: HangMonitor | None = None
    concerned: list[ProcMesh] = field(default_factory=list[ProcMesh])
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class CallProgress:
    """Shows what cells wait for.

    Args:
        router: schedules updates of outputs.
        output_of: returns the output of a cell.
        session: the meshes; only those that run cells can report where their ranks are.
        file_label: labels a file of user code; None means its path is used.
    """

    def __init__(
        self,
        router: OutputRouter,
        output_of: Callable[[str], CellOutput | None],
        session: MeshSession,
        file_label: FileLabel,
    ) -> None:
        self._router = router
        self._output_of = output_of
        self._locations = _EndpointLocations(session, file_label)
        self._cells: dict[int, _Waiting] = {}  # by thread, since subshells run cells too
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._closed = False
        self._unsubscribe = on_change(self._start)

    def begin(self, key: str) -> None:
        """Record that this thread begins a cell."""
        self.end()
        before = {call.number: call.waiters for call in awaited_here()}
        with self._changed:
            if self._closed:
                return
            self._cells[threading.get_ident()] = _Waiting(key, time.monotonic(), before)
            if self._asleep:
                self._changed.notify()
        if self._thread is None and tool_runtime().list_proc_meshes():
            self._start()

    def _start(self) -> None:
        """Start the thread; called once there are meshes."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="monarch-call-progress", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Record that this thread's cell has ended, and remove its line."""
        cell = self._cells.pop(threading.get_ident(), None)
        if cell is None:
            return
        with cell.lock:
            cell.ended = True
        if cell.output is not None and cell.output.progress(""):
            cell.output.show()

    def close(self) -> None:
        """Stop the thread."""
        self._unsubscribe()
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(2)

    def _run(self) -> None:
        pause = TICK
        while True:
            with self._changed:
                self._asleep = True
                self._changed.wait_for(lambda: self._cells or self._closed)
                self._asleep = False
                self._changed.wait_for(lambda: self._closed, pause)
                if self._closed:
                    return
                cells = list(self._cells.values())
            now = time.monotonic()
            for cell in cells:
                if now - cell.began >= LONG:
                    try:
                        self._look(cell, now)
                    except Exception:  # the mesh may just have been stopped; the cell continues
                        log.debug("what a cell waits for could not be shown", exc_info=True)
            pause = max(TICK, SHARE * (time.monotonic() - now))

    def _look(self, cell: _Waiting, now: float) -> None:
        pending = {call.number: call for call in awaited_here() if not call.tool}
        waited_for = [call for call in pending.values() if call.waiters > cell.before.get(call.number, 0)]
        cell.first = {call.number: cell.first.get(call.number, now) for call in waited_for}
        shown = [call for call in waited_for if now - cell.first[call.number] >= LONG]
        line = ""
        if shown:
            meshes = tool_runtime().list_proc_meshes()
            line = self._line(cell, shown, meshes, now)
            said = self._why_still(cell, shown, meshes, now)
            if line and said:
                line += f"\n{said}"
        with cell.lock:
            if cell.ended or not (line or cell.output):
                return
            if cell.output is None:
                cell.output = self._output_of(cell.key)
            if cell.output is not None and cell.output.progress(line):
                self._router.touch(cell.output)

    def _line(self, cell: _Waiting, calls: Sequence[Awaited], meshes: Sequence[ProcMesh], now: float) -> str:
        places = {proc: (mesh, rank) for mesh in meshes for rank, proc in enumerate(_procs(mesh))}
        alike: dict[tuple[str, str], list[Awaited]] = {}
        of_mesh: dict[str, ProcMesh] = {}
        for call in calls:
            found = places.get(call.asked[0])
            name = found[0].name if found is not None else ""
            if found is not None:
                of_mesh[name] = found[0]
            alike.setdefault((call.what, name), []).append(call)
        self._locations.ask(of_mesh, now)
        said: list[str] = []
        for (what, name), some in list(alike.items())[:_MOST]:
            known = {proc: rank for proc, (mesh, rank) in places.items() if mesh is of_mesh.get(name)}
            progress = _progress(some, known, cell.began)
            if name:
                progress.silent = of_mesh[name].unresponsive()
                progress.at(self._locations.of(name, what))
            several = sum(other == what for other, _ in alike) > 1 and name
            if line := progress.line(now):
                said.append(f"{what}{f' on {name}' if several else ''}: {line}")
        if said and len(alike) > _MOST:
            said.append(f"… and {len(alike) - _MOST} other endpoints")
        return "\n".join(said)

    def _why_still(self, cell: _Waiting, calls: Sequence[Awaited], meshes: Sequence[ProcMesh], now: float) -> str:
        waiting = {proc for call in calls for proc in call.procs}
        cell.concerned = [mesh for mesh in meshes if not waiting.isdisjoint(_procs(mesh))]
        if cell.watch is None:
            cell.watch = HangMonitor(lambda: _verdict(cell.concerned), now)
        standing = frozenset((call.number, call.procs) for call in calls)
        return cell.watch.tick(standing, bool(cell.concerned), now)


def _procs(mesh: ProcMesh) -> tuple[str, ...]:
    return tuple(ref.id for ref in mesh._target().procs)


def _progress(calls: Sequence[Awaited], ranks: Mapping[str, int], began: float) -> Progress:
    """Return the progress of the calls to one endpoint.

    Args:
        calls: the pending calls.
        ranks: the rank of each proc. Procs of a mesh spawned elsewhere are numbered in order.
        began: when the cell began.
    """
    asked = {proc: ranks.get(proc, at) for call in calls for at, proc in enumerate(call.asked)}
    waiting = {proc for call in calls for proc in call.procs}
    progress = Progress(sorted(asked.values()), began)
    for proc, rank in asked.items():
        if proc not in waiting:
            progress.done(rank)
    return progress


def _verdict(meshes: Sequence[ProcMesh]) -> Verdict:
    """Return the verdict on the first of these meshes whose ranks wait for others."""
    for mesh in meshes[:-1]:
        found = hang(mesh)
        if is_worth_telling(found):
            return found
    return hang(meshes[-1])


class _EndpointLocations:
    """Locations of ranks in their endpoints. Only meshes that run cells can report them.

    Args:
        session: the meshes.
        file_label: labels a file of user code.
    """

    def __init__(self, session: MeshSession, file_label: FileLabel) -> None:
        self._session = session
        self._file_label = file_label
        self._asked: dict[str, tuple[float, list[Future[Whereabouts | None]]]] = {}
        self._found: dict[str, list[Whereabouts]] = {}

    def ask(self, names: Iterable[str], now: float) -> None:
        """Collect the answers of these meshes and query them again, at most once a second."""
        for name in names:
            when, slots = self._asked.get(name, (0.0, []))
            late = not all(slot.done() for slot in slots)
            managed = self._session.managed(name)
            if managed is None or now - when < (UNANSWERED if late else PERIOD):
                continue
            answers = [slot.get() for slot in slots if slot.done() and slot.exception() is None]
            self._found[name] = [told for told in answers if told is not None]
            self._asked[name] = now, list(managed.monitor.where.stream())

    def of(self, name: str, what: str) -> Mapping[int, CodeLocation | None]:
        """Return the locations of the ranks of a mesh that run this endpoint."""
        found: dict[int, CodeLocation | None] = {}
        for told in self._found.get(name, ()):
            if told.endpoint == what:
                label = self._file_label(told.file)
                file = label.removeprefix("Cell ") if label else told.file.rpartition("/")[2]
                found[told.rank] = CodeLocation(file, told.line, told.function)
        return found


class MapProgress:
    """Show the progress of each map in the cell that started it; a subscriber of `monarch_kernel.pool.on_progress`."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def __call__(self, mapping: PoolMapping) -> None:
        """Show the progress of a map, or clear it when the map has ended."""
        output = self._notebook.output_of(mapping.cell)
        if output is not None and output.progress(_map_line(mapping, time.monotonic())):
            self._notebook.router.touch(output)


def _map_line(mapping: PoolMapping, now: float) -> str:
    """Return the progress line of a map, with an estimate of the remaining time."""
    passed = now - mapping.started
    if mapping.ended or passed < QUIET:
        return ""
    total = f" of {mapping.total:,}" if mapping.total is not None else ""
    parts = [f"map {mapping.name}: {mapping.done:,}{total} items", f"{mapping.ranks} ranks"]
    if mapping.failed:
        parts.append(f"{mapping.failed:,} failed")
    if mapping.total and mapping.done:
        parts.append(f"about {duration(passed / mapping.done * (mapping.total - mapping.done))} left")
    return " · ".join(parts)
