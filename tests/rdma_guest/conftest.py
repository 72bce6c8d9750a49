"""Fixtures of what runs inside the guest: one runtime for all of it, as everything is slow there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import this_host
from monarch_kernel.rdma import configure
from tests.conftest import leak_check
from tests.transfer.actors import KeeperActor
from tests.transfer.conftest import Owner


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """All tests together leave nothing behind."""
    configure(backend="ibverbs")
    with leak_check("tests in the guest"):
        yield


@pytest.fixture(scope="session")
def far(no_leaks: None) -> Owner:
    """An owner in another process, which is reached through an RDMA device."""
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="owner")
    actor = procs.spawn("keeper", KeeperActor)
    return Owner("ibverbs", lambda *args: actor.do.call_one(*args).get(), actor, procs)


@pytest.fixture
def owner(far: Owner) -> Owner:
    """The same, by the name that the conformance tests use."""
    return far
