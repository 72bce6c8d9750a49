"""Query a history in SQL, with DuckDB if it (and NumPy) is installed, otherwise with SQLite.

Each query runs in a separate in-memory database with the tables that it names. It therefore sees a consistent state
and cannot change the history. A query may come from an untrusted notebook: it can access no file or network and load no
extension.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from monarch_kernel.display.tables import AsTable, TableView

# The tables of a history, and the views of them.

#: The columns of each table, with their kinds. Times are microseconds since 1970. ``mesh_id`` is the key of a mesh.
TABLES: dict[str, dict[str, str]] = {
    "meshes": {
        "id": "text",
        "timestamp_us": "integer",
        "name": "text",
        "shape": "text",
        "ranks": "integer",
        "event": "text",  # "seen" or "gone"
    },
    "actors": {
        "id": "text",
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "name": "text",
        "class": "text",
    },
    "actor_status_events": {
        "timestamp_us": "integer",
        "actor_id": "text",
        "mesh_id": "text",
        "rank": "integer",
        "new_status": "text",  # "idle" or "processing"
        "reason": "text",  # the endpoint
    },
    "rank_status_events": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "new_status": "text",
        "reason": "text",
    },
    "actor_failures": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "ranks": "text",
        "kind": "text",
        "reason": "text",
    },
    "rank_samples": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "memory": "integer",
        "cpu": "real",
        "waiting": "integer",
        "calls": "integer",
        "failures": "integer",
        "sent": "integer",
        "received": "integer",
    },
    "host_samples": {
        "timestamp_us": "integer",
        "host": "text",
        "cpu": "real",
        "memory_used": "integer",
        "memory_total": "integer",
    },
}

_GAUGES = {"rank.memory": "memory", "rank.cpu": "cpu", "rank.waiting": "waiting"}
_SUMS = {"rank.calls": "calls", "rank.failures": "failures", "rank.sent": "sent", "rank.received": "received"}


def _long(metrics: dict[str, str]) -> str:
    """Return a view with one row for each metric of each sample."""
    return " UNION ALL ".join(
        f"SELECT timestamp_us, '{name}' AS name, mesh_id, rank, CAST({column} AS DOUBLE) AS value FROM rank_samples"
        for name, column in metrics.items()
    )


#: Views, with the table that each needs.
VIEWS: dict[str, tuple[str, str]] = {
    "metric_gauges": ("rank_samples", _long(_GAUGES)),
    "metric_sums": ("rank_samples", _long(_SUMS)),
}


# Tables stored as one array per column, of bounded size: new rows replace the oldest. Pure.

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

    def append(self, *row: object) -> None:
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

    def append(self, name: str, *row: object) -> None:
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


#: The maximum number of rows in the text of a result.
SHOWN = 200


class HistoryQueryError(ValueError):
    """A query is not valid SQL, or names an unknown table or column; the message lists the tables."""


@dataclass(frozen=True, slots=True, repr=False)
class QueryResult(AsTable):
    """The result of a query.

    Attributes:
        columns: the names of the columns.
        rows: the values.
        engine: the database used: "DuckDB" or "SQLite".
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    engine: str

    def table(self) -> TableView:
        """Return the first rows as a table."""
        shown = [["" if value is None else str(value) for value in row] for row in self.rows[:SHOWN]]
        more = f"{len(self.rows) - SHOWN} more rows" if len(self.rows) > SHOWN else ""
        numbers = [at for at in range(len(self.columns)) if all(_is_number(row[at]) for row in self.rows)]
        return TableView(self.columns, shown, right=numbers, note=more)

    def __len__(self) -> int:
        return len(self.rows)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, (int, float))


def named_tables(sql: str) -> list[str]:
    """Return the tables that a query needs: those whose names, or the names of whose views, occur in it."""
    words = set(re.findall(r"\w+", sql.lower()))
    needed = words | {table for view, (table, _) in VIEWS.items() if view in words}
    return [name for name in TABLES if name in needed]


def ask(
    tables: dict[str, ColumnTable], sql: str, engine: str = "", known: Sequence[str] = (*TABLES, *VIEWS)
) -> QueryResult:
    """Run a query.

    Args:
        tables: the tables that it needs.
        sql: one statement.
        engine: "DuckDB" or "SQLite"; empty: the better one that is installed.
        known: all available tables, for errors.

    Raises:
        HistoryQueryError: the query is invalid.
    """
    if not engine:
        installed = all(importlib.util.find_spec(name) is not None for name in ("duckdb", "numpy"))
        engine = "DuckDB" if installed else "SQLite"
    views = [f"CREATE VIEW {view} AS {text}" for view, (table, text) in VIEWS.items() if table in tables]
    try:
        return (_ask_duckdb if engine == "DuckDB" else _ask_sqlite)(tables, views, sql)
    except HistoryQueryError as error:
        told = f"{error} (the tables are {', '.join(known)}; docs/telemetry.md has their columns)"
        raise HistoryQueryError(told) from None


def _ask_sqlite(tables: dict[str, ColumnTable], views: Sequence[str], sql: str) -> QueryResult:
    database = sqlite3.connect(":memory:")
    try:
        for name, table in tables.items():
            columns = ", ".join(f'"{column}" {kind}' for column, kind in table.kinds.items())
            database.execute(f"CREATE TABLE {name} ({columns})")
            marks = ", ".join("?" * len(table.kinds))
            database.executemany(f"INSERT INTO {name} VALUES ({marks})", table)
        for view in views:
            database.execute(view)
        database.set_authorizer(_reads_only)
        try:
            found = database.execute(sql)
            rows = tuple(found.fetchall())
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise HistoryQueryError(str(error).strip()) from None
        return QueryResult(tuple(each[0] for each in found.description or ()), rows, "SQLite")
    finally:
        database.close()


def _reads_only(action: int, name: str | None, *_: str | None) -> int:
    """Authorize only reading statements, as SQLite's authorizer."""
    reads = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    describes = action == sqlite3.SQLITE_PRAGMA and name in ("table_info", "table_list", "table_xinfo")
    calls = action == sqlite3.SQLITE_FUNCTION and name != "load_extension"
    return sqlite3.SQLITE_OK if action in reads or describes or calls else sqlite3.SQLITE_DENY


def _ask_duckdb(tables: dict[str, ColumnTable], views: Sequence[str], sql: str) -> QueryResult:
    duckdb = importlib.import_module("duckdb")
    numpy = importlib.import_module("numpy")
    # An unknown table name must not be looked up among Python's variables.
    database = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
    try:
        kinds = {"integer": "BIGINT", "real": "DOUBLE", "text": "VARCHAR"}
        for name, table in tables.items():
            columns = ", ".join(f'"{column}" {kinds[kind]}' for column, kind in table.kinds.items())
            database.execute(f"CREATE TABLE {name} ({columns})")
            if table.rows:
                arrays = {
                    column: numpy.array(values.values(), dtype=object if kind == "text" else None)
                    for (column, values), kind in zip(table.columns.items(), table.kinds.values(), strict=True)
                }
                database.register("arrays", arrays)
                database.execute(f"INSERT INTO {name} SELECT * FROM arrays")
                database.unregister("arrays")
        for view in views:
            database.execute(view)
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        try:
            found = database.execute(sql)
            columns = tuple(each[0] for each in found.description or ())
            rows = tuple(tuple(row) for row in found.fetchall()) if columns else ()
        except duckdb.Error as error:
            raise HistoryQueryError(str(error).strip()) from None
        return QueryResult(columns, rows, "DuckDB")
    finally:
        database.close()
