"""Records of a store: small files, checked by digest, replaced atomically, with a version.

A record is never trusted without its digest: a truncated or changed record is reported as damaged. Records are not
flushed to disk individually. After a power failure, trees are verified before they are used again, so a lost record
costs only a verification.

``explain`` converts errors of the file system to errors of the store, with path, cause and remedy.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TypeVar

import msgspec

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import StoreError, TamperedError
from workspace_sync.model.manifest import DIGEST_SIZE, ManifestDelta, digest_of, printable
from workspace_sync.store.tree import Descriptor

R = TypeVar("R")

#: The version of the format on disk. It increases when an older program could not read it.
FORMAT = 1
_MAGIC = b"monarch sync "
_HEAD = len(_MAGIC) + 5 + DIGEST_SIZE


class StoreRecord(msgspec.Struct, array_like=True):
    """A record of a store. ``version`` is the version of its format."""

    made_by: str = "monarch_kernel"


class SlotRecord(msgspec.Struct, array_like=True):
    """Content of a slot.

    Attributes:
        part: its part of a workspace ("tree", "env").
        digest: of the manifest of its content; empty: no content.
        target: during a change, the digest of the new manifest; otherwise empty.
        boot: the boot of the machine during which the record was written; after a reboot, the slot is verified first.
        suspect: whether damaged content was found in it.
    """

    part: str
    digest: bytes = b""
    target: bytes = b""
    boot: str = ""
    suspect: bool = False


class Generation(msgspec.Struct, array_like=True):
    """A pair of trees (folders, environment) that a host has switched to.

    Attributes:
        number: its number, which increases with each switch.
        parts: (slot, digest of the manifest) by part; the slot may contain another tree by now.
        previous: the generation that a rollback from this one goes to; 0: none.
        time: the time of the switch to it (seconds since the epoch).
        moved: paths created by ranks that were moved to it ("part/path").
        kept: paths created by ranks that conflict with it, and their new locations ("part/path: place").
        changed: the first path that differs from the previous generation; empty for the first one.
        changes: the number of paths that differ.
        broken: why ranks could not import its content; a rollback goes to such a generation only if it is named.
    """

    number: int
    parts: dict[str, tuple[str, bytes]]
    previous: int = 0
    time: float = 0.0
    moved: list[str] = []
    kept: list[str] = []
    changed: str = ""
    changes: int = 0
    broken: str = ""

    @property
    def digests(self) -> dict[str, bytes]:
        """The digests of its trees by part."""
        return {part: digest for part, (_, digest) in self.parts.items() if digest}


class ManifestRecord(msgspec.Struct, array_like=True):
    """A manifest, and the (digest, size) of its rewritten files on this host, by path."""

    manifest: ManifestDelta
    rewritten: dict[bytes, tuple[bytes, int]] = {}


def write_record(folder: PrivateFolder, name: str, record: object) -> None:
    """Write a record atomically.

    Raises:
        StoreError: it cannot be written.
    """
    data = msgspec.msgpack.encode(record)
    with explain(os.path.join(folder.path, name)):
        try:
            folder.replace(name, b"".join((_MAGIC, b"%04d\n" % FORMAT, digest_of(data), data)))
        except OSError:
            remove_record(folder, f"{name}.new")
            raise


def remove_record(folder: PrivateFolder, name: str) -> None:
    """Remove a record or link if it exists."""
    try:
        os.unlink(name, dir_fd=folder.fd)
    except FileNotFoundError:
        pass


def read_record(folder: PrivateFolder, name: str, kind: type[R]) -> R:
    """Read a record.

    Raises:
        FileNotFoundError: there is none.
        TamperedError: it was changed or truncated.
        StoreError: a newer version has written it, or it cannot be read.
    """
    path = os.path.join(folder.path, name)
    data = _read(folder, name, path)
    head, content = data[:_HEAD], memoryview(data)[_HEAD:]
    version = head[len(_MAGIC) : len(_MAGIC) + 4]
    if head.startswith(_MAGIC) and version.isdigit() and int(version) > FORMAT:
        raise StoreError(
            f"{path} was written by a newer version (format {int(version)}, this one knows {FORMAT}): update this "
            "host, or name another folder in MONARCH_KERNEL_SYNC_FOLDER"
        )
    if len(head) < _HEAD or not head.startswith(_MAGIC) or digest_of(content) != head[-DIGEST_SIZE:]:
        raise TamperedError(
            f"{path} is damaged: its digest does not hold; what it described is verified or sent again by a repair "
            "(--verify), and files of ranks are kept"
        )
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise TamperedError(f"{path} is damaged: {e}") from None


def _read(folder: PrivateFolder, name: str, path: str) -> bytes:
    try:
        with os.fdopen(folder.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise StoreError(f"{path} cannot be read: {e.strerror or e}") from None


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


# Record the generations of a workspace on one host, and switch the symbolic link to the current one.

CURRENT = "current"
_NEXT = "current.new"
_GENERATION = re.compile(r"generations/([1-9][0-9]*)")
_NAME = re.compile(r"([1-9][0-9]*)(\.state(?:\.new)?)?")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Pattern of the name of a slot: its part, and a number.
SLOT = re.compile(r"([a-z]+)-([1-9][0-9]*)")


class Generations:
    """The folder ``generations`` of a workspace: links for the current one, and a record of each kept one.

    Args:
        workspace: the folder of the workspace, with the link ``current``.
        folder: its folder ``generations``.
    """

    def __init__(self, workspace: PrivateFolder, folder: PrivateFolder) -> None:
        self._workspace = workspace
        self._folder = folder

    def close(self) -> None:
        """Close the folder's descriptor."""
        self._folder.close()

    def current(self) -> tuple[int, str]:
        """Return the number of the link ``current`` (0 if there is none), and its problem ("" if it is valid).

        Whether the link should exist (because there are ``records``) is for the caller to decide.

        Raises:
            TamperedError: it is not a link.
            StoreError: it cannot be read.
        """
        path = f"{self._workspace.path}/{CURRENT}"
        try:
            target = os.readlink(CURRENT, dir_fd=self._workspace.fd)
        except FileNotFoundError:
            return 0, ""
        except OSError as e:
            if e.errno == errno.EINVAL:
                raise TamperedError(f"{path} is not a link any more: move it away, and sync again") from e
            raise explained(e, path) from e
        match = _GENERATION.fullmatch(target)
        if match is None:
            return 0, f"the link {path} leads to {target!r}, which is no generation"
        number = int(match[1])
        if not self.linked(number):
            return number, f"the link {path} leads to generation {number}, which is not there"
        return number, ""

    def records(self) -> tuple[list[Generation], str]:
        """Return all records, newest first, and the problem of a damaged one.

        Raises:
            StoreError: a newer version has written one, or it cannot be read.
        """
        found: list[Generation] = []
        problem = ""
        for name in self._folder.names():
            match = _NAME.fullmatch(name)
            if match is None or match[2] != ".state":
                continue
            try:
                record = read_record(self._folder, name, Generation)
            except FileNotFoundError:
                continue
            except TamperedError as e:
                problem = str(e)
                continue
            if record.number == int(match[1]) and all(SLOT.fullmatch(slot) for slot, _ in record.parts.values()):
                found.append(record)
            else:
                problem = f"{self._folder.path}/{name} is damaged: it does not describe generation {match[1]}"
        return sorted(found, key=lambda each: -each.number), problem

    def next_number(self) -> int:
        """Return the number of the next generation."""
        matches = [match for name in self._folder.names() if (match := _NAME.fullmatch(name))]
        return max([self.current()[0], *(int(match[1]) for match in matches)]) + 1

    def switch(self, generation: Generation) -> None:
        """Record a generation and make it current; the last step is one ``rename``.

        Raises:
            StoreError: it cannot be written; the current generation is unchanged.
        """
        number = str(generation.number)
        self.note(generation)
        with explain(self._folder.path):
            os.mkdir(number, 0o700, dir_fd=self._folder.fd)
            for part, (slot, _) in generation.parts.items():
                os.symlink(f"../../slots/{slot}", f"{number}/{part}", dir_fd=self._folder.fd)
            remove_record(self._workspace, _NEXT)
            os.symlink(f"generations/{number}", _NEXT, dir_fd=self._workspace.fd)
            os.rename(_NEXT, CURRENT, src_dir_fd=self._workspace.fd, dst_dir_fd=self._workspace.fd)

    def drop_others(self) -> None:
        """Remove the links and records of generations that no rollback can go to.

        These are the links of all generations but the current one, the records of generations that were never switched
        to, and damaged records of earlier ones. If none is current, nothing is removed.
        """
        current, problem = self.current()
        if not current or problem:
            return
        with explain(self._folder.path):
            remove_record(self._workspace, _NEXT)
            for name in self._folder.names():
                match = _NAME.fullmatch(name)
                if match is None:
                    continue
                if match[2] is None and int(match[1]) != current:
                    self._remove_links(name)
                elif match[2] is not None and (int(match[1]) > current or match[2] != ".state"):
                    remove_record(self._folder, name)
                elif match[2] == ".state" and int(match[1]) < current:
                    try:
                        read_record(self._folder, name, Generation)
                    except TamperedError:
                        remove_record(self._folder, name)

    def linked(self, number: int) -> dict[str, str]:
        """Return the slot of each part of a generation, from the links."""
        found: dict[str, str] = {}
        try:
            fd = os.open(str(number), _FOLDER, dir_fd=self._folder.fd)
        except FileNotFoundError:
            return found
        except OSError as e:
            raise explained(e, f"{self._folder.path}/{number}") from e
        with Descriptor(fd):
            for part in os.listdir(fd):
                try:
                    slot = os.path.basename(os.readlink(part, dir_fd=fd))
                except OSError:
                    continue
                match = SLOT.fullmatch(slot)
                if match is not None and match[1] == part:
                    found[part] = slot
        return found

    def note(self, generation: Generation) -> None:
        """Write the record of a generation."""
        write_record(self._folder, f"{generation.number}.state", generation)

    def remove_all(self) -> None:
        """Remove the link ``current``, then all links and records. Other files stay."""
        self.current()  # raises if the link was replaced by something else
        with explain(self._folder.path):
            remove_record(self._workspace, CURRENT)
            remove_record(self._workspace, _NEXT)
            for name in self._folder.names():
                match = _NAME.fullmatch(name)
                if match is not None and match[2] is None:
                    self._remove_links(name)
                elif match is not None:
                    remove_record(self._folder, name)

    def forget(self, number: int) -> None:
        """Remove the record of a generation that is not the current one."""
        with explain(self._folder.path):
            remove_record(self._folder, f"{number}.state")

    def _remove_links(self, name: str) -> None:
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._folder.fd)
        except OSError:
            return
        try:
            for link in os.listdir(fd):
                if stat.S_ISLNK(os.stat(link, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(link, dir_fd=fd)
            os.rmdir(name, dir_fd=self._folder.fd)
        except OSError:
            return  # it contains other files
        finally:
            os.close(fd)


_ELSEWHERE = "name a folder elsewhere in MONARCH_KERNEL_SYNC_FOLDER"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: free some space, or {_ELSEWHERE}",
    errno.EDQUOT: f"your quota is used up: free some space, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is mounted read-only: {_ELSEWHERE}",
    errno.EACCES: f"this user may not write there: {_ELSEWHERE}",
    errno.EPERM: f"this user may not do that there: {_ELSEWHERE}",
    errno.ENAMETOOLONG: f"the name is too long for this file system: shorten it, ignore it, or {_ELSEWHERE}",
    errno.EIO: "the disk has failed: see the kernel's log (dmesg)",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
}


def explained(e: OSError, path: str) -> StoreError:
    """Convert an error of the file system, with its path and the remedy."""
    advice = _ADVICE.get(e.errno or 0)
    why = e.strerror or str(e)
    return StoreError(f"{path}: {why}" + (f" ({advice})" if advice else ""))


class ExplainedErrors:
    """Context manager of ``explain``. Entered for each file, so it is not a generator."""

    __slots__ = ("_below", "_path")

    def __init__(self, path: str | bytes, below: bytes) -> None:
        self._path = path
        self._below = below

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, e: BaseException | None, trace: object) -> None:
        if isinstance(e, OSError) and not isinstance(e, InterruptedError):  # work that was cancelled
            whole = printable(os.fsencode(self._path))
            raise explained(e, f"{whole}/{printable(self._below)}" if self._below else whole) from e


def explain(path: str | bytes, below: bytes = b"") -> ExplainedErrors:
    """Convert errors of the file system to ``StoreError``.

    Args:
        path: the folder or file that the block works on.
        below: a path within it.
    """
    return ExplainedErrors(path, below)
