"""Install and remove `%mesh` in an IPython shell: in this kernel, a plain ipykernel, or a terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from monarch_kernel import aliases, environment
from monarch_kernel.debugger.frontend import use_frontend
from monarch_kernel.display.quantities import use_label
from monarch_kernel.introspection import use_display
from monarch_kernel.kernel.call_progress import MapProgress
from monarch_kernel.kernel.cell import is_mesh_cell
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.ipython_hooks import Introspection, debugging, inspecting, matcher
from monarch_kernel.kernel.magics.mesh_magics import MeshMagics
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output import cell_errors, formatters
from monarch_kernel.kernel.output.rank_comms import RankComms
from monarch_kernel.kernel.rank import lazy_shell
from monarch_kernel.kernel.session import session
from monarch_kernel.kernel.views import CommTarget, NotebookServices
from monarch_kernel.output import subscribe
from monarch_kernel.pool import on_progress
from monarch_kernel.watch import current_trace, provide
from monarch_kernel.widgets.connection import use_services
from monarch_kernel.widgets.open_views import close_views

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_ATTRIBUTE = "_monarch_kernel_extension"


class _Extension:
    """The installed parts. Each part pushes its undo function onto a stack."""

    def __init__(self, ip: InteractiveShell) -> None:
        self.notebook = notebook = Notebook(ip, session())
        self._undo = undo = ExitStack()
        undo.callback(notebook.close)
        of_monarch = environment.ENGINE.get() == "torchmonarch" or aliases.enabled()
        if not of_monarch and aliases.enable_monarch_imports(prefer_installed=True):  # in another kernel
            undo.callback(aliases.disable_monarch_imports)
        use_frontend(notebook.frontend)
        undo.callback(use_frontend, None)
        use_label(notebook.file_label)
        undo.callback(use_label, None)

        magics = MeshMagics(notebook)
        ip.register_magics(magics)
        undo.callback(_unregister_magics, ip)
        _append(undo, ip.input_transformers_cleanup, _keep_options)
        ranks = Introspection(notebook.session, magics.addressed_by)
        _append(undo, ip.Completer.custom_matchers, matcher(notebook, ranks))
        undo.callback(inspecting(ip, ranks))
        undo.callback(debugging(ip))

        use_display(lazy_shell.__name__)
        undo.callback(use_display, "")
        undo.callback(subscribe(notebook.router.on_event))
        undo.callback(on_progress(MapProgress(notebook)))
        undo.callback(provide(notebook.watched.source))
        cell_errors.install(ip)
        undo.callback(cell_errors.remove)
        formatters.install(ip, notebook.file_label)
        undo.callback(formatters.remove, ip)

        use_services(NotebookServices(notebook))
        undo.callback(use_services, None)
        undo.callback(close_views)
        kernel = getattr(ip, "kernel", None)
        if getattr(kernel, "comm_manager", None) is not None:  # a terminal has none
            undo.callback(CommTarget(kernel).close)
            comms = RankComms(kernel, notebook.session, notebook.parent_of)
            undo.callback(comms.close)
            undo.callback(subscribe(comms.on_event))

        for name, callback in (("pre_run_cell", notebook.before_cell), ("post_run_cell", notebook.after_cell)):
            ip.events.register(name, callback)
            undo.callback(ip.events.unregister, name, callback)
        notebook.stops.install()
        notebook.walltimes.install()
        relay = get_relay()
        if relay.notify is None:
            relay.notify = _notify
            undo.callback(_stop_notifying)

    def remove(self) -> None:
        """Remove all parts. Meshes are kept."""
        self._undo.close()


def load(ip: InteractiveShell) -> None:
    """Install the magics, their completion and the routing of output. A second call does nothing."""
    if getattr(ip, _ATTRIBUTE, None) is None:
        setattr(ip, _ATTRIBUTE, _Extension(ip))


def kernel_ends(ip: InteractiveShell) -> None:
    """Shut down the extension as the kernel ends: stop background work, and write the trace that is on.

    Cells that still run on ranks are marked as abandoned.
    """
    extension: _Extension | None = getattr(ip, _ATTRIBUTE, None)
    if extension is not None:
        extension.notebook.workspaces.unwatch()
        extension.notebook.router.abandon("the kernel ended before this cell did")
    running = current_trace()
    if running is not None:
        running.stop()


def unload(ip: InteractiveShell) -> None:
    """Undo `load`."""
    extension: _Extension | None = getattr(ip, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        delattr(ip, _ATTRIBUTE)


def _keep_options(lines: list[str]) -> list[str]:
    """Append an empty body to a `%%mesh` line that has none, as an input transformer.

    IPython rejects a cell magic without a body before the magic sees its options, such as `--help`.
    """
    alone = len(lines) == 1 and lines[0].startswith("%") and is_mesh_cell(lines[0])
    return [*(line.rstrip("\n") + "\n" for line in lines), "\n"] if alone else lines


def _notify(_cell: object, text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop_notifying() -> None:
    if get_relay().notify is _notify:
        get_relay().notify = None


def _unregister_magics(ip: InteractiveShell) -> None:
    for kind in ("line", "cell"):
        ip.magics_manager.magics[kind].pop("mesh", None)


def _append(undo: ExitStack, hooks: list[object], hook: object) -> None:
    """Append a hook to one of IPython's lists. The undo tolerates that the hook was removed meanwhile."""

    def remove() -> None:
        if hook in hooks:
            hooks.remove(hook)

    hooks.append(hook)
    undo.callback(remove)
