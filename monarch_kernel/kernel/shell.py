"""The shell of the kernel: IPython's, in which an interrupt always ends in KeyboardInterrupt."""

from __future__ import annotations

import asyncio
import sys
import threading
from traceback import walk_tb
from types import TracebackType
from typing import Any

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

from monarch_kernel.kernel.debug.mux import DEADLINE
from monarch_kernel.kernel.interrupts.sigint_handler import SigintHandler
from monarch_kernel.kernel.traceback_frames import cut


class MonarchShell(ZMQInteractiveShell):
    """A ``ZMQInteractiveShell`` that notifies the SIGINT handler when user code runs."""

    sigint: SigintHandler

    def __init__(self, **kwargs: Any) -> None:
        self.breakpoints_set = threading.Event()
        """Cleared while a debug request of the front end's sets breakpoints on ranks, which takes them up to seconds.

        A cell that is run meanwhile waits, so that it does not run past a breakpoint that its user sees.
        """
        self.breakpoints_set.set()
        super().__init__(**kwargs)

    def run_cell(self, *args: Any, **kwargs: Any) -> Any:
        """Run a cell that does not await."""
        with self.sigint.interruptible():
            self.breakpoints_set.wait(DEADLINE)
            return super().run_cell(*args, **kwargs)

    async def run_cell_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        """Run a cell that may await. No exception leaves this method, since it would lose the reply."""
        try:
            with self.sigint.interruptible():
                self.breakpoints_set.wait(DEADLINE)
                result = await super().run_cell_async(raw_cell, *args, **kwargs)
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # The exception hit IPython's own code, around user code.
            self.showtraceback()
            result = ExecutionResult(ExecutionInfo(raw_cell, False, False, True, None))
            result.error_in_exec = error
        if self._is_interrupt(result.error_in_exec):
            result.error_in_exec = KeyboardInterrupt()
        return result

    def user_expressions(self, expressions: dict[str, str]) -> Any:
        """Evaluate the expressions that the front end sent with the cell; they are user code as well."""
        with self.sigint.interruptible():
            return super().user_expressions(expressions)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show an error. A cell that Ctrl-C cancelled while it awaited shows KeyboardInterrupt."""
        _, value, tb = exc_tuple or sys.exc_info()
        if self._is_interrupt(value) or type(value) is KeyboardInterrupt:
            if not self._has_user_code(tb):  # it hit IPython's own code, between two lines of the cell
                self._showtraceback(KeyboardInterrupt, KeyboardInterrupt(), ["KeyboardInterrupt"])
                return
            exc_tuple = (KeyboardInterrupt, KeyboardInterrupt(), cut(tb, interrupt=True))
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _has_user_code(self, tb: TracebackType | None) -> bool:
        cells: Any = self.compile._filename_map
        return any(frame.f_code.co_filename in cells for frame, _line in walk_tb(tb))

    def _is_interrupt(self, error: BaseException | None) -> bool:
        return isinstance(error, asyncio.CancelledError) and self.sigint.cancelled
