"""Waiting for a descriptor in an event loop."""

from __future__ import annotations

import asyncio


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


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
