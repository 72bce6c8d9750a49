"""The kernel's shell: IPython's, with interrupts that always end in KeyboardInterrupt."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

from monarch_kernel.kernel.interrupts.sigint_handler import SigintHandler
from monarch_kernel.kernel.traceback_frames import cut


class MonarchShell(ZMQInteractiveShell):
    """``ZMQInteractiveShell`` that tells the SIGINT handler when the user's code runs."""

    sigint: SigintHandler

    def run_cell(self, *args: Any, **kwargs: Any) -> Any:
        """Run a cell that does not await."""
        with self.sigint.interruptible():
            return super().run_cell(*args, **kwargs)

    async def run_cell_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        """Run a cell that may await. An exception that left it would lose the reply, so none does."""
        try:
            with self.sigint.interruptible():
                result = await super().run_cell_async(raw_cell, *args, **kwargs)
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # It hit IPython's own code, around the user's.
            self.showtraceback()
            result = ExecutionResult(ExecutionInfo(raw_cell, False, False, True, None))
            result.error_in_exec = error
        if self._is_interrupt(result.error_in_exec):
            result.error_in_exec = KeyboardInterrupt()
        return result

    def user_expressions(self, expressions: dict[str, str]) -> Any:
        """Evaluate what the front end asked for after the cell; this is the user's code too."""
        with self.sigint.interruptible():
            return super().user_expressions(expressions)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show an error; the cancellation of an awaiting cell by Ctrl-C is shown as what it is."""
        _, value, tb = exc_tuple or sys.exc_info()
        if self._is_interrupt(value) or type(value) is KeyboardInterrupt:
            exc_tuple = (KeyboardInterrupt, KeyboardInterrupt(), cut(tb, interrupt=True))
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _is_interrupt(self, error: BaseException | None) -> bool:
        return isinstance(error, asyncio.CancelledError) and self.sigint.cancelled
