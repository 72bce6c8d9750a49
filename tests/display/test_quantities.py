"""Durations and sizes as people write them."""

from __future__ import annotations

from monarch_kernel.display.quantities import duration, memory, text_size


def test_durations() -> None:
    shown = [duration(each) for each in (0.0124, 0.21, 14.6, 185, 7805)]
    assert shown == ["12 ms", "0.2 s", "14 s", "3 min 5 s", "2 h 10 min"]


def test_sizes() -> None:
    assert [memory(each) for each in (0, 12_300_000, 1_440_000_000)] == ["0 MB", "12 MB", "1.4 GB"]
    shown = [text_size(each) for each in (1, 999, 14_200, 1_440_000, 5_000_000_000)]
    assert shown == ["1 byte", "999 bytes", "14 kB", "1.4 MB", "5.0 GB"]
