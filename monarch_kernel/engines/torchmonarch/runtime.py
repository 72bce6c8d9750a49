"""The engine of a controller whose meshes belong to Monarch."""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

try:
    import monarch.actor as monarch_actor  # pyright: ignore[reportMissingImports]  # torchmonarch is not among our dependencies
except ImportError as error:
    raise ImportError(
        f"the engine torchmonarch needs torchmonarch ({error}): pip install torchmonarch==0.7.0, in an environment "
        "that has monarch_kernel"
    ) from None

from typing import TYPE_CHECKING

from monarch_kernel.actor import Extent, HostMesh, ProcMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.controller import Carrier, ToolController
from monarch_kernel.engines.hosted.meshes import HostedHostMesh
from monarch_kernel.engines.interface import NotOffered, ToolRuntime
from monarch_kernel.engines.torchmonarch.ranks import NAME, ToolListener
from monarch_kernel.meshes import KeptError, KeptInfo
from monarch_kernel.private_files import read_own_file

if TYPE_CHECKING:
    from collections.abc import Callable

#: Matches reports of failures of actors that are not Monarch's own.
_OF_PROGRAM = re.compile(r"<(?!monarch\._src|root>)[\w.]+ ")
#: In Monarch's reports of failures: an actor of a mesh, with its coordinates.
_FAILED = re.compile(r"\{(?P<point>'[^}]*\d+/\d+[^}]*)\}")
#: A URL of a host or a controller of Monarch.
_ADDRESS = re.compile(r"[a-z][a-z0-9-]*://")
_CAUSE = re.compile(r"failed:\s*(?P<cause>.*)", re.DOTALL)


class ListenerCarrier:
    """The connection to the ranks of one Monarch mesh, through the `ToolListener` in each.

    Args:
        procs: Monarch's proc mesh.
        doors: the listeners on it.
        size: the number of ranks.
        name: the unique name that the listeners were spawned under; Monarch's reports of failures begin with it.
    """

    def __init__(self, procs: Any, doors: Any, size: int, name: str) -> None:
        self.procs = procs
        self.name = name
        self._doors = doors
        self._flat = doors.flatten("ranks")
        self._size = size
        self._parts: dict[tuple[int, int], object] = {}
        self._lock = threading.Lock()  # keeps messages to a rank in order

    def send(self, ranks: Sequence[int], data: bytes) -> None:
        """See ``controller.Carrier``."""
        with self._lock:
            if len(ranks) == self._size:
                self._doors.deliver.broadcast(data)
                return
            start = end = -1
            for rank in [*ranks, -1]:
                if rank == end:
                    end += 1
                    continue
                if start >= 0:
                    self._part(start, end).deliver.broadcast(data)
                start, end = rank, rank + 1

    def _part(self, start: int, end: int) -> Any:
        part = self._parts.get((start, end))
        if part is None:
            part = self._parts[start, end] = self._flat.slice(ranks=slice(start, end))
        return part

    def stop(self, reason: str, patience: float) -> None:
        """See ``controller.Carrier``."""
        with suppress(Exception):
            _apart(lambda: self.procs.stop(reason).get(patience))


class Attached:
    """The result of ``%mesh attach``, with the part of ``KeptHost`` that the magics use.

    Args:
        procs: the mesh.
    """

    def __init__(self, procs: ProcMesh) -> None:
        self.name = procs.name
        self.proc_meshes = [procs]
        self.missed: dict[str, int] = {}


class MonarchRuntime(ToolController, ToolRuntime):
    """Tools on meshes of Monarch's Rust runtime."""

    NAME = NAME
    OFFERS = frozenset()

    def __init__(self) -> None:
        ToolRuntime.__init__(self)
        ToolController.__init__(self, NAME)
        self._port: object = None
        self._known: dict[int, tuple[object, ProcMesh | None]] = {}  # the notebook's meshes, by identity
        atexit.register(self.close)

    # -- messages ------------------------------------------------------------------------------------

    def _reply_port(self) -> object:
        """Return the port to which ranks send; a thread reads it."""
        if self._port is None:
            monarch_actor.unhandled_fault_hook = self._on_fault
            self._port, receiver = _apart(monarch_actor.Channel.open)
            threading.Thread(target=self._read, args=(receiver,), name="monarch-tool-reader", daemon=True).start()
        return self._port

    def _read(self, receiver: Any) -> None:
        while True:
            try:
                uid, rank, data = receiver.recv().get()
            except BaseException:  # Monarch has ended
                return
            self.receive(uid, rank, data)

    def _on_fault(self, failure: Any) -> None:
        """Record which ranks died. An unhandled fault never ends a notebook; it is reported there."""
        report = str(failure.report())
        for mesh in list(self._meshes.values()):
            if isinstance(mesh.carrier, ListenerCarrier) and str(failure.mesh_name).startswith(mesh.carrier.name):
                self._note_death(mesh.procs, report)
                return
        if _OF_PROGRAM.search(report):
            print(f"Monarch reports a failure that no actor has handled:\n{report}", file=sys.stderr, flush=True)

    def _note_death(self, procs: ProcMesh, report: str) -> None:
        point, cause = _FAILED.search(report), _CAUSE.search(report)
        why = " ".join((cause["cause"] if cause else report).split())
        coords = dict(re.findall(r"'([^']+)': (\d+)/", point["point"])) if point else {}
        extent = procs.extent
        if set(coords) == set(extent.names):
            rank = extent.rank({label: int(value) for label, value in coords.items()})
            self.on_death(procs._procs[rank].id, why)

    # -- meshes --------------------------------------------------------------------------------------

    def adopt(self, procs: Any, name: str, *, owned: bool = True) -> ProcMesh:
        """Bring the tools into a mesh of Monarch.

        Args:
            procs: the mesh, a ``monarch.actor.ProcMesh``.
            name: its name for users.
            owned: whether all output of its processes goes to the notebook; otherwise only that of its cells does.
        """
        sizes = dict(procs.sizes)
        extent = Extent(tuple(sizes), tuple(sizes.values()))

        def make(first: wire.EnterRank) -> Carrier:
            port, data = self._reply_port(), wire.encode(first)
            own = f"tools{os.urandom(4).hex()}"
            return ListenerCarrier(
                procs, _apart(lambda: procs.spawn(own, ToolListener, port, data)), extent.nelements, own
            )

        return self.enter(name, extent, make, owned=owned)

    def start_procs(
        self, name: str, per_host: dict[str, int], env: dict[str, str | None], preload: tuple[str, ...]
    ) -> ProcMesh:
        """See ``ToolController.start_procs``."""
        begin = _Begin(env, preload, list(sys.path))
        procs = _apart(lambda: monarch_actor.this_host().spawn_procs(per_host=per_host, bootstrap=begin, name=name))
        mesh = self.adopt(procs, name)
        self._known[id(procs)] = procs, mesh
        return mesh

    def list_proc_meshes(self) -> list[ProcMesh]:
        """See ``ToolRuntime``. Returns meshes of ``%mesh up``, and meshes in variables of the notebook."""
        for name, value in list(vars(sys.modules["__main__"]).items()):
            if isinstance(value, monarch_actor.ProcMesh) and not name.startswith("_") and id(value) not in self._known:
                self._known[id(value)] = value, None  # before entering it, which calls this function, too
                self._known[id(value)] = value, self.adopt(value, name)
        return super().list_proc_meshes()

    def this_host(self) -> HostMesh:
        """See ``ToolRuntime``."""
        return HostedHostMesh(self)

    def joined_jobs(self) -> NoReturn:
        """Raise `NotOffered`: only kernels on this package's own engine can join jobs."""
        raise NotOffered(
            f"the engine {NAME} cannot join jobs that others have started; a kernel without MONARCH_KERNEL_ENGINE can"
        )

    def interrupt_main_thread(self) -> NoReturn:
        """Raise `NotOffered`."""
        raise NotOffered(f"the engine {NAME} cannot interrupt the main thread of the controller")

    def shut_down(self, timeout: float) -> None:
        """See ``ToolRuntime``."""
        self.end_all(timeout)
        ToolRuntime.shut_down(self, timeout)

    # -- kept meshes -----------------------------------------------------------------------------------

    def keep(self, name: str, idle: float) -> NoReturn:
        """Raise `KeptError`."""
        raise KeptError(f"the engine {NAME} keeps no meshes: they end with their controller")

    def kept(self) -> list[KeptInfo]:
        """Return nothing: Monarch keeps no meshes."""
        return []

    def end_kept(self, name: str, force: bool = False) -> NoReturn:
        """Raise `KeptError`."""
        raise KeptError(f"the engine {NAME} keeps no meshes: there is no {name!r}")

    def attach(self, name: str, force: bool = False) -> Any:
        """See ``ToolRuntime``. ``name`` is a file with the pickled ``monarch.actor.ProcMesh`` of a job.

        Raises:
            KeptError: there is no such file, it contains no such mesh, or the name is an address, which identifies no
                mesh.
        """
        if _ADDRESS.match(name):
            raise KeptError(
                f"{name} is an address, which gives other processes no access to a job's meshes: in the job, write "
                "one with pickle.dump(proc_mesh, file), and attach to that file"
            )
        try:
            data = read_own_file(os.path.expanduser(name))
            procs = _apart(lambda: pickle.loads(data))
        except Exception as error:
            raise KeptError(
                f"{name} gives no Monarch mesh ({error}); in the job, write one with pickle.dump(proc_mesh, file)"
            ) from None
        if not isinstance(procs, monarch_actor.ProcMesh):
            raise KeptError(f"{name} holds a {type(procs).__name__}, not a monarch.actor.ProcMesh")
        label = os.path.splitext(os.path.basename(name))[0]
        return Attached(self.adopt(procs, label, owned=False))


class _Begin:
    """The bootstrap of the ranks of ``%mesh up``.

    Args:
        env: environment variables to set; None unsets one.
        preload: modules to import.
        path: the controller's ``sys.path``.
    """

    def __init__(self, env: dict[str, str | None], preload: tuple[str, ...], path: list[str]) -> None:
        self._env = env
        self._preload = preload
        self._path = path

    def __call__(self) -> None:
        for name, value in self._env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.path.extend(each for each in self._path if each not in sys.path)
        for module in self._preload:
            importlib.import_module(module)


def _apart(work: Callable[..., object]) -> Any:
    """Call Monarch on a thread without an event loop: on a notebook's own thread it warns about each blocking call."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="monarch-tool-call")
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
