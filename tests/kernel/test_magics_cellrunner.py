"""Running a cell in a namespace, without any rank."""

from __future__ import annotations

import asyncio
import linecache
import threading
import traceback
from typing import Any

import pytest

from monarch_kernel.kernel.cell import Cell, check_syntax
from monarch_kernel.kernel.rank.cell_runner import CellRunner, Outcome
from monarch_kernel.kernel.rank.sent_values import fallback_bundle, plain_text
from monarch_kernel.kernel.rank.user_code import where_is


class Bench:
    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.runner = CellRunner(self.namespace, self.shown.append)
        self.count = 0

    def run(self, body: str, *, quiet: bool = False) -> Outcome:
        self.count += 1
        source = "\n" + body
        return self.runner.run(Cell("c", source, f"<cell-{self.count}>", "%%mesh\n" + body, quiet))

    def value(self, body: str) -> Any:
        outcome = self.run(body)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


@pytest.fixture
def bench() -> Any:
    bench = Bench()
    yield bench
    bench.runner.close()


def test_the_last_expression_is_shown_and_is_the_value(bench: Bench) -> None:
    outcome = bench.run("x = 2\nx + 1")
    assert outcome == Outcome(3, True, None)
    assert bench.shown == [3]
    assert bench.namespace["x"] == 2
    assert bench.value("_ + 1") == 4


def test_statements_and_none_show_nothing(bench: Bench) -> None:
    assert bench.run("x = 1") == Outcome()
    assert bench.run("None") == Outcome(None, True)
    assert bench.run("5", quiet=True) == Outcome(5, True)
    assert bench.run("") == Outcome()
    assert bench.shown == []


def test_top_level_await(bench: Bench) -> None:
    assert (
        bench.value("import asyncio\nawait asyncio.sleep(0)\n[i async for i in __import__('x').y()] if 0 else 7") == 7
    )
    assert bench.value("x = await asyncio.sleep(0, 5)\nx") == 5
    bench.run("await asyncio.sleep(0)\ntask = asyncio.get_event_loop().create_task(asyncio.sleep(0, 9))")
    assert bench.value("await task") == 9


def test_code_that_asks_for_the_running_loop_finds_the_one_of_the_cells(bench: Bench) -> None:
    bench.run("import asyncio\nasync def f(): return 4\ntask = asyncio.create_task(f())")
    assert bench.value("await task") == 4
    assert bench.value("task.get_loop() is asyncio.get_running_loop()") is True
    with pytest.raises(RuntimeError, match="no running event loop"):  # it is this test that asks, not a cell
        asyncio.get_running_loop()


def test_an_interrupt_in_an_await_leaves_nothing_behind(bench: Bench) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    bench.namespace["interrupt"] = interrupt
    outcome = bench.run(
        "import asyncio\nevents = []\n"
        "async def work():\n"
        "    asyncio.get_running_loop().call_soon(interrupt)\n"
        "    try:\n        await asyncio.Event().wait()\n    finally:\n        events.append('ended')\n"
        "await work()"
    )
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert bench.namespace["events"] == ["ended"]
    assert bench.value("await asyncio.sleep(0, 1)") == 1


def test_errors_begin_at_the_cell_and_show_its_source(bench: Bench) -> None:
    outcome = bench.run("def f():\n    raise ValueError('boom')\nf()")
    assert isinstance(outcome.error, ValueError)
    text = "".join(traceback.format_exception(outcome.error))
    assert "cell_runner.py" not in text
    assert "line 4, in <module>" in text
    assert "raise ValueError('boom')" in text


@pytest.mark.parametrize("body", ["import sys; sys.exit(3)", "raise KeyboardInterrupt", "await 1"])
def test_nothing_escapes(bench: Bench, body: str) -> None:
    assert bench.run(body).error is not None
    assert bench.value("1") == 1


def test_future_statements_hold_for_later_cells(bench: Bench) -> None:
    bench.run("from __future__ import annotations")
    bench.run("def f(x: Nowhere): ...")
    assert bench.namespace["f"].__annotations__ == {"x": "Nowhere"}


def test_functions_see_their_source_and_later_globals(bench: Bench) -> None:
    bench.run("def f():\n    return y")
    bench.run("y = 3")
    assert bench.value("f()") == 3
    assert linecache.getline("<cell-1>", 2) == "def f():\n"
    assert "def f" in bench.value("import inspect\ninspect.getsource(f)")


def test_syntax_is_checked_without_running() -> None:
    check_syntax("await x\nasync with y: pass", "f")
    with pytest.raises(SyntaxError):
        check_syntax("x = (", "f")
    with pytest.raises(SyntaxError):
        check_syntax("return 1", "f")


class Html:
    def _repr_html_(self) -> str:
        return "<b>"

    def __repr__(self) -> str:
        return "plain"


class Bundle(Html):
    def _repr_mimebundle_(self) -> Any:
        return {"text/plain": "p", "image/png": "AA"}, {"image/png": {"width": 1}}


class AnswersAll:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: "no"

    def __repr__(self) -> str:
        return "all"


def test_what_needs_ipython_to_be_shown() -> None:
    assert plain_text(1.5) == "1.5"
    assert plain_text("a\nb") == "'a\\nb'"
    assert plain_text([1, 2]) == "[1, 2]"
    assert plain_text(list(range(100))) is None
    assert plain_text(Html()) is None
    assert plain_text(AnswersAll()) == "all"
    assert fallback_bundle(Html()) == ({"text/html": "<b>", "text/plain": "plain"}, {})
    data, metadata = fallback_bundle(Bundle())
    assert data == {"text/plain": "p", "image/png": "AA", "text/html": "<b>"}
    assert metadata == {"image/png": {"width": 1}}
    assert "\n" in fallback_bundle(list(range(100)))[0]["text/plain"]


def test_where_a_thread_is_in_the_users_files() -> None:
    entered, leave = threading.Event(), threading.Event()

    def library_call() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=library_call)
    thread.start()
    entered.wait()
    assert thread.ident is not None
    found = where_is(thread.ident, lambda file: file != __file__)
    assert found is not None
    assert found[0] == __file__
    assert found[2] == "library_call"
    nowhere = where_is(thread.ident, lambda file: True)
    assert nowhere is not None
    assert nowhere[0] == threading.__file__
    leave.set()
    thread.join()
    assert where_is(0, lambda file: False) is None


def test_the_event_loop_is_made_when_used(bench: Bench) -> None:
    bench.run("1")
    assert bench.runner.loop.existing is None
