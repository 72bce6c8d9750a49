"""A full disk: `keep` says so, and where, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.meshes import KeptError, keep
from tests.conftest import wait_until
from tests.kept.conftest import processes

PAGE = os.sysconf("SC_PAGE_SIZE")


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, pages_left: int) -> None:
        """Fill it, but for so many pages."""
        found = os.statvfs(self.path)
        (self.path / "film").write_bytes(bytes((found.f_bavail - pages_left) * PAGE))
        assert os.statvfs(self.path).f_bavail == pages_left


@pytest.fixture
def disk() -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tempfile.mkdtemp(prefix="mk-disk-", dir="/tmp")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        os.rmdir(folder)
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(Path(folder))
    finally:
        wait_until(lambda: not processes(folder), "the keepers on it have ended")
        subprocess.run(["umount", "--lazy", folder], check=True)  # a process that ends may hold it a moment longer
        os.rmdir(folder)


# With none there is no room for what says whose the folder is, with one none for the log and the description.
@pytest.mark.parametrize("pages_left", [0, 1])
def test_keep_on_a_full_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch, pages_left: int) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_KEPT_DIR", str(disk.path))
    disk.fill(pages_left)
    with pytest.raises(KeptError, match=rf"mesh 't' cannot be kept: .*No space left on device: '{disk.path}/t"):
        keep("t")
    assert os.listdir(disk.path) == ["film"]
    (disk.path / "film").unlink()
    keep("t").down()
