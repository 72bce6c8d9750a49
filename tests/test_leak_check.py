"""The leak check of all tests: what one test leaves is named and cleaned, and is no neighbour's failure."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.conftest import alive, leak_check
from tests.waiting import patience


def test_a_process_that_is_left_is_named_and_ended() -> None:
    named = pytest.raises(AssertionError, match="the example left behind processes:\n.*sleep 600")
    with named, leak_check("example", deadline=0.1):
        left = subprocess.Popen(["sleep", "600"])
    assert not alive(left.pid)
    with leak_check("neighbour", deadline=0.1):
        pass
    left.wait(patience(10))


def test_all_that_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr("tests.conftest._within", lambda _deadline, condition: bool(condition()))
    thread = threading.Thread(target=stop.wait, name="monarch-left")
    shared = Path(f"/dev/shm/torch_{os.getpid()}_1")
    others = Path(f"/dev/shm/torch_{os.getppid()}_1")  # of a program beside these
    try:
        named = pytest.raises(AssertionError, match="threads: monarch-left; shared memory: torch_[0-9]+_1(\\n|$)")
        with named, leak_check("example"):
            thread.start()
            shared.touch()
            others.touch()
        with leak_check("neighbour"):
            pass
    finally:
        stop.set()
        thread.join(patience(10))
        shared.unlink()
        others.unlink()


def test_a_runtime_that_cannot_be_shut_down_is_not_the_next_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_kernel.runtime.actor import process, system

    def fail() -> None:
        raise OSError("stuck")

    named = pytest.raises(AssertionError, match="cannot be shut down: OSError: stuck")
    with monkeypatch.context() as patch, named, leak_check("example"):
        patch.setattr(system, "shutdown", fail)
    assert not process.started()
