"""Fixtures for tests of syncs: hosts with stores of their own, trees, and file systems with a peculiarity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.otheruser import other_user, shared  # noqa: F401  # fixtures
from tests.sync.disks import CannotMountError, case_insensitive, left_below, limited, reflinks, short_names
from tests.sync.hosts import StandingHosts, StoreHosts, standing_hosts
from tests.sync.trees import make_tree
from tests.workers import team


@pytest.fixture(autouse=True)
def nothing_mounted(tmp_path: Path) -> Iterator[None]:
    """A test that leaves a mount or a loop device in its folder fails."""
    yield
    left = left_below(tmp_path)
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with everything that a folder can hold."""
    return make_tree(tmp_path / "source")


@pytest.fixture(scope="module")
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingHosts]:
    """The workers that a file's tests share; so many as the most that one of them needs (``STANDING`` in the file)."""
    root, count = tmp_path_factory.mktemp("hosts"), getattr(request.module, "STANDING", 2)
    with standing_hosts(root, count, MONARCH_KERNEL_SYNC_FOLDER="{folder}") as made:
        yield made


@pytest.fixture
def store_hosts(
    standing: StandingHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], StoreHosts]]:
    """``store_hosts(2)``: workers over TCP, each with an empty store; this process has one, too.

    A file's tests share the workers, and none may end one: ``own_hosts`` are for that.
    """
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "client"))
    with standing.lent(tmp_path) as lend:
        yield lambda count: StoreHosts(lend(count), standing.folders[:count])


@pytest.fixture
def own_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StoreHosts]]:
    """``own_hosts(folder, folder)``: workers of the test's own, with these stores."""
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "client"))
    with team("tcp") as members:

        def start(*stores: Path) -> StoreHosts:
            for store in stores:
                members.start(env={"MONARCH_KERNEL_SYNC_FOLDER": str(store)})
            return StoreHosts(members, list(stores))

        yield start


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[[AbstractContextManager[Path]], Path]]:
    """Mounts a file system for one test, which is skipped where it cannot be made."""
    with ExitStack() as opened:

        def mount(made: AbstractContextManager[Path]) -> Path:
            try:
                return opened.enter_context(made)
            except CannotMountError as why:
                pytest.skip(str(why))

        yield mount


@pytest.fixture
def limited_disk(tmp_path: Path, disks: Callable[..., Path]) -> Callable[..., Path]:
    """``limited_disk(1 << 20)``: a file system that holds so many bytes; ``limited_disk(1 << 20, 50)``: and files."""
    return lambda size, files=0: disks(limited(tmp_path, size, files))


@pytest.fixture(params=["btrfs", "xfs"])
def reflink_disk(request: pytest.FixtureRequest, tmp_path: Path, disks: Callable[..., Path]) -> Path:
    """File systems on which files can share their bytes."""
    return disks(reflinks(tmp_path, request.param))


@pytest.fixture
def case_insensitive_disk(tmp_path: Path, disks: Callable[..., Path]) -> Path:
    """A file system that takes ``A`` for ``a``."""
    return disks(case_insensitive(tmp_path))


@pytest.fixture
def short_name_disk(tmp_path: Path, disks: Callable[..., Path]) -> Path:
    """A file system whose names are shorter than others'."""
    return disks(short_names(tmp_path))
