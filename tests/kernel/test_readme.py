"""What the README shows is what one gets who types it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs, wait_until
from tests.kernel.harness import Kernel, Outcome
from tests.kernel.screen import text
from tests.ports import free_port
from tests.waiting import listens, patience

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PATIENCE = patience(60)


def blocks(heading: str) -> list[str]:
    """The code blocks of one section."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)


def printed(outcome: Outcome) -> str:
    """What a person sees of a cell."""
    shown = [outcome.stdout, text(outcome), outcome.traceback, outcome.text]
    return "\n".join(part for part in shown if part)


def comparable(said: str) -> str:
    """Without what differs from run to run, and without how a terminal and a notebook differ."""
    said = re.sub(r"\x1b\[[0-9;]*m|^Out\[\d+\]:", "", said, flags=re.MULTILINE)
    said = re.sub(r"ready in [\d.]+ m?s", "ready", re.sub(r"\S+ pid \d+", "pid", said))
    return "\n".join(line.rstrip() for line in said.split("\n") if line.strip()).strip()


@pytest.mark.torch
def test_the_session(fresh_kernel: Kernel) -> None:
    needs("torch")
    (session,) = blocks("A session")
    cells = re.findall(r"^In \[(\d+)\]: (.*?)\n\n(.*?)(?=^In \[|\Z)", session, re.DOTALL | re.MULTILINE)
    assert [int(number) for number, _, _ in cells] == list(range(1, len(cells) + 1))
    assert len(cells) >= 5
    for _, source, wanted in cells:
        outcome = fresh_kernel.run(re.sub(r"^   \.\.\.: ?", "", source, flags=re.MULTILINE))
        assert comparable(printed(outcome)) == comparable(wanted)


def test_several_hosts(tmp_path: Path) -> None:
    shell, program = blocks("Several hosts")[:2]
    ports = {"node1": free_port(), "node2": free_port()}
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if not name.startswith(("MONARCH_", "XDG_"))}

    def here(code: str) -> str:
        return re.sub(r"tcp://(node\d):\d+", lambda match: f"tcp://127.0.0.1:{ports[match[1]]}", code)

    def command(line: str) -> list[str]:
        words = [word.replace("~", str(tmp_path)) for word in shlex.split(line, comments=True)]
        assert words[0] == "monarch-kernel"
        return [sys.executable, "-m", "monarch_kernel", *words[1:]]

    keys, worker = [line for line in shell.splitlines() if line]
    subprocess.run(command(keys), env=environment, check=True, capture_output=True, timeout=PATIENCE)
    workers = [
        subprocess.Popen(
            command(here(worker.replace("node1", node))), env=environment, stdout=subprocess.DEVNULL, text=True
        )
        for node in ports
    ]
    try:
        for port in ports.values():
            wait_until(lambda port=port: listens(port), "the worker listens", PATIENCE)
        program = here(program) + "procs.initialized.get(60)\nprint(procs.extent)\n"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "{hosts: 2, gpus: 4}\n"
    finally:
        for process in workers:
            process.send_signal(signal.SIGTERM)
        for process in workers:
            process.wait(PATIENCE)
