"""Expressions that select points of a mesh: `Selection`, with Monarch's grammar.

A chain selects along each dimension, outermost first: ``0:2,*``. Dimensions beyond the chain are selected entirely.
``,`` binds tighter than ``&``, and ``&`` tighter than ``|``; parentheses group.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from monarch_kernel.runtime.mesh.shape import Extent

_TOKEN = re.compile(r"\s*(?:(?P<range>(\d*)\s*:\s*(\d*)(?:\s*:\s*(\d+))?)|(?P<number>\d+)|(?P<sign>[*?|&,()]))")


@dataclass(frozen=True, slots=True)
class Selection:
    """A parsed selection, from `from_string`, `all` or `any`. Immutable and hashable; compares by expression."""

    @staticmethod
    def from_string(text: str) -> Selection:
        """Parse an expression.

        ``*`` selects all of a dimension, ``?`` any one index of it, ``3`` one index, ``0:4:2`` a range (its parts are
        optional, as in Python).

        Raises:
            ValueError: the expression is invalid; the message gives the position.
        """
        return _Parser(text).parsed()

    @staticmethod
    def all() -> Selection:
        """Select everything."""
        return _All(_REST)

    @staticmethod
    def any() -> Selection:
        """Select any one index of the outermost dimension; each evaluation chooses again."""
        return _Any(_REST)

    def ranks(self, extent: Extent) -> list[int]:
        """Return the selected ranks of an extent, ascending.

        Raises:
            ValueError: the expression has more dimensions than the extent.
        """
        return sorted(self._ranks(extent.shape, extent.strides, 0))

    def _ranks(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
        raise NotImplementedError

    def _then(self, rest: Selection) -> Selection:
        """Return this chain, extended by the dimensions of `rest`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Rest(Selection):
    """The end of a chain: selects all remaining dimensions entirely."""

    def _ranks(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
        found = {offset}
        for size, stride in zip(sizes, strides, strict=True):
            found = {base + i * stride for base in found for i in range(size)}
        return found

    def _then(self, rest: Selection) -> Selection:
        return rest

    def __repr__(self) -> str:
        return "True"


_REST = _Rest()


@dataclass(frozen=True, slots=True)
class _Step(Selection):
    """A selection along one dimension, and then along the inner dimensions."""

    inner: Selection

    def _indices(self, size: int) -> range:
        raise NotImplementedError

    def _ranks(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
        if not sizes:
            raise ValueError(f"the selection {self!r} names more dimensions than there are")
        found: set[int] = set()
        for i in self._indices(sizes[0]):
            found |= self.inner._ranks(sizes[1:], strides[1:], offset + i * strides[0])
        return found


@dataclass(frozen=True, slots=True)
class _All(_Step):
    def _indices(self, size: int) -> range:
        return range(size)

    def _then(self, rest: Selection) -> Selection:
        return _All(self.inner._then(rest))

    def __repr__(self) -> str:
        return f"All({self.inner!r})"


@dataclass(frozen=True, slots=True)
class _Any(_Step):
    def _indices(self, size: int) -> range:
        chosen = random.randrange(size)
        return range(chosen, chosen + 1)

    def _then(self, rest: Selection) -> Selection:
        return _Any(self.inner._then(rest))

    def __repr__(self) -> str:
        return f"Any({self.inner!r})"


@dataclass(frozen=True, slots=True)
class _Range(_Step):
    start: int
    stop: int | None
    step: int

    def _indices(self, size: int) -> range:
        return range(*slice(self.start, self.stop, self.step).indices(size))

    def _then(self, rest: Selection) -> Selection:
        return _Range(self.inner._then(rest), self.start, self.stop, self.step)

    def __repr__(self) -> str:
        stop = "None" if self.stop is None else f"Some({self.stop})"
        return f"Range(Range({self.start}, {stop}, {self.step}), {self.inner!r})"


@dataclass(frozen=True, slots=True)
class _Pair(Selection):
    left: Selection
    right: Selection


@dataclass(frozen=True, slots=True)
class _Union(_Pair):
    def _ranks(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
        return self.left._ranks(sizes, strides, offset) | self.right._ranks(sizes, strides, offset)

    def _then(self, rest: Selection) -> Selection:
        return _Union(self.left._then(rest), self.right._then(rest))

    def __repr__(self) -> str:
        return f"Union({self.left!r}, {self.right!r})"


@dataclass(frozen=True, slots=True)
class _Intersection(_Pair):
    def _ranks(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
        return self.left._ranks(sizes, strides, offset) & self.right._ranks(sizes, strides, offset)

    def _then(self, rest: Selection) -> Selection:
        return _Intersection(self.left._then(rest), self.right._then(rest))

    def __repr__(self) -> str:
        return f"Intersection({self.left!r}, {self.right!r})"


class _Parser:
    """A recursive-descent parser of one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parsed(self) -> Selection:
        whole = self._union()
        if self._text[self._at :].strip():
            raise self._error("'|', '&', ',' or the end")
        return whole

    def _union(self) -> Selection:
        left = self._intersection()
        while self._takes("|"):
            left = _Union(left, self._intersection())
        return left

    def _intersection(self) -> Selection:
        left = self._chain()
        while self._takes("&"):
            left = _Intersection(left, self._chain())
        return left

    def _chain(self) -> Selection:
        first = self._atom()
        return first._then(self._chain()) if self._takes(",") else first

    def _atom(self) -> Selection:
        if self._takes("("):
            inner = self._union()
            if not self._takes(")"):
                raise self._error("')'")
            return inner
        if self._takes("*"):
            return _All(_REST)
        if self._takes("?"):
            return _Any(_REST)
        found = _TOKEN.match(self._text, self._at)
        if found is None or found["sign"]:
            raise self._error("'*', '?', an index, a range or '('")
        self._at = found.end()
        if found["number"]:
            index = int(found["number"])
            return _Range(_REST, index, index + 1, 1)
        start, stop, step = found[2], found[3], found[4]
        if step and not int(step):
            raise ValueError(f"parse error: the range {found['range'].strip()!r} in {self._text!r} has the step 0")
        return _Range(_REST, int(start or 0), int(stop) if stop else None, int(step or 1))

    def _takes(self, sign: str) -> bool:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found["sign"] != sign:
            return False
        self._at = found.end()
        return True

    def _error(self, expected: str) -> ValueError:
        rest = self._text[self._at :].strip()
        return ValueError(
            f"parse error: Failed to parse selection {self._text!r}: expected {expected}, "
            f"found {rest[0]!r} at position {self._text.index(rest, self._at)}"
            if rest
            else f"parse error: Failed to parse selection {self._text!r}: expected {expected}, and it ends there"
        )
