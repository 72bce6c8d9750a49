"""`%mesh up --on`: asks an engine for hosts, waits for them in the cell or beside it, and starts the mesh there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel.job import EngineJob
from monarch_kernel.kernel import mesh_lifecycle
from monarch_kernel.kernel.cell_line import shown_line
from monarch_kernel.kernel.engine_hosts import EngineHosts
from monarch_kernel.kernel.managed_mesh import UpOptions
from monarch_kernel.kernel.mesh_lifecycle import Sync
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.asking import AskedHosts
from monarch_kernel.launchers.base import LaunchError

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook

_COMMAND = "%mesh up"


@dataclass(frozen=True)
class AskedJob:
    """A job that somebody names, instead of asking for hosts.

    Attributes:
        job: from the list of jobs.
        procs: a job does not say how many ranks its hosts are for.
    """

    job: EngineJob
    procs: None = None

    @property
    def gpus(self) -> int:
        """How many devices each of its hosts was asked to have."""
        return self.job.resources.gpus


def up_on_engine(
    notebook: Notebook,
    options: UpOptions,
    asked: AskedHosts | AskedJob,
    sync: Sync,
    say: Callable[[str], object],
    *,
    wait: bool,
    shared: bool,
) -> None:
    """Start a mesh on hosts of an engine.

    Args:
        notebook: the notebook.
        options: of the mesh.
        asked: the hosts.
        sync: is called before its ranks start, if the options say so.
        say: is called with lines for the user.
        wait: whether this returns when the mesh is there; otherwise a line in this cell tells of it.
        shared: whether ranks see all devices of their host.

    Raises:
        UsageError: the engine refuses, a host does not start, or there are more ranks than devices. Nothing is left.
    """
    place = _place(asked, shared, say)
    session = notebook.session
    session.engine_hosts[options.name] = place
    try:
        with _errors(), shown_line(notebook, f"{place.engine}: asking for hosts", say is print) as tell:
            place.ask()
            if wait:
                place.wait(tell)
        if wait:
            say(mesh_lifecycle.up(session, options, sync, place))
            return
    except BaseException:
        session.engine_hosts.pop(options.name, None)
        if not place.ended:
            place.end()
        raise
    line = _LaterLine(notebook, say)
    say(f"mesh {options.name}: job {place.job.job_id} of {place.engine} is asked for; %mesh ls and %mesh jobs show it")
    thread = threading.Thread(
        target=_later, args=(notebook, options, place, sync, line), name="monarch-up", daemon=True
    )
    thread.start()


class _LaterLine:
    """A line below the cell that did not wait."""

    def __init__(self, notebook: Notebook, say: Callable[[str], object]) -> None:
        self._router = notebook.router
        self._output = notebook.progress_output() if say is print else None

    def tell(self, text: str) -> None:
        """Replace the line."""
        if self._output is not None and self._output.live and self._output.notice(text):
            self._router.touch(self._output)

    def end(self, text: str) -> None:
        """The last thing to tell."""
        if self._output is None:
            return
        if self._output.live:
            self.tell(text)
        else:
            self._output.show_text("stderr", f"{text}\n")


def _later(notebook: Notebook, options: UpOptions, place: EngineHosts, sync: Sync, line: _LaterLine) -> None:
    try:
        place.wait(line.tell)
        text = mesh_lifecycle.up(notebook.session, options, sync, place)
    except Exception as error:  # nobody waits for it, so it is told in the cell
        if notebook.session.engine_hosts.get(options.name) is place:
            del notebook.session.engine_hosts[options.name]
            text = f"mesh {options.name}: {error}"
        else:  # by %mesh down
            text = f"mesh {options.name}: cancelled"
        if not place.ended:
            place.end()
    line.end(text)


def _place(asked: AskedHosts | AskedJob, shared: bool, say: Callable[[str], object]) -> EngineHosts:
    if isinstance(asked, AskedJob):
        return EngineHosts(asked.job, asked.job.engine, gpus=asked.gpus > 0, shared=shared)
    if asked.profile is not None:
        say(f"profile {asked.profile.name} of {asked.profile.file}: {asked.describe()}")
    with _errors():
        return EngineHosts(asked.job(), asked.engine, gpus=bool(asked.gpus), shared=shared, has_variables=True)


@contextmanager
def _errors() -> Generator[None]:
    """Turn what an engine says into an error of the line."""
    try:
        yield
    except (LaunchError, OSError) as error:
        raise usage_error(_COMMAND, str(error)) from None
