"""Patterns of strangers take steps in proportion to the lengths of pattern and name, whatever they are.

The steps are counted by a matcher that tries what ``re`` tries, in its order, so no clock is asked.
"""

from __future__ import annotations

import itertools
import random
import re
import re._constants as sre  # pyright: ignore[reportMissingImports]
import re._parser as parser  # pyright: ignore[reportMissingImports]
from collections.abc import Iterator
from typing import Any

import pytest

from workspace_sync.scanning.rules import translate


class Steps:
    """Matches as ``re.fullmatch`` does, by backtracking, and counts what it tries."""

    def __init__(self, regex: bytes, text: bytes) -> None:
        self.count = 0
        self._text = text
        self.found = any(end == len(text) for end in self._sequence(list(parser.parse(regex, re.DOTALL)), 0, 0))

    def _sequence(self, items: list[Any], at: int, place: int) -> Iterator[int]:
        """The places where what follows from an item on may end, in the order in which they are tried."""
        if at == len(items):
            yield place
            return
        for end in self._item(items[at], place):
            yield from self._sequence(items, at + 1, end)

    def _item(self, item: Any, place: int) -> Iterator[int]:
        self.count += 1
        kind, what = item
        if kind is sre.ATOMIC_GROUP:
            yield from itertools.islice(self._sequence(list(what), 0, place), 1)
        elif kind is sre.SUBPATTERN:
            yield from self._sequence(list(what[3]), 0, place)
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = what
            if most == 1:
                assert least == 0
                if kind is sre.MIN_REPEAT:
                    yield place
                yield from self._sequence(list(inner), 0, place)
                if kind is sre.MAX_REPEAT:
                    yield place
                return
            (single,) = inner
            assert (least, most) == (0, sre.MAXREPEAT)
            if kind is sre.MIN_REPEAT:
                yield place
                while self._takes(single, place):
                    place += 1
                    yield place
            else:
                end = place
                while self._takes(single, end):
                    end += 1
                yield from range(end, place - 1, -1)
        elif self._takes(item, place):
            yield place + 1

    def _takes(self, item: Any, place: int) -> bool:
        self.count += 1
        if place >= len(self._text):
            return False
        byte = self._text[place]
        kind, what = item
        if kind is sre.IN:
            negated = what[0][0] is sre.NEGATE
            return negated != any(
                byte == each[1] if each[0] is sre.LITERAL else each[1][0] <= byte <= each[1][1]
                for each in what[negated:]
            )
        return kind is sre.ANY or (byte == what if kind is sre.LITERAL else byte != what)


#: What is repeated in patterns, and behind all that; and what in names. Nearly all nearly match.
REPEATED = [
    b"*a",
    b"a*",
    b"*?",
    b"[ab]*",
    b"**/",
    b"**/a",
    b"**/a*/",
    b"**/*a*/",
    b"*/",
    b"*/**/",
    b"a**",
    b"*a/**/b*/",
]
LAST = [b"", b"b", b"*b", b"/b", b"**", b"[!a]"]
NAMES = [b"a", b"a/", b"ab", b"aaa/", b"a/b/", b"b/a"]


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("repeated", REPEATED)
def test_steps_grow_with_the_lengths_and_no_faster(repeated: bytes, path: bool) -> None:
    for last, name in itertools.product(LAST, NAMES):
        regex = translate(repeated * 8 + last, path=path)
        assert regex is not None
        for text in (b"%s", b"%sc", b"c/%s"):
            few, many = (Steps(regex, text % (name * (size // len(name)))).count for size in (120, 480))
            # Four times the name: a step for each byte and place in the pattern, at most.
            assert many <= 4.5 * few + 50, (repeated, last, name, few, many)
            assert many <= 480 * (len(repeated) * 8 + 10), (repeated, last, name, many)


def test_they_are_counted_as_re_tries_them() -> None:
    """A pattern that is translated piece by piece, as libraries do, takes a power of the length; and results agree."""
    regex = b".*".join([b"a"] * 5) + b".*b"
    few, many = (Steps(regex, b"a" * size).count for size in (20, 40))
    assert many > 8 * few
    chance = random.Random(7)
    for _ in range(150):
        pattern = b"".join(chance.choice([b"*", b"?", b"a", b"b", b"/", b"**/", b"[ab]", b"[!a]"]) for _ in range(6))
        for path in (False, True):
            found = translate(pattern, path=path)
            assert found is not None
            compiled = re.compile(found, re.DOTALL)
            for _ in range(10):
                text = bytes(chance.choice(b"ab/") for _ in range(chance.randrange(9)))
                assert Steps(found, text).found == (compiled.fullmatch(text) is not None), (pattern, text)
