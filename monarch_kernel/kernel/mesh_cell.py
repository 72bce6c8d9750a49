"""Run cells in the foreground or background; the handle of a background cell."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from monarch_kernel.actor import ValueMesh
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.cell_run import CellRun
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.managed_mesh import ManagedMesh
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.publisher import Source


class MeshCell:
    """The handle of a cell that runs in the background, such as one started with `--no-wait`."""

    def __init__(self, run: CellRun, done: threading.Event) -> None:
        self._run = run
        self._done = done

    def done(self) -> bool:
        """Return whether all ranks have finished, failed or died."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> ValueMesh[Any] | None:
        """Wait for the cell. Return its value, or raise its error."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the cell is still running on mesh {self._run.managed.name} after {timeout} s")
        error = self._run.error()
        if error is not None:
            raise error
        return self._run.value()

    get = result

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell on all ranks that still run it."""
        self._run.interrupt()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._run.failures else "done"
        return f"<cell on mesh {self._run.managed.name}, {state}>"


def run_here(notebook: Notebook, run: CellRun) -> None:
    """Run a cell and wait for it in the running cell of the notebook. Interrupts reach its ranks."""
    relay = get_relay()

    def pressed() -> None:
        if not relay.connected:  # in a plain ipykernel or IPython, the interrupt reaches only this code
            relay.press(run.cell.id)

    with relay.active(run), notebook.stops.runs(run):
        run.start()
        run.wait(pressed)
        if run.interrupted:  # the ranks have answered; another interrupt would hit the display of their error
            relay.retrying = False


def run_again(notebook: Notebook, managed: ManagedMesh, ranks: Sequence[int], cell: Cell) -> None:
    """Run a cell again on these ranks, after their predecessors have run it.

    Raises:
        MeshCellError: it failed.
    """
    cell = notebook.again(cell)
    expected = [Source(managed.name, rank) for rank in ranks]
    output = notebook.router.open(cell.id, notebook.output(expected=expected))
    run = CellRun(
        managed,
        ranks,
        cell,
        output,
        notebook.router,
        notebook.file_label,
        notebook.watched.cell_ended,
        replays=True,
    )
    run_here(notebook, run)
    error = run.error()
    if error is not None:
        error.colours = notebook.colours
        raise error


def run_in_background(run: CellRun) -> MeshCell:
    """Start a cell without making the notebook wait for it."""
    get_relay().add(run, background=True)
    run.start(then_wait=False)
    return wait_in_background(run)


def wait_in_background(run: CellRun) -> MeshCell:
    """Wait for a running cell on a separate thread, so that the notebook can continue."""
    relay = get_relay()
    done = threading.Event()

    def wait() -> None:
        try:
            run.wait(lambda: None)
            error = run.error()
            if error is not None:
                run.show_error(error)
        finally:
            relay.remove(run)
            done.set()

    relay.remove(run)
    relay.add(run, background=True)
    threading.Thread(target=wait, name="monarch-cell", daemon=True).start()
    return MeshCell(run, done)
