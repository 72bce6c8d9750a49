"""Programs of another user, who has no right to override modes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.otheruser import OtherUser, other_user, shared

__all__ = ["other_user", "shared"]


@pytest.fixture
def user(other_user: OtherUser, shared: Path) -> Callable[[str], str]:
    """Runs a program as another user; its first argument is a path for a store in a folder of that user.

    What it imports is imported as this user: the other one may not be able to read it.
    """
    folder = shared / "home"
    folder.mkdir(mode=0o700)
    os.chown(folder, other_user.uid, other_user.uid)
    prelude = f"""
        import concurrent.futures.thread, os, pwd, sys
        from tests.sync.store.trees import *
        from workspace_sync.store.store import Store
        os.setgroups([]); os.setgid({other_user.uid}); os.setuid({other_user.uid}); os.chdir("/")
    """

    def run(code: str) -> str:
        whole = textwrap.dedent(prelude) + textwrap.dedent(code)
        command = [sys.executable, "-c", whole, str(folder / "store")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
