"""Records of a store: small files, checked by digest, replaced atomically, with a version.

A record is never trusted without its digest: a truncated or changed record is reported as damaged. Records are not
flushed to disk individually. After a power failure, trees are verified before they are used again, so a lost record
costs only a verification.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import StoreError, TamperedError
from workspace_sync.model.manifest import DIGEST_SIZE, ManifestDelta, digest_of
from workspace_sync.store.failures import explain

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
