"""Streams: orders of operations that run at the same time, and tensors that one borrows from another."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from monarch_kernel.tensor import BorrowError, MixedTensorsError, Stream, get_active_stream, inspect, remote


def test_a_borrowed_tensor_is_ready(four: Any) -> None:
    slow = remote(lambda t: (__import__("time").sleep(0.05), t.add_(1))[1], propagate=lambda t: t)
    other = Stream("other")
    with four.activate():
        x = slow(torch.zeros(3))
        y, borrow = other.borrow(x, mutable=True)
        with other.activate():
            assert get_active_stream() is other
            for _ in range(3):
                y.mul_(2)
            z = slow(y.clone()) + torch.ones(3)
        borrow.drop()
        x += 5
        assert inspect(x)[0] == 13 and inspect(z, gpus=3)[0] == 10 and z.stream is other


def test_streams_run_at_the_same_time(four: Any) -> None:
    # The main stream waits on each rank for what only the other stream does.
    event = remote(lambda: setattr(__import__("builtins"), "_test_event", __import__("threading").Event()))
    wait = remote(lambda t: t + __import__("builtins")._test_event.wait(30), propagate=lambda t: t)
    tell = remote(lambda t: __import__("builtins")._test_event.set())
    other = Stream("other")
    with four.activate():
        event()
        x = torch.ones(1)
        inspect(x)
        y = wait(x)
        with other.activate():
            tell(torch.ones(1))
        assert inspect(y) == 2


def test_collectives_of_streams(four: Any) -> None:
    comms = Stream("comms")
    with four.activate():
        x = torch.ones(4) * four.rank_tensor("gpus")
        y, borrow = comms.borrow(x, mutable=True)
        y.reduce_("gpus", "sum")
        total = torch.ones(4).reduce("gpus", "sum")  # meanwhile, in the main stream
        with borrow:
            moved = y.to_mesh(four)
        assert inspect(x)[0] == 6 and inspect(total)[0] == 4 and inspect(moved, gpus=2)[0] == 6


def test_misuse_is_told(four: Any) -> None:
    other = Stream("other")
    with four.activate():
        x = torch.ones(2)
        y, borrow = other.borrow(x)
        with pytest.raises(MixedTensorsError, match="streams"):
            x + y
        with pytest.raises(BorrowError, match="written while it is lent"):
            x.add_(1)
        with pytest.raises(BorrowError, match="borrowed to be read"):
            y.add_(1)
        with pytest.raises(BorrowError, match="to be written"):
            other.borrow(x, mutable=True)
        assert inspect(x + 1)[0] == 2 and inspect(y + 1)[0] == 2
        borrow.drop()
        borrow.drop()
        with pytest.raises(BorrowError, match="after drop"):
            y + 1
        x.add_(1)
        y, borrow = other.borrow(x, mutable=True)
        with pytest.raises(BorrowError, match="while it is lent"):
            inspect(x)
        with borrow:
            y.add_(1)
        assert inspect(x)[0] == 3
        y, borrow = other.borrow(x)
        with borrow, pytest.raises(BorrowError, match="its own"):
            other.borrow(y)


def test_a_forgotten_borrow_is_warned_of(four: Any) -> None:
    with four.activate():
        x = torch.ones(2)
        with pytest.warns(RuntimeWarning, match="never dropped"):
            Stream("other").borrow(x)
            gc.collect()
