"""One workspace on one host: stage, switch, roll back, verify, forget. One lock guards all of it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import StoreError, SyncError, TamperedError, WorkspaceBusyError
from workspace_sync.model.manifest import Manifest, ManifestError, delta, patched, printable
from workspace_sync.model.manifest import changes as differences
from workspace_sync.store.early_tree import EARLY, EarlyTree, emptied
from workspace_sync.store.examination import HeldManifest, Problem, compared, empty, examined, glanced
from workspace_sync.store.kept import (
    Footprint,
    Inventory,
    Keeper,
    inventory,
    kept_tree,
    remove,
    resolved,
    strays,
    users_of,
    working_folders,
)
from workspace_sync.store.objects import Objects
from workspace_sync.store.records import (
    CURRENT,
    SLOT,
    Generation,
    Generations,
    ManifestRecord,
    SlotRecord,
    boot_id,
    explain,
    read_record,
    remove_record,
    write_record,
)
from workspace_sync.store.slot_change import SlotChange
from workspace_sync.store.sources import Donor, Sources
from workspace_sync.store.staging import Staging
from workspace_sync.store.tree import Descriptor, TreeFolder

if TYPE_CHECKING:
    from workspace_sync.environment.rewriter import Rewriter
    from workspace_sync.store.store import Store

# Lock of a workspace on one host: one staging at a time among all processes that use the store.

_LOCK = "lock"
_WAITING = "waiting"
#: The owner of the lock while older trees are updated. It releases the lock when another process waits for it.
_TIDYING = "this host, which tidies up after a sync"
#: The longest time that it may take to do so (seconds): its thread has a low priority.
_YIELDS = 60.0


class WorkspaceLock:
    """Two files of the workspace's folder: the owner holds ``lock``, waiting processes share ``waiting``.

    Both are kernel locks (``flock``), which are released when their process ends.

    Args:
        folder: of the workspace.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._holders = 0

    @property
    def held(self) -> bool:
        """Whether some thread of this process holds the lock through this object."""
        return self._holders > 0

    @contextmanager
    def hold(self, owner: str, wait: float) -> Generator[None]:
        """Hold the lock.

        Args:
            owner: a description of the holder, for messages to other clients.
            wait: the longest wait for it (seconds). Low-priority work is waited for until it releases the lock.

        Raises:
            WorkspaceBusyError: another client, which the message names, holds it, or the workspace was forgotten
                meanwhile.
            StoreError: the lock cannot be written.
        """
        with explain(f"{self._folder.path}/{_LOCK}"):
            fd = self._open(_LOCK)
        with Descriptor(fd):
            self._wait(fd, wait)
            if not self._is_there(fd):
                raise self._forgotten()
            with suppress(OSError):  # on a full disk, the lock is valid without the name
                os.ftruncate(fd, 0)
                os.pwrite(fd, owner.encode()[:1000], 0)
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1

    @contextmanager
    def tidy(self) -> Generator[None]:
        """Hold the lock for low-priority work, whose caller checks ``is_awaited`` often.

        Raises:
            WorkspaceBusyError: another process holds it.
        """
        with self.hold(_TIDYING, 0):
            yield

    def is_awaited(self) -> bool:
        """Return whether another process or thread waits for the lock."""
        return _is_held(lambda: self._open(_WAITING))

    def is_free(self) -> bool:
        """Return whether the lock is free."""
        return not _is_held(lambda: self._folder.open_file(_LOCK, os.O_RDONLY))

    def remove(self) -> None:
        """Remove the files of the held lock: waiting processes find that the workspace is forgotten."""
        for name in (_WAITING, _LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder.fd)

    def _wait(self, fd: int, wait: float) -> None:
        began = time.monotonic()
        waiting = -1
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    other = os.pread(fd, 1000, 0).decode("utf-8", "replace").strip() or "another client"
                patience = _YIELDS if other == _TIDYING and wait else wait
                if time.monotonic() - began >= patience:
                    raise WorkspaceBusyError(
                        f"{self._folder.path} is being synced by {other}: wait until that has ended, and sync again"
                    )
                if waiting < 0:
                    waiting = self._announce()
                time.sleep(0.01)
        finally:
            if waiting >= 0:
                os.close(waiting)

    def _announce(self) -> int:
        """Announce a waiter; -1: unknown until the query of another process has completed."""
        try:
            fd = self._open(_WAITING)
        except OSError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return -1
        return fd

    def _open(self, name: str) -> int:
        try:
            return self._folder.open_file(name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            raise self._forgotten() from None

    def _is_there(self, fd: int) -> bool:
        """Return whether the acquired lock still belongs to the workspace."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(_LOCK, dir_fd=self._folder.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _forgotten(self) -> WorkspaceBusyError:
        return WorkspaceBusyError(f"{self._folder.path} is being forgotten by another client: sync again")


def _is_held(opened: Callable[[], int]) -> bool:
    """Return whether any process has a lock on a file; False if the file cannot be opened."""
    try:
        fd = opened()
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# Slots of a workspace on one host: folders with complete trees, their records, and the manifests.

#: The part whose files several trees may share, because only installers write to an environment.
ENVIRONMENT = "env"
_STATE = ".state"
_MANIFEST = re.compile("([0-9a-f]{64})(?:-([0-9a-f]{64}))?")
#: The number of manifests that may be stored as differences to each other.
_LONGEST_CHAIN = 8
#: The number of manifests kept in memory.
_IN_MEMORY = 6
#: The number of attempts to read a manifest that another process is just storing in another form.
_TRIES = 5


class Slots:
    """The folders ``slots`` and ``manifests`` of a workspace.

    Args:
        folder: ``slots``.
        manifests: ``manifests``.
        objects: of the store.
        shares: whether hard links can share files of environments on this host.
    """

    def __init__(
        self, folder: PrivateFolder, manifests: PrivateFolder, objects: Objects, shares: Callable[[], bool]
    ) -> None:
        self._folder = folder
        self._manifests = manifests
        self._objects = objects
        self._shares = shares
        self._held: dict[bytes, HeldManifest] = {}
        self._mutex = threading.Lock()
        self.boot = boot_id()

    def close(self) -> None:
        """Close the descriptors."""
        self._folder.close()
        self._manifests.close()

    def path(self, slot: str) -> str:
        """Return the path of a slot."""
        return f"{self._folder.path}/{slot}"

    # -- manifests ----------------------------------------------------------------------------------------

    def manifest_path(self, digest: bytes) -> str:
        """Return the path of a manifest, for messages."""
        return f"{self._manifests.path}/{_manifest_name(digest, self._saved().get(digest, b''))}"

    def held(self, part: str, digest: bytes) -> HeldManifest | None:
        """Return a manifest as held by slots of a part, empty for an empty digest; None if it is missing or damaged."""
        if not digest:
            return HeldManifest(empty(), {}, self.read_only(part))
        with self._mutex:
            held = self._held.pop(digest, None)
            if held is not None:
                self._held[digest] = held  # most recently used
        if held is None:
            held = self._read(digest)
            if held is None:
                return None
            self._share(held)
            self._remember(held)
        held.read_only = self.read_only(part)
        return held

    def read_only(self, part: str) -> bool:
        """Return whether the files of a part have no write permission, so that trees can share them."""
        return part == ENVIRONMENT and self._shares()

    def _read(self, digest: bytes) -> HeldManifest | None:
        """Read a manifest; another process may just be storing it in another form."""
        for _ in range(_TRIES):
            base = self._saved().get(digest)
            if base is None:
                return None
            try:
                return self._read_noted(digest, base)
            except FileNotFoundError:
                continue
        return None

    def _read_noted(self, digest: bytes, base: bytes) -> HeldManifest | None:
        try:
            record = read_record(self._manifests, _manifest_name(digest, base), ManifestRecord)
            if base:
                before = self.glimpse(base)
                manifest = None if before is None else patched(before.manifest, record.manifest)
            else:
                manifest = Manifest(record.manifest.folders)
        except (TamperedError, ManifestError):
            return None
        if manifest is None or b"" not in manifest.folders or manifest.digest != digest:
            return None
        return HeldManifest(manifest, record.rewritten)

    def _saved(self) -> dict[bytes, bytes]:
        """Return the manifests on disk, each with its base if it is stored as a difference; empty: it is complete."""
        found: dict[bytes, bytes] = {}
        for name in self._manifests.names():
            if (match := _MANIFEST.fullmatch(name)) is not None:
                digest = bytes.fromhex(match[1])
                if found.get(digest) != b"":
                    found[digest] = bytes.fromhex(match[2] or "")
        return found

    def _remember(self, held: HeldManifest) -> None:
        with self._mutex:
            self._held[held.manifest.digest] = held
            while len(self._held) > _IN_MEMORY:
                del self._held[next(iter(self._held))]

    def _share(self, held: HeldManifest) -> None:
        """Make a manifest that was read share the folders of one in memory."""
        with self._mutex:
            other = next(reversed(self._held.values()), None)
        for path, folder in held.manifest.folders.items() if other is not None else ():
            same = other.manifest.folders.get(path) if other is not None else None
            if same is not None and same.digest == folder.digest:
                held.manifest.folders[path] = same

    def glimpse(self, digest: bytes) -> HeldManifest | None:
        """Return a manifest without keeping it in memory."""
        with self._mutex:
            held = self._held.get(digest)
        return held or self._read(digest)

    def save(self, held: HeldManifest, base: HeldManifest | None = None) -> None:
        """Store a manifest on disk.

        Args:
            base: a similar manifest on disk; then only the difference is written.
        """
        saved = self._saved()
        digest, before = held.manifest.digest, b"" if base is None else base.manifest.digest
        chain: list[bytes] = []
        at = before
        while at and at not in chain:
            chain.append(at)
            at = saved.get(at, digest)
        if at or len(chain) > _LONGEST_CHAIN or saved.get(digest) == b"":
            before = b""
        difference = delta(base.manifest if base is not None and before else None, held.manifest)
        write_record(self._manifests, _manifest_name(digest, before), ManifestRecord(difference, held.rewritten))
        if digest in saved and saved[digest] != before:
            remove_record(self._manifests, _manifest_name(digest, saved[digest]))
        with self._mutex:
            self._held.pop(digest, None)
        self._remember(held)

    def has_saved(self, digest: bytes) -> bool:
        """Return whether a manifest is on disk."""
        return digest in self._saved()

    def drop_manifests(self, needed: Iterable[bytes]) -> None:
        """Remove the manifests that neither slots nor ``needed`` refer to."""
        keep = set(needed)
        for slot in self.names():
            record = self.record(slot)
            if record is not None:
                keep |= {record.digest, record.target}
        saved = self._saved()
        todo = list(keep)
        while todo:
            base = saved.get(todo.pop(), b"")
            if base and base not in keep:
                keep.add(base)
                todo.append(base)
        for name in self._manifests.names():
            match = _MANIFEST.fullmatch(name)
            if name.endswith(".new") or (match is not None and bytes.fromhex(match[1]) not in keep):
                remove_record(self._manifests, name)
        with self._mutex:
            for digest in self._held.keys() - keep:
                del self._held[digest]

    def settle_manifests(self) -> None:
        """Store manifests in full that are stored as differences, so that chains do not grow."""
        for digest, base in self._saved().items():
            held = self.glimpse(digest) if base else None
            if held is not None:
                self.save(held)

    # -- slots ------------------------------------------------------------------------------------------------

    def names(self, part: str | None = None) -> list[str]:
        """Return the slots (of a part), newest first."""
        found = [match for name in self._folder.names() if (match := SLOT.fullmatch(name))]
        return [match[0] for match in sorted(found, key=lambda m: -int(m[2])) if part in (None, match[1])]

    def record(self, slot: str) -> SlotRecord | None:
        """Read the record of a slot; return None if its content is unknown.

        Raises:
            StoreError: a newer version has written it.
        """
        try:
            return read_record(self._folder, slot + _STATE, SlotRecord)
        except (FileNotFoundError, TamperedError):
            return None

    def note(self, slot: str, part: str, digest: bytes, *, target: bytes = b"", suspect: bool = False) -> None:
        """Record the content of a slot in this boot.

        Args:
            digest: of its manifest.
            target: of the manifest that it is being changed to.
            suspect: whether its content is damaged.
        """
        write_record(self._folder, slot + _STATE, SlotRecord(part, digest, target, self.boot, suspect))

    def problem(self, slot: str, digest: bytes) -> str:
        """Explain why a slot is not known to contain a tree; "" if it is."""
        where = self.path(slot)
        if not self.is_there(slot):
            return f"{where} is missing"
        try:
            record = read_record(self._folder, slot + _STATE, SlotRecord)
        except FileNotFoundError:
            return f"{where}{_STATE} is missing"
        except TamperedError as e:
            return str(e)
        if record.digest != digest or record.target:
            return f"{where} does not hold the tree that was switched to"
        if record.suspect:
            return f"{where} was found to be damaged"
        if record.boot != self.boot:
            return f"{where} was written before this machine started, and is verified before it is used again"
        if not self.has_saved(digest):
            return f"{self.manifest_path(digest)} is missing"
        return ""

    def open(self, slot: str) -> TreeFolder:
        """Open a slot."""
        with explain(self.path(slot)):
            return TreeFolder.open(self.path(slot), slot, self._folder.fd)

    def is_there(self, slot: str) -> bool:
        """Return whether there is a folder of this name."""
        try:
            return stat.S_ISDIR(os.stat(slot, dir_fd=self._folder.fd, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def interrupted(self, current: Iterable[bytes]) -> list[str]:
        """Return the slots that an interrupted process has left incomplete.

        Args:
            current: the digests of the current trees. Slots that were being changed to these, or being removed, are not
                included.
        """
        ours = {*current, empty().digest}
        found: list[str] = []
        for slot in self.names():
            record = self.record(slot)
            if record is not None and record.target and record.target not in ours:
                found.append(slot)
        return found

    def new(self, part: str) -> str:
        """Create a slot."""
        number = max((int(name.rpartition("-")[2]) for name in self.names(part)), default=0) + 1
        slot = f"{part}-{number}"
        self.note(slot, part, b"")
        with explain(self.path(slot)):
            os.mkdir(slot, 0o700, dir_fd=self._folder.fd)
        return slot

    def new_early(self, part: str, longest: int) -> EarlyTree:
        """Create a slot for content that arrives before its manifest.

        Args:
            longest: the maximum length of a name in the file system (bytes).
        """
        slot = self.new(part)
        self.note(slot, part, b"", target=EARLY)
        return EarlyTree(slot, self.open(slot), longest)

    def is_early(self, slot: str) -> bool:
        """Return whether the content of a slot has no manifest yet."""
        record = self.record(slot)
        return record is not None and record.target == EARLY

    def drop_early(self, early: EarlyTree) -> None:
        """Remove a slot whose manifest has not arrived."""
        with explain(self.path(early.slot)):
            if self.is_early(early.slot) and self.is_there(early.slot):
                with self.open(early.slot) as tree:
                    emptied(tree, None)
                self.remove(early.slot)

    def remove(self, slot: str) -> bool:
        """Remove an empty slot; return whether it is gone."""
        try:
            os.rmdir(slot, dir_fd=self._folder.fd)
        except OSError:
            return False
        remove_record(self._folder, slot + _STATE)
        return True

    def remove_records(self) -> None:
        """Remove the records of slots that no longer exist, and all manifests."""
        for name in self._folder.names():
            slot = name.removesuffix(".new").removesuffix(_STATE)
            if slot != name and SLOT.fullmatch(slot) and not self.is_there(slot):
                remove_record(self._folder, name)
        self.drop_manifests(())

    def users(self) -> list[str]:
        """Describe the processes that use a tree, for messages."""
        return users_of(resolved(self._folder.fd))

    def free(self, part: str, current: str, digest: bytes) -> list[str]:
        """Return the slots of a part that no process works in, except the current one; the best for a tree first."""
        busy = working_folders()
        here = resolved(self._folder.fd)

        def is_free(slot: str) -> bool:
            path = b"%b/%b" % (here, slot.encode())
            return slot != current and not any(each == path or each.startswith(path + b"/") for each in busy)

        def order(slot: str) -> tuple[bool, bool]:
            record = self.record(slot)
            return record is None or record.digest != digest, record is None or record.suspect or bool(record.target)

        return sorted(filter(is_free, self.names(part)), key=order)

    def donors(self, part: str | None, but: Iterable[str], trees: list[TreeFolder], *, steady: bool) -> list[Donor]:
        """Return slots (of a part) with trees as donors; their descriptors are added to ``trees``."""
        found: list[Donor] = []
        for slot in self.names(part):
            record = None if slot in but else self.record(slot)
            if record is None or not record.digest or record.target:
                continue
            held = self.held(record.part, record.digest)
            if held is not None:
                tree = self.open(slot)
                trees.append(tree)
                found.append(Donor(tree, held, steady=steady))
        return found

    def in_order(self, part: str, slot: str, digest: bytes) -> bool:
        """Return whether a slot contains a tree; after a reboot, verify it first."""
        record = self.record(slot)
        if record is None or record.digest != digest or record.target or record.suspect or not self.is_there(slot):
            return False
        if self.held(part, digest) is None:
            return False
        if record.boot == self.boot:
            return True
        return not self.verified(part, slot, digest)

    def verified(self, part: str, slot: str, digest: bytes) -> list[Problem]:
        """Hash everything in a slot, and record damage; return the damaged files."""
        held = self.held(part, digest)
        if held is None:
            return [Problem(self.manifest_path(digest), "the manifest is missing or damaged: sync again")]
        with explain(self.path(slot)), self.open(slot) as tree:
            problems = list(compared(tree, held))
        self.note(slot, part, digest, suspect=bool(problems))
        return problems

    def prepared(
        self,
        part: str,
        slot: str,
        tree: TreeFolder,
        current: Donor | None,
        keeper: Keeper,
        *,
        glance: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> HeldManifest:
        """Determine the exact content of a slot before it is changed, and move files of ranks out of it.

        Args:
            current: the current tree of the part, the destination of these files.
            glance: check size and time of each file.
            stopped: if true, ``InterruptedError`` is raised soon.
        """
        record = self.record(slot)
        have = None
        if record is not None and record.boot == self.boot and not record.target and not record.suspect:
            have = self.held(part, record.digest)

        def aside(path: bytes) -> None:
            keeper.keep(part, tree, path)

        examination = have is None
        with explain(tree.path):
            if record is not None and record.target == EARLY:
                emptied(tree, self._objects)
                have, examination = HeldManifest(empty(), {}, self.read_only(part)), False
            elif have is not None:
                if glance:
                    have = glanced(tree, have, aside, stopped)
            else:
                digests = [record.target, record.digest] if record is not None else []
                candidates = [held for digest in digests if digest and (held := self.held(part, digest))]
                if not candidates:
                    candidates = [held for digest in self._saved() if (held := self.held(part, digest))]
                unfinished = record is not None and bool(record.target)
                have = examined(tree, candidates, aside, unfinished=unfinished, stopped=stopped)
            if record is None or record.digest != have.manifest.digest:
                self.save(have)
            carry(part, tree, have.manifest, current, keeper)
            if examination:
                for path, folder in have.manifest.folders.items():
                    tree.finish_folder(path, folder)
        return have


def carry(part: str, tree: TreeFolder, manifest: Manifest, current: Donor | None, keeper: Keeper) -> None:
    """Move files of ranks from a tree to the current one.

    Args:
        manifest: of the tree.
        current: None: there is no current tree, and the files are kept elsewhere.
    """
    for path in list(strays(tree, manifest)):
        if current is None:
            keeper.keep(part, tree, path)
        else:
            keeper.move(part, tree, path, current.tree, current.held.manifest)


def _manifest_name(digest: bytes, base: bytes) -> str:
    return f"{digest.hex()}-{base.hex()}" if base else digest.hex()


#: The number of generations that a host keeps, including the current one.
KEEP_GENERATIONS = 6
#: The number of generations that are kept even if their content takes too much space.
_LEAST_GENERATIONS = 2
#: Other workspaces are searched for content if at least this much of it is missing (bytes).
_SEARCH_OTHERS = 1 << 20
#: The folders of a workspace whose descriptors are always open.
_FOLDERS = ("generations", "manifests", "slots")
#: The number of times that a faulty state is read again, as another process may be changing it.
_READS = 5
#: The longest time that a verification waits for a sync in progress (seconds).
_PATIENCE = 10.0


class WorkspaceState(msgspec.Struct, array_like=True):
    """Content of a workspace on a host.

    Attributes:
        generation: the number of the current generation; 0: none.
        digests: of its trees by part.
        generations: those kept for a rollback, and the current one; newest first.
        repair: why the next sync must verify or recreate the trees; empty: they are in order.
        unlinked: whether the link ``current`` leads to no trees; the state then describes the last trees.
        left: remains of an interrupted sync, and how they will be handled; empty: none.
    """

    generation: int
    digests: dict[str, bytes]
    generations: list[Generation]
    repair: str = ""
    unlinked: bool = False
    left: str = ""

    @property
    def current(self) -> Generation | None:
        """The current generation."""
        return next((each for each in self.generations if each.number == self.generation), None)


class WorkspaceFolder:
    """The folder of one workspace. ``Store.workspace`` returns it. One staging at a time.

    Attributes:
        path: its path. Ranks see ``path/current/tree`` and ``path/current/env``.
        id: of the workspace.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.id = name
        self.path = os.path.join(store.path, "w", name)
        with explain(self.path):
            self._folder = store.private_folder("w", name)
            self._generations = Generations(self._folder, store.private_folder("w", name, "generations"))
            self.slots = Slots(
                store.private_folder("w", name, "slots"),
                store.private_folder("w", name, "manifests"),
                store.objects,
                lambda: store.probed().hard_links,
            )
        self._lock = WorkspaceLock(self._folder)

    def close(self) -> None:
        """Close the descriptors."""
        self._folder.close()
        self._generations.close()
        self.slots.close()

    # -- the lock -----------------------------------------------------------------------------------------

    def lock(self, owner: str, wait: float) -> AbstractContextManager[None]:
        """Hold the workspace's lock, which is released when this process ends.

        Args:
            owner: a description of the holder, for messages to other clients.
            wait: the longest wait for it (seconds). A thread that updates older trees gives way.

        Raises:
            WorkspaceBusyError: another client holds it; the message names the client.
            StoreError: the lock cannot be written.
        """
        return self._lock.hold(owner, wait)

    def _check_locked(self) -> None:
        if not self._lock.held:
            raise StoreError(f"{self.path} is changed only by a process that holds its lock")

    # -- state ------------------------------------------------------------------------------------------------

    def state(self) -> WorkspaceState:
        """Read the current generation, those for a rollback, and whether something must be repaired.

        Raises:
            StoreError: the folder cannot be read, or a newer version has written it.
        """
        state = self._read_state()
        for _ in range(_READS):
            if not state.repair or self._lock.held:
                break
            before, state = state, self._read_state()  # another process may have switched meanwhile
            if state == before:
                break
        return state

    def _read_state(self) -> WorkspaceState:
        # The number first: its record was written before it became current.
        number, wrong = self._generations.current()
        records, problem = self._generations.records()
        if wrong := self._unlinked(number, wrong, records):
            state = WorkspaceState(records[0].number if records else 0, {}, records, wrong, True)
            current = state.current
        else:
            state = WorkspaceState(number, {}, [each for each in records if each.number <= number], problem)
            current = state.current
            if current is not None:
                state.repair = ""  # damage of an earlier generation does not affect the trees
                for slot, digest in current.parts.values():
                    state.repair = state.repair or self.slots.problem(slot, digest)
            elif number:
                state.repair = problem or f"the record of generation {number} in {self.path} is missing"
                current = self._as_linked(number)
                state.generations.insert(0, current)
        if current is not None:
            state.digests = current.digests
        left = self.slots.interrupted(state.digests.values())
        if left and not self._lock.held and self._lock.is_free():
            where = ", ".join(map(self.slots.path, left))
            state.left = f"a sync that was interrupted has left {where} half made: the next one uses or removes it"
        return state

    def _unlinked(self, number: int, wrong: str, records: Sequence[Generation]) -> str:
        """Explain why the link ``current`` leads to no trees; "" if it does, or if nothing was synced yet.

        Args:
            number, wrong: the result of ``Generations.current``.
            records: of all generations.
        """
        if wrong:
            return wrong
        link = f"the link {self.path}/{CURRENT}"
        if not number:
            return f"{link} is missing" if records else ""
        slots = self._generations.linked(number)
        record = next((each for each in records if each.number == number), None)
        if record is not None and slots != {part: slot for part, (slot, _) in record.parts.items()}:
            return f"{link} leads to trees that are not those of generation {number}"
        gone = [slot for slot in slots.values() if not self.slots.is_there(slot)]
        return f"{link} leads to {self.slots.path(gone[0])}, which is missing" if gone else ""

    def _recover(self) -> list[str]:
        """Make the link ``current`` lead to complete trees again; describe its problem and the repair."""
        number, wrong = self._generations.current()
        records, _ = self._generations.records()
        wrong = self._unlinked(number, wrong, records)
        if not wrong:
            if not number or any(each.number == number for each in records):
                return []
            linked = self._as_linked(number)
            linked.previous = next((each.number for each in records if each.number < number), 0)
            linked.time = time.time()
            self._generations.note(linked)
            return [f"the record of generation {number} in {self.path} was missing or damaged: it was written again"]
        for each in records:
            if each.parts and all(self.slots.in_order(part, *held) for part, held in each.parts.items()):
                again = self._generations.next_number()
                self._generations.switch(Generation(again, each.parts, each.previous, time.time()))
                return [f"{wrong}: it was set again, to the trees of generation {each.number}"]
        return [f"{wrong}, and none of the trees that it may have led to is whole: a sync makes a new one"]

    def _as_linked(self, number: int) -> Generation:
        """Reconstruct a generation without a record from its links and the records of its slots."""
        parts: dict[str, tuple[str, bytes]] = {}
        for part, slot in self._generations.linked(number).items():
            record = self.slots.record(slot)
            parts[part] = slot, record.digest if record is not None else b""
        return Generation(number, parts)

    def manifest(self, part: str, digest: bytes) -> Manifest | None:
        """Return the manifest of a tree that this host knows; None if it knows none of this digest."""
        held = self.slots.held(part, digest)
        return None if held is None else held.manifest

    def needed(self, content: set[bytes]) -> set[bytes] | None:
        """Return the part of some content that kept generations need; None if it cannot be determined."""
        records, problem = self._generations.records()
        if problem:
            return None
        found: set[bytes] = set()
        seen: set[bytes] = set()
        for digest in {digest for each in records for digest in each.digests.values()}:
            held = self.slots.glimpse(digest)
            if held is None:
                continue  # no rollback can go to it anyway
            found.update(content.intersection(kept for kept, _ in held.rewritten.values()))
            for folder in held.manifest.folders.values():
                if folder.digest in seen:
                    continue
                seen.add(folder.digest)
                for entry in folder.files.values():
                    if entry.digest in content:
                        found.add(entry.digest)
                    found.update(content.intersection(entry.chunks))
        return found

    # -- staging --------------------------------------------------------------------------------------------

    def begin_early(self, size: int) -> EarlyTree | None:
        """Take content of the first tree before its manifest; None if this host should wait for the manifest.

        It should wait if the store may already have some of the content, so that nothing is sent twice, and if only the
        manifest shows whether the tree can be stored.

        Args:
            size: of the tree (bytes).
        """
        self._check_locked()
        facts = self._store.facts()
        if facts.case_insensitive or facts.free < size or not self._store.is_empty():
            return None
        return self.slots.new_early("tree", facts.longest)

    def stage(
        self,
        targets: Mapping[str, Manifest],
        rewriter: Rewriter | None = None,
        early: EarlyTree | None = None,
    ) -> Staging:
        """Start creating trees from content of this host; ``Staging.missing`` has the rest.

        Args:
            targets: the manifests by part ("tree", "env"); parts that are not named stay as they are.
            rewriter: for files of an environment that contain its prefix.
            early: the content of the part "tree" that has already arrived.

        Raises:
            StoreError: they cannot be stored here.
        """
        self._check_locked()
        return self._stage(targets, rewriter, None, early)

    def _stage(
        self,
        targets: Mapping[str, Manifest],
        rewriter: Rewriter | None,
        previous: int | None,
        early: EarlyTree | None = None,
    ) -> Staging:
        notes = self._recover()
        if pieces := self._store.objects.remove_unfinished():
            notes.append(f"a sync that was interrupted had left {pieces} half-written pieces: they were removed")
        self._generations.drop_others()
        current = self.state().current
        there = current.parts.items() if current is not None else ()
        parts = {part: held for part, held in there if self.slots.is_there(held[0])}
        interrupted = self.slots.interrupted(digest for _, digest in parts.values())
        if early is not None:
            interrupted.remove(early.slot)
        unlisted = set(filter(self.slots.is_early, interrupted))
        keeper = self._keeper()
        trees: list[TreeFolder] = [keeper.tree]
        changes: dict[str, SlotChange] = {}

        def abort() -> None:
            try:
                for slot, change in changes.items():
                    self._abandon(slot, change, keeper)
            finally:
                _close(trees)
            self._drop_manifests()

        def commit() -> Generation:
            return self._commit(current, parts, changes, previous, keeper, trees)

        try:
            for part, target in targets.items():
                if part in parts and parts[part][1] == target.digest and self.slots.in_order(part, *parts[part]):
                    continue
                ahead = early if part == "tree" else None
                slot, change = self._begin(part, target, rewriter, parts.get(part, ("", b"")), keeper, trees, ahead)
                changes[slot] = change
                parts[part] = slot, target.digest
                if slot in unlisted:
                    left = f"a sync that was interrupted had left {self.slots.path(slot)} half made"
                    notes.append(f"{left}: what is whole in it is used again")
                elif slot in interrupted:
                    notes.append(self._used_again(slot, change))
            for slot in interrupted:
                notes += self._drop_interrupted(slot, [held[0] for held in parts.values()], keeper)
        except BaseException:
            abort()
            raise
        digest = targets["tree"].digest if "tree" in targets else b""
        return Staging(digest, list(changes.values()), commit, abort, notes)

    def _used_again(self, slot: str, change: SlotChange) -> str:
        """Describe the remains of an interrupted sync in a slot in a sentence."""
        used = whole = 0
        for path, entry in change.have.manifest.files():
            after = change.target.manifest.file(path)
            whole += 1
            used += after is not None and after.digest == entry.digest
        left = f"a sync that was interrupted had left {self.slots.path(slot)} half made"
        return f"{left}: {used} of the {whole} whole files in it are used again, and the rest was removed"

    def _drop_interrupted(self, slot: str, used: Collection[str], keeper: Keeper) -> list[str]:
        """Remove a slot that an interrupted sync has left incomplete and that is of no use; describe it."""
        part = slot.rpartition("-")[0]
        if slot in used or slot not in self.slots.free(part, "", b""):
            return []
        self._remove_slot(slot, part, None, keeper, lambda digest: False)
        return [f"a sync that was interrupted had left {self.slots.path(slot)} half made: it was removed"]

    def _keeper(self) -> Keeper:
        with explain(self.path):
            folder = self._store.private_folder("w", self.id, "kept")
            tree = TreeFolder(folder.path, os.dup(folder.fd))
            folder.close()
        return Keeper(tree, time.strftime("%Y-%m-%d-%H%M%S"))

    def _begin(
        self,
        part: str,
        manifest: Manifest,
        rewriter: Rewriter | None,
        current: tuple[str, bytes],
        keeper: Keeper,
        trees: list[TreeFolder],
        early: EarlyTree | None,
    ) -> tuple[str, SlotChange]:
        """Choose a slot for a tree, and change it as far as this host has the content."""
        known = self.slots.held(part, manifest.digest)
        target = HeldManifest(manifest, dict(known.rewritten) if known else {}, self.slots.read_only(part))
        donors: list[Donor] = []
        now = None
        if current[0] and (held := self.slots.held(part, current[1])) is not None:
            now = Donor(self.slots.open(current[0]), held)
            trees.append(now.tree)
            donors.append(now)
        if known is None:
            self.slots.save(target, now.held if now is not None else None)
        free = self.slots.free(part, current[0], manifest.digest) if early is None else []
        slot = free[0] if free else self.slots.new(part) if early is None else early.slot
        tree = self.slots.open(slot)
        trees.append(tree)
        donors += self.slots.donors(part, (slot, current[0]), trees, steady=True)

        def more(lacking: int) -> Sequence[Donor]:
            return self._store.donors(self.id, trees) if lacking >= _SEARCH_OTHERS else ()

        def begun() -> SlotChange:
            if early is None:
                have = self.slots.prepared(part, slot, tree, now, keeper)
            else:
                have = HeldManifest(empty(), {}, target.read_only)
                self.slots.save(have)
            self.slots.note(slot, part, have.manifest.digest, target=manifest.digest)
            sources = Sources(self._store.objects, donors, more)
            change = SlotChange(part, tree, have, target, sources, self._store.probed(), keeper, rewriter, early=early)
            try:
                change.begin()
            except BaseException:
                self._salvage(slot, change, keeper, discard=not free)
                raise
            return change

        try:
            return slot, begun()
        except StoreError as e:
            cause = e.__cause__
            if not (free and isinstance(cause, OSError) and cause.errno in _NOT_AS_RECORDED):
                raise
        return slot, begun()  # the examination has determined its real content

    def _salvage(self, slot: str, change: SlotChange, keeper: Keeper, *, discard: bool) -> None:
        """Determine the content of a slot whose change has failed, and record it.

        Args:
            discard: the slot is new: remove it, so that nothing is left.
        """

        def aside(path: bytes) -> None:
            keeper.keep(change.part, change.tree, path)

        with explain(change.tree.path):
            held = examined(change.tree, [change.target, change.have], aside, unfinished=True)
        if discard:
            self._clear(slot, change.part, change.tree, held, keeper, lambda digest: True)
        else:
            self.slots.save(held)
            self.slots.note(slot, change.part, held.manifest.digest)

    def _clear(
        self,
        slot: str,
        part: str,
        tree: TreeFolder,
        held: HeldManifest,
        keeper: Keeper,
        discards: Callable[[bytes], bool],
    ) -> None:
        """Remove a slot with everything that its manifest lists."""
        change = SlotChange(
            part,
            tree,
            held,
            HeldManifest(empty()),
            Sources(self._store.objects, ()),
            self._store.probed(),
            keeper,
            discards=discards,
        )
        change.begin()
        for name in tree.names(b""):  # caches
            if not tree.remove_folder(name):
                keeper.keep(part, tree, name)
        self.slots.remove(slot)

    def _remove_slot(
        self,
        slot: str,
        part: str,
        current: Donor | None,
        keeper: Keeper,
        discards: Callable[[bytes], bool],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Determine the content of a slot, and remove it except for files of ranks.

        Args:
            current: the current tree of the part, the destination of files of ranks; None: they are kept elsewhere.
        """
        with self.slots.open(slot) as tree:
            have = self.slots.prepared(part, slot, tree, current, keeper, stopped=stopped)
            self.slots.note(slot, part, have.manifest.digest, target=empty().digest)
            self._clear(slot, part, tree, have, keeper, discards)

    def _abandon(self, slot: str, change: SlotChange, keeper: Keeper, *, keep_made: bool = False) -> None:
        """Abandon the change of a slot in its current state, and record its content."""
        held = change.abandon(keep_made=keep_made)
        if not keep_made and not held.manifest.count()[0] and not change.have.manifest.count()[0]:
            self._clear(slot, change.part, change.tree, held, keeper, lambda digest: True)
            return
        if held.manifest.digest != change.target.manifest.digest:
            self.slots.save(held, change.target)
        self.slots.note(slot, change.part, held.manifest.digest)

    def _drop_manifests(self) -> None:
        records, _ = self._generations.records()
        self.slots.drop_manifests(digest for each in records for digest in each.digests.values())

    # -- the switch -------------------------------------------------------------------------------------------

    def _commit(
        self,
        current: Generation | None,
        parts: dict[str, tuple[str, bytes]],
        changes: dict[str, SlotChange],
        previous: int | None,
        keeper: Keeper,
        trees: list[TreeFolder],
    ) -> Generation:
        self._check_locked()
        if not changes and current is not None:
            _close(trees)
            return current
        for slot, change in changes.items():
            if change.target.rewritten:
                self.slots.save(change.target, change.have)
            self.slots.note(slot, change.part, change.target.manifest.digest)
        before = current.number if current is not None else 0
        generation = Generation(
            self._generations.next_number(), parts, before if previous is None else previous, time.time()
        )
        generation.changed, generation.changes = self._differences(current, changes)
        self._generations.switch(generation)
        # From here on the new trees are current: later failures are reported, and repaired by the next sync.
        try:
            self._succeed(current, changes, keeper)
        except (SyncError, OSError) as e:
            generation.kept.append(f"files of ranks stay in the tree before, until the next sync: {e}")
        finally:
            _close(trees)
        generation.moved = [*generation.moved, *keeper.moved]
        generation.kept = [*generation.kept, *keeper.kept]
        return generation

    def _differences(self, current: Generation | None, slots: dict[str, SlotChange]) -> tuple[str, int]:
        """Return the first path in which new trees differ from the current ones, and the number of such paths."""
        found: list[bytes] = []
        for change in slots.values():
            digest = current.digests.get(change.part) if current is not None else None
            old = self.manifest(change.part, digest) if digest else None
            if old is not None:
                new = change.target.manifest
                found += [each.path for each in differences(old, new) if not isinstance(each.new, int)]
        return (printable(min(found)), len(found)) if found else ("", 0)

    def _succeed(self, current: Generation | None, changes: dict[str, SlotChange], keeper: Keeper) -> None:
        """Move paths created by ranks from the previous trees to the current ones."""
        for change in changes.values():
            slot, digest = current.parts.get(change.part, ("", b"")) if current is not None else ("", b"")
            # In a slot without a record, paths created by ranks are unknown; they are found when the slot is changed.
            held = self.slots.held(change.part, digest) if digest else None
            if held is not None and self.slots.is_there(slot):
                with self.slots.open(slot) as tree, explain(tree.path):
                    carry(change.part, tree, held.manifest, Donor(change.tree, change.target), keeper)
        self._generations.drop_others()

    # -- rollback ---------------------------------------------------------------------------------------------

    def condemn(self, digest: bytes, why: str, owner: str, wait: float) -> None:
        """Record why ranks cannot import modules of a tree, in its generations; "" withdraws it.

        Raises:
            WorkspaceBusyError, StoreError: it cannot be recorded.
        """
        with self.lock(owner, wait):
            for record in self._generations.records()[0]:
                if digest in record.digests.values() and record.broken != why:
                    record.broken = why
                    self._generations.note(record)

    def rollback(self, steps: int = 1, generation: int | None = None, tree: str = "") -> Staging:
        """Stage the trees of an earlier generation again from content of this host. They become a new generation.

        Args:
            steps: the number of generations to go back; those that ranks could not import do not count.
            generation: alternatively, the number of a generation.
            tree: alternatively, the beginning of the digest of its tree (hex).

        Raises:
            StoreError: there is no such generation, or its content is no longer here.
        """
        self._check_locked()
        recovered = self._recover()
        state = self.state()
        by_number = {each.number: each for each in state.generations}
        wanted = generation
        if tree:
            named = [
                each
                for each in state.generations
                if any(digest.hex().startswith(tree) for digest in each.digests.values())
            ]
            if not named:
                raise StoreError(f"{self.path} keeps no tree {tree}; %mesh sync --rollback --list shows its trees")
            wanted = named[0].number
        if wanted is None:
            wanted = state.generation
            for _ in range(steps):
                wanted = _earlier(by_number, wanted)
        found = by_number.get(wanted)
        if found is None:
            kept = ", ".join(str(number) for number in by_number) or "none"
            which = f"{steps} before the current one" if generation is None else f"number {generation}"
            raise StoreError(f"{self.path} has no generation to go back to ({which}); it keeps {kept}")
        targets: dict[str, Manifest] = {}
        for part, (_, digest) in found.parts.items():
            manifest = self.manifest(part, digest)
            if manifest is None:
                raise StoreError(
                    f"{self.slots.manifest_path(digest)} of generation {found.number} is missing or damaged: "
                    "sync the earlier files from the client"
                )
            targets[part] = manifest
        staging = self._stage(targets, None, found.previous)
        staging.notes[:0] = recovered
        if missing := staging.missing:
            staging.abort()
            size = sum(size for _, size in missing)
            raise StoreError(
                f"{self.path}: {len(missing)} pieces ({size} bytes) of generation {found.number} are not on this host "
                "any more: sync the earlier files from the client"
            )
        return staging

    # -- verification ----------------------------------------------------------------------------------------------

    def verify(self, repair: bool = False) -> list[Problem]:
        """Hash everything in the current trees; files of ranks are ignored.

        Damaged trees are recorded as such, and the next sync recreates them. If the link ``current`` leads to no trees,
        it is set to the last complete ones.

        Args:
            repair: recreate them at once from content of this host, and switch.

        Returns:
            The damage that was found.

        Raises:
            WorkspaceBusyError: a sync is in progress.
            StoreError: the store cannot be read or written.
        """
        with self.lock("a verification", _PATIENCE):
            return self._verify(repair)

    def _verify(self, repair: bool) -> list[Problem]:
        problems = [Problem(self.path, each) for each in self._recover()]
        state = self.state()
        current = state.current
        if current is None or state.unlinked:
            return problems
        damaged: dict[str, Manifest] = {}
        for part, (slot, digest) in current.parts.items():
            found = self.slots.verified(part, slot, digest)
            problems += found
            manifest = self.manifest(part, digest)
            if found and manifest is not None:
                damaged[part] = manifest
        if repair and damaged:
            staging = self._stage(damaged, None, current.previous)
            try:
                staging.finish()
                staging.commit()
            except SyncError as e:
                staging.abort()
                problems.append(Problem(self.path, f"this host cannot repair it alone, sync again: {e}"))
        return problems

    # -- removal of the workspace -----------------------------------------------------------------------------

    def kept(self) -> Inventory:
        """Return the files of ranks that were in conflict with a tree."""
        with explain(self.path):
            tree = kept_tree(self._folder)
            if tree is None:
                return Inventory()
            with tree:
                return inventory(tree)

    def remove_kept(self) -> tuple[int, int]:
        """Remove these files permanently, except open ones; return their number and size (bytes)."""
        self._check_locked()
        with explain(self.path):
            tree = kept_tree(self._folder)
            if tree is None:
                return 0, 0
            with tree:
                return remove(tree, inventory(tree))

    def footprint(self) -> Footprint:
        """Count the content of the workspace, and list the processes that use it."""
        kept = self.kept()
        files = size = 0
        for slot in self.slots.names():
            record = self.slots.record(slot)
            held = self.slots.glimpse(record.digest) if record is not None and record.digest else None
            if held is not None:
                count = held.manifest.count()
                files, size = files + count[0], size + count[1]
        generations = len(self.state().generations)
        return Footprint(generations, files, size, len(kept.files), kept.size, self.slots.users())

    def forget(self, *, kept: bool) -> None:
        """Remove the trees, their records, and the folder of the workspace.

        The content of the trees becomes objects. Files created by ranks are moved to ``kept``, which stays, together
        with the folder, unless it is empty. No process may use the trees. If the call is interrupted by a kill, call it
        again.

        Args:
            kept: also remove these files permanently.

        Raises:
            StoreError: something cannot be removed.
        """
        self._check_locked()
        self._generations.remove_all()
        keeper = self._keeper()
        with keeper.tree:
            for slot in self.slots.names():
                self._remove_slot(slot, slot.rpartition("-")[0], None, keeper, lambda digest: False)
                if self.slots.is_there(slot):
                    raise StoreError(f"{self.slots.path(slot)} was written to meanwhile: forget the workspace again")
            if kept:
                with explain(keeper.tree.path):
                    remove(keeper.tree, inventory(keeper.tree))
        self.slots.remove_records()
        with explain(self.path):
            for name in (*_FOLDERS, "kept", "locked"):
                with suppress(OSError):
                    os.rmdir(name, dir_fd=self._folder.fd)
            self._lock.remove()  # waiting processes then start anew
            with suppress(OSError):
                os.rmdir(self.path)

    def is_there(self) -> bool:
        """Return whether the workspace has not been forgotten meanwhile, also by another process."""
        try:
            whole = os.path.samestat(os.fstat(self._folder.fd), os.lstat(self.path))
        except FileNotFoundError:
            return False
        return whole and all(os.path.lexists(f"{self.path}/{name}") for name in _FOLDERS)

    # -- after a switch ---------------------------------------------------------------------------------------

    def follow(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Update the older slots to the current trees, so that the next change is small, and drop unneeded content.

        Meant for a separate thread of low priority. The lock is held meanwhile, and released as soon as another process
        waits for it. If a sync is in progress, nothing is done.

        Args:
            stopped: polled often; true: stop soon, and leave the rest for a later call.

        Raises:
            StoreError: the store cannot be read or written.
        """
        try:
            with self._lock.tidy():
                self._follow(lambda: stopped() or self._lock.is_awaited())
        except (WorkspaceBusyError, InterruptedError):
            return

    def _follow(self, stopped: Callable[[], bool]) -> None:
        self._generations.drop_others()
        state = self.state()
        current = state.current
        if current is None or state.repair:
            return
        keeper = self._keeper()
        with keeper.tree:
            for part, (slot, digest) in current.parts.items():
                self._follow_part(part, slot, digest, keeper, stopped)
        for old in state.generations[KEEP_GENERATIONS:]:
            self._generations.forget(old.number)
        self._drop_manifests()
        self.slots.settle_manifests()
        kept = state.generations[:KEEP_GENERATIONS]
        while self._store.collect(stopped=stopped) and len(kept) > _LEAST_GENERATIONS:
            self._generations.forget(kept.pop().number)
            self._drop_manifests()

    def _follow_part(self, part: str, slot: str, digest: bytes, keeper: Keeper, stopped: Callable[[], bool]) -> None:
        held = self.slots.held(part, digest)
        if held is None:
            return
        free = self.slots.free(part, slot, digest)
        if not free and held.manifest.count()[1] * 2 > self._store.facts().free:
            return  # no space for a second tree: the next tree will be created completely
        spare = free[0] if free else self.slots.new(part)
        with self.slots.open(slot) as tree, self.slots.open(spare) as other:
            now = Donor(tree, held)
            have = self.slots.prepared(part, spare, other, now, keeper, glance=True, stopped=stopped)
            self.slots.note(spare, part, have.manifest.digest, target=digest)
            target = HeldManifest(held.manifest, dict(held.rewritten), held.read_only)
            sources = Sources(self._store.objects, [now])
            change = SlotChange(part, other, have, target, sources, self._store.probed(), keeper)
            try:
                change.begin(stopped)
            except BaseException:
                self._salvage(spare, change, keeper, discard=not free)
                raise
            if sources.problems:
                self.slots.note(slot, part, digest, suspect=True)
            self._abandon(spare, change, keeper, keep_made=True)
        if len(free) < 2:
            return
        here = {content[0] for path, entry in held.manifest.files() if (content := held.content(path, entry))}
        for surplus in free[1:]:
            if stopped():
                return
            with self.slots.open(slot) as tree:
                self._remove_slot(surplus, part, Donor(tree, held), keeper, here.__contains__, stopped)


#: Errors which mean that a folder does not match its record.
_NOT_AS_RECORDED = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL)
)


def _close(trees: list[TreeFolder]) -> None:
    while trees:
        trees.pop().close()


def _earlier(generations: Mapping[int, Generation], number: int) -> int:
    """Return the generation that one step back from this one leads to; 0: there is none.

    Generations that ranks could not import are skipped. A repair, and a sync after files were restored, create a
    generation with the same trees as the previous one; these are skipped, too, because a rollback to them would change
    nothing.
    """
    here = generations.get(number)
    digests = _digests(here)
    while here is not None:
        here = generations.get(here.previous)
        if here is not None and _digests(here) != digests and not here.broken:
            return here.number
    return 0


def _digests(generation: Generation | None) -> dict[str, bytes]:
    return {part: digest for part, (_, digest) in generation.parts.items()} if generation is not None else {}
