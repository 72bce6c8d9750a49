"""The viewer's side of joined jobs: each is a mesh of this controller, whose processes belong to another program.

This file is long because a joined job and the controller of its mesh change each other, from the threads of either:
ranks come and go, the mesh is formed again, and control passes between viewers.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import msgspec

from monarch_kernel._version import __version__
from monarch_kernel.actor import Extent, ProcMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.controller import Carrier, HostedLink, HostedMesh, ToolController
from monarch_kernel.engines.hosted.meshes import HOST, HostedProcMesh
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.gateway_machines import GatewayMachines
from monarch_kernel.engines.join.jobs import JoinableJob, job_named, jobs_of
from monarch_kernel.engines.join.rank_machines import (
    JoinableRank,
    OutsideRead,
    RankLink,
    ThisMachine,
    at_once,
)
from monarch_kernel.engines.join.remote_machine import CommandMachine, RankMachine, RemoteMachine
from monarch_kernel.introspection import StackRead
from monarch_kernel.protocol.data_pickles import NotDataError, check_data, without_foreign_exceptions
from monarch_kernel.protocol.faults import capture, decode_fault, encode_fault
from monarch_kernel.protocol.messages import DEAD, ERROR, Call, Create, Reply, decode_death, encode_death
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall
from monarch_kernel.subscriptions import Subscribers

log = logging.getLogger(__name__)

#: The interval at which a viewer checks for restarted ranks of its jobs (seconds).
LOOK = 0.5
#: The time for ranks to report which viewer has control (seconds). For the first viewer, they load the tools first.
DRIVE = 5.0
#: Releases within this time of each other are combined into one notice (seconds).
NEWS = 5.0
#: The time for ranks to let the tools in, including loading them (seconds).
ENTER = 20.0
#: How long a mesh waits for all ranks of a job that was restarted with another number of ranks (seconds).
GATHER = 5.0


class LinkCarrier:
    """The connections to the ranks of a joined job (``controller.Carrier``).

    Args:
        links: the connection of each rank.
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
        """Close the connections. The processes belong to the job and continue."""
        self.close()

    def close(self) -> None:
        """End the connections."""
        for link in list(self.links.values()):
            link.close()
        self.links.clear()


class JoinController(ToolController):
    """Manages the joined jobs of this process."""

    MESHES = "is a job that others have started, and a notebook that has joined it cannot"

    def __init__(self) -> None:
        super().__init__("join")
        self._loop = FrameLoop("monarch-join-links", self._note)
        self._loop.start()
        self._here = ThisMachine(self._loop)
        self._machines: list[RemoteMachine | GatewayMachines] = []
        self._jobs: dict[str, JoinedJob] = {}  # by the uid of the mesh
        self._rejoins = False
        self._stop_looking: threading.Event | None = None  # set while a thread looks for ranks
        #: Notified, with one line, when a job has come back in another shape and its mesh was formed again.
        self.on_reformed: Subscribers[[str, str]] = Subscribers("a callback on joined jobs")
        #: (job, sentence) for the user of this process: an event of a joined job that the user did not cause.
        self.notices: Subscribers[[str, str]] = Subscribers("a subscriber to notices of joined jobs")

    def _note(self, error: BaseException) -> None:
        log.error("a message of a joined rank could not be handled", exc_info=error)

    # -- jobs ----------------------------------------------------------------------------------------

    def add_machines(self, commands: Mapping[str, Sequence[str]], meet: str = "") -> None:
        """Also look for ranks on other machines, until the last joined job is left.

        Args:
            commands: for each machine name, the command that runs ``python -m monarch_kernel.engines.join.relay``
                there.
            meet: the URL of a meeting point, whose present and later machines are added.

        Raises:
            JoinError: a machine cannot be reached; then none is added.
        """
        for each in list(self._machines):
            if each.ended:  # connect to it again
                self._let_go_of(each)
        known = {each.name for each in self._machines}
        begun: list[RemoteMachine | GatewayMachines] = []
        try:
            for name, command in commands.items():
                if name not in known:
                    begun.append(CommandMachine(name, command, self._loop))
            if meet and meet not in known:
                begun.append(GatewayMachines(meet, self._loop))
            for each in begun:
                each.begin()
        except BaseException:
            for each in begun:
                each.close()
            raise
        self._machines.extend(begun)

    def machines(self) -> list[RankMachine]:
        """Return this machine, and those that were added."""
        found: list[RankMachine] = [self._here]
        for each in list(self._machines):
            found += each.opened() if isinstance(each, GatewayMachines) else [each]
        return found

    def _let_go_of(self, machine: RemoteMachine | GatewayMachines) -> None:
        self._machines.remove(machine)
        machine.close()

    def let_go_of_machines(self) -> None:
        """Look for ranks on this machine only, if no job is joined."""
        if not self._jobs and not self._rejoins:
            for each in list(self._machines):
                self._let_go_of(each)

    def joinable(self) -> list[JoinableJob]:
        """Return the jobs of this user that can be joined, on this machine and on those that were added."""
        return jobs_of(ranks_at(self.machines()))

    def join(
        self, name: str, timeout: float = ENTER, *, drive: bool = False, hold: float = 0.0, looks_on: bool = False
    ) -> HostedProcMesh:
        """Make a job a mesh of this controller, which gets control of it unless another viewer has control.

        If the job is already joined and its dimensions have changed, its mesh is formed again.

        Args:
            timeout: the time for its ranks to let the tools in (seconds).
            drive: take control even from another viewer. Ranks that the other viewer has stopped are handed over; its
                breakpoints are removed, and its cells are interrupted.
            hold: how long ranks that this controller has stopped stay stopped after its end (seconds). By default, they
                continue at once, or after ``SILENCE`` if the end is noticed only by silence.
            looks_on: join only to read, without a user: it never has control, and ranks that are held after an error
                remain held for another viewer.

        Raises:
            JoinError: there is no such job, it is already joined, or its ranks do not answer.
        """
        for before in list(self._jobs.values()):
            if before.name == name:
                if before.present_shape() == before.extent:
                    raise JoinError(f"job {name!r} is joined already; %mesh leave {name} lets go of it")
                return self._join_again(before)
        return self._join(name, timeout, drive, hold, looks_on=looks_on)

    def _join_again(self, before: JoinedJob) -> HostedProcMesh:
        """Form the mesh of a joined job again. The machines that were added stay."""
        self._rejoins = True
        try:
            self.leave(self._meshes[before.uid].procs)
            return self._join(before.name, ENTER, False, before.hold, looks_on=before.looks_on)
        finally:
            self._rejoins = False
            self.let_go_of_machines()

    def _join(
        self,
        name: str,
        timeout: float,
        drive: bool,
        hold: float,
        instead: JoinedJob | None = None,
        *,
        looks_on: bool = False,
    ) -> HostedProcMesh:
        joined = JoinedJob(self, name, drive, hold, looks_on)
        ranks = joined.connect()
        try:
            if instead is not None:  # only now, because the ranks of a starting job may not answer yet
                self.leave(self._meshes[instead.uid].procs)
            return self._enter(joined, ranks, timeout)
        except BaseException:
            joined.carrier.close()
            raise

    def _enter(self, joined: JoinedJob, ranks: dict[int, JoinableRank], timeout: float) -> HostedProcMesh:
        extent = joined.extent

        def make(first: wire.EnterRank) -> Carrier:
            joined.uid = first.uid
            joined.first = msgspec.structs.replace(
                first,
                hold=joined.hold,
                host=HOST,
                pid=os.getpid(),
                drive=joined.drive,
                looks_on=joined.looks_on,
            )
            self._jobs[first.uid] = joined
            for rank in range(extent.nelements):
                proc = f"{first.uid}.{rank}"
                if rank not in ranks:
                    self.system.node.pids[proc] = 0
                    self.on_death(proc, "it was not found when the job was joined")
                elif ranks[rank].silent:  # not waited for: the user may want to inspect this rank
                    announced = ranks[rank].announced
                    self.on_entered(self._meshes[first.uid], rank, announced.host, announced.pid)
            for rank in ranks:
                joined.let_in(rank)
            return joined.carrier

        try:
            procs = self.enter(joined.name, extent, make, owned=False, timeout=timeout)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                raise JoinError(str(error)) from None
            raise
        if not any(self.system.node.pids[ref.id] for ref in procs._procs):
            why = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(procs.dead().items()))
            self.leave(procs)
            raise JoinError(f"job {joined.name!r}: no rank has let the tools in: {why}")
        assert joined.first is not None
        joined.first = msgspec.structs.replace(joined.first, drive=False)  # for ranks that enter later
        self._settle(joined)
        self._look_out()
        return procs

    # -- who has control -------------------------------------------------------------------------------

    def driver_of(self, mesh: object, ask: bool = True) -> str:
        """See ``ToolRuntime``."""
        joined = self._jobs.get(getattr(mesh, "_mesh_uid", None) or "")
        if joined is None:
            return ""
        other = joined.other_driver(self.system.node.id)
        if other is None and ask and not joined.driven_by(self.system.node.id):
            self._ask_to_drive(joined, joined.answering(), force=False)
        if ask:
            self._settle(joined)
            other = joined.other_driver(self.system.node.id)
        return other or ""

    def drive(self, procs: ProcMesh) -> None:
        """Take control of a joined job, even from another viewer; see ``join``.

        Raises:
            JoinError: not all ranks have answered.
        """
        joined = self._joined(procs)
        self._ask_to_drive(joined, joined.answering(), force=True)
        if not joined.driven_by(self.system.node.id):
            raise JoinError(f"job {joined.name!r}: not all ranks answer; %mesh stacks shows where they are")

    def _joined(self, procs: ProcMesh) -> JoinedJob:
        joined = self._jobs.get(procs._mesh_uid)
        if joined is None:
            raise JoinError(f"job {procs.name!r} is not joined any more")
        return joined

    def _ask_to_drive(self, joined: JoinedJob, ranks: Sequence[int], force: bool) -> None:
        if not ranks:
            return
        with joined.changed:
            for rank in ranks:
                joined.drivers.pop(rank, None)
        joined.carrier.send(ranks, wire.pack(wire.DriveRank(force)))
        with joined.changed:
            joined.changed.wait_for(lambda: all(rank in joined.drivers for rank in ranks), DRIVE)

    def _settle(self, joined: JoinedJob) -> None:
        """Resolve a race between two viewers: the one that controls the first rank controls all ranks."""
        with joined.changed:
            mine = sorted(rank for rank, told in joined.drivers.items() if told.driver == self.system.node.id)
            others = sorted(
                rank for rank, told in joined.drivers.items() if told.driver not in ("", self.system.node.id)
            )
        if mine and others and mine[0] < others[0]:
            self._ask_to_drive(joined, others, force=True)
        if mine:
            self._start_beating()

    def handle(self, mesh: HostedMesh, rank: int, message: wire.ToolMessage, body: Body) -> None:
        """See ``ToolController.handle``. Messages of a rank are plain data and execute no code here.

        The exception are values of the program that this process has requested.
        """
        joined = self._jobs[mesh.uid]
        match message:
            case wire.RankDriver():
                self._on_driver(joined, rank, message)
            case wire.RankReleased():
                self._on_released(joined, rank, message)
            case wire.RankFault():
                joined.faults[rank] = message.count, message.text
                self.notices.notify(
                    joined.name,
                    f"a fault of the tools in rank {rank} ({message.count} so far), which its program has not felt: "
                    f"{message.text}",
                )
            case Reply():
                sink = self.system.node.calls.get(message.call)
                if isinstance(sink, OneCall | ManyCall | StreamCall) and _is_asked(sink, mesh, rank, message.rank):
                    super().handle(mesh, rank, *self._checked(sink, message, body))
            case Call():
                try:
                    self._check_call(message, body)
                    super().handle(mesh, rank, message, body)
                except Exception as error:
                    log.info("a joined rank sent a call that is refused: %s", error)
                    refusal = Reply(message.call, message.rank, ERROR)
                    joined.carrier.send([rank], wire.pack(refusal, encode_fault(capture(error))))
            case Create() if message.actor not in self._open_actors:
                log.info("a joined rank asked for an actor that ranks may not start in this process")
            case Create():
                pass  # it exists
            case _:
                super().handle(mesh, rank, message, body)

    def _checked(self, call: OneCall | ManyCall | StreamCall, reply: Reply, body: Body) -> tuple[Reply, Body]:
        """Return an answer whose body is data; an error if it was not."""
        target = call._target._mesh
        values: frozenset[str] = getattr(getattr(target, "_cls_or_pickle", None), "__values__", frozenset())
        plain = Reply(reply.call, reply.rank, reply.status)
        try:
            if reply.status == ERROR:
                return plain, encode_fault(without_foreign_exceptions(decode_fault(body)))
            if reply.status == DEAD:
                return plain, encode_death(decode_death(body))
            if call.what.rpartition(".")[2] not in values:
                check_data(bytes(body))
            return plain, body
        except Exception as error:
            log.info("a joined rank sent an answer that is refused: %s", error)
            return Reply(reply.call, reply.rank, ERROR), encode_fault(capture(error))

    def _check_call(self, message: Call, body: Body) -> None:
        """Check that a call is of an actor that ranks may call, with data.

        Raises:
            NotDataError: it is not.
        """
        if message.actor not in self._open_actors or message != Call(
            *(message.actor, message.endpoint, message.call, message.rank, message.labels, message.sizes),
            *(message.sender,),
            cell=message.cell,
        ):
            raise NotDataError("a message that ranks may not send to this process")
        actor = self.system.actors.get(message.actor)
        if actor is None or message.endpoint not in actor.spec.endpoints:
            raise NotDataError(f"{message.actor} has no endpoint {message.endpoint}")
        check_data(bytes(body))

    def _on_driver(self, joined: JoinedJob, rank: int, message: wire.RankDriver) -> None:
        me = self.system.node.id
        with joined.changed:
            before = joined.drivers.get(rank)
            joined.drivers[rank] = message
            joined.changed.notify_all()
            taken = before is not None and before.driver == me and message.driver not in ("", me)
            news = taken and message.driver != joined.taken_by
            if news:
                joined.taken_by = message.driver
            elif message.driver == me:
                joined.taken_by = ""
        if message.driver == me:
            self._start_beating()
        if news:
            self.notices.notify(
                joined.name,
                f"{driver_text(message)} has taken control; this notebook looks on from now "
                f"(%mesh join {joined.name} --drive takes it back)",
            )

    def _on_released(self, joined: JoinedJob, rank: int, message: wire.RankReleased) -> None:
        with joined.changed:
            first = time.monotonic() - joined.released > NEWS
            joined.released = time.monotonic()
        # The rank receives heartbeats again, and this viewer may have control. (It may have first seen that no viewer
        # has control, and so not send heartbeats.)
        joined.carrier.send([rank], wire.pack(wire.DriveRank(False)))
        if first:
            self.notices.notify(
                joined.name,
                f"this notebook was silent for {message.silent:.1f} s: what it had stopped has continued, and its "
                "cells there were interrupted; its breakpoints are armed again, unless another viewer has control",
            )

    def _is_waited_for(self, mesh: HostedMesh) -> bool:
        joined = self._jobs.get(mesh.uid)
        return super()._is_waited_for(mesh) or (joined is not None and joined.drives_any(self.system.node.id))

    def faults_of(self, procs: ProcMesh) -> dict[int, tuple[int, str]]:
        """Return the faults of the tools in a joined job, by rank: their number, and the last one."""
        return dict(self._joined(procs).faults)

    def is_joined(self, mesh: object) -> bool:
        """Return whether a mesh of procs is a joined job."""
        return getattr(mesh, "_mesh_uid", None) in self._jobs

    def announced(self, procs: ProcMesh) -> dict[int, RankAnnouncement]:
        """Return the processes of a joined job that are or were connected, by rank."""
        return dict(self._jobs[procs._mesh_uid].processes)

    def held_ranks(self, procs: ProcMesh) -> dict[int, str]:
        """Return the ranks of a joined job that were held after an error when they were joined, with the error."""
        return self._jobs[procs._mesh_uid].held

    def kill_procs(self, procs: HostedProcMesh, reason: str) -> NoReturn:
        """Raise `NotOffered`: this controller may not end the processes."""
        raise NotOffered(f"mesh {procs.name} {self.MESHES} end its processes")

    def stacks_from_outside(
        self, mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """See ``ToolRuntime``. Each stack is read on the machine of its rank."""
        joined, refs = self._jobs[mesh._mesh_uid], mesh._target().procs
        chosen = list(ranks)
        read = joined.read_stacks([int(refs[rank].id.rpartition(".")[2]) for rank in chosen], native, timeout)
        found: dict[int, StackRead] = {}
        for rank in chosen:
            ref = refs[rank]
            why, dump, error = read.get(int(ref.id.rpartition(".")[2]), ("", "", "it could not be read in time"))
            found[rank] = StackRead(ref.id, self.system.node.pids.get(ref.id, 0), ref.host, why, dump, error)
        return found

    def leave(self, procs: ProcMesh) -> None:
        """Leave a job, which continues."""
        self.stop_procs(self._meshes[procs._mesh_uid].procs, "left")

    def _forget(self, mesh: HostedMesh) -> None:
        joined = self._jobs.pop(mesh.uid, None)
        super()._forget(mesh)
        if joined is not None:
            joined.carrier.close()
        if not self._jobs and self._stop_looking is not None:
            self._stop_looking.set()
            self._stop_looking = None
        self.let_go_of_machines()

    def on_refusal(self, joined: JoinedJob, rank: int, why: str) -> None:
        """Handle that a rank cannot load the tools."""
        mesh = self._meshes.get(joined.uid)
        if mesh is not None:
            self.on_death(f"{joined.uid}.{rank}", f"it refuses viewers: {why}")
            self.notices.notify(joined.name, f"rank {rank} refuses viewers: {why}")
            self.enters_never(mesh, rank)

    # -- ranks that come and go ------------------------------------------------------------------------

    def on_closed(self, joined: JoinedJob, rank: int) -> None:
        """Handle that the connection to a rank has ended."""
        mesh = self._meshes.get(joined.uid)
        if mesh is not None:
            self.on_death(f"{joined.uid}.{rank}", "its process has ended, or has closed the connection")
            self.enters_never(mesh, rank)

    def _watch(self, mesh: HostedMesh, rank: int, pid: int) -> None:
        """Do nothing: the end of the connection shows the end of the process, on all machines."""

    def _look_out(self) -> None:
        """Look for new ranks while there are joined jobs."""
        if self._stop_looking is None:
            self._stop_looking = threading.Event()
            look = threading.Thread(target=self._look, args=(self._stop_looking,), name="monarch-join-look")
            look.daemon = True
            look.start()

    def _look(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK):
            for joined in list(self._jobs.values()):
                with suppress(JoinError, OSError):
                    for rank in joined.connect():
                        self.soon(partial(self._come_back, joined, rank))
                    if joined.has_another_world():
                        self._reform(joined)

    def _reform(self, joined: JoinedJob) -> None:
        """Form the mesh again, under the same name, if the job has another number of ranks."""
        if joined.uid not in self._meshes:
            return
        self._rejoins = True
        try:
            before = joined.extent.nelements
            count = len(self._join(joined.name, ENTER, False, joined.hold, joined, looks_on=joined.looks_on))
        finally:
            self._rejoins = False
        self.on_reformed.notify(
            joined.name,
            f"job {joined.name} was started again with {count} rank{'s' * (count != 1)} instead of {before}: its mesh "
            "was formed anew; breakpoints and values of cells are gone",
        )

    def _come_back(self, joined: JoinedJob, rank: int) -> None:
        """Let the tools enter the new process of a restarted rank."""
        mesh = self._meshes.get(joined.uid)
        if mesh is None:
            return
        node, proc = self.system.node, f"{joined.uid}.{rank}"
        node.deaths.pop(proc, None)
        link = node.links[proc] = HostedLink(mesh, rank)
        node.generation += 1
        joined.let_in(rank)
        for create, body in list(mesh.spawned.values()):
            link.send(wire.encode(create), body)
        self.system.changed()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """See ``ToolController.close``."""
        if self._stop_looking is not None:
            self._stop_looking.set()
        super().close()
        for each in list(self._machines):
            self._let_go_of(each)
        self._loop.close()


class JoinedJob:
    """A joined job: its ranks, and the connections to them.

    Args:
        controller: handles their messages.
        name: the name of the job.
        drive, hold, looks_on: see ``JoinController.join``.
    """

    def __init__(
        self,
        controller: JoinController,
        name: str,
        drive: bool = False,
        hold: float = 0.0,
        looks_on: bool = False,
    ) -> None:
        self._controller = controller
        self.name = name
        self.drive = drive
        self.hold = hold
        self.looks_on = looks_on
        #: The last report on the controlling viewer of each rank. The condition is notified when it changes.
        self.drivers: dict[int, wire.RankDriver] = {}
        self.changed = threading.Condition()
        self.taken_by = ""
        self.released = float("-inf")
        #: By rank: the number of faults of the tools, and the last one.
        self.faults: dict[int, tuple[int, str]] = {}
        self.carrier = LinkCarrier({})
        self.extent = Extent((), ())
        self.uid = ""
        self.first: wire.EnterRank | None = None
        #: The ranks that are held after an error, with the error, as reported when they were connected.
        self.held: dict[int, str] = {}
        self._known: dict[int, RankAnnouncement] = {}
        self._told = 0  # the number of ranks announced by its launcher when it was joined
        self._listed: JoinableJob | None = None
        self._differs_since = 0.0
        self._at: dict[int, RankMachine] = {}
        self._silent: set[tuple[object, ...]] = set()  # the processes that have not identified themselves

    def connect(self) -> dict[int, JoinableRank]:
        """Connect to the ranks that are not connected yet.

        Returns:
            The new ranks. The first call also determines the shape of the mesh.

        Raises:
            JoinError: there is no such job, or none of its ranks answers.
        """
        places = self._controller.machines()
        listed = ranks_at(places, self.name)
        job = job_named(self.name, listed)
        self._listed = job
        known = {each.process for each in list(self._known.values())}
        fresh = [each for each in job.ranks if each.process not in known]
        wanted = {place: [each for each in fresh if listed[each] is place] for place in places}
        asked = [place for place, there in wanted.items() if there]
        connected = at_once(lambda place: place.connect(wanted[place], self._on_frame, self._on_closed), asked)
        ranks: dict[int, JoinableRank] = {}
        at: dict[int, RankMachine] = {}
        for place, there in zip(asked, connected, strict=True):
            for found in sorted(there, key=lambda each: (each.rank, each.announced.since)):
                rank = self._place_of(found, job, ranks)
                if found.link is None or rank in ranks or (self.uid and rank >= self.extent.nelements):
                    if found.link is not None:
                        found.link.close()
                    continue
                ranks[rank], at[rank] = found, place
        self._check_versions(ranks)
        if not self.uid:
            if not ranks:
                raise JoinError(
                    f"job {self.name!r}: none of its {len(job.ranks)} ranks can be connected to; %mesh jobs shows "
                    "whether they are there"
                )
            self.extent = self._shape(ranks)
            self._told = job.told_world
        for rank, found in ranks.items():
            assert found.link is not None
            self.carrier.links[rank] = found.link
            if found.held:
                self.held[rank] = found.held
            self._known[rank] = found.announced
            self._at[rank] = at[rank]
            if found.silent:
                self._silent.add(found.announced.process)
        return ranks

    @property
    def processes(self) -> dict[int, RankAnnouncement]:
        """Return its processes, by rank."""
        return self._known

    def has_another_world(self) -> bool:
        """Return whether it was restarted with another number of ranks, and all of them are or should be running."""
        job = self._listed
        if job is None:
            return False
        if job.told_world == self._told and (self._told or len(job.ranks) <= self.extent.nelements):
            self._differs_since = 0.0
            return False
        now = time.monotonic()
        self._differs_since = self._differs_since or now
        return len(job.ranks) >= job.told_world or now - self._differs_since >= GATHER

    def _check_versions(self, ranks: dict[int, JoinableRank]) -> None:
        """Disconnect from ranks with an incompatible version of the package.

        Raises:
            JoinError: such a rank was found at the first attempt.
        """
        for rank, found in list(ranks.items()):
            if found.fault_count:
                self.faults[rank] = found.fault_count, found.faults[-1] if found.faults else ""
            if found.version != __version__ and not found.silent:
                for each in ranks.values() if not self.uid else [found]:
                    if each.link is not None:
                        each.link.close()
                if not self.uid:
                    raise JoinError(
                        f"job {self.name!r}: rank {rank} has monarch_kernel {found.version}, and this notebook "
                        f"{__version__}: install {found.version} here, or {__version__} there before it starts again"
                    )
                del ranks[rank]

    def answering(self) -> list[int]:
        """Return the ranks that are connected and have identified themselves."""
        known = self._known
        return [rank for rank in list(self.carrier.links) if rank in known and known[rank].process not in self._silent]

    def driven_by(self, controller: str) -> bool:
        """Return whether that viewer controls all ranks."""
        with self.changed:
            told = [self.drivers.get(rank) for rank in self.answering()]
        return all(each is not None and each.driver == controller for each in told)

    def drives_any(self, controller: str) -> bool:
        """Return whether that viewer controls any rank."""
        with self.changed:
            return any(each.driver == controller for each in self.drivers.values())

    def other_driver(self, controller: str) -> str | None:
        """Return another viewer that controls a rank, as text; None if there is none."""
        with self.changed:
            told = [each for _, each in sorted(self.drivers.items()) if each.driver not in ("", controller)]
        return driver_text(told[0]) if told else None

    def present_shape(self) -> Extent:
        """Return the shape that its mesh would have if it were joined now."""
        ranks: dict[int, JoinableRank] = {}
        for place in self._controller.machines():
            own = {each.process for each in place.find(self.name)}
            wanted = {each.process: rank for rank, each in self._known.items() if each.process in own}
            for found in place.connect([self._known[rank] for rank in wanted.values()], _no_frame, _not_closed):
                if found.link is not None:
                    found.link.close()
                ranks[wanted[found.announced.process]] = found
        return self._shape(ranks) if ranks else self.extent

    def _place_of(self, found: JoinableRank, job: JoinableJob, taken: Collection[int]) -> int:
        """Return the rank of a process. Processes without a known rank are numbered in order of appearance."""
        if found.rank >= 0:
            return found.rank
        living = self.carrier.links
        return next(at for at in range(len(job.ranks) + len(living)) if at not in taken and at not in living)

    @staticmethod
    def _shape(ranks: dict[int, JoinableRank]) -> Extent:
        """Return the dimensions on which all ranks that report any agree; otherwise one dimension."""
        world = max([max(ranks) + 1, *(found.announced.identity.world for found in ranks.values())])
        told = [found.dims for found in ranks.values() if found.dims]
        if told and all(list(each.items()) == list(told[0].items()) for each in told):
            extent = Extent(tuple(told[0]), tuple(told[0].values()))
            if extent.nelements == world:
                return extent
        return Extent(("ranks",), (world,))

    def read_stacks(self, ranks: Sequence[int], native: bool, timeout: float) -> dict[int, OutsideRead]:
        """Read the stacks of ranks without their cooperation."""
        known = {self._known[rank]: rank for rank in ranks if rank in self._known}

        def read(place: RankMachine) -> dict[RankAnnouncement, OutsideRead]:
            return place.read_stacks([each for each, rank in known.items() if self._at[rank] is place], native, timeout)

        reads = at_once(read, self._controller.machines())
        return {known[each]: found for there in reads for each, found in there.items()}

    def let_in(self, rank: int) -> None:
        """Send a rank the first message, after which it loads the tools."""
        first = self.first
        assert first is not None
        self.carrier.send([rank], wire.pack(msgspec.structs.replace(first, rank=rank)))

    def _rank_of(self, announced: RankAnnouncement) -> int | None:
        return next((rank for rank, each in list(self._known.items()) if each.process == announced.process), None)

    def _on_frame(self, of: RankAnnouncement, frame: bytes) -> None:
        if of.process in self._silent:  # a late greeting, which is no longer needed
            self._silent.discard(of.process)
            return
        rank = self._rank_of(of) or 0
        if frame.startswith(b'{"refused"'):  # a rank without tools; messages begin with a length
            why = str(json.loads(frame).get("refused", ""))
            self._controller.soon(lambda: self._controller.on_refusal(self, rank, why))
        else:
            self._controller.receive(self.uid, rank, frame)

    def _on_closed(self, of: RankAnnouncement) -> None:
        rank = self._rank_of(of)
        if rank is not None:
            self.carrier.links.pop(rank, None)
            with self.changed:
                self.drivers.pop(rank, None)
                self.changed.notify_all()
            self._controller.soon(lambda: self._controller.on_closed(self, rank))
            self._known.pop(rank, None)  # if only the connection was lost, the next search finds it again


def ranks_at(places: Sequence[RankMachine], name: str = "") -> dict[RankAnnouncement, RankMachine]:
    """Find the ranks of the jobs with this name, or of all jobs, on all machines in parallel."""
    places = [each for each in places if not each.ended]
    found = at_once(lambda place: place.find(name), places)
    return {each: place for place, ranks in zip(places, found, strict=True) for each in ranks}


def _no_frame(_of: RankAnnouncement, _frame: bytes) -> None:
    """Ignore messages of ranks that are only queried."""


def _not_closed(_of: RankAnnouncement) -> None:
    """Ignore the end of connections to ranks that are only queried."""


def _is_asked(call: OneCall | ManyCall | StreamCall, mesh: HostedMesh, rank: int, place: int) -> bool:
    """Return whether a call expects an answer of this rank of a mesh at this place."""
    procs = call._target.procs
    wanted = range(len(procs)) if not isinstance(call, OneCall) else (call._rank,)
    return place in wanted and procs[place].id == f"{mesh.uid}.{rank}"


def driver_text(told: wire.RankDriver) -> str:
    """Describe the viewer that has control."""
    since = time.strftime("%H:%M:%S", time.localtime(told.since))
    return f"the notebook with pid {told.pid} on {told.host} (since {since})"
