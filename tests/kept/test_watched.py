"""A watch sees a kept mesh while this controller has it, and all of it again after an attach."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from monarch_kernel.actor import shutdown_context
from monarch_kernel.meshes import attach, keep
from monarch_kernel.watch import RankView, Snapshot, Watch, advanced, watch
from tests.deaths import Mortal

pytestmark = pytest.mark.own_runtime

LIMIT = 60.0


@pytest.fixture(autouse=True)
def controller() -> Iterator[None]:
    yield
    shutdown_context().get()


def until(seen: Watch, holds: Callable[[RankView], bool]) -> Snapshot:
    """Wait until something holds of the only rank."""
    snapshot = seen.snapshot()
    for delta in seen.changes(LIMIT):
        snapshot = advanced(snapshot, delta)
        if [rank for ranks in snapshot.ranks.values() for rank in ranks if holds(rank)]:
            return snapshot
    raise AssertionError(f"it never held: {snapshot}")


def test_a_kept_mesh_is_watched_again_when_it_is_attached_to() -> None:
    host = keep("alpha", idle=60)
    mesh = host.hosts.spawn_procs({"gpus": 1}, name="train")
    mesh.spawn("trainer", Mortal).initialized.get(LIMIT)
    with watch(period=0.05) as seen:
        snapshot = until(seen, lambda rank: bool(rank.actors))
        assert [view.kept for view in snapshot.meshes.values()] == ["alpha"]
        host.detach()
        assert not seen.snapshot().meshes
        again = attach("alpha")
        snapshot = until(seen, lambda rank: bool(rank.actors) and bool(rank.rss))
        assert [view.kept for view in snapshot.meshes.values()] == ["alpha"]
        again.down()
        assert not seen.snapshot().meshes
