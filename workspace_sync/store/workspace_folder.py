"""One workspace on one host: its slots, its generations, and the one symbolic link that says which is current."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from workspace_sync.model.errors import StoreError, SyncError, TamperedError, WorkspaceBusyError
from workspace_sync.model.manifest import Manifest, delta
from workspace_sync.store.examination import Held, Problem, compared, empty, examined
from workspace_sync.store.failures import explain, explained
from workspace_sync.store.kept import Keeper, strays
from workspace_sync.store.records import (
    Generation,
    ManifestRecord,
    SlotRecord,
    boot_id,
    read_record,
    write_record,
)
from workspace_sync.store.slot_change import Donor, FileRewriter, SlotChange
from workspace_sync.store.staging import Staging
from workspace_sync.store.tree import Tree

if TYPE_CHECKING:
    from workspace_sync.store.store import Store

#: How many generations a host keeps, the current one among them.
KEEP_GENERATIONS = 6
#: The part whose files several trees may share: an environment is written by installers only.
ENVIRONMENT = "env"
_STATE = ".state"
_CURRENT = "current"
_GENERATION = re.compile(r"generations/([1-9][0-9]*)")
_RECORD = re.compile(r"([1-9][0-9]*)\.state")
_SLOT = re.compile(r"([a-z]+)-([1-9][0-9]*)")
#: Other workspaces are searched for content if at least this much of it is missing (bytes).
_SEARCH_OTHERS = 1 << 20


class WorkspaceState(msgspec.Struct, array_like=True):
    """What a host has of a workspace.

    Attributes:
        generation: the number of the current generation; 0: none.
        digests: of its trees by part.
        generations: those that are kept for a rollback, and the current one; the newest first.
        repair: why the trees are to be verified or made again by the next sync; empty: they are in order.
    """

    generation: int
    digests: dict[str, bytes]
    generations: list[Generation]
    repair: str = ""


class WorkspaceFolder:
    """The folder of one workspace; ``Store.workspace`` gives it.

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
            self._slots = store.private_folder("w", name, "slots")
            self._generations = store.private_folder("w", name, "generations")
            self._manifests = store.private_folder("w", name, "manifests")
        self._boot = boot_id()
        self._held: dict[bytes, Held] = {}
        self._mutex = threading.Lock()
        self._lock_fd = -1

    def close(self) -> None:
        """Close its descriptors."""
        for folder in (self._folder, self._slots, self._generations, self._manifests):
            folder.close()

    # -- the lock -----------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, owner: str, wait: float) -> Generator[None]:
        """Hold the workspace's lock, which ends with this process.

        Args:
            owner: who holds it, for the message that another client gets.
            wait: how long to wait for it (seconds).

        Raises:
            WorkspaceBusyError: another one holds it; the message says who.
            StoreError: the lock cannot be written.
        """
        with explain(self.path):
            fd = self._folder.open_file("lock", os.O_RDWR | os.O_CREAT)
        try:
            end = time.monotonic() + wait
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        other = os.pread(fd, 1000, 0).decode("utf-8", "replace").strip() or "another client"
                        raise WorkspaceBusyError(
                            f"{self.path} is being synced by {other}: wait until that has ended, and sync again"
                        ) from None
                    time.sleep(0.01)
            with explain(self.path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, owner.encode()[:1000], 0)
            self._lock_fd = fd
            try:
                yield
            finally:
                self._lock_fd = -1
        finally:
            os.close(fd)

    def _check_locked(self) -> None:
        if self._lock_fd < 0:
            raise StoreError(f"{self.path} is changed only by a process that holds its lock")

    # -- what is there ---------------------------------------------------------------------------------------

    def state(self) -> WorkspaceState:
        """The current generation, those for a rollback, and whether something is to be repaired.

        Raises:
            StoreError: the folder cannot be read, or a newer version has written it.
        """
        generations, problem = self._generation_records()
        number = self._current_number()
        current = next((each for each in generations if each.number == number), None)
        done = sorted((each for each in generations if each.number <= number), key=lambda each: -each.number)
        if number and current is None:
            return WorkspaceState(number, {}, done, problem or f"{self._generations.path}/{number}{_STATE} is missing")
        if current is None:
            return WorkspaceState(0, {}, [], problem)
        for part, (slot, digest) in current.parts.items():
            problem = problem or self._slot_problem(part, slot, digest)
        return WorkspaceState(number, current.digests, done, problem)

    def _slot_problem(self, part: str, slot: str, digest: bytes) -> str:
        where = f"{self._slots.path}/{slot}"
        try:
            record = read_record(self._slots, slot + _STATE, SlotRecord)
        except FileNotFoundError:
            return f"{where}{_STATE} is missing"
        except TamperedError as e:
            return str(e)
        if record.digest != digest or record.target:
            return f"{where} does not hold the tree that was switched to"
        if record.suspect:
            return f"{where} was found to be damaged"
        if record.boot != self._boot:
            return f"{where} was written before this machine started, and is verified before it is used again"
        if self._manifest(digest) is None:
            return f"{self._manifests.path}/{digest.hex()} is missing or damaged"
        return ""

    def _generation_records(self) -> tuple[list[Generation], str]:
        """All records of generations, and what is wrong with one."""
        found: list[Generation] = []
        problem = ""
        for name in self._generations.names():
            if (match := _RECORD.fullmatch(name)) is None:
                continue
            try:
                record = read_record(self._generations, name, Generation)
            except FileNotFoundError:
                continue
            except TamperedError as e:
                problem = str(e)
                continue
            if record.number == int(match[1]) and all(_SLOT.fullmatch(slot) for slot, _ in record.parts.values()):
                found.append(record)
            else:
                problem = f"{self._generations.path}/{name} is damaged: it does not describe generation {match[1]}"
        return found, problem

    def _current_number(self) -> int:
        try:
            target = os.readlink(_CURRENT, dir_fd=self._folder.fd)
        except FileNotFoundError:
            return 0
        except OSError as e:
            raise explained(e, f"{self.path}/{_CURRENT}") from e
        match = _GENERATION.fullmatch(target)
        if match is None:
            raise TamperedError(f"{self.path}/{_CURRENT} leads to {target!r}, which is no generation: remove the link")
        return int(match[1])

    def manifest(self, part: str, digest: bytes) -> Manifest | None:
        """The manifest of a tree that this host knows of; None: it knows none of this digest."""
        held = self._manifest(digest)
        return None if held is None else held.manifest

    def _manifest(self, digest: bytes) -> Held | None:
        with self._mutex:
            held = self._held.get(digest)
        if held is not None:
            return held
        try:
            record = read_record(self._manifests, digest.hex(), ManifestRecord)
            held = Held(Manifest(record.manifest.folders), record.rewritten)
            if record.manifest.digest != digest or held.manifest.digest != digest:
                return None
        except (FileNotFoundError, TamperedError, KeyError):
            return None
        with self._mutex:
            self._held[digest] = held
        return held

    def _held_by(self, part: str, digest: bytes) -> Held | None:
        """A manifest as the slots of a part hold it."""
        held = self._manifest(digest) if digest else Held(empty())
        if held is not None:
            held.read_only = part == ENVIRONMENT and self._store.probed().hard_links
        return held

    def _save_manifest(self, held: Held) -> None:
        digest = held.manifest.digest
        write_record(self._manifests, digest.hex(), ManifestRecord(delta(None, held.manifest), held.rewritten))
        with self._mutex:
            self._held[digest] = held

    # -- staging --------------------------------------------------------------------------------------------

    def stage(self, targets: Mapping[str, Manifest], rewriter: FileRewriter | None = None) -> Staging:
        """Begin to make trees, from all that this host has; what it lacks is in ``Staging.missing``.

        Args:
            targets: the manifests by part ("tree", "env"); parts that are not named stay as they are.
            rewriter: for files of an environment that name its prefix.

        Raises:
            StoreError: they cannot be stored here.
        """
        self._check_locked()
        return self._stage(targets, rewriter, previous=None)

    def _stage(self, targets: Mapping[str, Manifest], rewriter: FileRewriter | None, previous: int | None) -> Staging:
        state = self.state()
        self._drop_uncommitted(state.generation)
        current = next((each for each in state.generations if each.number == state.generation), None)
        parts = dict(current.parts) if current is not None else {}
        keeper = self._keeper()
        changes: list[tuple[str, SlotChange]] = []
        trees: list[Tree] = []
        try:
            for part, target in targets.items():
                if part in parts and parts[part][1] == target.digest and self._in_order(part, *parts[part]):
                    continue
                slot, change = self._begin(part, target, rewriter, parts, keeper, trees)
                changes.append((slot, change))
                parts[part] = slot, target.digest
        except BaseException:
            for slot, change in changes:
                self._abandon(slot, change)
            _close(trees)
            raise

        def commit() -> Generation:
            return self._commit(state, current, parts, changes, previous, keeper, trees)

        def abort() -> None:
            try:
                for slot, change in changes:
                    self._abandon(slot, change)
            finally:
                _close(trees)

        digest = targets["tree"].digest if "tree" in targets else b""
        return Staging(digest, [change for _, change in changes], commit, abort)

    def _keeper(self) -> Keeper:
        with explain(self.path):
            folder = self._store.private_folder("w", self.id, "kept")
            tree = Tree(folder.path, os.dup(folder.fd))
            folder.close()
        return Keeper(tree, time.strftime("%Y-%m-%d-%H%M%S"))

    def _in_order(self, part: str, slot: str, digest: bytes) -> bool:
        """Whether the current slot of a part is what it should be; after a reboot it is verified."""
        record = self._slot_record(slot)
        if record is None or record.digest != digest or record.target or record.suspect:
            return False
        held = self._held_by(part, digest)
        if held is None:
            return False
        if record.boot != self._boot:
            with explain(f"{self._slots.path}/{slot}"), Tree.open(*self._at(slot)) as tree:
                bad = next(compared(tree, held), None)
            self._write_slot(slot, SlotRecord(part, digest, b"", self._boot, bad is not None))
            return bad is None
        return True

    def _slot_record(self, slot: str) -> SlotRecord | None:
        try:
            return read_record(self._slots, slot + _STATE, SlotRecord)
        except (FileNotFoundError, TamperedError):
            return None

    def _write_slot(self, slot: str, record: SlotRecord) -> None:
        write_record(self._slots, slot + _STATE, record)

    def _at(self, slot: str) -> tuple[str, str, int]:
        return f"{self._slots.path}/{slot}", slot, self._slots.fd

    def _slot_names(self, part: str) -> list[str]:
        """The slots of a part that exist, the newest first."""
        found: dict[int, str] = {}
        for name in self._slots.names():
            match = _SLOT.fullmatch(name)
            if match is not None and match[1] == part:
                found[int(match[2])] = name
        return [found[number] for number in sorted(found, reverse=True)]

    def _free_slots(self, part: str, current: str, digest: bytes) -> list[str]:
        """Slots of a part that may be changed, the best for a tree first."""
        busy = _working_folders()

        def free(slot: str) -> bool:
            path = f"{self._slots.path}/{slot}"
            return slot != current and not any(each == path or each.startswith(path + "/") for each in busy)

        def order(slot: str) -> tuple[bool, bool]:
            record = self._slot_record(slot)
            return record is None or record.digest != digest, record is None or record.suspect or bool(record.target)

        return sorted(filter(free, self._slot_names(part)), key=order)

    def _new_slot(self, part: str) -> str:
        names = self._slot_names(part)
        number = max((int(name.rpartition("-")[2]) for name in names), default=0) + 1
        slot = f"{part}-{number}"
        self._write_slot(slot, SlotRecord(part, boot=self._boot))
        with explain(self._slots.path):
            os.mkdir(slot, 0o700, dir_fd=self._slots.fd)
        return slot

    def _begin(
        self,
        part: str,
        manifest: Manifest,
        rewriter: FileRewriter | None,
        parts: Mapping[str, tuple[str, bytes]],
        keeper: Keeper,
        trees: list[Tree],
    ) -> tuple[str, SlotChange]:
        """Choose a slot for a tree, and change it as far as this host has the content."""
        now, now_digest = parts.get(part, ("", b""))
        target = self._held_by(part, manifest.digest)
        if target is None:
            target = Held(manifest, {}, part == ENVIRONMENT and self._store.probed().hard_links)
            self._save_manifest(target)
        free = self._free_slots(part, now, manifest.digest)
        slot = free[0] if free else self._new_slot(part)
        with explain(f"{self._slots.path}/{slot}"):
            tree = Tree.open(*self._at(slot))
        trees.append(tree)
        donors: list[Donor] = []
        current_tree = None
        if now and (current_held := self._held_by(part, now_digest)) is not None:
            with explain(f"{self._slots.path}/{now}"):
                current_tree = Tree.open(*self._at(now))
            trees.append(current_tree)
            donors.append(Donor(current_tree, current_held))
        have = self._prepared(part, slot, tree, donors[0] if donors else None, keeper)
        self._write_slot(slot, SlotRecord(part, have.manifest.digest, manifest.digest, self._boot))
        for other in self._slot_names(part):
            if other not in (slot, now):
                donors += self._donor(part, other, trees)

        def more(lacking: int) -> Sequence[Donor]:
            return self._store.donors(self.id, trees) if lacking >= _SEARCH_OTHERS else ()

        change = SlotChange(
            part, tree, have, target, self._store.objects, self._store.probed(), keeper, rewriter, donors, more
        )
        try:
            change.begin()
        except BaseException:
            if not self._slot_record_digest(slot):
                self._abandon(slot, change)
            raise
        return slot, change

    def _slot_record_digest(self, slot: str) -> bytes:
        record = self._slot_record(slot)
        return b"" if record is None else record.digest

    def _donor(self, part: str, slot: str, trees: list[Tree]) -> list[Donor]:
        """A slot as a donor, if it holds a tree."""
        record = self._slot_record(slot)
        if record is None or not record.digest or record.target:
            return []
        held = self._held_by(part, record.digest)
        if held is None:
            return []
        try:
            tree = Tree.open(*self._at(slot))
        except OSError:
            return []
        trees.append(tree)
        return [Donor(tree, held, steady=False)]

    def donors(self, trees: list[Tree]) -> list[Donor]:
        """The trees of this workspace, for another one; their descriptors are added to ``trees``."""
        found: list[Donor] = []
        for name in self._slots.names():
            if (match := _SLOT.fullmatch(name)) is not None:
                found += self._donor(match[1], name, trees)
        return found

    def _prepared(self, part: str, slot: str, tree: Tree, current: Donor | None, keeper: Keeper) -> Held:
        """What a slot holds, exactly; files that ranks have made in it are moved out."""
        record = self._slot_record(slot)
        have = None
        if record is not None and record.boot == self._boot and not record.target and not record.suspect:
            have = self._held_by(part, record.digest)

        def aside(path: bytes) -> None:
            keeper.keep(part, tree, path)

        with explain(tree.path):
            if have is None:
                digests = (
                    [record.target, record.digest] if record is not None and (record.target or record.digest) else []
                )
                candidates = [held for digest in digests if digest and (held := self._held_by(part, digest))]
                if not candidates:
                    candidates = [held for digest in self._known() if (held := self._held_by(part, digest))]
                unfinished = record is not None and bool(record.target)
                have, _ = examined(tree, candidates, aside, unfinished=unfinished)
                self._save_manifest(have)
            self._carry(part, tree, have.manifest, current, keeper)
        return have

    def _carry(self, part: str, tree: Tree, manifest: Manifest, target: Donor | None, keeper: Keeper) -> None:
        """Move what ranks have made in a tree to the current one."""
        for path in list(strays(tree, manifest)):
            if target is None:
                keeper.keep(part, tree, path)
            else:
                keeper.move(part, tree, path, target.tree, target.held.manifest)

    def _known(self) -> list[bytes]:
        return [bytes.fromhex(name) for name in self._manifests.names() if re.fullmatch("[0-9a-f]{64}", name)]

    def _abandon(self, slot: str, change: SlotChange, *, keep_made: bool = False) -> None:
        """Leave a slot as far as its change came, and note what it holds."""
        with explain(change.tree.path):
            held = change.abandon(keep_made=keep_made)
        self._save_manifest(held)
        self._write_slot(slot, SlotRecord(change.part, held.manifest.digest, b"", self._boot))

    # -- the switch -------------------------------------------------------------------------------------------

    def _commit(
        self,
        state: WorkspaceState,
        current: Generation | None,
        parts: dict[str, tuple[str, bytes]],
        changes: list[tuple[str, SlotChange]],
        previous: int | None,
        keeper: Keeper,
        trees: list[Tree],
    ) -> Generation:
        self._check_locked()
        if not changes and current is not None:
            _close(trees)
            return current
        for slot, change in changes:
            if change.target.rewritten:
                self._save_manifest(change.target)
            self._write_slot(slot, SlotRecord(change.part, change.target.manifest.digest, b"", self._boot))
        records, _ = self._generation_records()
        number = max([state.generation, *(each.number for each in records)]) + 1
        before = current.number if current is not None else 0
        generation = Generation(number, parts, before if previous is None else previous, time.time())
        write_record(self._generations, f"{number}{_STATE}", generation)
        with explain(self._generations.path):
            os.mkdir(str(number), 0o700, dir_fd=self._generations.fd)
            for part, (slot, _) in parts.items():
                os.symlink(f"../../slots/{slot}", f"{number}/{part}", dir_fd=self._generations.fd)
            new = f"{_CURRENT}.new"
            try:
                os.unlink(new, dir_fd=self._folder.fd)
            except FileNotFoundError:
                pass
            os.symlink(f"generations/{number}", new, dir_fd=self._folder.fd)
            os.rename(new, _CURRENT, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        try:
            self._after(current, changes, keeper)
        except (SyncError, OSError) as e:
            generation.kept.append(f"files of ranks stay in the tree before: {e}")
        finally:
            _close(trees)
        generation.moved += keeper.moved
        generation.kept += keeper.kept
        return generation

    def _after(self, current: Generation | None, changes: list[tuple[str, SlotChange]], keeper: Keeper) -> None:
        """Move what ranks have made from the tree before, which the switch has succeeded."""
        for _, change in changes:
            if current is None or change.part not in current.parts:
                continue
            slot, digest = current.parts[change.part]
            held = self._held_by(change.part, digest)
            if held is not None:
                with explain(f"{self._slots.path}/{slot}"), Tree.open(*self._at(slot)) as tree:
                    self._carry(change.part, tree, held.manifest, Donor(change.tree, change.target), keeper)
        if current is not None:
            self._remove_links(current.number)

    def _drop_uncommitted(self, number: int) -> None:
        """Remove generations that were prepared, but never switched to."""
        with explain(self._generations.path):
            for name in self._generations.names():
                match = re.fullmatch(r"([1-9][0-9]*)(\.state(?:\.new)?)?", name)
                if match is None:
                    continue
                if match[2] is None and int(match[1]) != number:
                    self._remove_links(int(match[1]))
                elif match[2] is not None and int(match[1]) > number:
                    os.unlink(name, dir_fd=self._generations.fd)

    def _remove_links(self, number: int) -> None:
        """Remove the folder of a generation that is not current."""
        try:
            fd = os.open(
                str(number), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._generations.fd
            )
        except OSError:
            return
        try:
            for name in os.listdir(fd):
                if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=fd)
            os.rmdir(str(number), dir_fd=self._generations.fd)
        except OSError as e:
            raise explained(e, f"{self._generations.path}/{number}") from e
        finally:
            os.close(fd)

    # -- back -----------------------------------------------------------------------------------------------------

    def rollback(self, steps: int = 1, generation: int | None = None) -> Staging:
        """Stage the trees of an earlier generation again, from what this host has; they become a new generation.

        Args:
            steps: how many generations to go back.
            generation: the number of one, instead.

        Raises:
            StoreError: there is no such generation, or its content is not here any more.
        """
        self._check_locked()
        state = self.state()
        by_number = {each.number: each for each in state.generations}
        wanted = generation
        if wanted is None:
            wanted = state.generation
            for _ in range(steps):
                each = by_number.get(wanted)
                wanted = each.previous if each is not None else 0
        found = by_number.get(wanted)
        if found is None:
            kept = ", ".join(str(each.number) for each in state.generations) or "none"
            raise StoreError(
                f"{self.path} has no generation to go back to"
                + (f" of number {generation}" if generation is not None else f" ({steps} before the current one)")
                + f"; it keeps {kept}"
            )
        targets: dict[str, Manifest] = {}
        for part, (_, digest) in found.parts.items():
            manifest = self.manifest(part, digest)
            if manifest is None:
                raise StoreError(
                    f"{self._manifests.path}/{digest.hex()} of generation {found.number} is missing or damaged: "
                    "sync the earlier files from the client"
                )
            targets[part] = manifest
        staging = self._stage(targets, None, previous=found.previous)
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
        """Hash everything in the current trees; what ranks have made there is ignored.

        Args:
            repair: make damaged trees again from what this host has, and switch; the lock must be held. What it does
                not have comes with the next sync.

        Returns:
            What is wrong.
        """
        if repair:
            self._check_locked()
        state = self.state()
        problems: list[Problem] = []
        current = next((each for each in state.generations if each.number == state.generation), None)
        if current is None:
            return [Problem(self.path, state.repair)] if state.repair else []
        targets: dict[str, Manifest] = {}
        for part, (slot, digest) in current.parts.items():
            found = self._slot_problems(part, slot, digest)
            problems += found
            record = self._slot_record(slot)
            if record is None or record.suspect != bool(found) or record.boot != self._boot:
                self._write_slot(slot, SlotRecord(part, digest, b"", self._boot, bool(found)))
            held = self._held_by(part, digest)
            if found and held is not None:
                targets[part] = held.manifest
        if repair and targets:
            staging = self._stage(targets, None, previous=current.previous)
            try:
                staging.finish()
            except SyncError as e:
                staging.abort()
                problems.append(Problem(self.path, f"it cannot be repaired from what is on this host: {e}"))
            else:
                staging.commit()
        return problems

    def _slot_problems(self, part: str, slot: str, digest: bytes) -> list[Problem]:
        held = self._held_by(part, digest)
        if held is None:
            return [Problem(f"{self._manifests.path}/{digest.hex()}", "the manifest is missing or damaged: sync again")]
        try:
            tree = Tree.open(*self._at(slot))
        except OSError as e:
            return [Problem(f"{self._slots.path}/{slot}", e.strerror or str(e))]
        with tree:
            return list(compared(tree, held))

    # -- afterwards -----------------------------------------------------------------------------------------------

    def follow(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Bring the older slots to the current trees, so that the next change is small, and drop what is not needed.

        Meant for a thread of its own, after a switch; it holds the lock while it works.

        Args:
            stopped: asked often; true: stop soon, the rest is done another time.
        """
        try:
            with self.lock("this host, which tidies up after a sync", 0):
                self._follow(stopped)
        except WorkspaceBusyError:
            return

    def _follow(self, stopped: Callable[[], bool]) -> None:
        state = self.state()
        current = next((each for each in state.generations if each.number == state.generation), None)
        if current is None or state.repair:
            return
        for part, (slot, digest) in current.parts.items():
            if stopped():
                return
            self._follow_part(part, slot, digest, stopped)

    def _follow_part(self, part: str, slot: str, digest: bytes, stopped: Callable[[], bool]) -> None:
        held = self._held_by(part, digest)
        if held is None:
            return
        free = self._free_slots(part, slot, digest)
        if not free and held.manifest.count()[1] * 2 > self._store.facts().free:
            return  # no room for a second tree: the next one is made whole
        spare = free[0] if free else self._new_slot(part)
        keeper = self._keeper()
        with explain(self._slots.path), Tree.open(*self._at(slot)) as tree, Tree.open(*self._at(spare)) as other:
            donor = Donor(tree, held)
            have = self._prepared(part, spare, other, donor, keeper)
            if have.manifest.digest == digest:
                self._write_slot(spare, SlotRecord(part, digest, b"", self._boot))
                return
            self._write_slot(spare, SlotRecord(part, have.manifest.digest, digest, self._boot))
            target = Held(held.manifest, dict(held.rewritten), held.read_only)
            change = SlotChange(
                part, other, have, target, self._store.objects, self._store.probed(), keeper, None, [donor]
            )
            change.begin(stopped)
            if change.problems:
                self._write_slot(slot, SlotRecord(part, digest, b"", self._boot, True))
            self._abandon(spare, change, keep_made=True)


def _close(trees: list[Tree]) -> None:
    while trees:
        trees.pop().close()


def _working_folders() -> set[str]:
    """The folders in which processes of this user work."""
    found: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.add(os.readlink(f"/proc/{name}/cwd"))
            except OSError:  # it has ended, or belongs to another user
                continue
    return found
