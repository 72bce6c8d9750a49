"""Puts `%mesh` into an IPython shell, and takes it out again: our kernel, a plain ipykernel, or a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from monarch_kernel import errors
from monarch_kernel.debugger import source_locations
from monarch_kernel.kernel.cell_text import is_mesh_cell
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.introspection import Introspection
from monarch_kernel.kernel.magics.ipython_hooks import inspecting, matcher
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics
from monarch_kernel.kernel.map_progress import MapProgress
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output import call_errors, formatters
from monarch_kernel.kernel.session import session
from monarch_kernel.output import subscribe
from monarch_kernel.pool import on_progress

_ATTRIBUTE = "_monarch_kernel_extension"


class _Extension:
    """What `load` has put in place."""

    def __init__(self, ip: Any) -> None:
        self._ip = ip
        self.notebook = Notebook(ip, session())
        self.magics = MeshMagics(self.notebook)
        self._end_progress = on_progress(MapProgress(self.notebook))
        self._unsubscribe: Callable[[], None] = subscribe(self.notebook.router.on_event)
        ip.register_magics(self.magics)
        call_errors.install(ip)
        formatters.install(ip)
        for label in (source_locations.label_files, errors.label_files):
            label(self.notebook.file_label)
        self._events = (("pre_run_cell", self.notebook.before_cell), ("post_run_cell", self.notebook.after_cell))
        for name, callback in self._events:
            ip.events.register(name, callback)
        self.notebook.stops.install()
        ip.input_transformers_cleanup.append(_keep_options)
        ranks = Introspection(self.notebook.session, self.magics.addressed_by)
        self._matcher = matcher(self.notebook, ranks)
        self._stop_inspecting = inspecting(ip, ranks)
        ip.Completer.custom_matchers.append(self._matcher)
        relay = get_relay()
        if relay.notify is None:
            relay.notify = _notify

    def remove(self) -> None:
        """Undo all of it. The meshes stay."""
        self._unsubscribe()
        self._end_progress()
        call_errors.remove()
        formatters.remove(self._ip)
        self._stop_inspecting()
        self.notebook.close()
        for label in (source_locations.label_files, errors.label_files):
            label(None)
        for name, callback in self._events:
            self._ip.events.unregister(name, callback)
        if self._matcher in self._ip.Completer.custom_matchers:
            self._ip.Completer.custom_matchers.remove(self._matcher)
        if _keep_options in self._ip.input_transformers_cleanup:
            self._ip.input_transformers_cleanup.remove(_keep_options)
        for kind in ("line", "cell"):
            self._ip.magics_manager.magics[kind].pop("mesh", None)
        if get_relay().notify is _notify:
            get_relay().notify = None


def load(ip: Any) -> None:
    """Register the magics, their completion and the routing of output; a second call does nothing."""
    if getattr(ip, _ATTRIBUTE, None) is None:
        setattr(ip, _ATTRIBUTE, _Extension(ip))


def kernel_ends(ip: Any) -> None:
    """Have the cells that still run on ranks say that their kernel ended."""
    extension: _Extension | None = getattr(ip, _ATTRIBUTE, None)
    if extension is not None:
        extension.notebook.router.abandon("the kernel ended before this cell did")


def unload(ip: Any) -> None:
    """Take out what `load` put in."""
    extension: _Extension | None = getattr(ip, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        delattr(ip, _ATTRIBUTE)


def _keep_options(lines: list[str]) -> list[str]:
    """An input transformer: IPython refuses a cell magic without a body before that has seen its options."""
    alone = len(lines) == 1 and lines[0].startswith("%") and is_mesh_cell(lines[0])
    return [*(line.rstrip("\n") + "\n" for line in lines), "\n"] if alone else lines


def _notify(_cell: object, text: str) -> None:
    print(text, file=sys.stderr, flush=True)
