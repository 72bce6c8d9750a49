"""One owner for each backend: this process, or another one that is reached in a certain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.rdma import configure
from tests.actor.conftest import faults as faults
from tests.actor.conftest import no_faults as no_faults
from tests.transfer.actors import Keeper, KeeperActor

#: Every backend that runs on one host, and how TCP is used; the conformance tests run on each.
LOCAL_BACKENDS = ("local", "cma", "segment", "tcp", "tcp in the clear")
FAR_BACKENDS = LOCAL_BACKENDS[1:]


@dataclass
class Owner:
    """Who owns the buffers of a test."""

    backend: str
    do: Callable[..., Any]  # do("method of Keeper", *args)
    actor: Any  # None: this process
    procs: ProcMesh | None


@pytest.fixture
def forced() -> Iterator[Callable[[str], None]]:
    """``forced("segment")``: use that backend, here and in procs spawned from now on, until the test ends."""
    yield force
    configure(backend="auto", tcp="encrypted")


def force(name: str) -> None:
    """Use one of ``LOCAL_BACKENDS``."""
    backend, _, how = name.partition(" ")
    configure(backend=backend, tcp="trusted-network" if how else "encrypted")


@pytest.fixture(params=LOCAL_BACKENDS)
def owner(request: pytest.FixtureRequest, forced: Callable[[str], None]) -> Owner:
    """An owner that this process reaches through each backend."""
    return make_owner(request.param, forced)


@pytest.fixture(params=FAR_BACKENDS)
def far(request: pytest.FixtureRequest, forced: Callable[[str], None]) -> Owner:
    """The same, but always another process."""
    return make_owner(request.param, forced)


def make_owner(backend: str, forced: Callable[[str], None]) -> Owner:
    """An owner that is reached through a backend."""
    forced(backend)
    backend = backend.partition(" ")[0]
    if backend == "local":
        keeper = Keeper()
        return Owner(backend, lambda method, *args: getattr(keeper, method)(*args), None, None)
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="owner")
    actor = procs.spawn("keeper", KeeperActor)
    return Owner(backend, lambda *args: actor.do.call_one(*args).get(), actor, procs)
