"""Kernels and scripts whose meshes stay, in a folder of the test's own; nothing of it may be left in the end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.meshes import kept
from tests.conftest import alive, wait_until
from tests.kernel.conftest import bell, jupyter_folders, start_kernel

__all__ = ["bell", "jupyter_folders", "start_kernel"]


@pytest.fixture(autouse=True)
def kept_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where this test's kept meshes are. What the test leaves there is ended."""
    folder = tempfile.mkdtemp(prefix="mk-kept-", dir="/tmp")
    monkeypatch.setenv("MONARCH_KERNEL_KEPT_DIR", folder)
    try:
        yield folder
    finally:
        for info in kept():
            os.kill(info.pid, signal.SIGTERM)
        try:
            wait_until(lambda: not processes(folder), "all processes of kept meshes have ended")
            assert nothing_kept(folder), os.listdir(folder)
        finally:
            for pid in processes(folder):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder)


def processes(folder: str) -> set[int]:
    """What has been started, by whomever, for this folder's kept meshes."""
    marker = f"MONARCH_KERNEL_KEPT_DIR={folder}".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return {pid for pid in found if alive(pid)}


def nothing_kept(folder: str) -> bool:
    """Whether no mesh is left, and no folder of one."""
    return not os.listdir(folder)
