"""Describe a large first sync before it starts: the content to send, and the content left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from monarch_kernel.display.quantities import memory, text_size
from workspace_sync.model.manifest import Manifest, entry_path, printable
from workspace_sync.scanning.index import Record

#: Larger first syncs are announced (files, bytes).
FILES = 10_000
BYTES = 1 << 30
#: The number of folders and of ignore lines that are listed.
_NAMED = 5


@dataclass(frozen=True)
class LeftOut:
    """Entries left out by one line of an ignore file.

    Attributes:
        source: ``file:line: text``, or ``default: text``.
        files: the number of files, outside ignored folders.
        folders: the number of folders, which are not entered.
        bytes: the size of the files when they were first seen.
        example: one of them, a path in the tree.
    """

    source: str
    files: int
    folders: int
    bytes: int
    example: bytes


@dataclass(frozen=True)
class FolderSize:
    """A folder with everything below it.

    Attributes:
        path: in the tree.
        files: files.
        bytes: their bytes.
    """

    path: bytes
    files: int
    bytes: int


@dataclass(frozen=True)
class Announcement:
    """Content of a first sync before it is sent; ``str`` renders it.

    Attributes:
        sources: the folders of the client.
        files: the number of files to send.
        bytes: their bytes.
        largest: the folders with most of the content, largest first.
        left_out: the ignored entries by line, largest first.
    """

    sources: list[str]
    files: int
    bytes: int
    largest: list[FolderSize]
    left_out: list[LeftOut]

    def __str__(self) -> str:
        lines = [f"The first sync sends {self.files:,} files ({_size(self.bytes)}) from {', '.join(self.sources)}."]
        if self.largest:
            lines.append("Most of it is in:")
            lines += [
                f"  {_size(each.bytes):>9}  {each.files:>9,} files  {printable(each.path) or '.'}"
                for each in self.largest
            ]
        if self.left_out:
            lines.append("Left out:")
            lines += [f"  {_amount(each)}  by {each.source}" for each in self.left_out[: 2 * _NAMED]]
            if len(self.left_out) > 2 * _NAMED:
                lines.append(f"  ... and by {len(self.left_out) - 2 * _NAMED} more lines")
        lines.append(f"Lines in {self.sources[0]}/.meshignore leave out more; they are written as in .gitignore.")
        return "\n".join(lines)


def announce(
    sizes: Mapping[bytes, Iterable[int]], records: dict[bytes, Record], reasons: list[str], sources: list[str]
) -> Announcement | None:
    """Describe a first sync; return None if it sends at most 10,000 files and 1 GB.

    Args:
        sizes: of the files (bytes), by the path of their folder in the tree.
        records: the records of the client's folders.
        reasons: the reasons why entries are left out.
        sources: the folders of the client.
    """
    own = {path: (len(each), sum(each)) for path, found in sizes.items() if (each := list(found))}
    files, size = (sum(each) for each in zip((0, 0), *own.values(), strict=True))
    if files <= FILES and size <= BYTES:
        return None
    return Announcement(sources, files, size, largest_folders(own), left_out(records, reasons))


def sizes_in(manifest: Manifest) -> Iterator[tuple[bytes, list[int]]]:
    """Iterate over the folders of a manifest with the sizes of their files."""
    for path, folder in manifest.folders.items():
        yield path, [entry.size for entry in folder.files.values()]


def left_out(records: dict[bytes, Record], reasons: list[str]) -> list[LeftOut]:
    """Count the entries that each line leaves out, most bytes first."""
    files: dict[int, int] = {}
    folders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    examples: dict[int, bytes] = {}
    for place, record in records.items():
        for name, why in record.ignored.items():
            reason = why.reason
            counted = folders if why.folder else files
            counted[reason] = counted.get(reason, 0) + 1
            sizes[reason] = sizes.get(reason, 0) + why.size
            examples.setdefault(reason, entry_path(place, name))
    found = [
        LeftOut(reasons[reason], files.get(reason, 0), folders.get(reason, 0), sizes[reason], example)
        for reason, example in examples.items()
    ]
    return sorted(found, key=lambda each: (-each.bytes, -each.folders, -each.files, each.source))


def largest_folders(own: Mapping[bytes, tuple[int, int]]) -> list[FolderSize]:
    """Return the folders with the most bytes. A subfolder with most of its parent's bytes replaces the parent.

    Args:
        own: the number and bytes of the files directly in each folder.
    """
    totals: dict[bytes, list[int]] = {}
    for path, (files, size) in own.items():
        at = path
        while True:
            total = totals.setdefault(at, [0, 0])
            total[0] += files
            total[1] += size
            if not at:
                break
            at = at.rpartition(b"/")[0]
    below: dict[bytes, int] = {}  # the bytes of the largest subfolder
    for path, (_, size) in totals.items():
        if path:
            parent = path.rpartition(b"/")[0]
            below[parent] = max(below.get(parent, 0), size)
    chosen = [
        FolderSize(path, files, size)
        for path, (files, size) in totals.items()
        if size and below.get(path, 0) < 0.8 * size and (path or len(totals) == 1)
    ]
    return sorted(chosen, key=lambda each: (-each.bytes, each.path))[:_NAMED]


def _size(size: int) -> str:
    return memory(size) if size >= 1_000_000 else text_size(size)


def _amount(each: LeftOut) -> str:
    parts: list[str] = []
    if each.folders:
        parts.append("1 folder" if each.folders == 1 else f"{each.folders:,} folders")
    if each.files:
        parts.append(f"{'1 file' if each.files == 1 else f'{each.files:,} files'} ({_size(each.bytes)})")
    return ", ".join(parts)
