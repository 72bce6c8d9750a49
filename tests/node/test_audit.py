"""The audit: one line for each connection and its end, and one line a period for what strangers do."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.private_files import NotPrivateError
from monarch_kernel.runtime.node import audit
from monarch_kernel.runtime.node.audit import Audit, Tally
from monarch_kernel.runtime.node.poller import Poller
from tests.conftest import wait_until

FINGERPRINT = "3f9a1c2233445566" * 4
ALICE = ("alice", FINGERPRINT, "10.0.0.5:41234")


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller()
    made.start_background()
    yield made
    made.close()


def test_what_is_in_the_file_and_the_log(poller: Poller, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "audit.log"
    made = Audit(poller, str(path))
    made.connected(*ALICE)
    made.ended(*ALICE, "the connection\nwas closed")
    made.refused("10.0.0.66:50122", "it has no key that is trusted here")
    made.close()
    assert path.stat().st_mode & 0o777 == 0o600
    stamps, lines = zip(*(line.split(" ", 1) for line in path.read_text().splitlines()))
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp) for stamp in stamps)
    assert list(lines) == [
        "connected alice 3f9a1c2233445566 10.0.0.5:41234",
        "ended alice 3f9a1c2233445566 10.0.0.5:41234: the connection?was closed",
        "refused - - 10.0.0.66: it has no key that is trusted here",
    ]
    assert [record.getMessage() for record in caplog.records] == list(lines)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO, logging.WARNING]


def test_it_appends_and_goes_on_where_a_file_was_moved_away(poller: Poller, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text("before\n")
    path.chmod(0o600)
    made = Audit(poller, str(path))
    made.connected(*ALICE)
    path.rename(tmp_path / "audit.log.1")
    made.connected(*ALICE)
    made.close()
    assert (tmp_path / "audit.log.1").read_text().startswith("before\n")
    assert [len(file.read_text().splitlines()) for file in sorted(tmp_path.iterdir())] == [1, 2]


def test_a_disk_that_is_full_is_told_of(poller: Poller, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Audit(poller, str(tmp_path / "audit.log"))
    full = os.open("/dev/full", os.O_WRONLY)
    assert made._file is not None
    os.dup2(full, made._file._fd)
    os.close(full)
    made._path = made._file._path = "/dev/full"
    made.connected(*ALICE)
    made.close()
    assert "cannot write to the audit file /dev/full: No space left on device" in caplog.text


def test_what_it_cannot_append_to(poller: Poller, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link", "no/folder"):
        with pytest.raises(OSError):
            Audit(poller, str(tmp_path / name))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_others_have_prepared_gets_nothing(poller: Poller, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for mode in (0o666, 0o622, 0o644):
        path.touch()
        path.chmod(mode)
        with pytest.raises(NotPrivateError, match="other users may read or write"):
            Audit(poller, str(path))
    path.chmod(0o600)
    made = Audit(poller, str(path))
    path.unlink()
    path.touch()  # in its place, while it is written
    path.chmod(0o666)
    made.connected(*ALICE)
    made.close()
    assert not path.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_file_of_another_user_gets_nothing(poller: Poller, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.touch()
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(NotPrivateError, match="uid 12345, so nothing is written to it"):
        Audit(poller, str(path))


# -- counting -----------------------------------------------------------------------------------------


class Written:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str, int]] = []

    def __call__(self, address: str, reason: str, again: int) -> None:
        self.lines.append((address, reason, again))


def test_the_first_is_written_and_the_others_are_counted(poller: Poller) -> None:
    written = Written()
    counted = Tally(poller, 3600.0, written)
    for _ in range(1000):
        counted.add("10.0.0.66", "no key")
    counted.add("10.0.0.67", "no key")
    assert written.lines == [("10.0.0.66", "no key", 0), ("10.0.0.67", "no key", 0)]
    counted.close()
    assert written.lines[2:] == [("10.0.0.66", "no key", 999)]


def test_a_period_writes_what_it_has_counted_and_ends_when_it_is_quiet(poller: Poller) -> None:
    written = Written()
    counted = Tally(poller, 0.02, written)
    counted.add("10.0.0.66", "no key")
    counted.add("10.0.0.66", "no key")
    wait_until(lambda: ("10.0.0.66", "no key", 1) in written.lines, "the period's line")
    wait_until(lambda: counted._timer is None, "there is nothing to count any more")
    counted.add("10.0.0.66", "no key")
    assert written.lines == [("10.0.0.66", "no key", 0), ("10.0.0.66", "no key", 1), ("10.0.0.66", "no key", 0)]
    counted.close()


def test_many_addresses_are_counted_together(poller: Poller) -> None:
    written = Written()
    counted = Tally(poller, 3600.0, written)
    for number in range(10_000):
        counted.add(f"fe80::{number:x}", "no key")
    counted.close()
    assert len(written.lines) == audit.ADDRESSES + 2
    assert written.lines[-1] == (audit.OTHERS, "no key", 10_000 - audit.ADDRESSES - 1)


def test_no_count_is_lost_between_threads(poller: Poller) -> None:
    written = Written()
    counted = Tally(poller, 0.001, written)
    threads = [
        threading.Thread(target=lambda: [counted.add("10.0.0.66", "no key") for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted.close()
    wait_until(lambda: sum(again or 1 for _, _, again in written.lines) == 8000, "the last line")


def test_refusals_are_counted_by_host(poller: Poller, caplog: pytest.LogCaptureFixture) -> None:
    made = Audit(poller)
    for port in range(40000, 40010):
        made.refused(f"[::1]:{port}", "no key")
    made.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["refused - - [::1]: no key", "refused - - [::1]: no key (9 more since)"]
