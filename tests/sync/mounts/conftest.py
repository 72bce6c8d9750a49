"""Fixtures for tests of mounts: hosts with homes of their own, so that ``~/mnt`` is another folder on each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.otheruser import other_user  # noqa: F401  # a fixture
from tests.sync.hosts import StandingHosts, standing_hosts
from tests.workers import Team, team
from workspace_sync.mounts.mounting import Mounted, mine


def why_not() -> str:
    """Why nothing can be mounted here; empty if it can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        return f"/dev/fuse: {e.strerror}"
    if os.geteuid() != 0 and not shutil.which("fusermount3"):
        return "neither root nor fusermount3"
    return ""


def mounts_below(folder: Path) -> list[Mounted]:
    """The mounts of this package in a folder; other processes of this user may have others."""
    return [each for each in mine() if each.mountpoint.startswith(os.fsencode(folder) + b"/")]


@pytest.fixture(autouse=True)
def mounts_are_possible(tmp_path: Path) -> Iterator[None]:
    """Skips where there is no FUSE, and fails a test that leaves a mount."""
    if why := why_not():
        pytest.skip(f"nothing can be mounted here: {why}")
    yield
    assert not mounts_below(tmp_path)


class MountHosts:
    """Workers over TCP, each with a home and a store of its own.

    Attributes:
        team: the workers.
        homes: their homes.
        mesh: the hosts, attached.
    """

    def __init__(self, members: Team, homes: list[Path]) -> None:
        self.team = members
        self.homes = homes
        self.mesh: Any = members.attach()

    def mounts(self) -> list[Mounted]:
        """What is mounted in the homes."""
        return mounts_below(self.homes[0].parent)

    def servers(self) -> list[int]:
        """The processes that serve mounts in the homes."""
        return [int(each.source.split(b":")[3]) for each in self.mounts()]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingHosts]:
    """The two workers that a file's tests share."""
    if why := why_not():
        pytest.skip(f"nothing can be mounted here: {why}")
    folder = tmp_path_factory.mktemp("homes")
    with standing_hosts(folder, 2, HOME="{folder}", MONARCH_KERNEL_SYNC_FOLDER="{folder}/sync") as made:
        yield made


@pytest.fixture
def hosts(
    standing: StandingHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], MountHosts]]:
    """``hosts(2)``: two hosts with empty homes. A file's tests share the workers, and none may end one."""
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "client"))
    with standing.lent(tmp_path) as lend:

        def start(count: int) -> MountHosts:
            homes = standing.folders[:count]
            for home in homes:
                home.mkdir(mode=0o700)
            return MountHosts(lend(count), homes)

        yield start
        assert not mounts_below(standing.folders[0].parent)


@pytest.fixture
def own_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], MountHosts]]:
    """``own_hosts(2)``: two hosts of the test's own."""
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "client"))
    with team("tcp") as members:

        def start(count: int) -> MountHosts:
            homes = [tmp_path / f"home{n}" for n in range(count)]
            for home in homes:
                home.mkdir(mode=0o700)
                members.start(env={"HOME": str(home), "MONARCH_KERNEL_SYNC_FOLDER": str(home / "sync")})
            return MountHosts(members, homes)

        yield start
