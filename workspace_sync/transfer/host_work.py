"""Work of an agent on its host: stage and switch trees, fetch blocks and pass them on. Called by threads."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.introspection import ToolHost, spawn_tool
from monarch_kernel.rdma import RDMABuffer, configure
from workspace_sync.environment.facts import MachineFacts, facts
from workspace_sync.environment.locked import LockFile, clear, made_from_lock
from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.model.errors import IncompatibleError, ScanError, StoreError, SyncError, TamperedError
from workspace_sync.model.manifest import FileEntry, Manifest, ManifestDelta, changes, decode_delta, patched, printable
from workspace_sync.store.early_tree import EarlyTree
from workspace_sync.store.staging import SlotReader, Staging
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder
from workspace_sync.transfer.blocks import BlockPool, Piece, block_bytes, files_in, fill, piece_order, pieces_in, refill
from workspace_sync.transfer.messages import (
    Collected,
    Failed,
    HostState,
    PartState,
    Remains,
    Staged,
    StageRequest,
    Switched,
    encode_missing,
)

if TYPE_CHECKING:
    from monarch_kernel.actor import Port

    _Task = tuple[Port[object], Callable[..., object], tuple[object, ...]]


log = logging.getLogger(__name__)

#: The time limit to fetch one block from its source (seconds). The client overtakes slow fetches long before.
FETCH_TIMEOUT = 300.0
#: Smaller missing parts of an environment are sent, not created from a lock file (bytes).
_WORTH_MAKING = 256 << 10
#: The delay after a switch before older trees are updated (seconds): ranks that follow the sync have priority.
_FOLLOW_DELAY = 0.3
#: The folder in a workspace for environments created from a lock file. It exists only while its lock is held.
_LOCKED = "locked"
#: The longest wait for a workspace that another client syncs before parts of it are removed (seconds).
_PATIENCE = 5.0


class SourceError(SyncError):
    """A block could not be fetched because of its source or the connection to it."""


class BaseGoneError(SyncError):
    """The changes are for a manifest that this host no longer has."""


class SyncOverError(SyncError):
    """The sync was aborted."""


@dataclass(slots=True)
class _HeldBlock:
    memory: memoryview
    handle: RDMABuffer


@dataclass
class _Job:
    """One sync on this host.

    Attributes:
        busy: held during changes of the staging as a whole.
        users: the number of threads that store or read pieces.
        changed: notified when ``users`` falls.
        cancelled: whether its work must end.
        closing: releases the lock of the workspace at the end of the job.
        folder: of the workspace, once it is locked.
        early: content that has arrived before the manifest.
        staging: the trees that are being created.
        slots: reads their pieces.
        order: the pieces of its deltas, in order.
        pool: memory for blocks.
        held: blocks in memory, for other hosts.
        tables: the pieces of each content block that was here.
        ends: the size of each early block, and its end, which describes its content.
    """

    busy: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    cancelled: bool = False
    closing: ExitStack = field(default_factory=ExitStack)
    folder: WorkspaceFolder | None = None
    early: EarlyTree | None = None
    staging: Staging | None = None
    slots: SlotReader | None = None
    order: dict[bytes, int] = field(default_factory=dict[bytes, int])
    pool: BlockPool = field(default_factory=BlockPool)
    held: dict[int, _HeldBlock] = field(default_factory=dict[int, _HeldBlock])
    tables: dict[int, tuple[Piece, ...]] = field(default_factory=dict[int, tuple[Piece, ...]])
    ends: dict[int, tuple[int, bytes]] = field(default_factory=dict[int, tuple[int, bytes]])

    def opened(self) -> Staging:
        """Return the staging, which a stage request has opened."""
        if self.staging is None:
            raise SyncOverError("nothing is staged for this sync")
        return self.staging

    def lock(self, folder: WorkspaceFolder, owner: str, wait: float) -> None:
        """Lock the workspace until the end of the job, unless it is locked already."""
        if self.folder is None:
            self.closing.enter_context(folder.lock(owner, wait))
            self.folder = folder

    def reader(self) -> SlotReader:
        """Return a reader of pieces in the slots that are being created."""
        with self.changed:
            if self.slots is None:
                self.slots = SlotReader(self.opened())
            return self.slots

    def check(self) -> None:
        """Raise if the sync was aborted."""
        if self.cancelled:
            raise SyncOverError("the sync was aborted")

    @contextmanager
    def using(self) -> Generator[None]:
        """Keep the staging open for the duration of the context."""
        with self.changed:
            self.check()
            self.users += 1
        try:
            yield
        finally:
            with self.changed:
                self.users -= 1
                self.changed.notify_all()


class HostWork:
    """The work of one host for one client.

    Args:
        host: the name of the host.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._store_of_user: Store | None = None
        self._jobs: dict[str, _Job] = {}
        self._followers: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._guard = threading.Lock()

    @property
    def store(self) -> Store:
        """The store, opened at first use."""
        with self._guard:
            if self._store_of_user is None:
                self._store_of_user = Store()
            return self._store_of_user

    # -- jobs -----------------------------------------------------------------------------------------

    def open_job(self, session: str) -> None:
        """Register a sync. Called in the order in which messages arrive."""
        self._jobs.setdefault(session, _Job())

    def cancel_job(self, session: str) -> None:
        """Cancel all work of a sync. Called in the order in which messages arrive."""
        job = self._jobs.get(session)
        if job is not None:
            job.cancelled = True

    def _job(self, session: str) -> _Job:
        job = self._jobs.get(session)
        if job is None:
            raise SyncOverError("this sync is over")
        job.check()
        return job

    @contextmanager
    def _changing(self, session: str) -> Generator[_Job]:
        """Hold a sync whose staging changes as a whole: one request at a time."""
        job = self._job(session)
        with job.busy:
            job.check()
            yield job

    # -- state of the host ------------------------------------------------------------------------------

    def describe(self, workspace: str, kept: bool = False) -> HostState:
        """Describe the content of a workspace on the host, without changes.

        Args:
            kept: also count the kept files of ranks.
        """
        store = self.store.identity()
        if not self.store.has(workspace):
            return HostState(self.host, f"{self.store.path}/w/{workspace}", {}, store=store)
        folder = self.store.workspace(workspace)
        state = folder.state()
        known: dict[str, dict[bytes, None]] = {}
        for generation in state.generations:
            for part, digest in generation.digests.items():
                known.setdefault(part, {})[digest] = None
        parts = {part: PartState(digest, list(known.get(part, ()))) for part, digest in state.digests.items()}
        found = HostState(
            self.host, folder.path, parts, state.repair, state.generation, state.generations, store, state.left
        )
        if kept:
            about = folder.kept()
            found.kept_files, found.kept_bytes = len(about.files), about.size
        return found

    def facts(self, bases: list[str]) -> MachineFacts:
        """Return the facts that decide whether an environment runs here."""
        return facts(bases)

    # -- blocks -----------------------------------------------------------------------------------------

    def fetch(self, session: str, number: int, size: int, source: RDMABuffer, content: bool, early: bool) -> RDMABuffer:
        """Fetch a block, store its content, and keep it for other hosts.

        Args:
            content: whether it contains pieces; otherwise it is a part of a manifest, and only kept.
            early: whether it contains files that are sent before the manifest.

        Raises:
            SourceError: it could not be read, or is damaged.
            StoreError: it could not be stored.
        """
        job = self._job(session)
        memory = job.pool.take(size)
        try:
            source.read_into(memory, timeout=FETCH_TIMEOUT).get()
        except Exception as e:
            raise SourceError(str(e)) from e
        with job.using():
            if early:
                self._store_early(job, number, memory)
            elif content:
                self._store(job, number, memory)
            handle = RDMABuffer(memory)
            job.held[number] = _HeldBlock(memory, handle)
        return handle

    def _store(self, job: _Job, number: int, memory: memoryview) -> None:
        staging = job.opened()
        try:
            pieces = pieces_in(memory)
            for digest, data in pieces:
                job.check()
                staging.put(digest, data)
        except TamperedError as e:
            raise SourceError(str(e)) from e
        job.tables[number] = tuple((digest, len(data)) for digest, data in pieces)

    def _store_early(self, job: _Job, number: int, memory: memoryview) -> None:
        if job.early is None:
            raise SyncOverError("this host takes nothing before there is a manifest")
        try:
            files, end = files_in(memory)
            for file, data in files:
                job.check()
                job.early.put(file, data)
        except TamperedError as e:
            raise SourceError(str(e)) from e
        job.ends[number] = len(memory), end

    def offer(self, session: str, number: int) -> RDMABuffer:
        """Return the handle of a block that was here; rebuild it from the slot if it is no longer in memory."""
        job = self._job(session)
        with job.using():
            held = job.held.get(number)
            if held is None:
                memory = self._built_again(job, number)
                held = job.held[number] = _HeldBlock(memory, RDMABuffer(memory))
        return held.handle

    def _built_again(self, job: _Job, number: int) -> memoryview:
        if number in job.ends and job.early is not None:
            size, end = job.ends[number]
            memory = job.pool.take(size)
            if refill(memory, end, job.early.read) is not None:
                raise StoreError("a block that came early is not complete any more")
            return memory
        pieces = job.tables[number]
        memory = job.pool.take(block_bytes(pieces))
        fill(memory, pieces, job.reader().read)
        return memory

    def drop(self, session: str, numbers: list[int]) -> None:
        """Forget blocks that no other host needs from this one now."""
        job = self._jobs.get(session)
        if job is not None:
            for number in numbers:
                if (held := job.held.pop(number, None)) is not None:
                    give = partial(job.pool.give, held.memory)
                    held.handle.drop().add_done_callback(lambda _, give=give: give())

    # -- a new generation -------------------------------------------------------------------------------

    def begin_early(self, session: str, workspace: str, owner: str, wait: float, size: int) -> bool:
        """Start accepting files before the manifest; return whether this host accepts them.

        Args:
            size: the total size of the files (bytes).

        Raises:
            WorkspaceBusyError: another client is at it.
        """
        with self._changing(session) as job:
            folder = self.store.workspace(workspace)
            self._stop_following(workspace)
            job.lock(folder, owner, wait)
            job.early = folder.begin_early(size)
            return job.early is not None

    def stage(self, session: str, request: StageRequest) -> Staged:
        """Start creating the new trees; finish them at once if nothing is missing.

        Raises:
            WorkspaceBusyError: another client is at it.
            BaseGoneError: a delta is for a manifest that this host does not have.
            StoreError: the trees cannot be created.
        """
        with self._changing(session) as job:
            folder = self.store.workspace(request.workspace)
            if not request.dry:
                self._stop_following(request.workspace)
                job.lock(folder, request.owner, request.wait)
            targets: dict[str, Manifest] = {}
            deltas: list[ManifestDelta] = []
            for change in request.parts:
                arrived = change.data or b"".join(job.held[number].memory for number in change.blocks)
                delta = decode_delta(zlib.decompress(arrived))
                base = folder.manifest(change.part, delta.base) if delta.base else None
                if delta.base and base is None:
                    raise BaseGoneError(f"the manifest {delta.base.hex()[:12]} is not here any more")
                targets[change.part] = patched(base, delta)
                deltas.append(delta)
            job.order = piece_order(deltas)
            if request.dry:
                return self._would_stage(folder, targets, job)
            with job.changed:
                job.changed.wait_for(lambda: not job.users)
                if job.early is not None:
                    job.early.close()
            staging = job.staging = folder.stage(targets, Rewriter(f"{folder.path}/current/env"), job.early)
            job.check()
            if request.inline:
                wanted = dict(staging.missing)
                for digest, data in request.inline.items():
                    if digest in wanted:
                        staging.put(digest, memoryview(data))
            self._clear_locked(request.workspace)
            made, unmade = 0, ""
            if request.lock is not None and "env" in targets:
                made, unmade = self._make_locked(request.lock, request.workspace, targets["env"], staging, job)
            answer = self._answer(staging, job.order)
            answer.made, answer.unmade = made, unmade
            return answer

    def _make_locked(
        self, lock: LockFile, workspace: str, target: Manifest, staging: Staging, job: _Job
    ) -> tuple[int, str]:
        """Create missing content of an environment from a lock file; return the bytes, and why it could not be done."""
        missing = dict(staging.missing)
        wanted = {
            digest: size for _, entry in target.files() for digest, _, size in entry.pieces() if digest in missing
        }
        if sum(wanted.values()) < _WORTH_MAKING:
            return 0, ""
        made = 0
        try:
            with (
                self.store.private_folder("w", workspace, _LOCKED) as folder,
                made_from_lock(lock, folder.path, lambda: job.cancelled) as content,
            ):
                for digest, data in content.pieces(target, wanted):
                    job.check()
                    staging.put(digest, data)
                    made += len(data)
        except (IncompatibleError, ScanError, StoreError, OSError) as e:
            job.check()
            return made, str(e)
        finally:
            self._clear_locked(workspace)
        return made, ""

    def _clear_locked(self, workspace: str) -> None:
        """Remove the folder of lock file installs, also one of a killed agent. The workspace must be locked."""
        if os.path.lexists(os.path.join(self.store.path, "w", workspace, _LOCKED)):
            with self.store.private_folder("w", workspace, _LOCKED) as folder:
                clear(folder.path)

    def _would_stage(self, folder: WorkspaceFolder, targets: dict[str, Manifest], job: _Job) -> Staged:
        """Report the missing and deleted content; the current trees and the store's objects count as present."""
        digests = folder.state().digests
        here = self.store.objects.names()
        missing: dict[bytes, int] = {}
        deleted: list[str] = []
        files = 0
        for part, target in targets.items():
            current = folder.manifest(part, digests[part]) if part in digests else None
            have = set[bytes]()
            for _, entry in current.files() if current is not None else ():
                have.update(piece for piece, _, _ in entry.pieces())
            for change in changes(current, target):
                if change.new is None:
                    deleted.append(printable(change.path))
                elif isinstance(change.new, FileEntry):
                    files += 1
                    if change.new.digest not in here:
                        missing.update((piece, size) for piece, _, size in change.new.pieces() if piece not in have)
        return Staged(False, encode_missing(list(missing.items()), job.order), files, sorted(deleted))

    def condemn(self, workspace: str, digest: bytes, why: str, owner: str, wait: float) -> None:
        """Record that ranks cannot import modules of a tree."""
        if self.store.has(workspace):
            self._stop_following(workspace)
            self.store.workspace(workspace).condemn(digest, why, owner, wait)

    def rollback(self, session: str, workspace: str, owner: str, wait: float, steps: int, tree: str) -> Staged:
        """Stage the trees of an earlier generation, which are on this host."""
        with self._changing(session) as job:
            folder = self.store.workspace(workspace)
            self._stop_following(workspace)
            job.lock(folder, owner, wait)
            staging = job.staging = folder.rollback(steps, tree=tree)
            return self._answer(staging, {})

    def verify(self, workspace: str) -> list[str]:
        """Hash everything in the current trees; return the damage, which the next sync repairs."""
        if not self.store.has(workspace):
            return []
        return [str(problem) for problem in self.store.workspace(workspace).verify()]

    def finish(self, session: str) -> Staged:
        """Finish the trees, whose pieces have all arrived."""
        with self._changing(session) as job:
            return self._answer(job.opened(), job.order)

    def _answer(self, staging: Staging, order: dict[bytes, int]) -> Staged:
        missing = staging.missing
        if not missing:
            staging.finish()
        problems = [str(problem) for problem in staging.problems]
        return Staged(
            not missing, encode_missing(missing, order), staging.files, [], staging.reused, problems, staging.notes
        )

    def commit(self, session: str, workspace: str) -> Switched:
        """Switch to the new trees. The previous slot follows on a separate thread."""
        job = self._job(session)
        began = time.monotonic()
        with job.busy:
            staging = job.opened()
            generation = staging.commit()
            job.staging = None
            self._end(session, job)
        self._follow(workspace)
        seconds = time.monotonic() - began
        return Switched(
            generation.number, generation.digests, generation.moved, generation.kept, staging.files, seconds
        )

    def abort(self, session: str) -> None:
        """Remove everything of this sync. Wait for its work, which was cancelled by ``cancel_job``."""
        job = self._jobs.get(session)
        if job is None:
            return
        with job.busy:
            with job.changed:
                job.changed.wait_for(lambda: not job.users)
            try:
                if job.staging is not None:
                    job.staging.abort()
                if job.early is not None and job.folder is not None:
                    job.folder.slots.drop_early(job.early)
            finally:
                self._end(session, job)

    def _end(self, session: str, job: _Job) -> None:
        for held in job.held.values():
            held.handle.drop()
        job.held.clear()
        if job.early is not None:
            job.early.tree.close()
            job.early = None
        job.closing.close()
        self._jobs.pop(session, None)

    def collect(self, limit: int | None, kept: bool) -> Collected:
        """Remove unneeded old content, and report the kept files of ranks.

        Args:
            kept: also remove the kept files permanently.
        """
        before = self._objects_size()
        self.store.collect(limit)
        left = self._objects_size()
        found = Collected(self.host, max(0, before - left), left)
        for name in self.store.workspaces():
            folder = self.store.workspace(name)
            if kept:
                with folder.lock("a client that removes files that were kept", _PATIENCE):
                    files, size = folder.remove_kept()
                found.removed_files += files
                found.removed_bytes += size
            about = folder.kept()
            found.kept_files += len(about.files)
            found.kept_bytes += about.size
        return found

    def forget(self, workspace: str, owner: str, kept: bool, dry: bool) -> Remains:
        """Remove a workspace unless a process uses it; return its former content.

        Args:
            owner: the client, for messages to other clients.
            kept: also remove the files of ranks that were in conflict with a tree.
            dry: only list the content.

        Raises:
            WorkspaceBusyError: another client syncs it.
            StoreError: something cannot be removed.
        """
        store = self.store.identity()
        if not self.store.has(workspace):
            return Remains(f"{self.store.path}/w/{workspace}", store)
        self._stop_following(workspace)
        folder = self.store.workspace(workspace)
        with folder.lock(owner, _PATIENCE):
            about = folder.footprint()
            if not dry and not about.users:
                folder.forget(kept=kept)
                left = folder.kept()
                about.kept_files, about.kept_size = len(left.files), left.size
        return Remains(folder.path, store, about)

    def _objects_size(self) -> int:
        return sum(about.st_size for _, about in self.store.objects.all())

    # -- after a switch -----------------------------------------------------------------------------------

    def _follow(self, workspace: str) -> None:
        self._stop_following(workspace)
        stop = threading.Event()
        name = f"sync follow {workspace}"
        thread = threading.Thread(target=self._follow_quietly, args=(workspace, stop), name=name, daemon=True)
        self._followers[workspace] = (thread, stop)
        thread.start()

    def _follow_quietly(self, workspace: str, stop: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        if stop.wait(_FOLLOW_DELAY):
            return
        try:
            self.store.workspace(workspace).follow(stop.is_set)
        except (SyncError, OSError) as e:
            log.info("the older tree of %s was not brought up to date: %s", workspace, e)

    def _stop_following(self, workspace: str) -> None:
        """Wait until the thread of the last sync has ended, because it holds the lock."""
        thread, stop = self._followers.pop(workspace, (None, None))
        if thread is not None and stop is not None:
            stop.set()
            thread.join()


# Agents of hosts: actors that store trees for one client and pass blocks on. They are started at first use.

#: The number of threads that fetch blocks and store their content.
FETCHERS = 6


class SyncAgent(Actor):
    """The agent of one client on one host, in a separate process that ends with the client.

    Each request runs in a separate thread, so that the agent answers while it stages. Failures are also answers
    (``Failed``): an exception here is a bug in this package.

    Args:
        host: the name of its host.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, host: str) -> None:
        configure(allow_tcp_fallback=True)  # without RDMA hardware, bulk data between hosts uses TCP, without a warning
        self._work = HostWork(host)
        self._queue: queue.SimpleQueue[_Task] = queue.SimpleQueue()  # blocks: by a few threads that keep folders open
        self._threads = 0

    @endpoint(explicit_response_port=True)
    def work(self, port: Port[object], name: str, *args: Any) -> None:
        """Answer a request, which is a call of a method of ``HostWork``; "ping" is only answered."""
        if name in ("fetch", "begin_early", "stage", "rollback"):
            self._work.open_job(args[0])
        elif name == "abort":
            self._work.cancel_job(args[0])
        if name == "ping":
            port.send(None)
        elif name == "drop":
            port.send(self._work.drop(*args))
        elif name in ("fetch", "offer"):
            self._pass(port, getattr(self._work, name), *args)
        else:
            self._run(port, getattr(self._work, name), *args)

    def _pass(self, port: Port[object], work: Callable[..., object], *args: object) -> None:
        self._queue.put((port, work, args))
        if self._threads < FETCHERS:
            self._threads += 1
            threading.Thread(target=_serve, args=(self._queue,), name="sync blocks", daemon=True).start()

    def _run(self, port: Port[object], work: Callable[..., object], *args: object) -> None:
        threading.Thread(target=_answer, args=(port, work, args), name=f"sync {work.__name__}", daemon=True).start()


def _serve(tasks: queue.SimpleQueue[_Task]) -> None:
    while True:
        _answer(*tasks.get())


def _answer(port: Port[object], work: Callable[..., object], args: tuple[object, ...]) -> None:
    try:
        answer = work(*args)
    except SourceError as e:
        answer = Failed(type(e).__name__, str(e), source=True)
    except (SyncError, OSError, RuntimeError, ValueError) as e:
        answer = Failed(type(e).__name__, str(e) or type(e).__name__)
    except BaseException as e:
        text = "".join(traceback.format_exception(e)[-3:])
        answer = Failed(type(e).__name__, f"a fault of workspace sync itself:\n{text}")
    try:
        port.send(answer)
    except Exception as e:  # the client has ended, and this process ends with it
        log.info("an answer had no receiver any more: %r", e)


# -- agents of this client ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentLink:
    """The agent of one host.

    Attributes:
        host: its host.
        procs: its process.
        actor: the actor that receives requests.
    """

    host: ToolHost
    procs: Any
    actor: Any

    @property
    def alive(self) -> bool:
        """Whether its process has not ended, as far as this process knows."""
        return not self.procs._stopped and not self.procs.dead()


_lock = threading.Lock()
_agents: dict[str, AgentLink] = {}


def agents_of(hosts: Sequence[ToolHost]) -> list[AgentLink]:
    """Return the agents of some hosts. Missing agents are being started, and accept requests at once."""
    with _lock:
        for key in [key for key, link in _agents.items() if not link.alive]:
            del _agents[key]
        for host in hosts:
            if host.key not in _agents:
                procs = spawn_tool(host, "workspace_sync")
                _agents[host.key] = AgentLink(host, procs, procs.spawn("workspace_sync", SyncAgent, host.name))
        return [_agents[host.key] for host in hosts]
