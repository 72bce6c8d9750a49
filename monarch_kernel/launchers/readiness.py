"""Waiting for a descriptor, or for the end of a process, in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any


async def readable(fd: int) -> None:
    """Wait until a descriptor can be read, or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def writable(fd: int) -> None:
    """Wait until a descriptor can be written, or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


async def ended(pid: int) -> None:
    """Wait until a process, a child of this one that was not waited for, has ended."""
    fd = os.pidfd_open(pid)
    try:
        await readable(fd)
    finally:
        os.close(fd)


async def first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of these; the others end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
