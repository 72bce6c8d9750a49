"""The actors that `%mesh` puts on every rank: one that runs cells, one that tells where they are."""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import sysconfig
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import msgspec

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.errors import Fault, capture
from monarch_kernel.kernel import spawn_pickling
from monarch_kernel.kernel.rank import rank_output
from monarch_kernel.kernel.rank.cell_runner import Cell, CellRunner, fallback_bundle, plain_text, where_is
from monarch_kernel.kernel.rank.lazy_shell import LazyShell
from monarch_kernel.kernel.rank.process_group import (
    Rendezvous,
    choose_rendezvous,
    cpu_ticks,
    end_process_group,
    set_up,
)
from monarch_kernel.kernel.rank.value_size import shortened, size_at_least, text_at_least
from monarch_kernel.kernel.traceback_frames import WAITING
from monarch_kernel.spmd import are_broken, in_process_group, meetings, release, tidy_up
from monarch_kernel.tools import endpoints_here, failed_by_peer, keep_failure

#: A cell's value is sent to the notebook if its pickle is not larger than this (bytes).
VALUE_LIMIT = 16_000_000
#: A string (or bytes) that is longer than this is shown by its beginning (characters).
TEXT_LIMIT = 100_000
#: How much of it (characters).
SHOWN = 1_000

_KERNEL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_KERNEL)) + os.sep
# Code that is not the user's: where a rank is, is told by the innermost line outside of these.
_FOREIGN = tuple(
    {
        _PACKAGE,
        *(path + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))),
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True, slots=True)
class Reply:
    """How a cell ended on one rank.

    Attributes:
        rank: the rank in its mesh.
        value: the pickled value of the last expression; None if there is none or it was not sent.
        has_value: whether the cell ends in an expression.
        unsent: why the value was not sent, as a sentence.
        shown: the value as text, where it was not sent.
        fault: the exception that ended the cell.
        seconds: how long it took.
        broken: the process group that it is in cannot be used any more.
        meetings: how many process groups it has joined; ranks with different numbers would not meet.
    """

    rank: int
    value: bytes | None
    has_value: bool
    unsent: str
    shown: str
    fault: Fault | None
    seconds: float
    broken: bool = False
    meetings: int = 0


class _Activity:
    """What `CellExecutor` does on the main thread of this process, and what `Monitor` wants of it."""

    cell: str = ""
    file: str = ""
    since: float = 0.0
    stopped: ClassVar[set[str]] = set()
    shell: ClassVar[LazyShell | None] = None
    ended: ClassVar[deque[str]] = deque(maxlen=256)


class CellExecutor(Actor):
    """Runs cells in this rank's `__main__`, on its main thread."""

    __tool__ = True

    def __init__(self) -> None:
        self._me = context().actor_instance
        point = self._me.rank
        self._rank = point.rank
        main = _main_module()
        self._names = vars(main)
        self._names.update(rank=point.rank, world_size=point.extent.nelements, point=point)
        builtins.input = _no_input
        self._shell = LazyShell(main)
        self._shell.install()
        _Activity.shell = self._shell
        spawn_pickling.install()
        self._runner = CellRunner(self._names, self._show)
        self._owns_group = False

    # -- set-up --------------------------------------------------------------------------------

    @endpoint
    def reserve(self, backend: str, world_size: int, local_size: int, local: bool) -> Rendezvous:
        """Choose where the ranks meet; called on rank 0."""
        return choose_rendezvous(backend, world_size, local_size, local=local)

    @endpoint
    def set_up(self, rendezvous: Rendezvous, threads: int) -> None:
        """Set torchrun's environment, and join the process group if one is wanted."""
        self._owns_group = set_up(rendezvous, self._rank, threads)

    @endpoint
    def leave_group(self) -> None:
        """Leave the process group: ranks that wait for this one in a collective get an error."""
        end_process_group()

    def __cleanup__(self, error: BaseException | None) -> None:
        """Leave the process group that `set_up` joined."""
        if self._owns_group:
            end_process_group()
        self._runner.close()

    # -- cells ---------------------------------------------------------------------------------

    @endpoint
    def run(self, cell: Cell) -> Reply:
        """Run a cell. Never raises: what the cell raises is in the reply."""
        started = time.perf_counter()
        try:
            reply = self._run(cell, started)
        except BaseException as error:  # an interrupt that hit this code, around the user's
            reply = self._reply(started, fault=_fault_of(error))
        _Activity.cell = ""
        _Activity.ended.append(cell.id)
        _Activity.stopped.discard(cell.id)
        self._me.background = self._runner.loop.existing
        _surely(rank_output.end_cell, cell.id)
        return reply

    def _run(self, cell: Cell, started: float) -> Reply:
        rank_output.begin_cell(cell.id)
        _Activity.file, _Activity.since = cell.filename, time.time()
        _Activity.cell = cell.id
        if cell.id in _Activity.stopped:  # it waited behind another cell when it was interrupted
            raise KeyboardInterrupt
        self._shell.before_cell(cell.raw, cell.source)
        outcome = self._runner.run(cell)
        fault = None
        if outcome.error is not None:
            fault = _fault_of(outcome.error)
            keep_failure(outcome.error, cell.id)  # a debugger may stop here
        try:
            self._shell.after_cell(outcome.value, outcome.error)
        except BaseException as error:  # drawing a figure runs user code
            fault = fault or _fault_of(error)
        # Its frames hold on to the user's objects, and to us: what they refer to must go when the user lets go.
        outcome.error = None
        tidy_up()
        if fault is not None:
            return self._reply(started, fault=fault)
        if not outcome.has_value:
            return self._reply(started)
        pickled, unsent = _pickled(outcome.value)
        shown = "" if pickled is not None else _short(outcome.value)
        return self._reply(started, value=pickled, has_value=True, unsent=unsent, shown=shown)

    def _reply(
        self,
        started: float,
        *,
        value: bytes | None = None,
        has_value: bool = False,
        unsent: str = "",
        shown: str = "",
        fault: Fault | None = None,
    ) -> Reply:
        seconds = time.perf_counter() - started
        return Reply(self._rank, value, has_value, unsent, shown, fault, seconds, are_broken(), meetings())

    def _show(self, value: Any) -> None:
        if text_at_least(value, TEXT_LIMIT) > TEXT_LIMIT:
            rank_output.emit_display({"text/plain": shortened(value, SHOWN)}, {}, result=True)
            return
        text = None if self._shell.existing is not None else plain_text(value)
        bundle = ({"text/plain": text}, {}) if text is not None else self._shell.bundle(value)
        data, metadata = bundle or fallback_bundle(value)
        if data:
            rank_output.emit_display(data, metadata, result=True)

    # -- variables -----------------------------------------------------------------------------

    @endpoint
    def push(self, values: dict[str, Any]) -> None:
        """Set variables of the cells' namespace."""
        self._names.update(values)

    @endpoint
    def pull(self, names: list[str]) -> dict[str, Any]:
        """Variables of the cells' namespace; those that do not exist are left out."""
        return {name: self._names[name] for name in names if name in self._names}


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank's main thread is.

    Attributes:
        rank: the rank in its mesh.
        file: of the user's innermost line.
        line: its number.
        function: its function.
        waits: whether it waits in torch for other ranks.
        cell: the id of the cell that runs.
        cell_file: what tracebacks call that.
        since: when that began (`time.time()`).
        endpoint: what runs instead of a cell, if it is an actor: `trainers.step`.
    """

    rank: int
    file: str
    line: int
    function: str
    waits: bool
    cell: str = ""
    cell_file: str = ""
    since: float = 0.0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What an interrupt found on a rank: whether the cell had begun. One that had not will not run any of its code."""

    rank: int
    begun: bool


class Monitor(Actor):
    """Tells where this rank's main thread is, from a thread of its own."""

    __tool__ = True

    def __init__(self) -> None:
        self._rank = context().actor_instance.rank.rank
        self._main = threading.main_thread().ident or 0
        self._ticks = -1

    @endpoint
    def where(self) -> Whereabouts | None:
        """Where this rank is in its cell, or in an endpoint of an actor; None when neither runs."""
        if not _Activity.cell:
            return self._in_endpoint()
        place = where_is(self._main, _is_foreign)
        if place is None:
            return None
        return Whereabouts(self._rank, *place, self._waits(), _Activity.cell, _Activity.file, _Activity.since)

    def _in_endpoint(self) -> Whereabouts | None:
        for each in endpoints_here():
            place = None if each.tool else where_is(each.thread, _is_foreign)
            if place is not None:
                return Whereabouts(self._rank, *place, False, endpoint=f"{each.actor}.{each.endpoint}")
        return None

    @endpoint
    def interrupt_cell(self, cell: str) -> Interrupted:
        """Raise KeyboardInterrupt in that cell, now or as soon as it begins; never in another one."""
        dropped = self._drop(cell)
        if dropped.begun and cell not in _Activity.ended:
            os.kill(os.getpid(), signal.SIGINT)
            self._release(cell, ())  # no signal ends a wait in a collective
        return dropped

    @endpoint
    def release_cell(self, cell: str, failed: tuple[int, ...]) -> None:
        """Other ranks have failed in that cell: end this one's waits for them, until the cell has ended here."""
        self._release(cell, failed)

    def _release(self, cell: str, failed: tuple[int, ...]) -> None:
        def thread() -> int:
            return self._main if _Activity.cell == cell else 0

        release(cell, thread, lambda: cell not in _Activity.ended, frozenset(failed))

    @endpoint
    def drop_cell(self, cell: str) -> Interrupted:
        """If that cell has not begun, raise KeyboardInterrupt in it as soon as it does."""
        return self._drop(cell)

    def _drop(self, cell: str) -> Interrupted:
        # In this order: a cell that begins now says so before it looks whether it was stopped.
        _Activity.stopped.add(cell)
        return Interrupted(self._rank, _Activity.cell == cell or cell in _Activity.ended)

    def _waits(self) -> bool:
        """Whether the main thread is in torch, in a process group, and has not computed since it was last asked."""
        ticks, self._ticks = self._ticks, cpu_ticks(os.getpid())
        if ticks != self._ticks or not in_process_group():
            return False
        innermost = where_is(self._main, lambda _file: False)
        return innermost is not None and f"{os.sep}torch{os.sep}" in innermost[0]


def ask_names(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call one of `name_lookup`, on a rank; None where no cells can run."""
    shell = _Activity.shell
    return None if shell is None else function(shell, *args)


def _main_module() -> types.ModuleType:
    """A fresh `__main__`: the one of this process holds the host agent's names."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _is_foreign(file: str) -> bool:
    return file.startswith(_FOREIGN) or file.startswith("<frozen") or any(part in file for part in _INSTALLED)


def _fault_of(error: BaseException) -> Fault:
    # Where an interrupt hits, it is the line of the user that counts, not what waits below it.
    waits = WAITING if isinstance(error, KeyboardInterrupt) else ()
    fault = capture(error, (_KERNEL, *_ipython(), *waits))
    return msgspec.structs.replace(fault, of_peer=True) if failed_by_peer(error) else fault


def _ipython() -> tuple[str, ...]:
    module = sys.modules.get("IPython")
    file = getattr(module, "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file else ()


def _pickled(value: Any) -> tuple[bytes | None, str]:
    size = size_at_least(value, VALUE_LIMIT)
    if size > VALUE_LIMIT:
        return None, _too_large(size)
    written = _Limited()
    try:
        cloudpickle.Pickler(written, protocol=5).dump(value)
    except _Full:
        return None, _too_large(VALUE_LIMIT)
    except Exception as error:  # pickling runs user code
        return None, f"it cannot be pickled ({type(error).__name__}: {error})"
    return written.getvalue(), ""


class _Full(Exception):
    """A pickle has grown too large to be sent."""


class _Limited(io.BytesIO):
    """Takes a pickle until it is larger than what a cell sends; the rest is never made."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > VALUE_LIMIT:
            raise _Full
        return super().write(data)


def _too_large(size: int) -> str:
    return f"it is larger than a cell sends by itself (at least {size / 1e6:.0f} MB); use %mesh pull"


def _short(value: Any) -> str:
    return shortened(value, 200)


def _surely(action: Any, *args: Any) -> None:
    """Call `action`, once more if an interrupt hits it."""
    try:
        action(*args)
    except KeyboardInterrupt:
        action(*args)


def _no_input(prompt: object = "") -> str:
    asking = sys._getframe(1).f_globals.get("__name__")
    if asking in ("cmd", "pdb", "bdb"):
        raise RuntimeError(
            "pdb cannot ask on a rank, where nobody can type; write breakpoint() instead: it stops the rank and opens "
            "a prompt in the notebook, see also %mesh break and %mesh pm"
        )
    raise RuntimeError(
        "input() does not work on ranks, where nobody can type; ask in an ordinary cell and send the answer with "
        "%mesh push"
    )
