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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.watch.history.columns import ColumnTable
from monarch_kernel.watch.history.tables import TABLES, VIEWS

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


def _is_number(value: Any) -> bool:
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
    duckdb: Any = importlib.import_module("duckdb")
    numpy: Any = importlib.import_module("numpy")
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
