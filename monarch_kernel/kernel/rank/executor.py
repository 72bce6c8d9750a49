"""The actor that runs cells on a rank."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import begin_record, install_rank_main, main_names, trace_records
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank import cell_streams
from monarch_kernel.kernel.rank.cell_runner import CellRunner
from monarch_kernel.kernel.rank.lazy_shell import process_shell, show_bundle
from monarch_kernel.kernel.rank.monitor import CellActivity
from monarch_kernel.kernel.rank.sent_values import (
    check_not_bound,
    fallback_bundle,
    pickled,
    plain_text,
    short,
    shortened,
    text_at_least,
)
from monarch_kernel.kernel.rank.user_code import Rendezvous, choose_rendezvous, end_process_group, fault_of, set_up
from monarch_kernel.protocol.faults import Fault
from monarch_kernel.spmd import are_broken, meetings, tidy_up

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
#: Only the beginning of a longer string (or bytes) is shown (characters).
TEXT_LIMIT = 100_000
#: The length of the displayed beginning (characters).
SHOWN = 1_000


@dataclass(frozen=True, slots=True)
class CellReply:
    """How a cell ended on one rank.

    Attributes:
        rank: the rank in its mesh.
        value: the pickled value of the last expression; None if there is no value, or it is not sent.
        has_value: whether the cell ends in an expression.
        unsent: why the value is not sent, as a sentence.
        shown: the value as a short text, if rebuilding it may need more than builtins.
        fault: the exception that ended the cell.
        seconds: how long the cell took.
        broken: whether the process group of the rank is unusable.
        meetings: how many process groups the rank has joined; ranks with different numbers could not rendezvous.
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


class CellExecutor(Actor):
    """Runs cells in the `__main__` of this rank, on its main thread."""

    __tool__ = True
    #: Endpoints that return values of the program; the others return data.
    __values__ = frozenset({"pull", "offer"})
    #: Endpoints that other viewers of a joined job cannot call: see `joined_process.JoinedProcess`.
    __of_driver__ = frozenset({"run", "push", "set_up", "leave_group"})

    def __init__(self) -> None:
        self._me = tool_runtime().actor_here()
        point = self._me.rank
        self._rank = point.rank
        of_program = tool_runtime().OF_PROGRAM
        if not of_program:
            install_rank_main()
        self._names = main_names()
        known = {"rank": point.rank, "world_size": point.extent.nelements, "point": point}
        for name, value in known.items():
            if not of_program or name not in self._names:  # keep a program's own `rank`
                self._names[name] = value
        self._shell = process_shell()
        if of_program:
            self._names.setdefault("display", self._shell.display)
        else:
            builtins.input = _no_input
            self._shell.install()
        CellActivity.shell = self._shell
        self._runner = CellRunner(self._names, self._show)
        self._owns_group = False

    # -- set-up --------------------------------------------------------------------------------

    @endpoint
    def reserve(self, backend: str, world_size: int, local_size: int, local: bool) -> Rendezvous:
        """Choose a rendezvous. Called on rank 0."""
        return choose_rendezvous(backend, world_size, local_size, local=local)

    @endpoint
    def set_up(self, rendezvous: Rendezvous, threads: int) -> None:
        """Set torchrun's environment variables, and join the process group if requested."""
        self._owns_group = set_up(rendezvous, self._rank, threads)

    @endpoint
    def leave_group(self) -> None:
        """Leave the process group. Ranks that wait for this one in a collective get an error."""
        end_process_group()

    @endpoint
    def group_broken(self) -> bool:
        """Whether the process group of this rank was shut down."""
        return are_broken()

    def __cleanup__(self, error: BaseException | None) -> None:
        """Leave the process group that `set_up` joined."""
        if self._owns_group:
            end_process_group()
        self._runner.close()

    # -- cells ---------------------------------------------------------------------------------

    @endpoint
    def run(self, cell: Cell) -> CellReply:
        """Run a cell. Never raises: the reply holds what the cell raises."""
        started = time.perf_counter()
        end_record = begin_record(trace_records.CELL, cell.filename, call=cell.id)
        try:
            if cell.place is None:
                reply = self._run(cell, started)
            else:
                from monarch_kernel.kernel.rank.cell_locations import run_at  # imported here because few cells need it

                reply = run_at(cell.place, self._me, lambda names: self._run(cell, started, names))
        except BaseException as error:  # an interrupt that hit this code instead of the cell
            reply = self._reply(started, fault=fault_of(error))
        end_record(int(reply.fault is not None))
        CellActivity.cell = ""
        CellActivity.thread = 0
        CellActivity.ended.append(cell.id)
        CellActivity.stopped.discard(cell.id)
        self._me.background = self._runner.loop.existing
        _surely(cell_streams.end_cell, cell.id)
        return reply

    def _run(self, cell: Cell, started: float, names: dict[str, object] | None = None) -> CellReply:
        CellActivity.thread = threading.get_ident()
        cell_streams.begin_cell(cell.id)
        CellActivity.file, CellActivity.since = cell.filename, time.time()
        CellActivity.cell = cell.id
        if cell.id in CellActivity.stopped:  # it was interrupted while it waited behind another cell
            raise KeyboardInterrupt
        self._shell.before_cell(cell.raw, cell.source)
        outcome = self._runner.run(cell, names)
        fault = None
        if outcome.error is not None:
            fault = fault_of(outcome.error)
            tool_runtime().keep_failure(outcome.error, cell.id)  # the debugger may stop here
        try:
            self._shell.after_cell(outcome.value, outcome.error)
        except BaseException as error:  # drawing a figure runs user code
            fault = fault or fault_of(error)
        # Its frames refer to user objects, which must be freed when user code drops them.
        outcome.error = None
        if not tool_runtime().OF_PROGRAM:  # a joined program may be about to create its groups
            tidy_up()
        if fault is not None:
            return self._reply(started, fault=fault)
        if not outcome.has_value:
            return self._reply(started)
        sent, unsent = pickled(outcome.value)
        shown = "" if isinstance(outcome.value, _PLAIN) else short(outcome.value)
        return self._reply(started, value=sent, has_value=True, unsent=unsent, shown=shown)

    def _reply(
        self,
        started: float,
        *,
        value: bytes | None = None,
        has_value: bool = False,
        unsent: str = "",
        shown: str = "",
        fault: Fault | None = None,
    ) -> CellReply:
        seconds = time.perf_counter() - started
        return CellReply(self._rank, value, has_value, unsent, shown, fault, seconds, are_broken(), meetings())

    def _show(self, value: object) -> None:
        if text_at_least(value, TEXT_LIMIT) > TEXT_LIMIT:
            show_bundle({"text/plain": shortened(value, SHOWN)}, {}, result=True)
            return
        text = None if self._shell.existing is not None else plain_text(value)
        bundle = ({"text/plain": text}, {}) if text is not None else self._shell.bundle(value)
        data, metadata = bundle or fallback_bundle(value)
        if data:
            show_bundle(data, metadata, result=True)

    # -- variables -----------------------------------------------------------------------------

    @endpoint
    def push(self, values: dict[str, object]) -> None:
        """Set variables of the cells' namespace."""
        self._names.update(values)

    @endpoint
    def pull(self, names: list[str]) -> dict[str, object]:
        """Return variables of the cells' namespace, without those that do not exist."""
        found = {name: self._names[name] for name in names if name in self._names}
        for value in found.values():
            check_not_bound(value)
        return found

    @endpoint
    def offer(self, names: list[str]) -> dict[str, object]:
        """Return variables as offers for handles in the notebook; tensors stay on this rank."""
        from monarch_kernel.distributed import offer  # loads torch

        return {name: offer(self._names[name]) for name in names if name in self._names}


def _surely(action: Callable[..., object], *args: str) -> None:
    """Call `action`, and again if an interrupt hits it."""
    try:
        action(*args)
    except KeyboardInterrupt:
        action(*args)


def _no_input(prompt: object = "") -> str:
    asking = sys._getframe(1).f_globals.get("__name__")
    if asking in ("cmd", "pdb", "bdb"):
        raise RuntimeError(
            "pdb does not work on ranks, which have no standard input; use breakpoint(): it stops the rank and opens "
            "a prompt in the notebook, see also %mesh break and %mesh pm"
        )
    raise RuntimeError(
        "input() does not work on ranks, which have no standard input; ask in an ordinary cell, and send the answer "
        "with %mesh push"
    )
