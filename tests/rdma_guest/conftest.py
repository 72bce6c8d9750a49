"""Fixtures of what runs inside the guest: one runtime for all of it, as everything is slow there."""

from __future__ import annotations

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.rdma import configure
from tests.transfer.actors import KeeperActor
from tests.transfer.conftest import Owner


@pytest.fixture(scope="session", autouse=True)
def on_the_device(checked_session: None) -> None:
    """All tests are of one backend."""
    configure(backend="ibverbs")


@pytest.fixture(scope="session")
def far(on_the_device: None) -> Owner:
    """An owner in another process, which is reached through an RDMA device."""
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="owner")
    actor = procs.spawn("keeper", KeeperActor)
    return Owner("ibverbs", lambda *args: actor.do.call_one(*args).get(), actor, procs)


@pytest.fixture
def owner(far: Owner) -> Owner:
    """The same, by the name that the conformance tests use."""
    return far


@pytest.fixture(scope="session")
def two(far: Owner) -> ProcMesh:
    """Two others, for the conformance tests."""
    return this_host().spawn_procs(per_host={"gpus": 2})
