"""Nothing is left behind, whoever is killed and in whatever order."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.runtime.host import cleanup
from tests.waiting import patience

DEADLINE = patience(30.0)
ROOT = Path(__file__).parents[2]


class Family:
    """A running ``tests.host.tree``, watched through pidfds that were opened while everybody lived."""

    def __init__(self, tmp: Path) -> None:
        self.base = tmp
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.host.tree"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.communicate()
            pytest.fail("the controller of the test did not start")
        self.shown: dict[str, Any] = json.loads(line)
        self.run_dir = Path(self.shown["run_dir"])
        assert self.run_dir.parent == tmp
        self.pids = {
            "controller": [self.process.pid],
            **{key: [self.shown[key]] for key in ("agent", "server", "template")},
            "ranks": self.shown["ranks"],
            "users": self.shown["users"],
        }
        self.pidfds = {pid: os.pidfd_open(pid) for pids in self.pids.values() for pid in pids}

    def kill(self, *roles: str) -> None:
        """SIGKILL everybody of these roles, one right after the other."""
        for role in roles:
            for pid in self.pids[role]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfds[pid], signal.SIGKILL)

    def assert_gone(self, *roles: str) -> None:
        end = time.monotonic() + DEADLINE
        for role in roles:
            for pid in self.pids[role]:
                left = max(0.0, end - time.monotonic())
                assert select.select([self.pidfds[pid]], [], [], left)[0], f"{role} {pid} still lives"

    def assert_no_folder(self) -> None:
        end = time.monotonic() + DEADLINE
        while os.listdir(self.base):
            assert time.monotonic() < end, os.listdir(self.base)
            os.sched_yield()

    def close(self) -> None:
        self.kill(*self.pids)
        self.process.wait(DEADLINE)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        for fd in self.pidfds.values():
            os.close(fd)


@pytest.fixture
def family() -> Iterator[Family]:
    # Not tmp_path: it is too long for the sockets.
    with tempfile.TemporaryDirectory(prefix="mk-", dir="/tmp") as base:
        made = Family(Path(base))
        try:
            yield made
        finally:
            made.close()


BELOW = ("agent", "server", "template", "ranks", "users")


@pytest.mark.parametrize(
    "killed",
    [
        ("controller",),
        ("controller", "agent"),
        ("agent", "controller"),
        ("controller", "server"),
        ("server", "controller"),
        ("ranks", "controller"),
        ("template", "controller", "agent"),
        ("users", "ranks", "controller"),
    ],
    ids="+".join,
)
def test_kill_9_leaves_nothing(family: Family, killed: tuple[str, ...]) -> None:
    family.kill(*killed)
    family.assert_gone(*BELOW)
    family.assert_no_folder()


@pytest.mark.parametrize("killed", [("agent",), ("server",), ("agent", "server"), ("server", "agent")], ids="+".join)
def test_the_controller_survives_its_agent(family: Family, killed: tuple[str, ...]) -> None:
    family.kill(*killed)
    family.assert_gone(*BELOW)
    assert family.process.poll() is None
    family.kill("controller")
    family.process.wait(DEADLINE)
    # Whoever would have removed the folder is dead: the next controller does it.
    cleanup.remove_stale(str(family.base))
    family.assert_no_folder()


def test_all_keepers_killed_at_once_are_cleaned_up_by_the_next_launch(family: Family) -> None:
    family.kill("controller", "agent", "server", "template")
    family.assert_gone("agent", "server", "template", "ranks")
    family.process.wait(DEADLINE)
    assert cleanup.remove_stale(str(family.base)) in ([], [str(family.run_dir)])
    family.assert_gone("users")
    family.assert_no_folder()


def test_sigterm_to_the_agent(family: Family) -> None:
    os.kill(family.shown["agent"], signal.SIGTERM)
    family.assert_gone(*BELOW)


def test_a_template_takes_its_ranks_with_it_and_nobody_else(family: Family) -> None:
    family.kill("template")
    family.pids["ranks"], others = [family.shown["ranks"][2]], family.shown["ranks"]
    family.assert_gone("template", "ranks")
    assert not select.select([family.pidfds[others[0]]], [], [], 0)[0]


def test_an_orderly_end(family: Family) -> None:
    assert family.process.stdin is not None
    family.process.stdin.write("end\n")
    family.process.stdin.flush()
    family.assert_gone(*BELOW)
    family.assert_no_folder()


def test_a_stale_folder_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    base = str(tmp_path)
    living = cleanup.make_run_dir(base)
    assert os.stat(living.path).st_mode & 0o777 == 0o700
    dead = cleanup.make_run_dir(base)
    os.close(dead.lock_fd)  # as the end of its process does
    other = tmp_path / "monarch-0-of-somebody"
    other.mkdir()
    assert cleanup.remove_stale(base) == [dead.path]
    assert os.path.isdir(living.path)
    assert other.is_dir()
    living.remove()
    assert sorted(os.listdir(base)) == [other.name]


def test_kill_run_finds_processes_by_their_environment(tmp_path: Path) -> None:
    mark = str(tmp_path / "run")
    env = {**os.environ, cleanup.MARKER: mark}
    ours = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], env={**env, cleanup.MARKER: mark + "x"})
    try:
        assert cleanup.kill_run(mark) == 1
        assert ours.wait(DEADLINE) == -9
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_the_children_of_a_process_that_is_still_ending_are_found() -> None:
    program = """
import ctypes, os, subprocess, sys, threading, time
from monarch_kernel.runtime.host import cleanup, forkserver

forkserver.become_subreaper()
never, end = os.pipe()
if not (ending := os.fork()):
    child = subprocess.Popen(["sleep", "600"])
    threading.Thread(target=os.read, args=(never, 1)).start()
    print(child.pid, flush=True)
    ctypes.CDLL(None).pthread_exit(None)  # the main thread alone: a zombie in /proc, which has its child still
while ") Z " not in open(f"/proc/{ending}/stat").read():
    time.sleep(0.001)
cleanup.kill_below(0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert parent.wait(DEADLINE) == 0
            assert select.select([child], [], [], DEADLINE)[0], "it has outlived the clean-up"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
