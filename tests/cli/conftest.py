"""Commands in processes of their own, with a list of jobs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class Cli:
    """Runs `monarch-kernel`.

    Attributes:
        env: the environment of all commands.
        folder: where they run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "project"
        self.folder.mkdir()
        self.env = {
            **os.environ,
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }

    @staticmethod
    def line(*words: str) -> list[str]:
        """What runs a command."""
        return [sys.executable, "-P", "-m", "monarch_kernel", *words]

    def __call__(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.line(*words), capture_output=True, text=True, input=text, timeout=60, env=self.env, cwd=self.folder
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """Runs commands; the list of jobs is empty afterwards."""
    cli = Cli(tmp_path_factory.mktemp("cli"))
    yield cli
    cli("kill", "--orphans")
    assert not list((cli.root / "state" / "monarch_kernel" / "jobs").glob("*"))


@pytest.fixture(scope="module")
def job(run: Cli) -> str:
    """A job of two hosts, each a process of this machine."""
    made = run("up", "process", "--hosts", "2", "-e", "SIDE=left", "-e", "SHELL=/bin/bash")
    assert made.returncode == 0, made.stderr
    return made.stdout.split()[-1]
