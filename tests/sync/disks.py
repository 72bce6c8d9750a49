"""File systems of a test's own: soon full, with reflinks, one that takes ``A`` for ``a``, one with short names only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The size of a file system in a file; XFS makes none that is smaller than 300 MB.
SIZE = 320 << 20


class CannotMountError(Exception):
    """This user, this kernel or this machine's programs cannot make the file system."""


def _run(*command: str, given: str = "") -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, input=given)
        return done.stdout.strip()
    except FileNotFoundError:
        raise CannotMountError(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        raise CannotMountError(f"{command[0]}: {said[-1] if said else error.returncode}") from None


def _only_root() -> None:
    if os.geteuid() != 0:
        raise CannotMountError("only root can mount file systems")


@contextmanager
def limited(folder: Path, size: int, files: int = 0) -> Generator[Path]:
    """A tmpfs that holds so many bytes, and so many files if any are named; on exit it is gone with all of them."""
    _only_root()
    where = folder / "limited"
    where.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={files},mode=0700", "tmpfs", str(where))
    try:
        yield where
    finally:
        _run("umount", str(where))
        where.rmdir()


@contextmanager
def _loop(folder: Path, name: str, make: Sequence[str], mount: Sequence[str]) -> Generator[Path]:
    """A file system in a file; ``make`` gets the file, ``mount`` its device and the folder."""
    _only_root()
    if not os.path.exists("/dev/loop-control"):
        raise CannotMountError("this kernel offers no loop devices")
    image, where = folder / f"{name}.image", folder / name
    with image.open("wb") as file:
        file.truncate(SIZE)
    device = ""
    try:
        _run(*make, str(image))
        device = _run("losetup", "--find", "--show", str(image))
        where.mkdir()
        try:
            _run(*mount, device, str(where))
            try:
                where.chmod(0o700)
                yield where
            finally:
                _run("umount", str(where))
        finally:
            where.rmdir()
    finally:
        if device:
            _run("losetup", "--detach", device)
        image.unlink()


@contextmanager
def reflinks(folder: Path, kind: str) -> Generator[Path]:
    """A ``btrfs`` or an ``xfs`` in a file: files can share their bytes until one of them is written."""
    made = ["mkfs.btrfs", "--quiet"] if kind == "btrfs" else ["mkfs.xfs", "-q", "-m", "reflink=1"]
    with _loop(folder, kind, made, ["mount", "-t", kind]) as where:
        yield where


@contextmanager
def case_insensitive(folder: Path) -> Generator[Path]:
    """ext4 with such folders if the kernel has them, else NTFS over FUSE."""
    if os.path.exists("/sys/fs/ext4/features/casefold"):
        with _loop(folder, "casefold", ["mkfs.ext4", "-q", "-O", "casefold"], ["mount"]) as where:
            root = where / "folded"
            root.mkdir(mode=0o700)
            _run("chattr", "+F", str(root))
            yield root
    elif shutil.which("lowntfs-3g") is None:
        raise CannotMountError("this kernel's ext4 has no case-insensitive folders, and lowntfs-3g is not installed")
    else:
        mount = ["lowntfs-3g", "-o", "ignore_case,permissions"]
        with _loop(folder, "ntfs", ["mkntfs", "--quick", "--force", "--quiet"], mount) as where:
            yield where


@contextmanager
def short_names(folder: Path) -> Generator[Path]:
    """A folder in which a name may have about 170 bytes, as on some encrypted home folders."""
    behind, where = folder / "short-behind", folder / "short"
    behind.mkdir()
    where.mkdir()
    try:
        _run("encfs", "--standard", "--stdinpass", str(behind), str(where), given="password\n")
        try:
            yield where
        finally:
            _run("fusermount3", "-u", str(where))
    finally:
        where.rmdir()
        shutil.rmtree(behind)


def left_below(folder: Path) -> list[str]:
    """Mounts and loop devices that are left there."""
    left = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4].startswith(f"{folder}/")
    ]
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = device.read_text().strip()
        except OSError:  # it was released a moment ago
            continue
        if backing.startswith(f"{folder}/"):
            left.append(f"/dev/{device.parent.parent.name} on {backing}")
    return left
