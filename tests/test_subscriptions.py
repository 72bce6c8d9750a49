"""Registries of callbacks: the one type, and the public functions that hand out its subscriptions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.introspection import on_failure
from monarch_kernel.meshes import on_change
from monarch_kernel.output import subscribe
from monarch_kernel.pool import on_progress
from monarch_kernel.subscriptions import Subscribers, Subscription


def test_callbacks_are_called_in_order_until_they_are_closed() -> None:
    heard: list[Any] = []
    registry: Subscribers[[int]] = Subscribers("a callback")
    assert not registry
    first = registry.subscribe(lambda n: heard.append(("first", n)))
    second = registry.subscribe(lambda n: heard.append(("second", n)))
    registry.notify(1)
    first.close()
    first.close()
    registry.notify(2)
    second()
    registry.notify(3)
    assert heard == [("first", 1), ("second", 1), ("second", 2)]
    assert not registry


def test_one_callback_that_is_subscribed_twice_is_closed_once_at_a_time() -> None:
    heard: list[int] = []
    registry: Subscribers[[int]] = Subscribers("a callback")
    with registry.subscribe(heard.append):
        registry.subscribe(heard.append)
        registry.notify(1)
    registry.notify(2)
    assert heard == [1, 1, 2]


def test_what_one_callback_raises_concerns_no_other(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    registry: Subscribers[[int]] = Subscribers("a callback of the test")
    registry.subscribe(lambda n: 1 // n)
    registry.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        registry.notify(0)
    assert heard == [0]
    assert "a callback of the test failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_callback_may_close_itself_and_subscribe_others_while_it_is_called() -> None:
    heard: list[str] = []
    registry: Subscribers[[]] = Subscribers("a callback")

    def once() -> None:
        heard.append("once")
        subscription.close()
        registry.subscribe(lambda: heard.append("new"))

    subscription = registry.subscribe(once)
    registry.subscribe(lambda: heard.append("other"))
    registry.notify()
    assert heard == ["once", "other"]
    registry.notify()
    assert heard == ["once", "other", "other", "new"]


def test_threads_lose_no_subscription_of_each_other() -> None:
    registry: Subscribers[[]] = Subscribers("a callback")
    count = 200
    heard: list[int] = []

    def work(number: int) -> None:
        for each in range(count):
            subscription = registry.subscribe(lambda: heard.append(number))
            if each % 2:
                subscription.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry.notify()
    assert sorted(heard) == sorted(number for number in range(4) for _ in range(count // 2))


@pytest.mark.parametrize("register", [on_change, on_failure, on_progress, subscribe])
def test_public_functions_give_subscriptions_that_can_be_called_as_before(register: Callable[..., Any]) -> None:
    for end in ("call", "close"):
        subscription = register(lambda *_args: None)
        assert isinstance(subscription, Subscription)
        subscription() if end == "call" else subscription.close()
