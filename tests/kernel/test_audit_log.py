"""The audit log of a kernel: what is written before and after each thing that is done."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.kernel.notebook import LONGEST, AuditLog
from monarch_kernel.private_files import AppendOnlyFile, NotPrivateError
from tests.kernel.harness import Kernel


def entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_entry_before_and_one_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "train.ipynb")
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path), texts=False)
    with log.during("mesh cell", "x = 1\ny", mesh="m", ranks="0-1", hosts=["a"]):
        (begun,) = entries(path)  # it is there before anything runs
    with pytest.raises(ValueError), log.during("command", line="up --procs 2"):
        raise ValueError("no\nmore")
    one, ended, two, failed = entries(path)
    assert one == begun and path.stat().st_mode & 0o777 == 0o600
    assert one["sha256"] == hashlib.sha256(b"x = 1\ny").hexdigest() and one["lines"] == 2 and "text" not in one
    assert (one["notebook"], one["did"], one["mesh"], one["ranks"]) == ("train.ipynb", "mesh cell", "m", "0-1")
    assert one["pid"] == os.getpid() and one["user"] and one["host"] and one["hosts"] == ["a"]
    assert (ended["id"], ended["outcome"]) == (one["id"], "ok") and ended["seconds"] >= 0
    assert two["line"] == "up --procs 2" and "sha256" not in two and two["id"] != one["id"]
    assert failed["outcome"] == "ValueError: no"
    log.close()


def test_texts_are_written_if_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path), texts=True)
    log.begin("cell", "a\n\u2603\ud800")("ok")
    log.begin("cell", "x" * (LONGEST + 1))("ok")
    first, _, second, _ = entries(path)
    assert first["text"] == "a\n\u2603\ud800" and "cut" not in first
    assert len(second["text"]) == LONGEST and second["cut"] is True
    log.close()


def test_off_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_KERNEL_AUDIT_LOG", raising=False)
    log = AuditLog.of_environment()
    with log.during("cell", "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_private_is_refused_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit.jsonl"
    path.touch(mode=0o644)
    os.chmod(path, 0o644)
    log = AuditLog(str(path), texts=False)
    log.begin("cell", "x")("ok")
    said = capsys.readouterr().err
    assert said.count("This is not in the audit log") == 2 and "chmod 600" in said and not path.read_text()
    with pytest.raises(NotPrivateError, match="other users may read or write"):
        AppendOnlyFile(str(path))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        AppendOnlyFile(str(link))
    assert not (tmp_path / "elsewhere").exists()


def test_it_goes_on_where_the_file_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = AppendOnlyFile(str(path))
    file.append("one")
    path.rename(tmp_path / "old")
    file.append("two")
    file.close()
    file.append("three")
    assert ((tmp_path / "old").read_text(), path.read_text()) == ("one\n", "two\n")


def test_what_a_kernel_does(
    start_kernel: Callable[..., Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    monkeypatch.setenv("MONARCH_KERNEL_AUDIT_LOG", str(path))
    monkeypatch.setenv("MONARCH_KERNEL_AUDIT_TEXT", "1")
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 2")
    kernel.ok("%%mesh -r 1\nx = 1")
    assert kernel.run("%%mesh\n1 / 0").status == "error"
    assert kernel.run("1 / 0").status == "error"
    kernel.ok("%mesh down")
    found = entries(path)
    begun = {each["id"]: each for each in found if "did" in each}
    outcomes = {each["id"]: each["outcome"] for each in found if "outcome" in each}
    assert begun.keys() == outcomes.keys() and {each["pid"] for each in begun.values()} == {kernel.pid}
    commands = [each for each in begun.values() if each["did"] == "command"]
    assert [each["line"] for each in commands] == ["up --procs 2", "down"]
    assert {each["by"] for each in commands} == {"a cell of the notebook"}
    one, two = (each for each in begun.values() if each["did"] == "mesh cell")
    assert (one["mesh"], one["ranks"], one["text"], outcomes[one["id"]]) == ("m", "1", "x = 1", "ok")
    assert one["hosts"] == [one["host"]] and two["ranks"] == "0-1" and outcomes[two["id"]].startswith("MeshCellError")
    texts = {each["text"]: outcomes[each["id"]] for each in begun.values() if each["did"] == "cell"}
    assert texts["%mesh down"] == "ok" and texts["1 / 0"].startswith("ZeroDivisionError")
