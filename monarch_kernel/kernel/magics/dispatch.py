"""The subcommands of `%mesh`, and the dispatcher that runs them for cells and for clicks in views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.kernel.magics.arguments import Subcommands, parse
from monarch_kernel.kernel.magics.dap_magics import DapMagics
from monarch_kernel.kernel.magics.job_magics import JobMagics
from monarch_kernel.kernel.magics.lifecycle_magics import LifecycleMagics
from monarch_kernel.kernel.magics.numerics_magics import CaptureMagics, ComparisonMagics, NumericsMagics
from monarch_kernel.kernel.magics.status_magics import StatusMagics, TelemetryMagics
from monarch_kernel.kernel.magics.stop_magics import StopMagics
from monarch_kernel.kernel.magics.sync_magics import SyncMagics
from monarch_kernel.kernel.magics.value_magics import ValueMagics, VariableMagics
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.launchers.host_request import nearest

#: The groups of subcommands.
GROUPS: tuple[type[Subcommands], ...] = (
    LifecycleMagics,
    StatusMagics,
    SyncMagics,
    VariableMagics,
    ValueMagics,
    StopMagics,
    DapMagics,
    TelemetryMagics,
    NumericsMagics,
    CaptureMagics,
    ComparisonMagics,
    JobMagics,
)

#: The subcommands of each topic, in the order of `%mesh --help`.
TOPICS = {
    "everyday": ("up", "ls", "status", "use", "down", "logs", "push", "pull"),
    "trouble": ("interrupt", "kill", "heal", "restart", "hang", "stacks", "look", "stragglers"),
    "values": ("diff", "plot"),
    "debugger": ("break", "clear", "debug", "pm", "focus", "debugpy"),
    "code": ("sync",),
    "elsewhere": ("attach", "detach", "jobs", "join", "leave"),
    "recordings": ("metrics", "trace", "history"),
    "silent errors": ("record", "compare", "bisect", "capture", "replay"),
    "tensors": ("plan", "watch", "memory"),
}
SUBCOMMANDS = tuple(word for words in TOPICS.values() for word in words)

#: The function of each subcommand.
FUNCTIONS: dict[str, Callable[..., object]] = {
    word: each for group in GROUPS for word, each in group.functions().items()
}


class MeshCommands:
    """All subcommands, bound to one notebook.

    Args:
        notebook: the notebook.
        say: called with each text for the user; by default, the cell prints it.
        name: the name of the caller, shown to other viewers of the debugger.
    """

    def __init__(
        self, notebook: Notebook, say: Callable[[str], object] = print, name: str = "a cell of the notebook"
    ) -> None:
        self._audit, self._name = notebook.audit, name
        groups = [group(notebook, say, name) for group in GROUPS]
        self._group_of = {word: group for group in groups for word in group.functions()}

    def run(self, line: str) -> Any:
        """Run the part of a line after `%mesh`.

        Returns:
            The result to show, such as `Stacks`; None if the subcommand only prints text.

        Raises:
            UsageError: the line is wrong or cannot be executed now. The message is a sentence with the reason.
        """
        word, _, rest = line.strip().partition(" ")
        if word not in SUBCOMMANDS:
            near = nearest(word, SUBCOMMANDS)
            known = ", ".join(SUBCOMMANDS)
            raise UsageError(f"%mesh: there is no subcommand {word!r}{near}; there are {known}")
        found = parse(FUNCTIONS[word], rest)
        if found is None:
            return None
        with self._audit.during("command", line=line.strip(), by=self._name):
            try:
                return FUNCTIONS[word](self._group_of[word], found)
            except NotOffered as error:
                raise UsageError(f"%mesh {word}: {error}") from None
