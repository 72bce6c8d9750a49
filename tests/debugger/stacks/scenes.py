"""Coroutines that wait in every way that asyncio has, and their stacks; as a script, all of them as JSON.

Standard library only, for interpreters that have nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from monarch_kernel.debugger.rank.task_stacks import task_stacks
from tests.waiting import patience

HERE = __file__
Function = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """What the coroutines below wait for."""

    def __init__(self) -> None:
        self.waiting = 0
        self.opened = asyncio.Event()
        self.spinning = threading.Event()
        self.stop = threading.Event()


async def leaf(scene: Scene) -> None:
    scene.waiting += 1
    await scene.opened.wait()


async def middle(scene: Scene) -> None:
    await leaf(scene)


async def by_gather(scene: Scene) -> None:
    await asyncio.gather(middle(scene), leaf(scene))


async def by_group(scene: Scene) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(middle(scene))


async def by_wait(scene: Scene) -> None:
    await asyncio.wait([asyncio.create_task(leaf(scene))])


async def by_wait_for(scene: Scene) -> None:
    await asyncio.wait_for(leaf(scene), 60)


async def by_shield(scene: Scene) -> None:
    await asyncio.shield(asyncio.create_task(leaf(scene)))


async def by_task(scene: Scene) -> None:
    await asyncio.create_task(leaf(scene))


async def numbers(scene: Scene) -> AsyncIterator[int]:
    await leaf(scene)
    yield 1


async def by_generator(scene: Scene) -> None:
    async for _ in numbers(scene):
        pass


async def by_spinning(scene: Scene) -> None:
    scene.waiting += 1
    scene.spinning.set()
    while not scene.stop.is_set():
        pass


@contextmanager
def running(function: Function, waiting: int) -> Generator[None]:
    """Run `function` in a loop of its own until so many coroutines wait."""
    scene = Scene()
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_until_complete(function(scene))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        deadline = time.monotonic() + patience(20)
        while scene.waiting != waiting:  # no event tells of it: it may be any of the coroutines
            assert time.monotonic() < deadline, f"{scene.waiting} of {waiting} coroutines wait"
            time.sleep(0.001)
        if not scene.spinning.is_set():
            # The loop runs this when all of them have got to where they wait.
            settled = threading.Event()
            loop.call_soon_threadsafe(settled.set)
            assert settled.wait(20)
        yield
    finally:
        scene.stop.set()
        loop.call_soon_threadsafe(scene.opened.set)
        thread.join(20)
        assert not thread.is_alive()


def paths(function: Function) -> list[list[str]]:
    """The functions of this file in each stack that begins with `function`."""
    found = [
        [frame.f_code.co_name for frame in task.links if frame.f_code.co_filename == HERE] for task in task_stacks()
    ]
    return sorted(path for path in found if path[:1] == [function.__name__])


#: What waits, and the functions through which it does.
SCENES: list[tuple[Function, list[list[str]]]] = [
    (by_gather, [["leaf"], ["middle", "leaf"]]),
    (by_group, [["middle", "leaf"]]),
    (by_wait, [["leaf"]]),
    (by_wait_for, [["leaf"]]),
    (by_shield, [["leaf"]]),
    (by_task, [["leaf"]]),
    (by_generator, [["numbers", "leaf"]]),
]


def all_paths() -> dict[str, list[list[str]]]:
    """What is found of each scene, by the name of its function."""
    found: dict[str, list[list[str]]] = {}
    for function, expected in SCENES:
        with running(function, len(expected)):
            found[function.__name__] = paths(function)
    return found


def expected_paths() -> dict[str, list[list[str]]]:
    """What is to be found of each scene."""
    return {function.__name__: [[function.__name__, *path] for path in expected] for function, expected in SCENES}


if __name__ == "__main__":
    print(json.dumps(all_paths()))
