"""Trees to sync, and changes to them. Equal seeds produce equal bytes; a tree is created once and reused."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

#: The number of bytes written at a time.
PIECE = 16 << 20
#: The module that is edited, and imported by ranks.
MODULE = "edited"
#: The maximum size of a small file (bytes).
SMALL = 16 << 10
#: The number of files in a folder, and of folders in a folder.
PER_FOLDER, PER_PARENT = 20, 25


@dataclass(frozen=True)
class TreeSpec:
    """Parameters of a tree.

    Attributes:
        name: of its folder.
        files: the number of files, without the module.
        size: their total size (bytes).
        seed: of sizes and content.
    """

    name: str
    files: int
    size: int
    seed: int = 13

    def layout(self) -> Iterator[tuple[str, int]]:
        """Iterate over path and size of each file: sizes as in a tree of sources and data, half below some 8 KB."""
        draw = random.Random(self.seed)
        drawn = [draw.lognormvariate(math.log(6000), 1.9) for _ in range(self.files)]
        scale = self.size / sum(drawn)
        for number, size in enumerate(drawn):
            folder = number // PER_FOLDER
            parent, top = folder // PER_PARENT, folder // PER_PARENT**2
            yield f"p{top}/q{parent}/r{folder}/file{number}.bin", max(1, int(size * scale))


class BenchTree:
    """A tree on disk, and changes to it."""

    def __init__(self, spec: TreeSpec, folder: Path) -> None:
        self.spec = spec
        self.path = folder / spec.name
        self._files: list[tuple[str, int]] = list(spec.layout())
        self._changes = 0

    @property
    def size(self) -> int:
        """The size of its files (bytes)."""
        return sum(size for _, size in self._files)

    def make(self) -> BenchTree:
        """Write the tree unless an earlier run has; an unfinished tree is written again."""
        stamp = self.path.with_suffix(".made")
        wanted = json.dumps(asdict(self.spec))
        if not (stamp.exists() and stamp.read_text() == wanted):
            print(f"making {self.path}: {self.spec.files:,} files, {self.size / 1e9:.1f} GB ...", file=sys.stderr)
            stamp.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            content = random.Random(self.spec.seed)
            for name, size in self._files:
                file = self.path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as out:
                    for at in range(0, size, PIECE):
                        out.write(content.randbytes(min(PIECE, size - at)))
            os.sync()
            stamp.write_text(wanted)
        self.edit()
        return self

    def warm(self) -> None:
        """Read everything once, so that it is in the page cache for each peer."""
        buffer = bytearray(PIECE)
        for name, _ in self._files:
            with open(self.path / name, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def edit(self) -> int:
        """Edit the module; return its new value."""
        self._changes += 1
        value = (os.getpid() << 20) + self._changes  # never equal to a value of an earlier run
        (self.path / f"{MODULE}.py").write_text(f'"""Edited by the bench."""\n\nVALUE = {value}\n')
        return value

    def change_small(self, count: int) -> list[str]:
        """Write other bytes of the same length into small files; return their paths."""
        draw = self._random()
        names = [(name, size) for name, size in self._files if size <= SMALL][:count]
        for name, size in names:
            (self.path / name).write_bytes(draw.randbytes(size))
        return [name for name, _ in names]

    def change_inside(self, size: int) -> str:
        """Overwrite some bytes somewhere in the largest file; return its path."""
        draw = self._random()
        name, length = max(self._files, key=lambda each: each[1])
        with (self.path / name).open("r+b") as file:
            file.seek(draw.randrange(length - size))
            file.write(draw.randbytes(size))
        return name

    def sample(self, count: int = 200) -> list[str]:
        """Return some of its files, spread over the whole tree, and the module."""
        step = max(1, len(self._files) // count)
        return [f"{MODULE}.py", *(name for name, _ in self._files[::step])]

    def _random(self) -> random.Random:
        self._changes += 1
        return random.Random(f"{os.getpid()} {self._changes}")
