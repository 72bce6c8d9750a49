"""Command lines of ssh, made of words that somebody else may have written: none of them is an option."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_kernel
from monarch_kernel.launchers.relay_commands import relay_commands
from monarch_kernel.launchers.ssh import SSHLauncher, checked_host, ssh_command

ROOT = Path(monarch_kernel.__file__).parent.parent


@pytest.mark.parametrize(
    "word",
    [
        "-oProxyCommand=touch${IFS}x",
        "-J",
        "",
        "a b",
        "a\nb",
        "a\x1b[2Jb",
        "$(id)",
        "`id`",
        "a;b",
        "a|b",
        "x@-oProxyCommand=id",
        "user@'host'",
    ],
)
def test_what_is_no_host(word: str, tmp_path: Path) -> None:
    for use in (
        lambda: checked_host(word),
        lambda: ssh_command(["ssh"], word, "true"),
        lambda: SSHLauncher([word]),
    ):
        with pytest.raises(ValueError, match="is not a host for ssh"):
            use()


@pytest.mark.parametrize(
    "word", ["node1", "me@node1", "10.0.0.5", "fe80::1%eth0", "[::1]", "ssh://me@node1:2222", "knoten-ä.example"]
)
def test_what_is_a_host(word: str) -> None:
    assert ssh_command(["ssh", "-F", "config"], word, "true")[-3:] == ["--", word, "true"]


def test_a_hostfile_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    (tmp_path / "hosts").write_text(f"node1\n-oProxyCommand=touch${{IFS}}{evil}\n")
    with pytest.raises(ValueError, match="ProxyCommand"):
        relay_commands("json.tool", "", str(tmp_path / "hosts"), "")
    report = [sys.executable, "-m", "monarch_kernel", "report", "train", "--hostfile", str(tmp_path / "hosts")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(report, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "is not a host for ssh" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not evil.exists()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed")
def test_ssh_itself_takes_a_word_behind_the_options_for_a_host(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    command = ssh_command(["ssh", "-F", "none"], "localhost", "true")
    command[command.index("localhost")] = f"-oProxyCommand=touch {evil}"
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 255 and not evil.exists()


def test_every_command_line_of_ssh_is_made_in_one_place() -> None:
    """A list that begins with ssh, or with the command that stands for it, and has a word of another kind."""
    made: set[str] = set()
    for package in ("monarch_kernel", "workspace_sync"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_bytes()
            if b"ssh" in text and any(_is_command(node) for node in ast.walk(ast.parse(text))):
                made.add(str(path.relative_to(ROOT)))
    extends = "monarch_kernel/launchers/sky/launcher.py"  # the command that stands for ssh, with an option more
    assert made == {"monarch_kernel/launchers/ssh.py", extends}


def _is_command(node: ast.AST) -> bool:
    if not isinstance(node, ast.List | ast.Tuple) or len(node.elts) < 2:
        return False
    first = node.elts[0].value if isinstance(node.elts[0], ast.Starred) else node.elts[0]
    name = getattr(first, "attr", getattr(first, "id", getattr(first, "value", "")))
    return name in ("ssh", "_ssh")
