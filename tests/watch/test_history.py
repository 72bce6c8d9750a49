"""The history: its tables, how much it keeps, and queries by both engines."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.watch import History, HistoryQueryError
from monarch_kernel.watch.history.query import TABLES, VIEWS, BoundedTables, ColumnTable, ask, named_tables
from tests.actor.conftest import Procs
from tests.conftest import wait_until
from tests.watch.actors import Worker

ENGINES = ["SQLite", "DuckDB"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """An engine that is installed."""
    if request.param == "DuckDB":
        pytest.importorskip("duckdb")
        pytest.importorskip("numpy")
    return str(request.param)


def test_tables_keep_what_they_have_room_for() -> None:
    limit = 200_000
    tables = BoundedTables({"a": {"at": "integer", "text": "text"}, "b": {"at": "integer", "value": "real"}}, limit)
    for number in range(30_000):
        tables.append("a", number, f"text {number}")
        if number % 10 == 0:
            tables.append("b", number, number / 2)
        assert tables.nbytes < limit + 256 * 300
    kept = list(tables.tables["a"])
    assert kept == [(number, f"text {number}") for number in range(30_000 - len(kept), 30_000)] and len(kept) > 400
    assert tables.dropped == 33_000 - len(kept) - tables.tables["b"].rows
    copied = tables.tables["a"].copy()
    tables.append("a", 0, "later")
    assert list(copied) == kept


def test_equal_texts_are_kept_once() -> None:
    table = ColumnTable({"text": "text"})
    for number in range(10_000):
        table.append("x" * 1000 if number % 2 else "y" * 1000)
    assert table.nbytes < 10_000 * 8 + 4000
    table.drop(9_999)
    assert list(table) == [("x" * 1000,)] and table.nbytes < 2000


def filled() -> dict[str, ColumnTable]:
    tables = {name: ColumnTable(columns) for name, columns in TABLES.items()}
    for at in range(3):
        tables["rank_samples"].append(1_000_000 * at, "m", at % 2, 100 + at, 1.5, at, 10 * at, 0, 7, 8)
    tables["rank_status_events"].append(1_000_000, "m", 1, "dead", "killed; 'by' \"someone\" \u2603")
    return tables


def test_both_engines_give_the_same_answers(engine: str) -> None:
    tables = filled()
    found = ask(tables, "SELECT rank, MAX(memory) AS most FROM rank_samples GROUP BY rank ORDER BY rank", engine)
    assert (found.columns, found.rows, found.engine) == (("rank", "most"), ((0, 102), (1, 101)), engine)
    found = ask(tables, "SELECT name, value FROM metric_sums WHERE rank = 1 AND name = 'rank.calls'", engine)
    assert found.rows == (("rank.calls", 10.0),)
    found = ask(tables, "SELECT reason FROM rank_status_events", engine)
    assert found.rows == (("killed; 'by' \"someone\" \u2603",),) and "\u2603" in repr(found)
    assert ask(tables, "SELECT COUNT(*) FROM meshes", engine).rows == ((0,),)
    for view in VIEWS:
        assert len(ask(tables, f"SELECT * FROM {view}", engine)) == 3 * (3 if view == "metric_gauges" else 4)


@pytest.mark.parametrize(
    "sql", ["SELEC 1", "SELECT * FROM nothing", "SELECT nothing FROM meshes", "SELECT 1; SELECT 2;x"]
)
def test_queries_that_are_wrong(engine: str, sql: str) -> None:
    nothing = "a variable that is no table"
    with pytest.raises(HistoryQueryError, match="the tables are meshes, actors, "):
        ask(filled(), sql, engine)
    assert nothing


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT readfile('{file}')",
        "COPY (SELECT 1) TO '{new}'",
        "COPY meshes FROM '{file}'",
        "EXPORT DATABASE '{new}'",
        "IMPORT DATABASE '{folder}'",
        "ATTACH '{new}' AS other",
        "ATTACH DATABASE '{new}' AS other",
        "VACUUM INTO '{new}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '{file}'",
        "SELECT load_extension('{file}')",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "SET temp_directory = '{new}'",
        "PRAGMA temp_store_directory = '{folder}'",
        "PRAGMA database_list",
        "CREATE SECRET (TYPE s3)",
        "SELECT writefile('{new}', 'x')",
    ],
)
def test_a_query_reaches_no_file_and_loads_nothing(engine: str, sql: str, tmp_path: Path) -> None:
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_text("precious")
    try:
        shown = repr(ask(filled(), sql.format(file=file, new=new, folder=tmp_path), engine))
    except HistoryQueryError:
        shown = ""
    assert "precious" not in shown and str(file) not in shown
    assert file.read_text() == "precious" and os.listdir(tmp_path) == ["file"]


def test_a_query_may_name_what_it_computes(engine: str) -> None:
    sql = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5) SELECT SUM(x), UPPER('a') FROM n"
    assert ask(filled(), sql, engine).rows == ((15, "A"),)


def test_only_tables_that_a_query_names_are_loaded() -> None:
    assert named_tables("select * from MESHES, metric_sums") == ["meshes", "rank_samples"]


def test_the_history_of_real_ranks(procs: Procs, faults: queue.Queue[Any]) -> None:
    kept = History(period=0.05)
    assert not kept.is_on and kept.query("SELECT * FROM meshes").rows == ()
    kept.start()
    kept.start()
    mesh = procs(2)
    worker = mesh.spawn("worker", Worker)
    worker.work.call().get()
    sampled = "SELECT COUNT(DISTINCT rank) FROM rank_samples WHERE memory > 0 AND mesh_id LIKE '%'"
    wait_until(lambda: kept.query(sampled).rows == ((2,),), "both ranks were sampled")
    calls = "SELECT MAX(value) FROM metric_sums WHERE name = 'rank.calls'"
    wait_until(lambda: kept.query(calls).rows == ((1.0,),), "the call was counted")
    ((key, name, shape, ranks),) = kept.query("SELECT id, name, shape, ranks FROM meshes").rows
    assert (name, shape, ranks) == (mesh.name, "gpus=2", 2)
    assert ("worker", "Worker") in kept.query("SELECT name, class FROM actors").rows
    series = kept.series(key, "rss")
    assert set(series) == {0, 1} and all(value > 0 for _, value in series[0] if value)
    with pytest.raises(ValueError, match="not sampled; there are rss"):
        kept.series(key, "name")

    pid = mesh.status().get().get(1).pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    faults.get(timeout=30)
    dead = "SELECT rank, reason FROM rank_status_events WHERE new_status = 'dead'"
    wait_until(lambda: len(kept.query(dead)) == 1, "the death was noted")
    ((rank, reason),) = kept.query(dead).rows
    assert rank == 1 and "SIGKILL" in reason
    wait_until(lambda: len(kept.query("SELECT * FROM actor_failures WHERE kind = 'death'")) == 1, "as a failure, too")
    kept.clear()
    assert kept.query("SELECT name, ranks FROM meshes").rows == ((mesh.name, 2),)  # what there is now
    assert not kept.query("SELECT * FROM actor_failures").rows
    kept.stop()
    kept.stop()
    rows = kept.query("SELECT COUNT(*) FROM rank_samples").rows
    assert rows[0][0] >= 2 and kept.nbytes > 0 and not kept.dropped
    kept.clear()
    assert kept.query("SELECT COUNT(*) FROM rank_samples").rows == ((0,),)
