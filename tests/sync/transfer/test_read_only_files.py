"""Read-only files of several chunks: who is not root cannot open them for writing, and has them made and changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import patience

PROGRAM = """
import os, stat, sys
from pathlib import Path
import workspace_sync
from monarch_kernel.actor import this_host

folder = Path(sys.argv[1])
big = folder / "big.bin"


def synced(content):
    if big.exists():
        big.chmod(0o644)
    big.write_bytes(content)
    big.chmod(0o444)
    report = workspace_sync.sync(this_host(), workspace_sync.Workspace(dirs=[str(folder)]))
    [made] = (Path(report.hosts[0].path) / "current" / "tree").resolve().rglob("big.bin")
    assert made.read_bytes() == content and stat.S_IMODE(made.stat().st_mode) == 0o444
    return report.sent


first = bytearray(os.urandom(12 << 20))
(folder / "small").write_text("so that the first sync is over")
workspace_sync.sync(this_host(), workspace_sync.Workspace(dirs=[str(folder)]))
assert synced(bytes(first)) >= len(first)
first[1 << 20] ^= 255
assert synced(bytes(first)) < len(first) // 2
"""


def test_they_are_made_and_changed_without_the_powers_of_root(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "workspace")]
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere, and setpriv is not installed to give that up")
        given_up = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--inh-caps={given_up}", f"--bounding-set={given_up}", *command]
    (tmp_path / "workspace").mkdir()
    env = {**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(tmp_path / "store")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
