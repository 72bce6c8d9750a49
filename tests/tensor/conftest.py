"""Meshes of tests of tensors: one for each module, where nothing dies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import this_host
from monarch_kernel.runtime.actor import system
from tests.conftest import leak_check

# Without torch, none of the modules here can even be imported.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="module")
def runtime() -> Iterator[None]:
    """One controller and host agent for the tests of a module."""
    with leak_check("module"):
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of a module share a runtime; with the mark ``own_runtime`` a test gets one, which it may break."""
    if request.node.get_closest_marker("own_runtime"):
        system.shutdown()
        with leak_check():
            yield
    else:
        request.getfixturevalue("runtime")
        yield


@pytest.fixture(scope="module")
def four(runtime: None) -> Any:
    """Four ranks."""
    return this_host().spawn_procs(per_host={"gpus": 4}, name="four")
