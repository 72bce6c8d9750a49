"""IPython on a rank, for `get_ipython()`, `display()`, magics and figures.

Imported only when a cell uses IPython, or has a result that is more than text (see `lazy_shell`). `CellRunner`, not the
shell, runs cells. The shell stores no history and writes no files.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from IPython.core import page, pylabtools
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from monarch_kernel.introspection import main_names
from monarch_kernel.kernel.rank import cell_streams
from monarch_kernel.kernel.rank.lazy_shell import GIVEN, show_bundle
from monarch_kernel.kernel.rank.sent_values import jsonable

_CONFIG = Config({"HistoryManager": {"enabled": False, "hist_file": ":memory:"}})


class RankDisplayPublisher(DisplayPublisher):
    """Sends displays to the output of the cell that displays them."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_kwargs: object,
    ) -> None:
        """Called for every display."""
        display_id = (transient or {}).get("display_id")
        show_bundle(jsonable(data), jsonable(metadata or {}), display_id=display_id, update=update)

    def clear_output(self, wait: bool = False) -> None:
        """Called by `IPython.display.clear_output`."""
        cell_streams.clear_output(wait)


class RankShell(InteractiveShell):
    """The `get_ipython()` of a rank."""

    display_pub_class = RankDisplayPublisher  # type: ignore[assignment]

    def init_ipython_dir(self, ipython_dir: object) -> None:
        """Create no folder: a rank leaves no files behind."""

    def init_profile_dir(self, profile_dir: object) -> None:
        """See `init_ipython_dir`."""

        self.db = {}  # the storage of %cd and %bookmark

    def enable_gui(self, gui: object = None) -> None:
        """Reject backends that need a screen; figures are shown inline."""
        if gui not in (None, "inline"):
            raise UsageError(
                f"a rank has no screen for {gui!r}; use %matplotlib inline, which shows figures in the notebook"
            )

    def enable_matplotlib(self, gui: Any = None) -> Any:
        """Implement `%matplotlib`: reject a backend that needs a screen before loading it."""
        self.enable_gui(pylabtools.find_gui_and_backend(gui, None)[0])
        return super().enable_matplotlib(gui)

    def init_user_ns(self) -> None:
        """Add the names that magics need, without replacing any: cells may have run before the shell exists."""
        self.user_ns.setdefault("get_ipython", self.get_ipython)
        self.user_ns.setdefault("_dh", [os.getcwd()])
        for name in GIVEN:  # %who shows only names of user code
            self.user_ns_hidden[name] = self.user_ns.get(name)

    def init_hooks(self) -> None:
        """Make `?` print its text, since there is no pager."""
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(_print_page), 99)

    def init_prompts(self) -> None:
        """Set no `sys.ps1`: some libraries take it as a sign of an interactive session and refuse multiprocessing."""

    def init_sys_modules(self) -> None:
        """Do nothing: `__main__` is already the namespace of the cells."""

    def system(self, cmd: str) -> None:
        """Run `!cmd` with the stdout and stderr of the rank."""
        cell_streams.flush()
        # IPython's own method warns about !pip and !cd, and names its own lines in the warning.
        self.system_raw(cmd)

    def ask_exit(self) -> None:
        """Handle `exit()` in a cell."""
        raise UsageError("stop ranks from the notebook: %mesh down, or %mesh restart for fresh ones")

    _magics = 0  # the current nesting depth

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> object:
        """Run a magic. An error that it would only print (`%run`, `%time`) makes the cell fail."""
        self._magics += 1
        try:
            return super().run_line_magic(magic_name, line, _stack_depth + 1)
        finally:
            self._magics -= 1

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> object:
        """See `run_line_magic`. Rejects `%%mesh`, which would call itself."""
        if magic_name == "mesh":
            raise UsageError("%%mesh can only stand in the first line of a cell")
        self._magics += 1
        try:
            return super().run_cell_magic(magic_name, line, cell)
        finally:
            self._magics -= 1

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: object) -> None:
        """Raise the error that a magic has caught, instead of only showing it: other ranks may wait for this one."""
        value = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if self._magics and value is not None:
            raise value
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: object, evalue: object, stb: list[str]) -> None:
        print("\n".join(stb), file=sys.stderr)


def make_shell() -> RankShell:
    """Create the shell of this process, over the namespace of its cells."""
    displayhook, excepthook = sys.displayhook, sys.excepthook
    shell = RankShell.instance(config=_CONFIG, user_module=sys.modules["__main__"], user_ns=main_names())
    sys.displayhook, sys.excepthook = displayhook, excepthook
    shell.builtin_trap.activate()
    return shell


def _print_page(text: object, *_args: object, **_kwargs: object) -> None:
    print(text.get("text/plain", "") if isinstance(text, dict) else text)
