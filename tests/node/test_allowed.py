"""Allow-lists: what is read from them, when, and how the command changes them."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import KeyFileError, allow_list, make_key_file
from monarch_kernel.protocol.keys.allow_list import AllowList, add_key, read_list, revoke_keys
from monarch_kernel.protocol.keys.identity import Public, new_identity, parse_line
from tests.waiting import patience


@pytest.fixture(scope="module")
def alice() -> Public:
    return new_identity("alice").public


@pytest.fixture(scope="module")
def bob() -> Public:
    return new_identity("bob").public


@pytest.fixture
def path(tmp_path: Path, alice: Public, bob: Public) -> str:
    named = str(tmp_path / "team.allow")
    add_key(named, alice)
    add_key(named, bob)
    return named


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(allow_list.time, "monotonic", made.monotonic)
    return made


def names(listed: AllowList) -> set[str]:
    return {key.name for key in listed.keys.values()}


# -- reading ------------------------------------------------------------------------------------------


def test_who_is_added_is_allowed_at_once(tmp_path: Path, alice: Public, bob: Public, clock: Clock) -> None:
    named = str(tmp_path / "list")
    add_key(named, alice)
    listed = AllowList(named, required=True)
    assert not listed.refresh()
    add_key(named, bob)
    assert listed.refresh()
    assert names(listed) == {"alice", "bob"}


def test_who_is_revoked_is_out_when_the_file_is_still(path: str, clock: Clock) -> None:
    listed = AllowList(path, required=True)
    revoke_keys(path, "bob")
    assert not listed.refresh()
    clock.now += allow_list.SETTLE
    assert listed.refresh()
    assert names(listed) == {"alice"}


def test_an_editor_that_empties_the_file_first_revokes_nobody(path: str, clock: Clock) -> None:
    listed = AllowList(path, required=True)
    text = Path(path).read_text()
    for step in ("", "# not all yet\n", text):
        Path(path).write_text(step)
        clock.now += allow_list.SETTLE / 2
        assert not listed.refresh()
    clock.now += allow_list.SETTLE
    assert not listed.refresh()
    assert names(listed) == {"alice", "bob"}


def test_a_change_that_leaves_the_stamp_as_it_is(path: str, clock: Clock) -> None:
    """The clock of a file system is coarse: a second change in the same tick is found, too."""
    listed = AllowList(path, required=True)
    text = Path(path).read_text()
    Path(path).write_text(text.replace("alice", "carol"))
    stamp = os.stat(path).st_mtime_ns
    assert listed.refresh()
    Path(path).write_text(text.replace("alice", "david"))
    os.utime(path, ns=(stamp, stamp))
    clock.now += allow_list.SETTLE
    listed.refresh()
    clock.now += allow_list.SETTLE
    listed.refresh()
    assert names(listed) == {"david", "bob"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda path, text: path.write_text(text + "monarch-key carol AAAA\n"),
            r"line 3: the key of carol is not a cert",
        ),
        (
            lambda path, text: path.write_text(text + "ssh-ed25519 AAAA carol\n"),
            r"line 3: a key is given as 'monarch-key",
        ),
        (lambda path, text: path.write_text(text[:-30]), "ends in the middle of a line"),
        (lambda path, text: path.chmod(0o664), "others than its owner may write to the allow-list .*chmod go-w"),
        (lambda path, text: (path.unlink(), path.mkdir()), "not a regular file"),
    ],
    ids=["not-a-key", "another-line", "cut", "others-may-write", "folder"],
)
def test_a_list_that_is_wrong_changes_nothing_and_is_told_of_once(
    path: str, change: Callable[[Path, str], object], said: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    listed = AllowList(path, required=True)
    file = Path(path)
    change(file, file.read_text())
    for _ in range(3):
        clock.now += allow_list.SETTLE
        assert not listed.refresh()
    assert names(listed) == {"alice", "bob"}
    assert re.search(said, caplog.text)
    assert caplog.text.count("stays in force") == 1
    with pytest.raises(KeyFileError, match=said):
        AllowList(path, required=True)


def test_a_list_that_is_taken_away_allows_nobody(path: str, clock: Clock) -> None:
    listed = AllowList(path, required=True)
    os.unlink(path)
    assert not listed.refresh()
    clock.now += allow_list.SETTLE
    assert listed.refresh()
    assert names(listed) == set()


def test_a_list_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"there is no allow-list .*monarch-kernel keys add"):
        AllowList(str(tmp_path / "none"), required=True)
    assert names(AllowList(str(tmp_path / "none"), required=False)) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_list_of_another_user(path: str) -> None:
    os.chown(path, 65533, -1)
    with pytest.raises(KeyFileError, match="belongs to .*, which could change the keys that this process trusts"):
        AllowList(path, required=True)


@pytest.mark.parametrize("line", ["", "monarch-key alice", "monarch-key al/ice AAAA", "monarch-key alice A*A"])
def test_what_is_no_public_line(line: str) -> None:
    with pytest.raises(ValueError):
        parse_line(line)


# -- changing -----------------------------------------------------------------------------------------


def test_comments_and_order_stay(tmp_path: Path, alice: Public, bob: Public) -> None:
    file = tmp_path / "list"
    file.write_text(f"# the team\n\n{alice.line}\n  # bob is on leave\n{bob.line}\n")
    file.chmod(0o640)
    assert revoke_keys(str(file), alice.fingerprint[:8]) == [alice]
    lines = file.read_text().splitlines()
    assert lines[:2] + lines[3:] == ["# the team", "", "  # bob is on leave", bob.line]
    assert re.fullmatch(rf"# revoked \S+Z: alice {alice.fingerprint}", lines[2])
    assert file.stat().st_mode & 0o777 == 0o640
    assert add_key(str(file), alice)
    assert read_list(str(file)) == [bob, alice]
    assert not add_key(str(file), alice)
    assert list(tmp_path.iterdir()) == [file]


def test_a_name_is_one_key(path: str) -> None:
    with pytest.raises(KeyFileError, match="another key of the name alice"):
        add_key(path, new_identity("alice").public)


def test_who_is_not_on_the_list(path: str) -> None:
    with pytest.raises(KeyFileError, match="no key 'carol'; the keys on it: alice, bob"):
        revoke_keys(path, "carol")


def test_a_link_to_a_list_stays_one(path: str, tmp_path: Path, alice: Public) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    revoke_keys(str(link), "bob")
    assert link.is_symlink()
    assert read_list(path) == [alice]


def _add_some(path: str, keys: list[Public]) -> None:
    for key in keys:
        add_key(path, key)


def test_nothing_is_lost_when_several_change_it_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "list")
    keys = [new_identity(f"key{i}").public for i in range(24)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_some, args=(path, keys[i::4])) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(patience(60))
    assert {key.name for key in read_list(path)} == {key.name for key in keys}


# -- the command --------------------------------------------------------------------------------------


def run_keys(*words: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_kernel", "keys", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), input=said)


def test_the_command_from_a_key_to_its_revocation(tmp_path: Path) -> None:
    key, team = str(tmp_path / "alice.key"), str(tmp_path / "team.allow")
    private = make_key_file(key, "alice").private
    line = run_keys("show", key).stdout
    assert parse_line(line).name == "alice"
    added = run_keys("add", team, "-", said=f"# of alice\n{line}")
    assert added.returncode == 0 and added.stdout.startswith("Added alice (")
    assert run_keys("add", team, line.strip()).stdout.startswith("Already there: alice (")
    listed = run_keys("list", team)
    assert listed.stdout == f"{parse_line(line).fingerprint[:16]}  alice\n"
    assert run_keys("revoke", team, "alice").stdout.startswith("Revoked alice (")
    assert run_keys("list", team).stdout == ""
    assert run_keys("add", team, key, "--name", "alice@work").stdout.startswith("Added alice@work (")
    assert private.hex() not in Path(team).read_bytes().hex()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "LIST"), "see 'monarch-kernel keys --help'"),
        (("add", "LIST", "/none"), "cannot read /none"),
        (("add", "LIST", "monarch-key", "x", "AAAA"), "the key of x is not a certificate"),
        (("list", "/none"), "there is no allow-list /none"),
        (("revoke", "/none", "x"), "there is no allow-list /none"),
        (("show", "/none"), "there is no key file /none"),
        (("new", "/none/x"), "cannot write the key file /none/x"),
        (("new", "x", "--name", "a b"), "cannot be the name of a key"),
    ],
)
def test_what_the_command_refuses(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from monarch_kernel.__main__ import main

    named = [str(tmp_path / word) if word in ("LIST", "x") and i == 1 else word for i, word in enumerate(words)]
    assert main(["keys", *named]) == 1
    error = capsys.readouterr().err
    assert error.startswith("monarch-kernel: ") and said in error
    assert len(error.splitlines()) == 1
    assert os.listdir(tmp_path) == []
