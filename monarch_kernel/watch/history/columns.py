"""Tables stored as one array per column, of bounded size: new rows replace the oldest. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

#: The overhead of a stored string (bytes): the object, and its entries in the dictionary of its column.
_TEXT = 160


class Column(Protocol):
    """The values of one column."""

    def append(self, value: Any, /) -> None: ...
    def drop(self, count: int) -> None: ...
    def copy(self) -> Column: ...
    def values(self) -> Sequence[Any]: ...
    @property
    def nbytes(self) -> int: ...


class NumberColumn:
    """Integers of 64 bits, or floating-point numbers.

    Args:
        code: "q" or "d", a type code of ``array``.
    """

    __slots__ = ("_array",)

    def __init__(self, code: str) -> None:
        self._array: array[Any] = array(code)

    def append(self, value: float) -> None:
        """Add a value."""
        self._array.append(value)

    def drop(self, count: int) -> None:
        """Remove the oldest values."""
        self._array = self._array[count:]

    def copy(self) -> NumberColumn:
        """Return a copy of the column."""
        copied = NumberColumn(self._array.typecode)
        copied._array = self._array[:]
        return copied

    def values(self) -> array[Any]:
        """Return all values, oldest first."""
        return self._array

    @property
    def nbytes(self) -> int:
        """The size in memory (bytes)."""
        return len(self._array) * self._array.itemsize


class TextColumn:
    """Strings or None. Equal strings are stored once."""

    __slots__ = ("_codes", "_known", "_nbytes", "_texts")

    def __init__(self) -> None:
        self._codes = array("l")
        self._texts: list[str | None] = []
        self._known: dict[str | None, int] = {}
        self._nbytes = 0

    def append(self, value: str | None) -> None:
        """Add a value."""
        code = self._known.get(value)
        if code is None:
            code = self._known[value] = len(self._texts)
            self._texts.append(value)
            self._nbytes += _TEXT + len((value or "").encode("utf-8", "surrogatepass"))
        self._codes.append(code)

    def drop(self, count: int) -> None:
        """Remove the oldest values, and strings that are no longer used."""
        left = self.values()[count:]
        self._codes, self._texts, self._known, self._nbytes = array("l"), [], {}, 0
        for value in left:
            self.append(value)

    def copy(self) -> TextColumn:
        """Return a copy of the column."""
        copied = TextColumn()
        copied._codes, copied._texts = self._codes[:], self._texts.copy()
        copied._known, copied._nbytes = self._known.copy(), self._nbytes
        return copied

    def values(self) -> list[str | None]:
        """Return all values, oldest first."""
        texts = self._texts
        return [texts[code] for code in self._codes]

    @property
    def nbytes(self) -> int:
        """The size in memory (bytes)."""
        return len(self._codes) * self._codes.itemsize + self._nbytes


class ColumnTable:
    """Rows of one table.

    Args:
        columns: the kind of each column by name: "integer", "real" or "text".
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.kinds = dict(columns)
        codes = {"integer": "q", "real": "d"}
        self.columns: dict[str, Column] = {
            name: TextColumn() if kind == "text" else NumberColumn(codes[kind]) for name, kind in columns.items()
        }
        self._appends = [column.append for column in self.columns.values()]
        self.rows = 0

    def append(self, *row: Any) -> None:
        """Add a row."""
        for append, value in zip(self._appends, row, strict=True):
            append(value)
        self.rows += 1

    def drop(self, count: int) -> None:
        """Remove the oldest rows."""
        for column in self.columns.values():
            column.drop(count)
        self._appends = [column.append for column in self.columns.values()]
        self.rows -= count

    def copy(self) -> ColumnTable:
        """Return a copy of the table, without rows that are added later."""
        copied = ColumnTable(self.kinds)
        copied.columns = {name: column.copy() for name, column in self.columns.items()}
        copied._appends = [column.append for column in copied.columns.values()]
        copied.rows = self.rows
        return copied

    @property
    def nbytes(self) -> int:
        """The size in memory (bytes)."""
        return sum(column.nbytes for column in self.columns.values())

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows, oldest first."""
        return zip(*(column.values() for column in self.columns.values()), strict=True)


class BoundedTables:
    """Several tables with a common size limit. Not thread-safe.

    Args:
        tables: the columns of each table.
        limit: the maximum size of all rows (bytes).
    """

    #: The size is checked once per this number of rows.
    CHECKED = 256

    def __init__(self, tables: Mapping[str, Mapping[str, str]], limit: int) -> None:
        self.limit = limit
        self.tables = {name: ColumnTable(columns) for name, columns in tables.items()}
        #: The number of rows dropped to make room.
        self.dropped = 0
        self._unchecked = 0

    @property
    def nbytes(self) -> int:
        """The size in memory (bytes)."""
        return sum(table.nbytes for table in self.tables.values())

    def append(self, name: str, *row: Any) -> None:
        """Add a row to a table."""
        self.tables[name].append(*row)
        self._unchecked += 1
        if self._unchecked >= self.CHECKED:
            self._unchecked = 0
            while self.nbytes > self.limit:
                largest = max(self.tables.values(), key=lambda table: table.nbytes)
                count = max(1, largest.rows // 4)
                largest.drop(count)
                self.dropped += count
