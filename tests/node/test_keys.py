"""Key files: made once, for their owner alone, and read only if they are what they should be."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import KeyFileError, load_keys, make_key_file
from monarch_kernel.protocol.keys.identity import new_identity
from tests.waiting import patience


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "team.key"
    make_key_file(path)
    return path


def test_a_key_file_is_read_back_as_a_pair(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load_keys(key_file)
    assert keys.path == str(key_file) and len(keys.fingerprint) == 64
    monkeypatch.setenv("MONARCH_KERNEL_KEY_FILE", str(key_file))
    assert keys.same_as(load_keys()) and keys.same_as(load_keys(str(key_file)))


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_only_its_owner_can_use_it_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_key_file(tmp_path / "k")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_a_key_file_is_never_overwritten(key_file: Path) -> None:
    text = key_file.read_text()
    with pytest.raises(KeyFileError, match="exists already"):
        make_key_file(key_file)
    assert key_file.read_text() == text


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"cannot write the key file .*No such file"):
        make_key_file(tmp_path / "no" / "k")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=re.escape(f"there is no key file {tmp_path}/k")):
        load_keys(tmp_path / "k")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_use(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_keys(key_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user(key_file: Path) -> None:
    os.chown(key_file, 65533, -1)
    with pytest.raises(KeyFileError, match="belongs to .*65533"):
        load_keys(key_file)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(KeyFileError, match="not a regular file"):
            load_keys(path)


def _other_private() -> str:
    return base64.b64encode(new_identity("other").private).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: b"",
        lambda fields: b"\xff\xfe not a key",
        lambda fields: b"[1, 2]",
        lambda fields: json.dumps({k: v for k, v in fields.items() if k != "private"}).encode(),
        lambda fields: json.dumps({**fields, "private": 5}).encode(),
        lambda fields: json.dumps({**fields, "private": fields["private"][:-4]}).encode(),
        lambda fields: json.dumps({**fields, "certificate": "~" * 40}).encode(),
        lambda fields: json.dumps({**fields, "private": _other_private()}).encode(),
        lambda fields: json.dumps({**fields, "name": "two words"}).encode(),
        lambda fields: json.dumps({**fields, "more": "x" * 5_000_000}).encode(),
    ],
    ids=["empty", "binary", "list", "half", "number", "short", "not-base64", "not-a-pair", "name", "huge"],
)
def test_what_is_no_key_file(key_file: Path, change: object) -> None:
    assert callable(change)
    key_file.write_bytes(change(json.loads(key_file.read_text())))
    with pytest.raises(KeyFileError, match="is not a key file"):
        load_keys(key_file)


def private_part(path: Path) -> str:
    return json.loads(path.read_text())["private"]


def test_the_secret_is_not_shown(key_file: Path) -> None:
    keys = load_keys(key_file)
    assert private_part(key_file) not in repr(keys) + str(keys) + f"{keys}"


def test_the_command_makes_a_file_and_shows_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "team.key"
    command = [sys.executable, "-m", "monarch_kernel", "keys", str(path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert first.returncode == 0 and str(path) in first.stdout
    secret = private_part(path)
    second = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert second.returncode == 1 and "exists already" in second.stderr and "Traceback" not in second.stderr
    assert secret not in first.stdout + first.stderr + second.stdout + second.stderr
