"""What is shown of the dump that a crashed rank leaves."""

from __future__ import annotations

import pytest

from monarch_kernel.runtime.host.procs import CrashFilter

DUMP = b"""Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/tmp/ipykernel_7/12.py", line 3 in <module>
  File "/x/monarch_kernel/kernel/rank/cell_runner.py", line 117 in _execute
  File "/x/monarch_kernel/runtime/rank/main.py", line 81 in run
  File "<string>", line 1 in <module>

Extension modules: msgspec._core, numpy.linalg (total: 2)
"""

SHOWN = b"""Fatal Python error: Segmentation fault
Stack (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/tmp/ipykernel_7/12.py", line 3 in <module>
"""


@pytest.mark.parametrize("size", [1 << 20, 64, 20])
def test_our_frames_and_modules_are_left_out(size: int) -> None:
    crash = CrashFilter()
    assert crash.feed(b"a warning\n") == b"a warning\n"
    shown = b"".join(crash.feed(DUMP[at : at + size]) for at in range(0, len(DUMP), size))
    assert shown + crash.close() == SHOWN


def test_what_a_child_of_the_rank_leaves_does_not_swallow_the_ranks_own_lines() -> None:
    crash = CrashFilter()
    assert crash.feed(b"before " + DUMP + b"the rank goes on\n  File nothing\n") == (
        b"before " + SHOWN + b"the rank goes on\n  File nothing\n"
    )
    assert crash.feed(b"\nand on") == b"\nand on"


def test_a_dump_without_an_end_of_line() -> None:
    crash = CrashFilter()
    assert crash.feed(b"Fatal Python error: Aborted") == b""
    assert crash.close() == b"Fatal Python error: Aborted"
