"""What of a rank's log is delivered to a controller that was not there."""

from __future__ import annotations

import pytest

from monarch_kernel.protocol.output_records import encode_text, plain_text
from monarch_kernel.runtime.host.keeper_agent import newest

LINES = b"one\ntwo\nthree\n"
RECORDS = [record for text in (b"one\n", b"two\n", b"three\n") for record in encode_text("stdout", "c", text)]


@pytest.mark.parametrize(
    "missed, limit, wanted",
    [
        (len(LINES), 100, LINES),
        (0, 100, b""),
        (6, 100, b"three\n"),  # all that is missed, wherever it begins
        (8, 100, b"o\nthree\n"),
        (len(LINES), 8, b"three\n"),  # cut by the limit: from the beginning of a line
        (100, 100, b"two\nthree\n"),  # the log has forgotten the beginning
        (len(LINES), 3, b"ee\n"),  # one long line
    ],
)
def test_lines(missed: int, limit: int, wanted: bytes) -> None:
    assert newest(LINES, missed, limit) == wanted


def test_records_are_whole() -> None:
    log = b"".join(RECORDS)
    for limit in range(len(RECORDS[2]), len(log)):
        found = plain_text([(1, newest(log, len(log), limit))])
        assert found.endswith("three\n")
        assert "\0" not in found
