"""Slots of a workspace on one host: folders with complete trees, their records, and the manifests."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import TamperedError
from workspace_sync.model.manifest import Manifest, ManifestError, delta, patched
from workspace_sync.store.early_tree import EARLY, EarlyTree, emptied
from workspace_sync.store.examination import HeldManifest, Problem, compared, empty, examined, glanced
from workspace_sync.store.failures import explain
from workspace_sync.store.kept import Keeper, resolved, strays, users_of, working_folders
from workspace_sync.store.objects import Objects
from workspace_sync.store.records import (
    SLOT,
    ManifestRecord,
    SlotRecord,
    boot_id,
    read_record,
    remove_record,
    write_record,
)
from workspace_sync.store.sources import Donor
from workspace_sync.store.tree import TreeFolder

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
