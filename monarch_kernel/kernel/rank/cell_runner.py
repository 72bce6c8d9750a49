"""Run a cell in a namespace, like IPython. Independent of actors and meshes.

A cell's source is plain Python (the kernel has transformed it). Its last expression is shown, `await` works at the top
level, and its traceback begins at the cell's own first frame.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from monarch_kernel.kernel.cell import Cell, remember_source
from monarch_kernel.kernel.rank.cell_loop import CellLoop

if TYPE_CHECKING:
    from types import TracebackType


_FUTURES = {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}


@dataclass(slots=True)
class Outcome:
    """How a cell ended; `error` is None if it completed."""

    value: object = None
    has_value: bool = False
    error: BaseException | None = None


class CellRunner:
    """Runs cells in one namespace, one at a time.

    Args:
        namespace: the globals of all cells.
        show: called with the value of the last expression of a cell, unless it is None.
    """

    def __init__(self, namespace: dict[str, object], show: Callable[[object], None]) -> None:
        self.namespace = namespace
        self._show = show
        self._flags = 0
        self.loop = CellLoop()

    def run(self, cell: Cell, names: dict[str, object] | None = None) -> Outcome:
        """Run `cell`. The outcome contains any exception that it raises, including SystemExit and KeyboardInterrupt.

        Args:
            names: the globals of this cell, if they differ from those of all cells.
        """
        remember_source(cell.filename, cell.raw)
        outcome, began = Outcome(), time.monotonic()
        try:
            body, last = self._compile(cell)
            with self.loop.offered():
                self._execute(body, names)
                if last is not None:
                    outcome.value = self._execute(last, names)
            if last is not None:
                outcome.has_value = True
                if not cell.quiet and outcome.value is not None:
                    builtins._ = outcome.value  # type: ignore[attr-defined]
                    self._show(outcome.value)
        except BaseException as error:
            captures = sys.modules.get("monarch_kernel.numerics.step_capture")  # if any, it may wait for an exception
            if captures is not None:
                captures.note_exception(error, began)
            outcome.error = error
            outcome.has_value = False
            error.__traceback__ = _from_file(error.__traceback__, cell.filename)
        return outcome

    def close(self) -> None:
        """Close the event loop of the cells."""
        self.loop.close()

    def _compile(self, cell: Cell) -> tuple[CodeType, CodeType | None]:
        tree = ast.parse(cell.source, cell.filename)
        last: ast.expr | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body.pop().value  # type: ignore[attr-defined]
        body = self._code(tree, cell.filename, "exec")
        return body, None if last is None else self._code(ast.Expression(last), cell.filename, "eval")

    def _code(self, tree: ast.Module | ast.Expression, filename: str, mode: str) -> CodeType:
        flags = self._flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, filename, mode, flags, dont_inherit=True)
        for flag in _FUTURES:  # `from __future__ import ...` also applies to later cells
            self._flags |= code.co_flags & flag
        return code

    def _execute(self, code: CodeType, names: dict[str, object] | None) -> object:
        found = eval(code, self.namespace if names is None else names)
        return self.loop.run(found) if code.co_flags & inspect.CO_COROUTINE else found


def _from_file(traceback: TracebackType | None, filename: str) -> TracebackType | None:
    """Return a traceback without the frames above the first one in `filename`; the whole traceback if there is none."""
    at = traceback
    while at is not None:
        if at.tb_frame.f_code.co_filename == filename:
            return at
        at = at.tb_next
    return traceback
