"""A network of its own for the daemons of an engine, which listen on all addresses."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.launchers.engines import CannotRunError

CLONE_NEWNET = 0x40000000  # of sched.h


@contextmanager
def own_network() -> Iterator[None]:
    """This thread, and all that it starts meanwhile, in a network namespace.

    Raises:
        CannotRunError: this user can make none here.
    """
    if os.getuid() != 0:
        raise CannotRunError("only root can make a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise CannotRunError(f"this machine makes no network namespaces: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(outside, CLONE_NEWNET) == 0
    finally:
        os.close(outside)
