"""Drive one sync over all hosts: from their states to trees that are staged everywhere, and the switch.

Each host proceeds independently (``Step``); the scheduler makes decisions that concern several. Only the switch waits
for all.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.rdma import RDMABuffer
from workspace_sync.environment.locked import LockFile
from workspace_sync.model.sync_report import SyncProgress
from workspace_sync.transfer.blocks import Changes, ContentBlock, PartChange, Piece, pack
from workspace_sync.transfer.calls import Answer, Calls
from workspace_sync.transfer.messages import (
    INLINE,
    Failed,
    HostState,
    Missing,
    PartTarget,
    Staged,
    StageRequest,
    Switched,
    decode_missing,
)
from workspace_sync.transfer.scheduler import CLIENT, Action, Fetch, FetchLimits, GiveUp, Scheduler
from workspace_sync.transfer.supply import EarlyPipe, Supply

#: The size of blocks of large manifests (bytes).
_MANIFEST_BLOCK = 1 << 20
#: Blocks are sent without waiting for hosts that answer this much later than the first one (seconds).
LATE = 1.5
#: The total size of blocks that a host keeps in memory for others (bytes). Older ones are read back from its slot.
KEPT = 48 << 20
#: The interval of checks for slow hosts (seconds).
_TICK = 0.25
#: The longest wait of a host for another client, and of this one for hosts to drop staged trees (seconds).
_WAIT, _ABORT = 0.5, 10.0
#: The number of times that a host may find at the end that content is still missing.
_ROUNDS = 3


class Step(enum.Enum):
    """Progress of a host."""

    EARLY = "it gets what the scan has read so far"
    MANIFEST = "it gets the manifest"
    STAGING = "it makes what it can"
    WAITING = "it waits for the blocks to be packed"
    FETCHING = "it gets blocks"
    FINISHING = "it finishes the trees"
    STAGED = "it can switch"
    SWITCHED = "it has the new trees"
    FAILED = "it stays on the old trees"


_BUSY = (Step.MANIFEST, Step.STAGING, Step.WAITING, Step.FETCHING, Step.FINISHING)


@dataclass
class HostRun:
    """One host in one sync.

    Attributes:
        state: its state before the sync.
        changes: the change of each part.
        step: its progress.
        error: why it failed.
        kind: the class of that error.
        received: received bytes.
        staged: its last answer on staging, including content created from a lock file in any of its answers.
        switched: its answer to the commit.
        rounds: the number of times that it was found to lack content.
        kept: the sizes of blocks in its memory, by number.
        missing: the pieces that it lacks.
    """

    state: HostState
    changes: list[PartChange] = field(default_factory=list[PartChange])
    step: Step = Step.MANIFEST
    error: str = ""
    kind: str = ""
    received: int = 0
    staged: Staged = field(default_factory=lambda: Staged(False, Missing()))
    switched: Switched | None = None
    rounds: int = 0
    kept: dict[int, int] = field(default_factory=dict[int, int])
    missing: list[Piece] = field(default_factory=list[Piece])


class StagingRun:
    """Driver of the hosts of one sync. Used by one thread.

    Args:
        calls: to the agents.
        session: the id of this sync.
        workspace: the name of its folder on hosts.
        owner: this client, for messages to other clients.
        states: the states of the hosts to change.
        dry: only determine the content that would be sent.
        lock: a lock file of the environment, from which hosts install what they can.
        progress: called with the progress.
    """

    def __init__(
        self,
        calls: Calls,
        session: str,
        workspace: str,
        owner: str,
        states: Mapping[str, HostState],
        *,
        dry: bool = False,
        lock: LockFile | None = None,
        progress: Callable[[SyncProgress], None] | None = None,
    ) -> None:
        self._calls = calls
        self._session = session
        self._workspace = workspace
        self._owner = owner
        self._changes = Changes([])
        self._dry = dry
        self._lock = lock
        self._progress = progress
        self._numbers = itertools.count()
        self._blocks: dict[int, ContentBlock] = {}
        self._early: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._scheduler = Scheduler(FetchLimits(client_readers=min(8, max(3, 2 * len(states)))))
        self._supply = Supply(
            lambda digest, into: self._changes.read(digest, into), lambda number, result: calls.post(number, result)
        )
        self._for_client: dict[int, list[str]] = {}
        self._handles: dict[tuple[str, int], RDMABuffer] = {}
        self._readers: dict[tuple[str, int], int] = {}
        self._first_missing = 0.0
        self._told = 0.0
        #: The number of bytes that the client sent.
        self.sent = 0
        #: When the last block arrived (monotonic); 0: none has arrived.
        self.last_arrival = 0.0
        self.hosts = {host: HostRun(state) for host, state in states.items()}

    # -- staging ------------------------------------------------------------------------------------------

    def stage_earlier(self, steps: int, tree: str) -> None:
        """Stage an earlier generation on all hosts, from their own content."""
        args = self._session, self._workspace, self._owner, _WAIT, steps, tree
        for host, run in self.hosts.items():
            run.step = Step.STAGING
            self._calls.ask(host, "stage", "rollback", *args)
        while any(run.step is Step.STAGING for run in self.hosts.values()):
            answer = self._calls.next(_TICK, lead=True)
            if answer is not None:
                self._take(answer, time.monotonic())

    def send_early(self, pipe: EarlyPipe, size: int) -> None:
        """Send content during a scan, if all hosts accept it, so that the client sends each byte once.

        Returns when the scan is over and hosts have received its content, or when hosts have refused.

        Args:
            pipe: the source of the content.
            size: the total size of the content that the scan reads (bytes).

        Raises:
            ScanError: a file that had to be sent again has changed.
        """
        for host, run in self.hosts.items():
            run.step = Step.EARLY
            args = self._session, self._workspace, self._owner, _WAIT, size
            self._calls.ask(host, Step.EARLY, "begin_early", *args)
        asked = set(self.hosts)
        pipe.arrived = lambda: self._calls.post(Step.EARLY, None)
        ticked = time.monotonic()
        while not (pipe.over and not asked and self._scheduler.done):
            answer = self._calls.next(_TICK)
            now = time.monotonic()
            if answer is not None:
                if answer.about is not Step.EARLY or answer.lost:
                    self._take(answer, now)
                elif answer.host:
                    asked.discard(answer.host)
                    if answer.value is not True:
                        return
            there = [host for host, run in self.hosts.items() if run.step is Step.EARLY]
            asked.intersection_update(there)
            if not there:
                return
            for block in pipe.pop() if not asked else ():
                number = next(self._numbers)
                self._early.add(number)
                self._sizes[number] = block.size
                self._supply.add_early(number, block, pipe)
                for host in there:
                    self._do(self._scheduler.need(host, {number: block.size}, now))
            if now - ticked > _TICK:
                ticked = now
                self._do(self._scheduler.tick(now))
            if not asked:
                self._tell(now, size * len(there))

    def stage(self, changes: Changes) -> None:
        """Stage on all hosts. Afterwards each is staged or failed.

        Args:
            changes: the changes to sync.

        Raises:
            ScanError: a file has changed since it was scanned.
        """
        now = time.monotonic()
        self._changes = changes
        for run in self.hosts.values():
            run.changes = [changes.of(part, _bases(run.state, part.name)) for part in changes.parts]
        for change in (change for run in self.hosts.values() for change in run.changes):
            change.blocks.clear()  # they belong to an earlier run, whose hosts were busy
        for host, run in self.hosts.items():
            if run.step is Step.FAILED:
                continue
            run.step = Step.MANIFEST
            large = self._manifest_blocks(run.changes)
            if large:
                self._do(self._scheduler.need(host, large, now))
            else:
                self._ask_to_stage(host, run)
        ticked = now
        while any(run.step in _BUSY for run in self.hosts.values()):
            moving = any(run.step in (Step.MANIFEST, Step.FETCHING) for run in self.hosts.values())
            answer = self._calls.next(_TICK, lead=not moving)
            now = time.monotonic()
            if answer is not None:
                self._take(answer, now)
            self._pack(now)
            if now - ticked > _TICK:
                ticked = now
                self._do(self._scheduler.tick(now))
            self._tell(now)

    def _manifest_blocks(self, changes: Iterable[PartChange]) -> dict[int, int]:
        """Build the blocks of manifests that are too large for a message."""
        found: dict[int, int] = {}
        for change in changes:
            if len(change.data) > INLINE and not change.blocks:
                data = memoryview(change.data)
                for at in range(0, len(data), _MANIFEST_BLOCK):
                    number = next(self._numbers)
                    change.blocks.append(number)
                    self._sizes[number] = len(data[at : at + _MANIFEST_BLOCK])
                    self._supply.add_data(number, data[at : at + _MANIFEST_BLOCK])
            found.update((number, self._sizes[number]) for number in change.blocks)
        return found

    def _ask_to_stage(self, host: str, run: HostRun) -> None:
        inline: dict[bytes, bytes] = {}
        pieces = [change.new_pieces(INLINE) for change in run.changes] if not self._dry else []
        if (
            all(each is not None for each in pieces)
            and sum(size for each in pieces for _, size in each or ()) <= INLINE
        ):
            for digest, size in {piece for each in pieces for piece in each or ()}:
                inline[digest] = self._read(digest, size)
        parts = [
            PartTarget(change.part.name, change.delta.digest, b"" if change.blocks else change.data, change.blocks)
            for change in run.changes
        ]
        size = sum(map(len, inline.values())) + sum(len(part.data) for part in parts)
        self.sent += size
        run.received += size
        run.step = Step.STAGING
        lock = self._lock if any(_is_new(change, run.state) for change in run.changes) else None
        if lock is not None:
            self.sent += len(lock.data)
            run.received += len(lock.data)
        request = StageRequest(self._workspace, self._owner, parts, _WAIT, inline, self._dry, lock)
        self._calls.ask(host, "stage", "stage", self._session, request)

    def _read(self, digest: bytes, size: int) -> bytes:
        memory = bytearray(size)
        self._changes.read(digest, memoryview(memory))
        return bytes(memory)

    def _pack(self, now: float) -> None:
        """Pack missing pieces as soon as all hosts have reported them."""
        waiting = {host: run for host, run in self.hosts.items() if run.step is Step.WAITING}
        if not waiting:
            return
        early = any(run.step in (Step.MANIFEST, Step.STAGING) for run in self.hosts.values())
        if early and now - self._first_missing < LATE:
            return
        lacking: dict[str, list[Piece]] = {}
        needs: dict[str, dict[int, int]] = {}
        for host, run in waiting.items():
            run.step = Step.FETCHING
            needs[host] = {}
            lacking[host] = self._of_packed(run, needs[host]) if self._blocks else run.missing
        blocks = pack(lacking, next(self._numbers))
        self._supply.add(blocks)
        for block in blocks:
            self._blocks[block.number] = block
            self._sizes[block.number] = block.size
            for host in block.hosts:
                needs[host][block.number] = block.size
        if blocks:
            self._numbers = itertools.count(blocks[-1].number + 1)
        for run in waiting.values():
            run.missing = []
        for host, need in needs.items():
            self._do(self._scheduler.need(host, need, now))

    def _of_packed(self, run: HostRun, need: dict[int, int]) -> list[Piece]:
        """Choose existing blocks that the host lacks completely; return the pieces that it lacks in addition."""
        if run.rounds > 1:  # its pieces of these blocks were damaged, but the blocks count as received
            return run.missing
        lacks = dict(run.missing)
        for number, block in self._blocks.items():
            if all(digest in lacks for digest, _ in block.pieces):
                need[number] = block.size
                for digest, _ in block.pieces:
                    del lacks[digest]
        return list(lacks.items())

    # -- answers ------------------------------------------------------------------------------------------

    def _take(self, answer: Answer, now: float) -> None:
        if answer.about is Step.EARLY and not answer.lost:
            return  # another host has refused it
        if answer.host == "" and isinstance(answer.about, int):
            self._on_built(answer.about, answer.value, now)
            return
        run = self.hosts.get(answer.host)
        if run is None:
            return
        if answer.lost:
            self._fail(answer.host, answer.value, now)
        elif isinstance(answer.about, tuple):
            what, number, other = answer.about
            if what == "fetch":
                self._on_fetched(answer.host, run, number, other, answer.value, now)
            else:
                self._on_offered(answer.host, number, other, answer.value, now)
        elif isinstance(answer.value, Failed):
            self._fail(answer.host, answer.value, now)
        else:
            self._on_staged(run, answer.value, now)
            self._go_on(answer.host, run)

    def _on_staged(self, run: HostRun, staged: Staged, now: float) -> None:
        staged.made, staged.unmade = run.staged.made or staged.made, run.staged.unmade or staged.unmade
        run.staged = staged
        if staged.finished:
            run.step = Step.STAGED
            return
        order = {digest: size for change in run.changes for digest, size in change.order.items()}
        run.missing = decode_missing(staged.missing, order.items())
        if self._dry:
            run.step = Step.STAGED
            return
        run.rounds += 1
        if run.rounds > _ROUNDS:
            run.step = Step.FAILED
            run.error = f"it lacks {len(run.missing)} pieces again and again, for no known reason"
            return
        run.step = Step.WAITING
        self._first_missing = self._first_missing or now

    def _go_on(self, host: str, run: HostRun) -> None:
        """Take the next step of a host that has fetched all its blocks."""
        if not self._scheduler.complete(host):
            return
        if run.step is Step.MANIFEST:
            self._ask_to_stage(host, run)
        elif run.step is Step.FETCHING:
            run.step = Step.FINISHING
            self._calls.ask(host, "finish", "finish", self._session)

    def _fail(self, host: str, failed: Failed, now: float) -> None:
        run = self.hosts[host]
        if run.step is not Step.FAILED:
            run.step, run.error, run.kind = Step.FAILED, failed.text, failed.kind
            self._do(self._scheduler.lost(host, now))

    # -- blocks -------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Fetch):
                self._fetch(action)
            elif isinstance(action, GiveUp):
                self._fail(action.host, Failed("TransferError", action.reason), time.monotonic())
            elif action.source == CLIENT:
                self._supply.drop(action.block)
            else:
                self._drop(action.source, [action.block])

    def _fetch(self, fetch: Fetch) -> None:
        host, number, source = fetch.host, fetch.block, fetch.source
        if source == CLIENT:
            self._for_client.setdefault(number, []).append(host)
            self._supply.want(number)
            return
        self._readers[source, number] = self._readers.get((source, number), 0) + 1
        handle = self._handles.get((source, number))
        if handle is None:
            self._calls.ask(source, ("offer", number, host), "offer", self._session, number)
        else:
            self._ask_to_fetch(host, number, source, handle)

    def _ask_to_fetch(self, host: str, number: int, source: str, handle: RDMABuffer) -> None:
        content = number in self._blocks
        about = ("fetch", number, source)
        args = self._session, number, self._sizes[number], handle, content, number in self._early
        self._calls.ask(host, about, "fetch", *args)

    def _on_built(self, number: int, result: RDMABuffer | BaseException, now: float) -> None:
        if not isinstance(result, RDMABuffer):
            raise result
        for host in self._for_client.pop(number, ()):
            if self.hosts[host].step is not Step.FAILED:
                self._ask_to_fetch(host, number, CLIENT, result)

    def _on_offered(self, source: str, number: int, host: str, value: Any, now: float) -> None:
        if isinstance(value, Failed):
            self._read_ends(source, number)
            self._do(self._scheduler.forgot(source, number, now))
            return
        self._handles[source, number] = value
        self._keep(source, number)
        if self.hosts[host].step is not Step.FAILED:
            self._ask_to_fetch(host, number, source, value)

    def _on_fetched(self, host: str, run: HostRun, number: int, source: str, value: Any, now: float) -> None:
        if source != CLIENT:
            self._read_ends(source, number)
        if run.step is Step.FAILED:
            return
        if isinstance(value, Failed):
            if value.source:
                self._do(self._scheduler.failed(host, number, source, value.text, now))
            else:
                self._fail(host, value, now)
            return
        size = self._sizes[number]
        self.last_arrival = now
        run.received += size
        if source == CLIENT:
            self.sent += size
        self._handles[host, number] = value
        self._keep(host, number)
        self._do(self._scheduler.fetched(host, number, source, now))
        self._go_on(host, run)

    def _read_ends(self, source: str, number: int) -> None:
        left = self._readers.get((source, number), 0) - 1
        if left > 0:
            self._readers[source, number] = left
        else:
            self._readers.pop((source, number), None)

    def _keep(self, host: str, number: int) -> None:
        """Record that a host has a block in its memory, and make it drop the oldest if there are too many."""
        kept = self.hosts[host].kept
        kept[number] = self._sizes[number]
        excess = sum(kept.values()) - KEPT
        if excess > 0:
            gone: list[int] = []
            for old, size in kept.items():
                # Parts of a manifest cannot be read back.
                if excess > 0 and old != number and self._is_content(old) and (host, old) not in self._readers:
                    gone.append(old)
                    excess -= size
            self._drop(host, gone)

    def _is_content(self, number: int) -> bool:
        return number in self._blocks or number in self._early

    def _drop(self, host: str, numbers: list[int]) -> None:
        """Make a host forget blocks. It forgets parts of a manifest by itself."""
        run = self.hosts.get(host)
        numbers = [number for number in numbers if self._is_content(number)]
        if run is None or run.step is Step.FAILED or not numbers:
            return
        for number in numbers:
            run.kept.pop(number, None)
            self._handles.pop((host, number), None)
        self._calls.tell(host, "drop", self._session, numbers)

    # -- switch and end -----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Switch on all hosts that are staged, and wait for their answers.

        Once begun, the switch is sent to all of them: an interrupt is raised after their answers have arrived.
        """
        staged = [host for host, run in self.hosts.items() if run.step is Step.STAGED]
        interrupted: BaseException | None = None
        todo = list(staged)
        while todo or any(self._calls.owes(host) and self.hosts[host].step is Step.STAGED for host in staged):
            try:
                while todo:
                    host = todo.pop()
                    self._calls.ask(host, "commit", "commit", self._session, self._workspace)
                answer = self._calls.next(_TICK, lead=True)
                if answer is not None and answer.host:
                    self._on_switched(answer)
            except KeyboardInterrupt as e:
                if interrupted is not None:
                    raise
                interrupted = e
        if interrupted is not None:
            interrupted.add_note("the switch had begun: the hosts have the new tree")
            raise interrupted

    def _on_switched(self, answer: Answer) -> None:
        run = self.hosts.get(answer.host)
        if run is None or run.step is not Step.STAGED:
            return
        if answer.lost:
            run.step, run.kind = Step.FAILED, "HostLostError"
            run.error = f"it is not known whether it has switched ({answer.value.text}); the next sync finds out"
        elif answer.about == "commit":
            if isinstance(answer.value, Failed):
                run.step, run.error, run.kind = Step.FAILED, answer.value.text, answer.value.kind
            else:
                run.step, run.switched = Step.SWITCHED, answer.value

    def abort(self) -> None:
        """Make all hosts that have not switched drop their staged trees, and wait until they have."""
        self._calls.forget()
        asked = [
            host for host in self._calls.hosts if host in self.hosts and self.hosts[host].step is not Step.SWITCHED
        ]
        for host in asked:
            self._calls.ask(host, "abort", "abort", self._session)
        end = time.monotonic() + _ABORT
        while any(map(self._calls.owes, asked)) and time.monotonic() < end:
            self._calls.next(0.1, lead=True)

    def close(self) -> None:
        """Drop the client's blocks."""
        self._supply.close()

    def _tell(self, now: float, total: int = 0) -> None:
        """Report the progress.

        Args:
            total: the total bytes for all hosts, while the scan is running.
        """
        if self._progress is None or now - self._told < 0.1:
            return
        self._told = now
        through = sum(run.step is Step.STAGED for run in self.hosts.values())
        done = sum(run.received for run in self.hosts.values())
        sending = total > 0 or any(run.step is Step.FETCHING for run in self.hosts.values())
        total = total or sum(block.size * len(block.hosts) for block in self._blocks.values())
        self._progress(SyncProgress("send" if sending else "stage", min(done, total), total, through, len(self.hosts)))


def _is_new(change: PartChange, state: HostState) -> bool:
    """Return whether a host gets an environment that it does not have."""
    part = change.part
    return part.name == "env" and (part.name not in state.parts or state.parts[part.name].digest != change.delta.digest)


def _bases(state: HostState, part: str) -> list[bytes]:
    """Return the manifests of a host, the current one first."""
    about = state.parts.get(part)
    if about is None:
        return []
    return [digest for digest in dict.fromkeys([about.digest, *about.known]) if digest]
