"""Puts `%mesh` into an IPython shell, and takes it out again: our kernel, a plain ipykernel, or a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from monarch_kernel.debugger.places import label_files
from monarch_kernel.kernel import callerrors, formatters
from monarch_kernel.kernel.completion import MeshCompleter
from monarch_kernel.kernel.interrupts import get_relay
from monarch_kernel.kernel.magics import SUBCOMMANDS, MeshMagics
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.session import session
from monarch_kernel.output import subscribe

_ATTRIBUTE = "_monarch_kernel_extension"


class _Extension:
    """What `load` has put in place."""

    def __init__(self, ip: Any) -> None:
        self._ip = ip
        self.notebook = Notebook(ip, session())
        self.magics = MeshMagics(self.notebook)
        self._unsubscribe: Callable[[], None] = subscribe(self.notebook.router.on_event)
        ip.register_magics(self.magics)
        callerrors.install(ip)
        formatters.install(ip)
        label_files(self.notebook.file_label)
        self._events = (("pre_run_cell", self.notebook.before_cell), ("post_run_cell", self.notebook.after_cell))
        for name, callback in self._events:
            ip.events.register(name, callback)
        self.notebook.stops.install()
        ip.input_transformers_cleanup.append(_keep_options)
        self._matcher = _matcher(self.magics, self.notebook)
        ip.Completer.custom_matchers.append(self._matcher)
        relay = get_relay()
        if relay.notify is None:
            relay.notify = _notify

    def remove(self) -> None:
        """Undo all of it. The meshes stay."""
        self._unsubscribe()
        callerrors.remove()
        formatters.remove(self._ip)
        self.notebook.close()
        label_files(None)
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


def unload(ip: Any) -> None:
    """Take out what `load` put in."""
    extension: _Extension | None = getattr(ip, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        delattr(ip, _ATTRIBUTE)


def _keep_options(lines: list[str]) -> list[str]:
    """An input transformer: IPython refuses a cell magic without a body before that has seen its options."""
    alone = len(lines) == 1 and lines[0].startswith("%%mesh") and lines[0].split()[0] == "%%mesh"
    return [*(line.rstrip("\n") + "\n" for line in lines), "\n"] if alone else lines


def _matcher(magics: MeshMagics, notebook: Notebook) -> Any:
    parsers = {word: getattr(magics, word).parser for word in SUBCOMMANDS}
    completer = MeshCompleter(parsers, magics.mesh_cell.parser, notebook.known)

    @context_matcher()
    def mesh_matcher(context: CompletionContext) -> Any:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        found = completer.complete(line)
        if found is None:
            return {"completions": [], "suppress": False}
        texts, word = found
        return {
            "completions": [SimpleCompletion(text, type="mesh") for text in texts],
            "matched_fragment": word,
            "suppress": True,
        }

    return mesh_matcher


def _notify(_cell: object, text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)
