"""IPython on a rank, for `get_ipython()`, `display()`, magics and figures.

Imported only when a cell uses IPython, or has a result that is more than text (see `lazy_shell`). `CellRunner`, not the
shell, runs cells. The shell stores no history and writes no files.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections import defaultdict
from contextvars import copy_context
from typing import Any

import comm
from comm.base_comm import BaseComm
from IPython.core import page, pylabtools
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from monarch_kernel.display import OUTPUT_MIME
from monarch_kernel.introspection import main_names
from monarch_kernel.kernel.rank import cell_streams
from monarch_kernel.kernel.rank.lazy_shell import GIVEN, show_bundle
from monarch_kernel.kernel.rank.sent_values import jsonable

# Comms of a rank, which connect widgets to the front end. Their messages travel like the rank's output.
#
# This module is imported after a rank has imported the package `comm`, which `ipywidgets` does.
#
# If a front end has no live widgets, an output shows the widget's text. The text is updated when the cell ends, and
# the output of a closed widget is removed.

#: The outputs in which cells show each widget: MIME bundle and metadata by cell, by the widget's model.
_shown: defaultdict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(dict)


class RankComm(BaseComm):
    """A comm whose other end is in the front end of the controller."""

    cell = ""

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        """Send a message: `comm_open`, `comm_msg` or `comm_close`."""
        self.cell = self.cell or cell_streams.current_cell()
        content = jsonable({"data": data or {}, "metadata": metadata or {}, **keys})
        encoded = [b64encode(memoryview(each).cast("B")).decode("ascii") for each in buffers or ()]
        cell_streams.emit_comm({"type": msg_type, "comm": self.comm_id, "buffers": encoded, **content})
        if msg_type == "comm_close":
            for cell in _shown.pop(self.comm_id, {}):
                _replace(cell, self.comm_id, {}, {})

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Call the widget's callback, but not IPython's hooks, which would show a cell's unfinished figures."""
        if self._msg_callback is not None:
            self._msg_callback(msg)


def use() -> None:
    """Make comms of this process `RankComm`s."""
    comm.create_comm = RankComm


def note_shown(model: str, data: dict[str, Any], metadata: dict[str, Any]) -> str | None:
    """Record that the running cell shows a MIME bundle with the view of the widget that has this model.

    Returns:
        The display id by which the output is replaced; None if no widget of this rank has that view.
    """
    if not isinstance(comm.get_comm_manager().comms.get(model), RankComm):
        return None
    data[OUTPUT_MIME] = {"model_id": model}
    _shown[model][cell_streams.current_cell()] = data, metadata
    return model


def update_texts() -> None:
    """Replace the texts of widgets in the running cell that have changed."""
    cell = cell_streams.current_cell()
    for model, outputs in list(_shown.items()):
        found = comm.get_comm_manager().comms.get(model)
        widget = getattr(getattr(found, "_msg_callback", None), "__self__", None)
        if cell not in outputs or widget is None:
            continue
        data, metadata = outputs[cell]
        try:
            text = widget._repr_mimebundle_()["text/plain"]
        except Exception:  # user code of a widget
            continue
        if text != data["text/plain"]:
            outputs[cell] = {**data, "text/plain": text}, metadata
            _replace(cell, model, *outputs[cell])


def _replace(cell: str, model: str, data: dict[str, Any], metadata: dict[str, Any]) -> None:
    def emit() -> None:
        cell_streams.set_cell(cell)
        cell_streams.emit_display(data, metadata, display_id=model, update=True)

    copy_context().run(emit)


def receive(number: str, kind: str, content: dict[str, Any], buffers: list[bytes]) -> bool:
    """Pass a message of the front end to a comm, on the calling thread; its output belongs to the comm's cell.

    Args:
        number: the id of the comm.
        kind: `comm_msg` or `comm_close`.
        content: the content of the message.
        buffers: the buffers of the message.

    Returns:
        Whether the comm exists.
    """
    manager = comm.get_comm_manager()
    found = manager.comms.get(number)
    if not isinstance(found, RankComm):
        return False
    message = {"header": {}, "parent_header": {}, "metadata": {}, "content": content, "buffers": buffers}
    cell_streams.set_cell(found.cell)
    try:
        if kind == "comm_close":
            del manager.comms[number]
            found._closed = True
            found.handle_close(message)
        else:
            found.handle_msg(message)
    finally:
        cell_streams.flush()
        cell_streams.set_cell(None)
    return True


_CONFIG = Config({"HistoryManager": {"enabled": False, "hist_file": ":memory:"}})


class RankDisplayPublisher(DisplayPublisher):
    """Sends displays to the output of the cell that displays them."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_kwargs: Any,
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

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """Create no folder: a rank leaves no files behind."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """See `init_ipython_dir`."""

        self.db = {}  # the storage of %cd and %bookmark

    def enable_gui(self, gui: Any = None) -> None:
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

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run a magic. An error that it would only print (`%run`, `%time`) makes the cell fail."""
        self._magics += 1
        try:
            return super().run_line_magic(magic_name, line, _stack_depth + 1)
        finally:
            self._magics -= 1

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """See `run_line_magic`. Rejects `%%mesh`, which would call itself."""
        if magic_name == "mesh":
            raise UsageError("%%mesh can only stand in the first line of a cell")
        self._magics += 1
        try:
            return super().run_cell_magic(magic_name, line, cell)
        finally:
            self._magics -= 1

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Raise the error that a magic has caught, instead of only showing it: other ranks may wait for this one."""
        value = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if self._magics and value is not None:
            raise value
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        print("\n".join(stb), file=sys.stderr)


def make_shell() -> RankShell:
    """Create the shell of this process, over the namespace of its cells."""
    displayhook, excepthook = sys.displayhook, sys.excepthook
    shell: Any = RankShell.instance(config=_CONFIG, user_module=sys.modules["__main__"], user_ns=main_names())
    sys.displayhook, sys.excepthook = displayhook, excepthook
    shell.builtin_trap.activate()
    return shell


def _print_page(text: Any, *_args: Any, **_kwargs: Any) -> None:
    print(text.get("text/plain", "") if isinstance(text, dict) else text)
