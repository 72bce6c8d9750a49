"""`%mesh up --on`: request hosts from a provider, wait for them in the cell or in the background, start the mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel.job import EngineJob
from monarch_kernel.kernel import mesh_lifecycle
from monarch_kernel.kernel.managed_mesh import UpOptions
from monarch_kernel.kernel.mesh_lifecycle import Sync
from monarch_kernel.kernel.progress import shown_line
from monarch_kernel.kernel.session import ProviderHosts
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.host_request import AskedHosts

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook

_COMMAND = "%mesh up"


@dataclass(frozen=True)
class AskedJob:
    """An existing job, named on the line in place of a request for hosts.

    Attributes:
        job: the entry in the list of jobs.
        procs: None: a job has no number of ranks for its hosts.
    """

    job: EngineJob
    procs: None = None

    @property
    def gpus(self) -> int:
        """Return how many devices were requested for each of its hosts."""
        return self.job.resources.gpus


def up_on_provider(
    notebook: Notebook,
    options: UpOptions,
    asked: AskedHosts | AskedJob,
    sync: Sync,
    say: Callable[[str], object],
    *,
    wait: bool,
    shared: bool,
) -> None:
    """Start a mesh on hosts of a provider.

    Args:
        notebook: the notebook.
        options: the options of the mesh.
        asked: the request for hosts.
        sync: called before its ranks start, if the options ask for a sync.
        say: called with lines for the user.
        wait: whether to wait until the mesh is up; otherwise a line in this cell reports it.
        shared: whether ranks see all devices of their host.

    Raises:
        UsageError: the provider rejects the request, a host does not start, or there are more ranks than devices. The
            hosts are released.
    """
    place = _place(asked, shared, say)
    session = notebook.session
    session.provider_hosts[options.name] = place
    try:
        with _errors(), shown_line(notebook, f"{place.engine}: asking for hosts", say is print) as tell:
            place.ask()
            if wait:
                place.wait(tell)
        if wait:
            say(mesh_lifecycle.up(session, options, sync, place))
            return
    except BaseException:
        session.provider_hosts.pop(options.name, None)
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
    """A status line below a cell that did not wait."""

    def __init__(self, notebook: Notebook, say: Callable[[str], object]) -> None:
        self._router = notebook.router
        self._output = notebook.progress_output() if say is print else None

    def tell(self, text: str) -> None:
        """Replace the line."""
        if self._output is not None and self._output.live and self._output.notice(text):
            self._router.touch(self._output)

    def end(self, text: str) -> None:
        """Show the final text."""
        if self._output is None:
            return
        if self._output.live:
            self.tell(text)
        else:
            self._output.show_text("stderr", f"{text}\n")


def _later(notebook: Notebook, options: UpOptions, place: ProviderHosts, sync: Sync, line: _LaterLine) -> None:
    try:
        place.wait(line.tell)
        text = mesh_lifecycle.up(notebook.session, options, sync, place)
    except Exception as error:  # no caller waits for the result, so the cell shows the error
        if notebook.session.provider_hosts.get(options.name) is place:
            del notebook.session.provider_hosts[options.name]
            text = f"mesh {options.name}: {error}"
        else:  # ended by %mesh down
            text = f"mesh {options.name}: cancelled"
        if not place.ended:
            place.end()
    line.end(text)


def _place(asked: AskedHosts | AskedJob, shared: bool, say: Callable[[str], object]) -> ProviderHosts:
    if isinstance(asked, AskedJob):
        return ProviderHosts(asked.job, asked.job.engine, gpus=asked.gpus > 0, shared=shared)
    if asked.profile is not None:
        say(f"profile {asked.profile.name} of {asked.profile.file}: {asked.describe()}")
    with _errors():
        return ProviderHosts(asked.job(), asked.engine, gpus=bool(asked.gpus), shared=shared, has_variables=True)


@contextmanager
def _errors() -> Generator[None]:
    """Convert errors of the provider to errors of the line."""
    try:
        yield
    except (LaunchError, OSError) as error:
        raise usage_error(_COMMAND, str(error)) from None
