"""``python -m workspace_sync``: what it does, prints and exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sync.hosts import StoreHosts
from tests.sync.trees import difference, snapshot
from tests.waiting import patience
from workspace_sync.__main__ import main

Hosts = Callable[..., StoreHosts]


def run(made: StoreHosts, command: str, *options: str) -> int:
    hosts = [part for url in made.team.urls for part in ("--host", url)]
    return main([command, *hosts, "--key-file", str(made.team.key_file), *options])


def test_from_a_terminal(store_hosts: Hosts, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = store_hosts(2)
    assert run(made, "sync", str(tree)) == 0
    said = capsys.readouterr().out
    assert "node0" in said
    assert "sent to 2 hosts" in said
    first = snapshot(tree)
    for store in made.stores:
        got = snapshot(next(store.glob("w/*")) / "current" / "tree" / tree.name)
        assert not difference(got, first)

    (tree / "tool").write_text("new")
    assert run(made, "sync", str(tree), "--dry-run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [host["lacks"] for host in report["hosts"]] == [3, 3]
    assert run(made, "sync", str(tree), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [host["switched"] for host in report["hosts"]] == [True, True]

    assert run(made, "status", str(tree)) == 0
    assert report["digest"][:8] in capsys.readouterr().out
    assert run(made, "rollback", str(tree)) == 0
    victim = next(made.stores[0].glob("w/*/current/tree/*/tool"))
    victim.write_text("#!/bin/sh\nexit 9\n")
    assert run(made, "verify", str(tree)) == 1
    assert str(victim.name) in capsys.readouterr().out
    assert run(made, "collect", "--limit", "0") == 0
    assert "node1" in capsys.readouterr().out


def test_what_is_wrong_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"there is no folder {tmp_path / 'nowhere'}\n"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to("/etc/hostname")
    os.environ["MONARCH_KERNEL_SYNC_FOLDER"], before = str(tmp_path / "s"), os.environ.get("MONARCH_KERNEL_SYNC_FOLDER")
    try:
        assert main(["sync", str(folder)]) == 2
        assert "out" in capsys.readouterr().err
        assert main(["rollback", str(folder)]) == 1
        assert "no generation to go back to" in capsys.readouterr().err
    finally:
        if before is None:
            del os.environ["MONARCH_KERNEL_SYNC_FOLDER"]
        else:
            os.environ["MONARCH_KERNEL_SYNC_FOLDER"] = before


def test_ctrl_c_ends_it_with_130(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    for number in range(64):
        (big / f"f{number}").write_bytes(os.urandom(2 << 20))
    code = (
        "import os, signal, sys, workspace_sync.session as s\n"
        "from workspace_sync.transfer.staging_run import StagingRun\n"
        "real = StagingRun.stage\n"
        "def stage(self, changes):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    real(self)\n"
        "StagingRun.stage = stage\n"
        "from workspace_sync.__main__ import main\n"
        "sys.exit(main(['sync', sys.argv[1]]))\n"
    )
    env = {**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(tmp_path / "store")}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(big)], env=env, capture_output=True, timeout=patience(60), check=False
    )
    assert ended.returncode == 130, ended.stderr.decode()
    assert b"interrupted; the hosts keep the trees that they have" in ended.stderr
    assert not list(tmp_path.glob("store/w/*/current"))
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_watch_syncs_at_every_save_until_ctrl_c(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-m", "workspace_sync", "sync", "--watch", "--json", str(folder)]
    env = {**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(tmp_path / "store")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["kind"] == "synced"
        (folder / "a.txt").write_text("one")
        assert json.loads(watching.stdout.readline())["report"]["sync"]["hosts"][0]["files"] == 1
        (there,) = tmp_path.glob("store/w/*/current/tree/folder/a.txt")
        assert there.read_text() == "one"
        watching.send_signal(signal.SIGINT)
        assert watching.wait(patience(60)) == 130
