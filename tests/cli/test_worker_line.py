"""How `monarch-kernel worker` reads its line: at once what launchers write, by argparse all else, and both alike."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.__main__ import command_parser
from monarch_kernel.cli import worker

OF_SSH = (
    "--listen tcp://10.0.0.1:0 --announce - --announce ~/workers/a.json --key - --env - --log ~/workers/a.log "
    "--idle 60 --walltime 3600 --background"
)


@pytest.mark.parametrize(
    "line",
    [
        OF_SSH,
        "--listen ipc:///tmp/x --lifeline 7 --name node1 --keep folder --lock 8",
        "--listen tcp://a:1@tcp://0.0.0.0:1 --key-file key --allow list --audit log --key-env KEY",
    ],
)
def test_both_read_the_lines_of_launchers_alike(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "_run", lambda options: run.append(vars(options)) or 0)
    assert worker.run_plain(line.split()) == 0
    parser = command_parser("worker")
    assert parser is not None
    read = vars(parser.parse_args(line.split()))
    del read["run"]
    assert run == [read]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--listen",
        "--listen=ipc:///tmp/x",
        "--list ipc:///tmp/x",
        "--listen ipc:///tmp/x --idle soon",
        "--listen ipc:///tmp/x --env FILE",
        "--listen ipc:///tmp/x --name --background",
        "--listen ipc:///tmp/x more",
    ],
)
def test_all_else_is_for_argparse(line: str) -> None:
    assert worker.run_plain(line.split()) is None
