"""The viewer's side: a joined job is a mesh of this controller, whose processes are not its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from monarch_kernel.actor import Extent, ProcMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.controller import Carrier, HostedMesh, ToolController
from monarch_kernel.engines.hosted.meshes import HostedProcMesh
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.jobs import JoinableJob, job_named, jobs_of
from monarch_kernel.engines.join.places import FoundRank, RankLink, RankPlace, ThisMachine
from monarch_kernel.engines.join.remote_machine import RemoteMachine

log = logging.getLogger(__name__)

#: How many machines are asked at once.
_AT_ONCE = 32
#: How often a viewer looks for ranks that its jobs have started again (seconds).
LOOK = 0.5
#: How long ranks may take to let the tools in (seconds): they load them then.
ENTER = 20.0


class LinkCarrier:
    """Reaches the ranks of a joined job (``controller.Carrier``).

    Args:
        links: by rank.
    """

    def __init__(self, links: dict[int, RankLink]) -> None:
        self.links = links

    def send(self, ranks: Sequence[int], data: bytes) -> None:
        """See ``controller.Carrier``."""
        for rank in ranks:
            link = self.links.get(rank)
            if link is not None:
                link.send(data)

    def stop(self, reason: str, patience: float) -> None:
        """The processes are the job's: only the connections end."""
        self.close()

    def close(self) -> None:
        """End the connections."""
        for link in list(self.links.values()):
            link.close()
        self.links.clear()


class JoinController(ToolController):
    """The joined jobs of this process."""

    def __init__(self) -> None:
        super().__init__("join")
        self._loop = FrameLoop("monarch-join-links", self._note)
        self._loop.start()
        self._places: list[RankPlace] = [ThisMachine(self._loop)]
        self._jobs: dict[str, JoinedJob] = {}  # by the uid of the mesh
        self._looking: threading.Thread | None = None
        self._stop_looking = threading.Event()

    def _note(self, error: BaseException) -> None:
        log.error("a message of a joined rank could not be handled", exc_info=error)

    # -- jobs ----------------------------------------------------------------------------------------

    def add_machines(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Also look for ranks on other machines, from now on until the last joined job is left.

        Args:
            commands: runs ``python -m monarch_kernel.engines.join.relay`` on each machine, by its name.

        Raises:
            JoinError: one cannot be reached; then none is added.
        """
        known = {each.name for each in self._machines}
        begun: list[RemoteMachine] = []
        try:
            for name, command in commands.items():
                if name not in known:
                    begun.append(RemoteMachine(name, command, self._loop))
            for each in begun:
                each.begin()
        except BaseException:
            for each in begun:
                each.close()
            raise
        self._places.extend(begun)

    @property
    def _machines(self) -> list[RemoteMachine]:
        return [each for each in self._places if isinstance(each, RemoteMachine)]

    def _let_go_of_machines(self) -> None:
        for each in self._machines:
            self._places.remove(each)
            each.close()

    def joinable(self) -> list[JoinableJob]:
        """The jobs of this user that can be joined, on this machine and on those that were added."""
        return jobs_of(found_at(self._places))

    def join(self, name: str, timeout: float = ENTER) -> HostedProcMesh:
        """Make a job a mesh of this controller.

        Raises:
            JoinError: there is no such job, it is joined already, or its ranks do not answer.
        """
        if any(mesh.name == name for mesh in self.list_proc_meshes()):
            raise JoinError(f"job {name!r} is joined already; %mesh leave {name} lets go of it")
        joined = JoinedJob(self, name, self._places)
        ranks = joined.connect()
        try:
            return self._enter(joined, ranks, timeout)
        except BaseException:
            joined.carrier.close()
            raise

    def _enter(self, joined: JoinedJob, ranks: dict[int, FoundRank], timeout: float) -> HostedProcMesh:
        extent = joined.extent

        def make(first: bytes) -> Carrier:
            message = wire.decode(first)
            assert isinstance(message, wire.EnterRank)
            joined.uid, joined.first = message.uid, message
            self._jobs[message.uid] = joined
            for rank in range(extent.nelements):
                if rank not in ranks:
                    self.on_death(f"{message.uid}.{rank}", "it was not found when the job was joined")
            for rank in ranks:
                joined.let_in(rank)
            return joined.carrier

        try:
            procs = self.enter(joined.name, extent, make, owned=False, timeout=timeout)
        except TimeoutError as error:
            raise JoinError(str(error)) from None
        except BaseException:
            self._jobs.pop(joined.uid, None)
            raise
        self._look_out()
        return procs

    def is_joined(self, mesh: Any) -> bool:
        """Whether a mesh of procs is that of a joined job."""
        return getattr(mesh, "_uid", None) in self._jobs

    def leave(self, procs: ProcMesh) -> None:
        """Let go of a job, which goes on."""
        self.stop_procs(self._meshes[procs._uid].procs, "left")

    def _forget(self, mesh: HostedMesh) -> None:
        joined = self._jobs.pop(mesh.procs._uid, None)
        super()._forget(mesh)
        if joined is not None:
            joined.carrier.close()
        if not self._jobs:
            self._stop_looking.set()
            self._let_go_of_machines()

    # -- ranks that come and go ------------------------------------------------------------------------

    def on_closed(self, joined: JoinedJob, rank: int) -> None:
        """A connection to a rank has ended."""
        if joined.uid in self._meshes:
            self.on_death(f"{joined.uid}.{rank}", "its process has ended, or has closed the connection")

    def _watch(self, mesh: HostedMesh, rank: int, pid: int) -> None:
        """The end of the connection tells the end of the process, on all machines."""

    def _look_out(self) -> None:
        """Look for ranks that come later, while there are joined jobs."""
        self._stop_looking.clear()
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, name="monarch-join-look", daemon=True)
            self._looking.start()

    def _look(self) -> None:
        while not self._stop_looking.wait(LOOK):
            for joined in list(self._jobs.values()):
                with suppress(JoinError, OSError):
                    for rank in joined.connect():
                        self._come_back(joined, rank)

    def _come_back(self, joined: JoinedJob, rank: int) -> None:
        """A rank runs again, in another process: the tools that its mesh has enter that, too."""
        mesh = self._meshes.get(joined.uid)
        if mesh is None:
            return
        proc = f"{joined.uid}.{rank}"
        with self.node.lock:
            self.node.deaths.pop(proc, None)
            self.node.generation += 1
        joined.let_in(rank)
        for spawned in list(mesh.spawned.values()):
            joined.carrier.send([rank], wire.encode(spawned))
        self._changes.notify()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """See ``ToolController.close``."""
        self._stop_looking.set()
        super().close()
        self._let_go_of_machines()
        self._loop.close()


class JoinedJob:
    """A job that is joined: its ranks, and the connections to them.

    Args:
        controller: takes their messages.
        name: of the job.
        places: where to look for its ranks.
    """

    def __init__(self, controller: JoinController, name: str, places: Sequence[RankPlace]) -> None:
        self._controller = controller
        self.name = name
        self._places = places
        self.carrier = LinkCarrier({})
        self.extent = Extent((), ())
        self.uid = ""
        self.first: wire.EnterRank | None = None
        self._known: dict[int, RankAnnouncement] = {}

    def connect(self) -> dict[int, FoundRank]:
        """Connect to the ranks that are not connected yet.

        Returns:
            The new ones; the first call also decides on the shape of the mesh.

        Raises:
            JoinError: there is no such job, or none of its ranks answers.
        """
        listed = found_at(self._places, self.name)
        job = job_named(self.name, listed)
        fresh = [each for each in job.ranks if each not in self._known.values()]
        ranks: dict[int, FoundRank] = {}
        for place in self._places:
            wanted = [each for each in fresh if listed[each] is place]
            for found in place.connect(wanted, self._on_frame, self._on_closed) if wanted else ():
                rank = self._place_of(found, job, len(ranks))
                if found.link is None or rank in ranks or (self.uid and rank >= self.extent.nelements):
                    if found.link is not None:
                        found.link.close()
                    continue
                ranks[rank] = found
        if not self.uid:
            if not ranks:
                raise JoinError(
                    f"job {self.name!r}: none of its {len(job.ranks)} ranks answers; they are stopped, or native code "
                    "holds their interpreter lock: %mesh look shows where they are"
                )
            self.extent = self._shape(ranks)
        for rank, found in ranks.items():
            assert found.link is not None
            self.carrier.links[rank] = found.link
            self._known[rank] = self._listed(found, fresh)
        return ranks

    @staticmethod
    def _listed(found: FoundRank, fresh: Sequence[RankAnnouncement]) -> RankAnnouncement:
        """What was announced at first, which is what a later look finds."""
        same = (found.announced.host, found.announced.pid, found.announced.since)
        return next(each for each in fresh if (each.host, each.pid, each.since) == same)

    @staticmethod
    def _place_of(found: FoundRank, job: JoinableJob, count: int) -> int:
        return found.rank if found.rank >= 0 else (0 if len(job.ranks) == 1 else count)

    @staticmethod
    def _shape(ranks: dict[int, FoundRank]) -> Extent:
        world = max([max(ranks) + 1, *(found.announced.identity.world for found in ranks.values())])
        for found in ranks.values():
            size = 1
            for each in found.dims.values():
                size *= each
            if found.dims and size == world:
                return Extent(tuple(found.dims), tuple(found.dims.values()))
        return Extent(("ranks",), (world,))

    def let_in(self, rank: int) -> None:
        """Send a rank the first message, with which it loads the tools."""
        first = self.first
        assert first is not None
        self.carrier.send([rank], wire.encode(msgspec.structs.replace(first, rank=rank)))

    def _rank_of(self, announced: RankAnnouncement) -> int | None:
        same = (announced.host, announced.pid, announced.since)
        for rank, each in self._known.items():
            if (each.host, each.pid, each.since) == same:
                return rank
        return None

    def _on_frame(self, _of: RankAnnouncement, frame: bytes) -> None:
        self._controller.receive(frame)

    def _on_closed(self, of: RankAnnouncement) -> None:
        rank = self._rank_of(of)
        if rank is not None:
            self.carrier.links.pop(rank, None)
            self._controller.on_closed(self, rank)


def found_at(places: Sequence[RankPlace], name: str = "") -> dict[RankAnnouncement, RankPlace]:
    """The ranks of jobs of this name, or of all, and where each is; all places are asked at once."""
    places = [each for each in places if not (isinstance(each, RemoteMachine) and each.ended)]
    with ThreadPoolExecutor(max(1, min(len(places), _AT_ONCE)), "monarch-join-find") as pool:
        found = list(pool.map(lambda place: place.find(name), places)) if len(places) > 1 else [places[0].find(name)]
    return {each: place for place, ranks in zip(places, found, strict=True) for each in ranks}
