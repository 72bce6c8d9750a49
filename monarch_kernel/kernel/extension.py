"""Puts `%mesh` into an IPython shell, and takes it out again: our kernel, a plain ipykernel, or a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.utils.tokenutil import token_at_cursor

from monarch_kernel import errors
from monarch_kernel.debugger import source_locations
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.arguments import parser_of
from monarch_kernel.kernel.magics.completion import MeshCompleter
from monarch_kernel.kernel.magics.introspection import Introspection
from monarch_kernel.kernel.magics.mesh_magics import FUNCTIONS, MeshMagics
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
        self._matcher = _matcher(self.magics, self.notebook, ranks)
        self._stop_inspecting = _inspecting(ip, ranks)
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
    alone = len(lines) == 1 and lines[0].startswith("%%mesh") and lines[0].split()[0] == "%%mesh"
    return [*(line.rstrip("\n") + "\n" for line in lines), "\n"] if alone else lines


def _matcher(magics: MeshMagics, notebook: Notebook, ranks: Introspection) -> Any:
    parsers = {word: parser_of(function) for word, function in FUNCTIONS.items()}
    completer = MeshCompleter(
        parsers, parser_of(MeshMagics.mesh_cell), lambda: replace(notebook.known(), of_ranks=ranks.variables)
    )

    @context_matcher()
    def mesh_matcher(context: CompletionContext) -> Any:
        lines = context.full_text.split("\n")
        line = lines[context.cursor_line][: context.cursor_position]
        found = completer.complete(line)
        if found is not None:
            texts, word = found
            matches = [SimpleCompletion(text, type="mesh") for text in texts]
        else:
            offset = sum(len(each) + 1 for each in lines[: context.cursor_line]) + context.cursor_position
            of_rank = ranks.complete(context.full_text, offset)
            if of_rank is None:
                return {"completions": [], "suppress": False}
            word, named = of_rank
            matches = [SimpleCompletion(text, type=kind) for text, kind in named]
        return {"completions": matches or _Nothing(), "matched_fragment": word, "suppress": True}

    return mesh_matcher


class _Nothing(tuple[Any, ...]):
    """No completions, and none of the notebook's own either: IPython drops those only for a matcher that has some."""

    def __len__(self) -> int:
        return 1


def _inspecting(ip: Any, ranks: Introspection) -> Callable[[], None]:
    """Have a kernel describe names of `%%mesh` cells as a rank knows them; gives what undoes that."""
    kernel = getattr(ip, "kernel", None)
    if kernel is None:
        return lambda: None
    inspect = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        name = token_at_cursor(code, cursor_pos)
        bundle = ranks.describe(code, cursor_pos, name, detail_level, tuple(omit_sections)) if name else None
        if bundle is None:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        if not ip.enable_html_pager:
            bundle.pop("text/html", None)
        return {"status": "ok", "data": bundle, "metadata": {}, "found": True}

    kernel.do_inspect = do_inspect

    def undo() -> None:
        del kernel.do_inspect

    return undo


def _notify(_cell: object, text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)
