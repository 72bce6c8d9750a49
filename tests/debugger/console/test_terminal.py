"""`monarch-kernel debug`: a terminal that comes to a running script, which has never heard of a debugger."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.cli.debug import choose
from monarch_kernel.introspection import Controller, controllers
from tests.conftest import alive, wait_until
from tests.waiting import patience

PATIENCE = patience(60.0)
ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys, time
from monarch_kernel.actor import Actor, current_rank, endpoint, this_host

class Worker(Actor):
    @endpoint
    def work(self, turns):
        rank = current_rank().rank
        for turn in range(turns):
            value = rank * 10
            time.sleep(0.01)
            note = turn
        return note

mesh = this_host().spawn_procs(per_host={"gpus": 3}, name="trainers")
workers = mesh.spawn("worker", Worker)
waiting = workers.work.call(int(sys.argv[1]))
print("monarch_kernel.debugger" in sys.modules, flush=True)
waiting.get()
print("done", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script, and wait until its endpoint runs; it makes so many turns."""
    started: list[subprocess.Popen[str]] = []
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def start(turns: int = 100_000) -> subprocess.Popen[str]:
        command = [sys.executable, str(path), str(turns)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n", "the script has loaded the debugger by itself"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def debug(pid: int, *commands: str) -> str:
    """What `monarch-kernel debug PID` says to some commands."""
    words = [word for command in commands for word in ("-c", command)]
    done = subprocess.run(
        [sys.executable, "-m", "monarch_kernel", "debug", str(pid), *words],
        capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Screen:
    """`monarch-kernel debug` in a terminal that a person sits at."""

    def __init__(self, *words: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.environ.update(TERM="xterm", COLUMNS="120", LINES="40")
            os.execv(sys.executable, [sys.executable, "-m", "monarch_kernel", "debug", *words])
        self.text = ""
        self._at = 0

    def shows(self, *texts: str) -> None:
        """Read until these texts have come, in this order, after what was read before."""
        deadline = time.monotonic() + PATIENCE
        for text in texts:
            while (at := self.text.find(text, self._at)) < 0:
                assert time.monotonic() < deadline, f"{text!r} did not come after {self.text[self._at :]!r}"
                self._read(deadline)
            self._at = at + len(text)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._fd, 65536) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        for question in data.split(b"\x1b[6n")[1:]:  # where is the cursor?
            del question
            os.write(self._fd, b"\x1b[1;1R")
        self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", data.decode(errors="replace"))
        return bool(data)

    def types(self, line: str) -> None:
        """Type a line."""
        os.write(self._fd, line.encode() + b"\r")

    def presses(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._fd, key)

    def ends(self) -> int:
        """Wait for the end; the exit status."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            assert time.monotonic() < deadline, f"it does not end: {self.text[self._at :]!r}"
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


def test_a_script_that_was_never_debugged_is_stopped_seen_stepped_and_let_go(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    process = script(200)
    said = debug(
        process.pid, "list", "pause", "attach worker 1", "p rank, self", "detach", "break 11",
        "ranks 0-2", "continue", "clear all",
    )  # fmt: skip
    assert said.startswith("No rank is stopped.\n")
    assert "in Worker.work  (paused)" in said
    assert re.search(r"^rank, self = \(1, <.*Worker", said, re.MULTILINE)
    assert "Ranks 0-2 continue." in said
    assert process.stdout is not None
    wait_until(lambda: "No rank" in debug(process.pid, "all", "continue", "list"), "nothing is stopped any more")
    assert process.stdout.readline() == "done\n"
    assert process.wait(PATIENCE) == 0


def test_a_person_at_a_terminal(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    screen = Screen(str(process.pid))
    screen.shows(f"Process {process.pid}", "help lists the commands", "(mesh)")
    screen.types("break train.py:11 -r 0-1")
    screen.shows("Breakpoint 1: train.py:11, on trainers 0-1")
    # The stops that follow are told without being asked for.
    screen.shows("0-1  train.py:11 in Worker.work  (breakpoint 1)")
    screen.types("p value")
    screen.shows("0  value = 0", "1  value = 10")
    screen.types("n")
    screen.shows("0-1  train.py:12")
    screen.presses(b"print val\t")
    screen.shows("ue")  # the rest of it
    screen.presses(b"\x03")  # Ctrl-C gives the line up
    screen.types("group 7")
    screen.shows("There is one group only.")
    screen.types("quit")
    assert screen.ends() == 0
    assert alive(process.pid)
    assert "0-1  train.py:12" in debug(process.pid, "groups")  # they are still stopped


def test_one_of_two_terminals_has_control(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    first = Screen(str(process.pid))
    first.types("pause 0-2")
    first.shows("(paused)")
    assert "controls the debugger" in debug(process.pid, "next")
    assert "This console controls the debugger." in debug(process.pid, "drive --force", "next")
    first.types("n")
    first.shows("0-2  train.py:")
    first.types("quit")
    assert first.ends() == 0


def test_a_lost_terminal_frees_control_and_leaves_ranks_stopped(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    process = script()
    first = Screen(str(process.pid))
    first.types("pause 0-2")
    first.shows("(paused)")
    os.kill(first.pid, signal.SIGKILL)
    first.ends()
    wait_until(lambda: "controls the debugger" not in debug(process.pid, "next"), "the next terminal may take control")
    assert "0-2  train.py:" in debug(process.pid, "groups")


def test_the_end_of_the_script_ends_the_terminal(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    screen = Screen(str(process.pid))
    screen.shows("(mesh)")
    process.kill()
    assert screen.ends() == 1
    assert f"Process {process.pid} has ended" in screen.text


def test_a_script_that_cannot_answer_is_told_apart(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    (controller,) = [one for one in controllers() if one.pid == process.pid]
    from monarch_kernel.introspection import ask_console

    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConnectionError, match=r"does not answer within 1 s.*py-spy dump"):
            ask_console(controller, timeout=1.0)
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_only_this_users_own_folders_are_looked_into(
    script: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = script()
    (controller,) = [one for one in controllers() if one.pid == process.pid]
    assert "train.py" in controller.program
    debug(process.pid, "list")
    console = Path(controller.address).parent / "console.sock"
    assert console.stat().st_mode & 0o777 == 0o600
    assert console.parent.stat().st_mode & 0o777 == 0o700
    # A folder that others can write to proves nothing about who listens in it.
    with (
        tempfile.TemporaryDirectory(prefix="mk-", dir="/tmp") as base,  # the path of a Unix socket must be short
        socket.socket(socket.AF_UNIX) as listener,
    ):
        folder = Path(base, f"monarch-{os.getuid()}-x")
        folder.mkdir(mode=0o700)
        listener.bind(str(folder / "controller-1.sock"))
        listener.listen()
        monkeypatch.setattr("tempfile.tempdir", base)
        assert [one.pid for one in controllers() if base in one.address] == [os.getpid()]
        folder.chmod(0o755)
        assert [one for one in controllers() if base in one.address] == []


@pytest.mark.skipif("os.getuid() != 0", reason="only root can become another user")
def test_another_user_gets_nothing(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    debug(process.pid, "list")
    (controller,) = [one for one in controllers() if one.pid == process.pid]
    console = str(Path(controller.address).parent / "console.sock")
    code = (
        "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\n"
        "try:\n    socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError:\n    print('refused')\n"
    )
    for address in (console, controller.address):
        done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == "refused\n", done


# -- which process -----------------------------------------------------------------------------


def test_the_process_is_chosen_or_it_is_said_which_there_are() -> None:
    one, two = Controller(10, "python a.py", "/a"), Controller(11, "python b.py", "/b")
    assert choose([one], None) is one
    assert choose([one, two], 11) is two
    for found, pid, said in (
        ([], None, "none of your processes on this machine has meshes"),
        ([one, two], None, r"pass the PID of one:\n +10  python a.py\n +11  python b.py"),
        ([one], 12, r"process 12 has no meshes or belongs to another user; these processes have:\n +10"),
        ([], 12, "process 12 has no meshes or belongs to another user, and none of your other processes has meshes"),
    ):
        with pytest.raises(LookupError, match=said):
            choose(found, pid)
