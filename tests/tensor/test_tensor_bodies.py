"""Bodies of messages with plain tensors: what arrives is what was sent, small or large."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from monarch_kernel.protocol.serialize import OUT_OF_BAND, Unpickling, dumps, loads


def there(value: Any) -> Any:
    """A value as it arrives in another process."""
    body, buffers = dumps(value)
    return loads(bytearray(b"".join(body)) if isinstance(body, list) else body, buffers)


@pytest.mark.parametrize("size", [0, 1, 5, OUT_OF_BAND])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_arrives_as_it_is(size: int, dtype: torch.dtype) -> None:
    sent = torch.arange(size).to(dtype)
    got = there(((sent,), {}))[0][0]
    assert got.dtype == dtype
    assert torch.equal(got, sent)
    got.zero_()  # a receiver may write to it


def test_shapes_strides_and_gradients_arrive() -> None:
    sent = [torch.tensor(3.0), torch.ones(2, 3, requires_grad=True), torch.arange(6).view(2, 3).t(), torch.ones(1)[:0]]
    for before, after in zip(sent, there(sent), strict=True):
        assert torch.equal(before, after)
        assert (before.shape, before.stride()) == (after.shape, after.stride())
        assert before.requires_grad == after.requires_grad


def test_what_a_small_tensor_carries_arrives() -> None:
    marked = torch.ones(2)
    marked.note = "mine"  # type: ignore[attr-defined]
    assert there(marked).note == "mine"
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(there(sparse).to_dense(), torch.eye(2))
    part = torch.nn.Parameter(torch.ones(2))
    assert type(there(part)) is torch.nn.Parameter


def test_a_part_of_a_large_tensor_goes_without_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unpickling, "function", pickle.loads)  # the tensor engine is not loaded
    body, buffers = dumps(torch.zeros(100_000)[:4])
    assert not buffers
    assert len(body) < 1_000
