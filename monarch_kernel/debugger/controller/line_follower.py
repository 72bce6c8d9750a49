"""Where a line of a file is in a later version of the file."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

#: How alike two lines have to be for one to count as the other, edited (0 to 1).
ALIKE = 0.6
#: Larger differences are not compared line by line, as that takes time that grows with the square (lines).
MOST_COMPARED = 4000


def follow_line(old: Sequence[str], new: Sequence[str], line: int) -> int | None:
    """The number of a line in a later version, from 1 on; None if it is gone.

    What stays around the line decides first; then an equal line, the nearest one; then the most similar line of what
    has replaced its part of the file.

    Args:
        old: the lines in which the number is known.
        new: those of the later version.
        line: from 1 on.
    """
    at = line - 1
    if not 0 <= at < len(old):
        return None
    head = 0
    while head < min(len(old), len(new)) and old[head].rstrip() == new[head].rstrip():
        head += 1
    if at < head:
        return line
    tail = 0
    most = min(len(old), len(new)) - head
    while tail < most and old[-1 - tail].rstrip() == new[-1 - tail].rstrip():
        tail += 1
    if at >= len(old) - tail:
        return line + len(new) - len(old)
    before = [text.rstrip() for text in old[head : len(old) - tail]]
    after = [text.rstrip() for text in new[head : len(new) - tail]]
    found = _within(before, after, at - head)
    return None if found is None else head + found + 1


def _within(before: list[str], after: list[str], at: int) -> int | None:
    """The index in ``after`` of what is at that index in ``before``."""
    start, end = 0, len(after)
    if len(before) <= MOST_COMPARED and len(after) <= MOST_COMPARED:
        for tag, a1, a2, b1, b2 in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if a1 <= at < a2:
                if tag == "equal":
                    return b1 + at - a1
                start, end = b1, b2
    text = before[at].strip()
    if not text:
        return None
    guess = min(start + max(0, at - start), max(end - 1, 0))
    same = [index for index, each in enumerate(after) if each.strip() == text]
    if same:
        return min(same, key=lambda index: abs(index - guess))
    ratios = [(SequenceMatcher(None, text, after[index].strip()).ratio(), -index) for index in range(start, end)]
    best = max(ratios, default=(0.0, 0))
    return -best[1] if best[0] >= ALIKE else None
