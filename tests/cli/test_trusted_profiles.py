"""A project's profile that was trusted once, and whose files have changed since."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SSH = """#!/bin/sh
echo "$@" >> {calls}
exit 255
"""


@pytest.fixture
def calls(run: Cli) -> Iterator[Path]:
    """The calls of ssh, one a line; what stands for it on PATH reaches nothing."""
    (folder := run.root / "bin").mkdir()
    made = run.root / "calls"
    (folder / "ssh").write_text(SSH.format(calls=made))
    (folder / "ssh").chmod(0o755)
    path = run.env["PATH"]
    run.env["PATH"] = f"{folder}{os.pathsep}{path}"
    yield made
    run.env["PATH"] = path
    made.unlink(missing_ok=True)
    (folder / "ssh").unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ('hostfile = "team.txt"', "team.txt"),
        ('nodes = ["good"]\nssh = "ssh -F ssh.config"', "ssh.config"),
        ('nodes = ["good"]\nssh = "ssh -Fssh.config"', "ssh.config"),
        ('nodes = ["good"]\nkey_file = "team.key"', "team.key"),
    ],
    ids=["hostfile", "configuration", "configuration-in-one-word", "key"],
)
def test_a_file_that_it_names_has_changed(run: Cli, calls: Path, setting: str, named: str) -> None:
    (run.folder / ".monarch").mkdir(exist_ok=True)
    (run.folder / ".monarch" / "config.toml").write_text(f'[profiles.team]\non = "ssh"\nhosts = 1\n{setting}\n')
    file = run.folder / named
    if named == "team.key":
        assert run("keys", "new", named).returncode == 0
    else:
        file.write_text("good\n" if named == "team.txt" else "# nothing\n")
    assert "add --trust once" in run("up", "team").stderr and not calls.exists()
    run("up", "team", "--trust")
    asked = calls.read_text()
    assert "good" in asked
    run("up", "team")
    again = calls.read_text()
    assert len(again) > len(asked)  # nothing has changed, and nothing is asked

    if named == "team.key":
        file.unlink()
        assert run("keys", "new", named).returncode == 0
    else:
        file.write_text("evil\n" if named == "team.txt" else "ProxyCommand evil\n")
    refused = run("up", "team")
    assert refused.returncode == 1 and "you have not said that you trust" in refused.stderr
    assert calls.read_text() == again
