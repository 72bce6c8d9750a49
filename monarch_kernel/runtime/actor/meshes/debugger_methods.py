"""The debugger as methods of a proc mesh, and the controller's actor that is notified of stopped ranks."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.actor import extensions


class DebuggerMethods:
    """The debugger as methods of a proc mesh. ``monarch_kernel.debug`` has the same functions with more options."""

    def dead(self: Any) -> dict[int, str]:
        """Return the ranks that this process knows as dead, with the causes. Sends no messages."""
        deaths = self._system.node.deaths
        if not deaths:
            return {}
        return {rank: deaths[ref.id].cause for rank, ref in enumerate(self._target().procs) if ref.id in deaths}

    def stacks(self, **options: Any) -> Any:
        """Return the Python stacks of all ranks, merged; see ``monarch_kernel.debug.stacks``."""
        return extensions.debugger_functions().stacks(self, **options)

    def diff(self, expression: str, **options: Any) -> Any:
        """Return the distinct values of an expression over the ranks; see ``monarch_kernel.debug.diff``."""
        return extensions.debugger_functions().diff(self, expression, **options)

    def pull(self, expression: str, **options: Any) -> Any:
        """Return the value of an expression on one rank; see ``monarch_kernel.debug.pull``."""
        return extensions.debugger_functions().pull(self, expression, **options)

    def hang(self, **options: Any) -> Any:
        """Diagnose why these ranks make no progress; see ``monarch_kernel.debug.hang``."""
        return extensions.debugger_functions().hang(self, **options)

    @property
    def debug(self) -> Any:
        """The stopped ranks of this mesh, to step and inspect; a ``monarch_kernel.debug.StopSet``."""
        return extensions.debugger_functions().select(self)


def debug_controller() -> Any:
    """Return the controller's actor that is notified of stopped ranks.

    Programs use ``monarch_kernel.debug`` instead.
    """
    return extensions.debug_hub().hub_actor()
