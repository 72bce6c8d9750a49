"""What tests of links over TCP share: a team's key, sides that talk, and processes at the other end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from tests.conftest import wait_until
from tests.node.tcpside import Side

PEER = str(Path(__file__).with_name("tcppeer.py"))
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key_file(tmp_path / "team.key")
    return tmp_path / "team.key"


@pytest.fixture
def keys(key_file: Path) -> Keys:
    return load_keys(key_file)


@pytest.fixture
def sides(keys: Keys) -> Iterator[Callable[..., Side]]:
    before = set(threading.enumerate())  # of a test that has failed, maybe: that is not this one's fault
    with ExitStack() as made:  # one that cannot be closed leaves no other one open

        def make(with_keys: Keys = keys, background: bool = True, steady: bool = True) -> Side:
            side = Side(with_keys, background, steady)
            made.callback(side.close)
            return side

        yield make

    def left() -> list[str]:
        ours = (thread.name for thread in set(threading.enumerate()) - before)
        return [name for name in ours if name in ("monarch-heartbeat", "monarch-poller")]

    wait_until(lambda: not left(), "the threads of all sides have ended")


@pytest.fixture
def peer(key_file: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts processes; gives each with the first line that it prints."""
    made: list[subprocess.Popen[str]] = []

    def start(role: str, url: str = "tcp://127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, PEER, role, str(key_file), url],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        made.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip() if role == "listen" else ""

    yield start
    for process in made:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
