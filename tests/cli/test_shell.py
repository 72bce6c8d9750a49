"""`monarch-kernel shell`, at a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal
from tests.conftest import alive, wait_until
from tests.waiting import patience

Open = Callable[..., Terminal]


@pytest.fixture
def shell(run: Cli, job: str) -> Iterator[Open]:
    """Open a shell, and wait for its prompt."""
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        terminal = Terminal(run, "shell", job, *words)
        opened.append(terminal)
        terminal.type("PS1=re''ady'> '\n")  # so that the echo of the line is no prompt
        terminal.until("ready> ")
        return terminal

    yield start
    for terminal in opened:
        terminal.close()


def pid_of(terminal: Terminal, line: str = "echo pid=$$") -> int:
    terminal.type(f"{line}\n")
    return int(terminal.until(r"pid=(\d+)")[1])


def test_a_session(shell: Open) -> None:
    terminal = shell("1", "-e", "MINE=here")
    terminal.type("echo $SIDE-$MINE; tty; stty size\n")
    terminal.until(r"left-here\s+/dev/pts/\d+\s+24 100")
    assert not terminal.restored, "raw meanwhile"
    terminal.type("sh -c 'trap \"stty size; exit\" WINCH; echo ar''med; while :; do sleep 0.1; done'\n")
    terminal.until("armed")
    terminal.resize(40, 120)
    terminal.until("40 120")
    terminal.until("ready> ")

    terminal.type("sh -c 'echo ru\"\"ns; exec sleep 1000'; echo code=$?\n")
    terminal.until(r"runs\s")  # which the line itself, as it was typed, does not have
    terminal.type("\x03")
    terminal.until("ready> ")
    stays = pid_of(terminal, "sleep 1000 & echo pid=$!")

    terminal.type("seq 200000; exit 7\n")
    terminal.until(r"\s200000\s")
    assert terminal.process.wait(patience(40)) == 7
    assert terminal.restored
    wait_until(lambda: not alive(stays), "what the shell had started ends with it")


def test_a_client_that_dies_ends_the_shell(shell: Open) -> None:
    terminal = shell()
    terminal.type("trap '' HUP\n")
    found = pid_of(terminal)
    terminal.process.kill()
    terminal.process.wait()
    wait_until(lambda: not alive(found), "the shell ends")


def test_a_client_that_is_ended_restores_the_terminal(shell: Open) -> None:
    terminal = shell()
    found = pid_of(terminal)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(patience(40)) == 128 + signal.SIGTERM
    assert terminal.restored
    wait_until(lambda: not alive(found), "the shell ends")


def test_a_shell_that_is_lost(shell: Open) -> None:
    terminal = shell()
    terminal.type("kill -9 $PPID\n")  # the process that holds the terminal
    terminal.until("monarch-kernel: ")
    assert terminal.process.wait(patience(40)) == 1
    assert terminal.restored


def test_lines_without_a_shell(run: Cli, job: str) -> None:
    none = run("shell", job)
    assert none.returncode == 1 and "exec runs commands without one" in none.stderr
    strange = run("shell", job, "2")
    assert strange.returncode == 2 and "no host 2 in this mesh of 2 (0 to 1)" in strange.stderr
    assert "no mesh 'other'" in run("shell", job, "--mesh", "other").stderr
    terminal = Terminal(run, "shell", job, "--workdir", "/nowhere")
    terminal.until("no shell on host 0: /nowhere: No such file or directory")
    assert terminal.process.wait(patience(40)) == 1
    terminal.close()
