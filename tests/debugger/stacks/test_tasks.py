"""Asyncio's tasks as stacks, of an event loop in another thread."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debugger.rank.task_stacks import task_stacks
from tests.debugger.stacks import scenes
from tests.debugger.stacks.scenes import HERE, by_spinning, running
from tests.waiting import patience


def test_a_task_goes_on_in_what_it_waits_for() -> None:
    assert scenes.all_paths() == scenes.expected_paths()


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_on_other_versions_of_python(version: str) -> None:
    """Asyncio keeps its tasks elsewhere from 3.12 on."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip("the test above has shown it")
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"there is no Python {version} here")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([str(found[-1]), HERE], capture_output=True, text=True, timeout=patience(60), env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == scenes.expected_paths()


def test_a_running_task_is_read_from_its_thread() -> None:
    with running(by_spinning, 1):
        (task,) = [task for task in task_stacks() if task.running is not None]
        assert task.running is not None and task.running.f_code is by_spinning.__code__


def test_tasks_that_wait_for_each_other() -> None:
    loop = asyncio.new_event_loop()

    async def circle() -> tuple[Any, Any]:
        tasks: list[asyncio.Task[None]] = []

        async def one() -> None:
            await asyncio.sleep(0)
            await asyncio.wait([tasks[1]])

        async def other() -> None:
            await asyncio.sleep(0)
            await asyncio.wait([tasks[0]])

        tasks += [asyncio.create_task(one()), asyncio.create_task(other())]
        for _ in range(5):
            await asyncio.sleep(0)
        found = task_stacks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found, tasks

    found, tasks = loop.run_until_complete(circle())
    loop.close()
    (path,) = [task.tasks for task in found if tasks[0] in task.tasks]
    assert set(path) == set(tasks)


def test_no_loop_no_tasks() -> None:
    assert not [task for task in task_stacks() if task.links and task.links[0].f_code.co_filename == HERE]
