"""Trees for tests of syncs: everything that a folder can hold, changes to it, and what is really there."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
from pathlib import Path

#: Names that are legal and seldom thought of; one is no UTF-8.
ODD_NAMES = (b"with space", b"new\nline", b"\xff\xfe", "ärger ✓".encode(), b"-rf", b"*", b"quote'\"", b"a" * 255)
#: What a tree holds: path -> mode and kind, with the digest of a file and the target of a link.
Snapshot = dict[bytes, tuple[str, ...]]


def write(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """A file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def make_tree(root: Path, seed: int = 1, files: int = 120, large: int = 12 << 20) -> Path:
    """A tree with small files, one large file, links, modes, empty folders and odd names."""
    draw = random.Random(seed)
    root.mkdir(parents=True)
    for number in range(files):
        folder = root / f"pkg{number % 7}" / f"sub{number % 3}"
        write(folder / f"m{number}.py", f"VALUE = {number}\n" + "#" * draw.randrange(3000))
    write(root / "large.bin", draw.randbytes(large))
    write(root / "tool", "#!/bin/sh\nexit 0\n", 0o755)
    write(root / "empty_file", b"")
    (root / "empty" / "deeper").mkdir(parents=True)
    (root / "link").symlink_to("pkg0/sub0/m0.py")
    (root / "pkg1" / "dangling").symlink_to("nowhere")
    (root / "folder_link").symlink_to("pkg2")
    for name in ODD_NAMES:
        with open(os.fsencode(root) + b"/" + name, "wb") as file:
            file.write(b"odd " + name)
    return root


def mutate(root: Path, draw: random.Random) -> None:
    """Change it as people do: edits, inside a large file, new and deleted files, a rename, another kind."""
    files = sorted(path for path in root.rglob("m*.py") if path.is_file() and not path.is_symlink())
    for path in draw.sample(files, 12):
        path.write_text(f"VALUE = {draw.random()}\n")
    for path in draw.sample(files, 3):
        path.unlink()
    for _ in range(4):
        write(root / f"new{draw.randrange(5)}" / f"m{draw.randrange(10**9)}.py", draw.randbytes(2000))
    with (root / "large.bin").open("r+b") as file:
        file.seek(draw.randrange(8 << 20))
        file.write(draw.randbytes(1 << 20))
    (root / "pkg3").rename(root / "moved")
    (root / "moved").rename(root / "pkg3" if draw.random() < 0.5 else root / f"pkg{draw.randrange(10**6)}")
    if not (root / "pkg3").exists():
        write(root / "pkg3" / "sub0" / f"m{draw.randrange(10**9)}.py", "VALUE = 3\n")
    swap = root / "swap"
    if swap.is_dir():
        shutil.rmtree(swap)
        swap.write_text("now a file")
    elif swap.is_symlink():
        swap.unlink()
        write(swap / "inner" / "m1.py", "now a folder")
    else:
        swap.unlink(missing_ok=True)
        swap.symlink_to("tool")
    (root / "tool").chmod(draw.choice([0o700, 0o755, 0o750]))


def snapshot(root: Path | str) -> Snapshot:
    """What is there, read in full: nothing that anyone recorded about it is believed."""
    found: Snapshot = {}
    todo = [b""]
    base = os.fsencode(root)
    while todo:
        folder = todo.pop()
        status = os.lstat(os.path.join(base, folder))
        assert stat.S_ISDIR(status.st_mode), folder
        found[folder] = ("folder", oct(stat.S_IMODE(status.st_mode)))
        for name in os.listdir(os.path.join(base, folder)):
            path = os.path.join(folder, name)
            status = os.lstat(os.path.join(base, path))
            if stat.S_ISDIR(status.st_mode):
                todo.append(path)
            elif stat.S_ISLNK(status.st_mode):
                found[path] = ("link", os.readlink(os.path.join(base, path)).hex())
            else:
                assert stat.S_ISREG(status.st_mode), path
                with open(os.path.join(base, path), "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[path] = ("file", oct(stat.S_IMODE(status.st_mode)), digest)
    return found


def difference(one: Snapshot, other: Snapshot) -> str:
    """How two snapshots differ, for a failure message; empty: not at all."""
    lines = [
        f"{path!r}: {one.get(path)} / {other.get(path)}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]
    more = f"\n... {len(lines) - 10} more" if len(lines) > 10 else ""
    return "\n".join(lines[:10]) + more
