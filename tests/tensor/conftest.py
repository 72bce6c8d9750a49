"""Meshes of tests of tensors: one for each file, where nothing dies."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from monarch_kernel.actor import this_host

# Without torch, none of the modules here can even be imported.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="module")
def four(runtime: None) -> Any:
    """Four ranks."""
    return this_host().spawn_procs(per_host={"gpus": 4}, name="four")
