"""The armed breakpoints: the lines of code that they apply to, and the decision to stop when one is reached."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType

from monarch_kernel.debugger.model.stops import ANY_ERROR, Bound, Breakpoint
from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.stopping.expressions import fill, short, summary, value_of
from monarch_kernel.debugger.rank.stopping.lines import bind
from monarch_kernel.debugger.source_locations import LIBRARY, RUNTIME, kind_of, matching_parts

# Match a breakpoint's file to the loaded files of this process.

_SAME = 1000

#: The controller's path of a file that was synced to this host; None for others.
ClientPath = Callable[[str], str | None]


def not_synced(_path: str) -> None:
    """Return None; used as the ``ClientPath`` if nothing was synced."""


class Files:
    """The files that breakpoints name, and how well each loaded file matches each of them.

    The same file, or the same name of a cell, matches best. Otherwise, it is the file whose path shares the most
    components with the requested one, counted from the end: a workspace may have another path on this host. A file that
    was synced there also matches like the controller's file that it came from. A library file must match by more than
    its base name.

    Args:
        asked: the files of breakpoints.
        client_path: translates loaded files.
    """

    def __init__(self, asked: Iterable[str], client_path: ClientPath) -> None:
        self._client_path = client_path
        self._asked = sorted(set(asked))
        self._bases = {os.path.basename(name) for name in self._asked}
        self._best = dict.fromkeys(self._asked, 1)
        self._seen: dict[str, tuple[str, ...]] = {}

    def match(self, loaded: str) -> tuple[str, ...]:
        """Return the requested names that a loaded file may match. Check `stands_for` before use."""
        found = self._seen.get(loaded)
        if found is None:
            found = self._seen[loaded] = tuple(self._matches(loaded))
        return found

    def stands_for(self, asked: str, loaded: str) -> bool:
        """Return whether a loaded file still matches best, of all files that are loaded now."""
        return self._score(asked, loaded) >= self._best.get(asked, 1)

    def _matches(self, loaded: str) -> list[str]:
        library = kind_of(loaded) == LIBRARY
        if library and os.path.basename(loaded) not in self._bases:
            return []  # most files end here, so it is cheap
        found: list[str] = []
        for asked in self._asked:
            score = self._score(asked, loaded)
            if score >= self._best[asked]:
                self._best[asked] = score
                found.append(asked)
        return found

    def _score(self, asked: str, loaded: str) -> int:
        score = matching_parts(asked, loaded)
        synced_from = self._client_path(loaded) if score < _SAME else None
        if synced_from is not None:  # the user names the controller's file
            score = max(score, matching_parts(asked, synced_from))
        if 0 < score < _SAME and kind_of(loaded) == LIBRARY:
            whole = asked.strip(os.sep).count(os.sep) + 1
            return score if score > 1 and score == whole else 0
        return score


log = logging.getLogger(__name__)

#: Decides whether to stop at a breakpoint with `first` or `differs`: (breakpoint, number of the hit, value).
Ask = Callable[[Breakpoint, int, object], bool]

Lines = dict[int, tuple["ArmedBreakpoint", ...]]


@dataclass(slots=True, eq=False)
class ArmedBreakpoint:
    """A breakpoint, and its state in this process."""

    spec: Breakpoint
    call: Callable[[], None] | None = None  # called instead of stopping
    hits: int = 0
    lines: set[int] = field(default_factory=set[int])  # the lines where it is bound
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to stop at this breakpoint; `text` is an additional message for the user."""

    breakpoint: Breakpoint
    text: str


class ArmedBreakpoints:
    """A set of armed breakpoints. Breakpoints that are also in `previous` keep their hit counts.

    Args:
        breakpoints: the breakpoints to arm.
        previous: the breakpoints that were armed before.
        client_path: translates loaded files that were synced.
        calls: further breakpoints, each with a function that the thread calls there instead of stopping.
    """

    def __init__(
        self,
        breakpoints: Iterable[Breakpoint],
        previous: ArmedBreakpoints | None = None,
        client_path: ClientPath = not_synced,
        calls: Iterable[tuple[Breakpoint, Callable[[], None]]] = (),
    ) -> None:
        kept = {armed.spec: armed.hits for armed in previous.armed} if previous is not None else {}
        self.armed = [ArmedBreakpoint(spec, hits=kept.get(spec, 0)) for spec in breakpoints]
        self.calls = [ArmedBreakpoint(spec, call) for spec, call in calls]
        self._errors = [armed for armed in self.armed if armed.spec.error]
        self._by_file: dict[str, list[ArmedBreakpoint]] = {}
        for armed in (*self.armed, *self.calls):
            if not armed.spec.error and kind_of(armed.spec.file) != RUNTIME:
                self._by_file.setdefault(armed.spec.file, []).append(armed)
        self._files = Files(self._by_file, client_path)

    @property
    def has_lines(self) -> bool:
        """Whether there is any breakpoint at a line."""
        return bool(self._by_file)

    @property
    def has_errors(self) -> bool:
        """Whether there is any breakpoint at errors."""
        return bool(self._errors)

    def wants(self, filename: str) -> bool:
        """Return whether a file that code was loaded from may have breakpoints."""
        return kind_of(filename) != RUNTIME and bool(self._files.match(filename))

    def lines_of(self, code: CodeType) -> Lines:
        """Return the lines of a code object that have breakpoints, with these breakpoints. Mark them as bound."""
        lines: Lines = {}
        for asked in self._files.match(code.co_filename):
            for armed in self._by_file[asked]:
                line = bind(code, armed.spec.line)
                if line is not None:
                    lines[line] = (*lines.get(line, ()), armed)
                    armed.lines.add(line)
        return lines

    def bounds(self, note: str) -> list[Bound]:
        """Return the state of each breakpoint. `note` is added to those at lines."""
        return [self._bound(armed, note) for armed in self.armed]

    def _bound(self, armed: ArmedBreakpoint, note: str) -> Bound:
        spec = armed.spec
        if spec.error:
            return Bound(spec.id, True, 0)
        if kind_of(spec.file) == RUNTIME:
            return Bound(spec.id, False, spec.line, "code of monarch_kernel itself cannot be stopped")
        if armed.lines:
            after = [line for line in armed.lines if line >= spec.line]
            return Bound(spec.id, True, min(after or armed.lines), note)
        waits = f"no code at line {spec.line} of {spec.file} is loaded; it takes hold when such code runs"
        return Bound(spec.id, False, spec.line, f"{waits}. {note}" if note else waits)

    # -- hits, on the thread that has reached a breakpoint -------------------------------------------

    def reached(self, frame: FrameType, here: tuple[ArmedBreakpoint, ...], ask: Ask) -> Decision | None:
        """Decide whether to stop a frame at a line with breakpoints; None to continue. Log points print."""
        filename = frame.f_code.co_filename
        decision: Decision | None = None
        for armed in here:
            if self._files.stands_for(armed.spec.file, filename):
                judged = _judge(armed, frame, ask)  # each counts and prints, even if another one stops
                decision = decision or judged
        return decision

    def failed(self, frame: FrameType, error: BaseException, ask: Ask) -> Decision | None:
        """Decide whether to stop for an error that has ended an endpoint or a cell; None to continue."""
        decision: Decision | None = None
        for armed in self._errors:
            if _is_called(armed.spec.error, error):
                judged = _judge(armed, frame, ask)
                decision = decision or judged
        return decision


def _is_called(name: str, error: BaseException) -> bool:
    if name == ANY_ERROR:
        return isinstance(error, Exception)
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(error).__mro__)


def _judge(armed: ArmedBreakpoint, frame: FrameType, ask: Ask) -> Decision | None:
    spec = armed.spec
    if spec.together and not common_point.is_reached(spec.together):
        return None
    if armed.call is not None:
        armed.call()
        return None
    if spec.condition:
        try:
            if not value_of(frame, spec.condition):
                return None
        except Exception as error:
            return Decision(spec, f"its condition {spec.condition!r} failed: {summary(error)}")
    with armed.lock:
        armed.hits += 1
        hit = armed.hits
    if hit < spec.hits:
        return None
    if spec.log:
        print(fill(frame, spec.log, short), file=sys.stdout, flush=True)
        return None
    if not spec.first and not spec.differs:
        return Decision(spec, "")
    value: object = None
    if spec.differs:
        try:
            value = value_of(frame, spec.differs)
        except Exception as error:
            return Decision(spec, f"its expression {spec.differs!r} failed: {summary(error)}")
    try:
        return Decision(spec, "") if ask(spec, hit, value) else None
    except Exception as error:
        log.exception("asking about breakpoint %d failed", spec.id)
        return Decision(spec, f"it is not known whether to stop: {summary(error)}")
