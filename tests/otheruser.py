"""Another user of this machine, for tests that must not be fooled, reached or hurt by one.

It is a Python process that has given up root for a uid that no account has. That is as much another user to the kernel
as one with an account, needs no ``useradd`` (which changes files of the machine that a killed test would leave behind),
and takes 50 ms. Only root can do it: elsewhere these tests are skipped, and say so.

Use the fixtures: ``from tests.otheruser import other_user, shared`` in a conftest.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# What its programs may use is imported first: the user may not be able to read where this interpreter lies.
_PRELUDE = """
import contextlib, ctypes, encodings.idna, json, os, pickle, select, signal, socket, stat, struct, sys, time
from pathlib import Path
os.setgroups([]); os.setgid({uid}); os.setuid({uid}); os.umask(0); os.chdir("/")
"""


class OtherUser:
    """A user that is neither root nor the user that runs the tests."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def _command(self, code: str, *arguments: object) -> list[str]:
        whole = _PRELUDE.format(uid=self.uid) + textwrap.dedent(code)
        return [sys.executable, "-I", "-S", "-c", whole, *map(str, arguments)]

    def run(self, code: str, *arguments: object) -> str:
        """Run a program as that user, to its end; what it printed."""
        done = subprocess.run(self._command(code, *arguments), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def running(self, code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """A program of that user, from its first line of output on; killed at the end of the block."""
        process = subprocess.Popen(self._command(code, *arguments), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="session")
def other_user() -> OtherUser:
    """Another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    uid = 61234
    while _is_known(uid):
        uid += 1
    return OtherUser(uid)


def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is to this test and all that it starts what ``/tmp`` is: all users may write there."""
    folder = tempfile.mkdtemp(prefix="mk-s-", dir="/tmp")
    os.chmod(folder, 0o1777)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield Path(folder)
    shutil.rmtree(folder)
