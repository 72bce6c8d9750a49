"""Fixtures for tests over several hosts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import children, describe, wait_until
from tests.network.cluster import Cluster, Controller
from tests.network.hosts import CannotMakeHosts, Network, make_network

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need hosts."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.network)


@contextmanager
def network(*names: str) -> Generator[Network]:
    """A network of hosts; nothing of it is left behind. Skips where there can be none."""
    before = children()
    try:
        made = make_network(names)
    except CannotMakeHosts as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()
    left = children() - before
    wait_until(lambda: not left & children(), f"no process of the hosts is left: {list(map(describe, left))}")


@pytest.fixture
def hosts() -> Iterator[Callable[[int], Network]]:
    """``hosts(2)``: a controller's machine, ``controller``, and two hosts, ``host0`` and ``host1``, for one test.

    Besides them, ``spare``.
    """
    with ExitStack() as made:
        yield lambda n: made.enter_context(network("controller", "spare", *_names(n)))


@pytest.fixture
def cluster(hosts: Callable[[int], Network], tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """``cluster(2)``: the same with a worker on each host, for a test that breaks them."""
    made: list[Cluster] = []

    def make(n: int, env: Mapping[str, str] | None = None) -> Cluster:
        made.append(Cluster(hosts(n), tmp_path, env))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four hosts with workers that all tests of a module share; they break none of them."""
    with network("controller", *_names(4)) as made:
        cluster = Cluster(made, tmp_path_factory.mktemp("cluster"))
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def controller(shared: Cluster) -> Controller:
    """A controller of the shared workers."""
    return shared.control()


def _names(n: int) -> list[str]:
    return [f"host{i}" for i in range(n)]
