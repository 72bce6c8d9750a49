"""Create the IPython shell of a rank when IPython is first imported there.

Some libraries check at import whether they run in IPython (matplotlib's inline backend does), so the shell must exist
as soon as the package is imported. `get_ipython` and `display` are builtins from the start.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from monarch_kernel.display import VIEW_MIME
from monarch_kernel.introspection import after_import, main_names
from monarch_kernel.kernel.rank import cell_streams

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo

_INLINE = "module://matplotlib_inline.backend_inline"


#: Names that every cell has from the start.
GIVEN = ("get_ipython", "rank", "world_size", "point")


class LazyShell:
    """The shell of this rank, once it is needed."""

    def __init__(self) -> None:
        self._shell: Any = None
        self._info: ExecutionInfo | None = None  # about the running cell, if the shell existed when it began

    def install(self) -> None:
        """Watch for the import of IPython, and make `get_ipython` and `display` available."""
        if importlib.util.find_spec("IPython") is None:
            os.environ.pop("MPLBACKEND", None)
            return
        inline = importlib.util.find_spec("matplotlib_inline") is not None
        if inline and os.environ.get("MPLBACKEND", _INLINE) == _INLINE:
            matplotlib = sys.modules.get("matplotlib")
            if matplotlib is not None and "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:
                matplotlib.rcParams["backend"] = _INLINE  # it has read the variable already
            os.environ["MPLBACKEND"] = _INLINE
        after_import("comm", _use_comms)
        if "IPython" in sys.modules:
            self.get()
            return
        after_import("IPython", lambda _module: self.get())
        builtins.get_ipython = self.get  # type: ignore[attr-defined]
        builtins.display = self.display  # type: ignore[attr-defined]

    @property
    def names(self) -> dict[str, Any]:
        """The namespace of the cells."""
        return main_names()

    @property
    def existing(self) -> object:
        """Return the shell, or None if it was not needed yet."""
        return self._shell

    def get(self) -> Any:
        """Return the shell, created on first use; None if IPython is not installed."""
        if self._shell is None:
            try:
                from monarch_kernel.kernel.rank.rank_shell import make_shell
            except ImportError:
                return None
            if self._shell is None:  # the import of IPython may have created it
                self._shell = make_shell()
        return self._shell

    def bundle(self, value: object) -> tuple[dict[str, object], dict[str, object]] | None:
        """Return a value's MIME bundle and its metadata; empty if it displays itself, None without IPython."""
        shell = self.get()
        if shell is None:
            return None
        from monarch_kernel.kernel.rank.sent_values import jsonable

        data, metadata = shell.display_formatter.format(value)
        return jsonable(data), jsonable(metadata)

    def before_cell(self, raw: str, source: str) -> None:
        """Run the hooks for the beginning of a cell, such as %autoreload's check for changed modules."""
        self._info = None
        if self._shell is not None:
            from IPython.core.interactiveshell import ExecutionInfo

            self._info = ExecutionInfo(raw, False, False, True, None, transformed_cell=source)
            self._shell.events.trigger("pre_execute")
            self._shell.events.trigger("pre_run_cell", self._info)

    def after_cell(self, value: Any, error: BaseException | None) -> None:
        """Run the hooks for the end of a cell, such as matplotlib's, which shows its figures."""
        if self._shell is None:
            return
        if "comm" in sys.modules:
            from monarch_kernel.kernel.rank.rank_comms import update_texts

            update_texts()
        self._shell.events.trigger("post_execute")
        if self._info is not None:
            from IPython.core.interactiveshell import ExecutionResult

            result = ExecutionResult(self._info)
            result.result, result.error_in_exec = value, error
            self._shell.events.trigger("post_run_cell", result)

    def display(self, *objects: object, **options: Any) -> object:
        self.get()
        from IPython.display import display

        return display(*objects, **options)


def show_bundle(
    data: dict[str, Any],
    metadata: dict[str, object],
    *,
    display_id: str | None = None,
    update: bool = False,
    result: bool = False,
) -> None:
    """Show a MIME bundle in the current cell, or replace the one that has this display id.

    Args:
        data: the bundle.
        metadata: of the bundle.
        display_id: identifies the output. A widget's view has its own by default.
        update: replace.
        result: show it as the cell's value.
    """
    if VIEW_MIME in data and display_id is None and "comm" in sys.modules:
        from monarch_kernel.kernel.rank.rank_comms import note_shown

        display_id = note_shown(data[VIEW_MIME].get("model_id"), data, metadata)
    cell_streams.emit_display(data, metadata, display_id=display_id, update=update, result=result)


def _use_comms(_module: object) -> None:
    from monarch_kernel.kernel.rank.rank_comms import use

    use()


_shell: LazyShell | None = None


def process_shell() -> LazyShell:
    """Return the shell of this process. There is at most one."""
    global _shell
    if _shell is None:
        _shell = LazyShell()
    return _shell
