"""The file systems that tests of syncs run on are what they are said to be."""

from __future__ import annotations

import errno
import fcntl
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sync.disks import left_below
from tests.sync.trees import difference, make_tree, mutate, snapshot

FICLONE = 0x40049409  # of linux/fs.h


def test_a_limited_disk_is_soon_full(limited_disk: Callable[[int], Path]) -> None:
    with pytest.raises(OSError) as caught:
        (limited_disk(1 << 20) / "file").write_bytes(bytes(2 << 20))
    assert caught.value.errno == errno.ENOSPC


def test_reflinks_share_bytes(reflink_disk: Path) -> None:
    (reflink_disk / "a").write_bytes(b"x" * 100_000)
    with (reflink_disk / "a").open("rb") as one, (reflink_disk / "b").open("wb") as other:
        fcntl.ioctl(other, FICLONE, one.fileno())
    assert (reflink_disk / "b").read_bytes() == b"x" * 100_000


def test_names_of_other_case_are_the_same(case_insensitive_disk: Path) -> None:
    (case_insensitive_disk / "Name").write_text("one")
    assert (case_insensitive_disk / "nAME").read_text() == "one"


def test_a_long_name_is_too_long(short_name_disk: Path) -> None:
    (short_name_disk / ("a" * 100)).write_text("fits")
    with pytest.raises(OSError) as caught:
        (short_name_disk / ("a" * 200)).write_text("does not")
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_mount_that_is_left_is_found(limited_disk: Callable[[int], Path], tmp_path: Path) -> None:
    assert left_below(tmp_path) == []
    where = limited_disk(1 << 20)
    assert left_below(tmp_path) == [str(where)]


def test_a_snapshot_sees_every_kind_of_change(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree", large=9 << 20)
    before = snapshot(root)
    assert before == snapshot(make_tree(tmp_path / "again", large=9 << 20))
    mutate(root, random.Random(1))
    assert len(difference(before, snapshot(root)).splitlines()) > 5
