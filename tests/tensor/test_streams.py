"""Streams: orders of operations that run at the same time, and tensors that one borrows from another."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from monarch_kernel.tensor import (
    BorrowError,
    MixedTensorsError,
    Stream,
    call_on_shard_and_fetch,
    get_active_mesh,
    get_active_stream,
    grad_function,
    grad_generator,
    gradient_execution_order,
    inspect,
    remote,
)


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


def test_a_borrow_concerns_all_views(four: Any) -> None:
    other, third = Stream("other"), Stream("third")
    with four.activate():
        x = torch.zeros(4)
        part = x[1:].view(3)
        y, borrow = other.borrow(x)
        with pytest.raises(BorrowError, match=r"(?s)^aten::add_\.Tensor: .*lent.*Traceback of borrow.*test_streams"):
            part.add_(1)
        last = x.unsqueeze(0)[0, 3:]
        with pytest.raises(BorrowError, match="written while it is lent"):
            last.fill_(1)
        view = y[2:]
        with pytest.raises(BorrowError, match="borrowed to be read is borrowed to be written"):
            third.borrow(view, mutable=True)
        z, second = third.borrow(view)
        assert inspect(z * 2 + 1).tolist() == [1, 1]
        with pytest.raises(BorrowError, match="lent itself"):
            borrow.drop()
        second.drop()
        borrow.drop()
        with pytest.raises(BorrowError, match=r"(?s)after drop.*is dropped at.*test_streams"):
            view + 1
        part.add_(1)
        assert inspect(x).tolist() == [0, 1, 1, 1]
        y, borrow = other.borrow(part, mutable=True)
        for use in (lambda: x + 1, lambda: inspect(x), lambda: other.borrow(x), lambda: remote(len)(x)):
            with pytest.raises(TypeError, match="used while it is lent"):
                use()
        y[0].fill_(7)
        borrow.drop()
        assert inspect(x).tolist() == [0, 7, 1, 1]


def test_a_refused_fetch_loses_nothing(four: Any) -> None:
    with four.activate():
        x, total = torch.ones(2), torch.zeros(2)
        _, borrow = Stream("other").borrow(x, mutable=True)
        total.add_(3)
        with pytest.raises(BorrowError):
            inspect([total, x])
        total.add_(4)
        with pytest.raises(BorrowError):
            torch.nonzero(x)
        total.add_(5)
        lock = threading.Lock()
        with pytest.raises(TypeError, match="pickle"):
            call_on_shard_and_fetch(lambda t: lock, total)
        borrow.drop()
        assert inspect(total).tolist() == [12, 12]


def test_a_dropped_tensor_is_gone_with_its_views(four: Any) -> None:
    def held() -> int:
        return call_on_shard_and_fetch(_held).get()

    other = Stream("other")
    with four.activate():
        before = held()
        x = torch.ones(4)
        part, copy = x[1:], x * 2
        x.drop()
        assert x.dropped and part.dropped and not copy.dropped and held() == before + 1
        uses: list[Any] = [torch.neg, torch.relu_, inspect, lambda t: 1 - t, lambda t: t == t, lambda t: t + 1]
        for use in uses:
            for gone in (x, part):
                with pytest.raises(BorrowError, match=r"(?s)was dropped.*is dropped at.*x\.drop\(\)"):
                    use(gone)
        assert inspect(copy)[0] == 2
        x.drop()
        x = torch.ones(4)
        y, borrow = other.borrow(x, mutable=True)
        x.drop()
        with other.activate():
            y.mul_(3)
            assert inspect(y).tolist() == [3] * 4
        borrow.drop()
        with pytest.raises(BorrowError, match="was dropped"):
            inspect(x)
        del x, y, part, copy
        assert held() == before


def test_stages_of_a_pipeline_give_gradients_one_by_one(four: Any) -> None:
    stages = [Stream("first"), Stream("second")]
    active: list[Any] = []

    @grad_function
    def into_second(t: Any) -> Any:
        def moved(value: Any, stream: Stream) -> Any:
            lent, borrow = stream.borrow(value)
            with borrow, stream.activate():
                return lent.clone()

        def back(grad: Any) -> Any:
            active.append((get_active_mesh(), get_active_stream()))
            return moved(grad * torch.ones(2), stages[0])

        return moved(t, stages[1]), back

    with four.activate():
        with stages[0].activate():
            w = torch.full((2, 2), 2.0, requires_grad=True)
            h = into_second(torch.ones(2, 2) @ w)
        with stages[1].activate():
            v = torch.full((2, 2), 3.0, requires_grad=True)
            loss = (h @ v).sum()
    order = gradient_execution_order([loss], [w, v])
    assert order == [1, 0]
    steps = grad_generator(loss, [v, w])
    assert inspect(next(steps)).tolist() == [[8, 8], [8, 8]]
    last = next(steps)
    assert last is not None and inspect(last).tolist() == [[12, 12], [12, 12]]
    assert last.stream is stages[0]  # type: ignore[attr-defined]  # a handle
    assert active == [(four, stages[1])]


def _held() -> int:
    from monarch_kernel.runtime.tensor.rank.current_executor import here

    return len(here().store.values)
