"""What the tests stop in: a user's code. Lines are found by the marks in their comments."""

# ruff: noqa: RET504  # lines of their own to stop at

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

TOTAL = 7


def plain(x: int) -> int:
    y = x + 1  # mark: plain first
    z = y * 2  # mark: plain second
    return z  # mark: plain return


def caller(x: int) -> int:
    a = 1  # mark: caller first
    b = plain(x)  # mark: caller call
    c = a + b  # mark: caller after
    return c  # mark: caller return


def two_calls() -> int:
    total = plain(1) + other(2)  # mark: two calls
    return total  # mark: two return


def other(x: int) -> int:
    return x - 1  # mark: other


def busy(go_on: threading.Event, begun: threading.Event) -> int:
    turns = 0
    while not go_on.is_set():
        turns += 1  # mark: busy turn
        begun.set()
    return turns


def spin(state: dict[str, Any]) -> None:
    state["turns"] = 0
    while state["run"]:
        state["turns"] += 1  # mark: spin


def counted(n: int) -> int:
    total = 0
    for i in range(n):
        total += i  # mark: counted body
    return total


def numbers(n: int) -> Iterator[int]:
    for i in range(n):  # mark: numbers for
        yield i * 10  # mark: numbers yield
    last = n  # mark: numbers last
    del last


def consume(n: int) -> list[int]:
    got = []
    for number in numbers(n):  # mark: consume for
        got.append(number)  # mark: consume body
    return got  # mark: consume return


def suspended(values: Iterator[int]) -> int:
    return next(values)


async def napper(n: int) -> int:
    before = n  # mark: napper before
    await asyncio.sleep(0.01)  # mark: napper await
    after = before + 1  # mark: napper after
    return after  # mark: napper return


async def waits(what: Any) -> str:
    await what
    done = "done"  # mark: waits after
    return done


async def awaiter() -> int:
    first = await napper(1)  # mark: awaiter await
    return first + 1  # mark: awaiter after


async def noise(stop: list[bool]) -> None:
    while not stop:
        await asyncio.sleep(0)  # mark: noise


async def with_noise() -> int:
    stop: list[bool] = []
    task = asyncio.create_task(noise(stop))
    result = await napper(5)  # mark: with noise
    stop.append(True)  # mark: with noise after
    await task
    return result


def run_async(function: Callable[[], Any]) -> Any:
    return asyncio.run(function())


def squares(n: int) -> list[int]:
    found = [
        i * i  # mark: comprehension
        for i in range(n)
    ]
    return found


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        before = "w"  # mark: wrapper
        return function(*args) if before else None  # mark: wrapper call

    return wrapper


@decorate
def decorated(x: int) -> int:  # mark: decorated head
    """Nothing but a text before the first line."""
    y = x * 3  # mark: decorated
    return y


def recurse(n: int) -> int:
    if n == 0:
        return 0  # mark: recurse end
    below = recurse(n - 1)  # mark: recurse call
    return below + 1  # mark: recurse after


def raises(n: int) -> int:
    if n:
        raise ValueError(f"n is {n}")  # mark: raises
    return n


def handles() -> str:
    try:
        raises(3)  # mark: handles call
    except ValueError as error:  # mark: handles except
        text = str(error)  # mark: handles body
    return text


def handles_deep() -> str:
    text = ""
    with contextlib.suppress(KeyError):
        text = middle()  # mark: deep call
    return text  # mark: deep after


def middle() -> str:
    return str(lookup({}))  # mark: middle


def lookup(table: dict[str, str]) -> str:
    value = table["missing"]  # mark: lookup
    return value


def callbacks() -> list[int]:
    order = sorted([3, 1, 2], key=key)  # mark: callbacks call
    mapped = functools.reduce(lambda a, b: [*a, b], order, [])  # mark: callbacks lambda
    return mapped  # mark: callbacks return


def key(x: int) -> int:
    return -x  # mark: key


def closure() -> int:
    shared = 1

    def change() -> None:
        nonlocal shared
        shared += 10

    change()  # mark: closure call
    result = shared  # mark: closure after
    return result


def with_locals(a: int, text: str = "hello") -> dict[str, Any]:
    items = [1, 2, 3]
    table = {"one": 1, 2: "two"}
    nothing = None  # mark: with locals
    return {"a": a, "text": text, "items": items, "table": table, "nothing": nothing}


def interruptible() -> str:
    try:
        here = 1  # mark: interruptible
        again = here + 1
        del again
    except KeyboardInterrupt:
        return "interrupted"
    return "ran through"


def hit_breakpoint(hook: Callable[[], None]) -> int:
    before = 1
    hook()  # mark: hook
    after = before + 1  # mark: after hook
    return after  # mark: hook return


def one_line(x: int) -> int: return x + 1  # mark: one line  # fmt: skip


def gap(x: int) -> int:
    a = x

    # mark: gap
    return a  # mark: gap after


class Thing:
    """Has a method, attributes and slots."""

    kind = "thing"  # mark: class body

    def __init__(self, name: str) -> None:
        self.name = name  # mark: init

    def method(self) -> str:
        return self.name  # mark: method


class Slow:
    """Its repr takes until somebody lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __repr__(self) -> str:
        while not self.gate.is_set():
            pass
        return "Slow()"


def forks() -> int:
    import os

    child = os.fork()
    if child == 0:
        plain(1)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def deep_step(n: int) -> int:
    value = middle_step(n)  # mark: deep step
    return value  # mark: deep step after


def middle_step(n: int) -> int:
    return inner_step(n)  # mark: middle step


def inner_step(n: int) -> int:
    return n + 1  # mark: inner step
