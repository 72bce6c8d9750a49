"""How meshes for sharded tensors end."""

from __future__ import annotations

import gc

import pytest
import torch

from monarch_kernel.distributed import Mesh, distribute
from tests.conftest import alive, wait_until

pytestmark = pytest.mark.own_runtime


def test_closed_mesh_ends_its_processes() -> None:
    mesh = Mesh((2,), ("x",))
    pids = list(mesh.procs.pids().values())
    assert distribute(torch.ones(3), mesh, ["x"]).sum().item() == 3
    mesh.close()
    mesh.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="was closed"):
        distribute(torch.ones(3), mesh)


def test_mesh_lives_as_long_as_a_tensor_of_it() -> None:
    mesh = Mesh((2,), ("x",))
    pids = list(mesh.procs.pids().values())
    x = distribute(torch.arange(3.0), mesh, ["x"])
    del mesh
    gc.collect()
    assert x.sum().item() == 3 and x.device_mesh.shape == (2,)
    del x
    gc.collect()
    wait_until(lambda: not any(map(alive, pids)), "the processes of a forgotten mesh end")
