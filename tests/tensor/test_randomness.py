"""Seeds and states of the ranks' random numbers, gradients by Monarch's names, and Monarch's modules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import monarch_kernel
from monarch_kernel.builtins.random import seed_remote, set_manual_seed_remote
from monarch_kernel.random import get_rng_state, get_state, manual_seed, new_state, set_rng_state, set_state
from monarch_kernel.tensor import (
    call_on_shard_and_fetch,
    fetch_shard,
    grad_function,
    grad_generator,
    inspect,
    reduce,
    reduce_,
    show,
)
from tests.waiting import patience


def test_seeds_and_states(four: Any) -> None:
    torch.manual_seed(7)
    local = torch.rand(3)
    with four.activate():
        torch.manual_seed(7)
        same = torch.rand(3)
        state = get_rng_state()
        first = torch.rand(3)
        set_rng_state(state)
        again = torch.rand(3)
        manual_seed(7, per_rank=True)
        own = torch.rand(3)
    assert torch.equal(inspect(same), local) and torch.equal(inspect(same, gpus=3), local)
    assert torch.equal(inspect(first, gpus=2), inspect(again, gpus=2))
    assert torch.equal(inspect(own), local) and not torch.equal(inspect(own, gpus=1), local)
    with pytest.raises(ValueError, match="no device mesh"):
        manual_seed(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_draw_the_same_again(four: Any, reentrant: bool) -> None:
    def region(x: Any) -> Any:
        return torch.nn.functional.dropout(torch.nn.functional.dropout(x, 0.3) * x, 0.5)

    with four.activate():
        torch.manual_seed(3)
        given = torch.rand(64)
        found = []
        for checkpointed in (True, False):
            manual_seed(11, per_rank=True)
            torch.random.default_generator.manual_seed(5)
            x = given.clone().requires_grad_()
            y = torch.nn.functional.dropout(x * 2, 0.1)
            for _ in range(3):
                y = checkpoint(region, y, use_reentrant=reentrant) if checkpointed else region(y)
                y = torch.nn.functional.dropout(y + 1, 0.1)
            y.sum().backward()
            after = torch.rand(8)  # what the program draws next is not what the backward pass drew
            found.append([inspect(t, gpus=k).clone() for t in (y, x.grad, after) for k in (0, 3)])
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_numbers_that_are_not_kept_are_drawn_anew(four: Any) -> None:
    with four.activate():
        x = torch.ones(256, requires_grad=True)
        y = checkpoint(
            lambda x: torch.nn.functional.dropout(x, 0.5) * x, x, use_reentrant=False, preserve_rng_state=False
        )
        y.sum().backward()
        assert inspect(x.grad).shape == (256,)


def test_gradients_by_name(four: Any) -> None:
    @grad_function
    def double(x: Any, y: Any) -> Any:
        return x * 2 + y, lambda grad: (grad * 20, grad)

    with four.activate():
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        unused = torch.ones(2, requires_grad=True)
        gradients = grad_generator(double(x, y).sum(), [y, x, unused])
        assert inspect(next(gradients))[0] == 1 and inspect(next(gradients))[0] == 20
        assert next(gradients) is None


def test_values_are_shown(four: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with four.activate():
        show(torch.ones(2) * four.rank_tensor("gpus"), gpus=2)
    assert "tensor([2., 2.])" in capsys.readouterr().out


def test_ranks_log(four: Any) -> None:
    import logging

    from monarch_kernel.builtins import log_remote, set_logging_level_remote

    def keep() -> None:
        logger, lines = logging.getLogger("monarch.ranks"), []  # type: ignore[var-annotated]
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger.addHandler(handler)
        logger.propagate = False
        logger.lines = lines  # type: ignore[attr-defined]

    with four.activate():
        call_on_shard_and_fetch(keep).get()
        set_logging_level_remote(logging.INFO)
        log_remote("rank %s of %d", four.rank_tensor("gpus"), 4, level=logging.INFO)
        log_remote("hidden", level=logging.DEBUG)
        lines = call_on_shard_and_fetch(lambda: logging.getLogger("monarch.ranks").lines, shard={"gpus": 3}).get()  # type: ignore[attr-defined]
    assert lines == ["rank 3 of 4"]


def test_monarchs_modules() -> None:
    program = """
from monarch_kernel import enable_monarch_imports
enable_monarch_imports()
import monarch, sys
assert "torch" not in sys.modules
from monarch import Tensor, Stream, fetch_shard, inspect, no_mesh, remote, to_mesh, slice_mesh, show, get_active_mesh
from monarch.mesh_controller import RemoteException
from monarch.gradient_generator import grad_generator
from monarch.builtins.random import set_manual_seed_remote
from monarch.common.stream import Stream as S
import monarch.random
assert S is Stream
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))
    assert monarch_kernel.fetch_shard is monarch_kernel.tensor.fetch_shard


def test_states_of_monarchs_kind(four: Any) -> None:
    with four.activate():
        manual_seed(4)
        state = get_state()
        first = torch.rand(3)
        set_state(state)
        assert torch_equal(first, torch.rand(3))
        set_state(new_state(four.rank_tensor("gpus") + 5))
        found = torch.rand(3)
        given = [fetch_shard(found, gpus=k).get() for k in range(4)]
    for k, got in enumerate(given):
        assert torch.equal(got, torch.rand(3, generator=torch.Generator().manual_seed(5 + k)))


def test_seeds_of_monarchs_kind(four: Any) -> None:
    with four.activate():
        set_manual_seed_remote(5, 3)
        alike = torch.rand(2)
        set_manual_seed_remote(5, four.rank_tensor("gpus"))
        found = inspect(torch.rand(2), gpus=0)
        set_manual_seed_remote(5, four.rank_tensor("gpus"))
        other = torch.rand(2)
        given = [fetch_shard(x, gpus=3).get() for x in (alike, other)]
        seed_remote()
        assert not torch_equal(inspect(torch.rand(2)), found)
    for got in given:
        assert torch.equal(got, torch.rand(2, generator=torch.Generator().manual_seed(5 ^ 3)))
    assert torch.equal(found, torch.rand(2, generator=torch.Generator().manual_seed(5)))


def torch_equal(a: Any, b: Any) -> bool:
    return bool((a == b).all())


def test_reductions_of_many(four: Any) -> None:
    with four.activate():
        rank = four.rank_tensor("gpus")
        found = reduce({"a": rank, "b": [rank * 2, "it"]}, "gpus")
        assert inspect(found["a"]) == 6
        assert found["b"][1] == "it"
        reduce_([rank], "gpus", "max")
        assert inspect(rank) == 3
