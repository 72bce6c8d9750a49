"""Cells that VS Code debugs, by *Debug Cell* and *Run by Line*: its extension's requests, in the extension's order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.debugger.dap.stop_table import BASE
from tests.kernel import harness
from tests.kernel.harness import Cell, Kernel, Outcome, stop_kernel
from tests.kernel.screen import text
from tests.kernel.vscode import ENVIRONMENT, NOTEBOOK, Window

RANKS = 2
WORK = """%%mesh
def work(rank):
    x = rank + 1
    y = x * 10
    return y
work(rank)"""
#: A cell of another notebook.
OTHER = "vscode-notebook-cell:/mnt/alice/other.ipynb#W0sZmlsZQ%3D%3D"
PLAIN = "total = 0\nfor n in range(3):\n    total += n\ntotal"


class DebuggedCell:
    """A cell of a notebook that VS Code debugs, from the first request to the last.

    Args:
        window: the notebook.
        index: the cell.
        breakpoints: the lines of the breakpoints in the gutter, by cell.
        foreign: lines of breakpoints in a cell of another notebook.
        by_line: *Run by Line*.
    """

    def __init__(
        self,
        window: Window,
        index: int,
        breakpoints: dict[int, list[int]] | None = None,
        foreign: list[int] | None = None,
        by_line: bool = False,
    ) -> None:
        self.window, self.index = window, index
        self._files: dict[int, str] = {}
        self._outcome: Outcome | None = None
        self.ask(
            "initialize",
            clientID="vscode",
            clientName="Visual Studio Code",
            adapterID="Python Kernel Debug Adapter",
            pathFormat="path",
            linesStartAt1=True,
            columnsStartAt1=True,
            supportsVariableType=True,
            supportsVariablePaging=True,
            supportsProgressReporting=True,
            supportsInvalidatedEvent=True,
            locale="en",
        )
        for thread in self.ask("debugInfo")["stoppedThreads"]:
            self.ask("continue", threadId=thread)
        self.ask(
            "attach",
            type="Python Kernel Debug Adapter",
            name=os.path.basename(NOTEBOOK),
            request="attach",
            justMyCode=True,
            __mode="runByLine" if by_line else "cell",
            __cellIndex=index,
            __notebookUri=f"file://{NOTEBOOK}",
        )
        self.foreign = self._send_breakpoints(OTHER, foreign or [])
        self.made = {at: self.set_breakpoints(at, lines) for at, lines in (breakpoints or {}).items()}
        self.ask("setFunctionBreakpoints", breakpoints=[])
        self.ask("setExceptionBreakpoints", filters=[], filterOptions=[])
        window.hidden("import debugpy\ndebugpy.debug_this_thread()")
        for at in range(len(window.cells)):
            self.dump(at)
        if by_line:
            lines = window.cells[index].split("\n")
            first = next(number for number, line in enumerate(lines, 1) if line.split("#")[0].strip())
            self.made[index] = self.set_breakpoints(index, [first])
        self.cell: Cell = window.start(index)
        self.ask("configurationDone")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request that must succeed; return the body of the reply."""
        reply = self.window.kernel.debug(command, arguments)
        assert reply["success"], reply
        return dict(reply.get("body") or {})

    def dump(self, at: int) -> str:
        """Have the kernel write a cell to a file; return its path."""
        self._files[at] = self.ask("dumpCell", code=self.window.cells[at])["sourcePath"]
        return self._files[at]

    def set_breakpoints(self, at: int, lines: list[int]) -> list[dict[str, Any]]:
        """Replace the breakpoints of a cell. Where none is left, VS Code does not translate its name of the cell."""
        self.dump(at)
        return self._send_breakpoints(self._files[at] if lines else self.window.uri(at), lines)

    def _send_breakpoints(self, path: str, lines: list[int]) -> list[dict[str, Any]]:
        wanted = [{"line": line} for line in lines]
        source = {"name": os.path.basename(NOTEBOOK), "path": path}
        body = self.ask("setBreakpoints", source=source, lines=lines, breakpoints=wanted, sourceModified=False)
        return list(body["breakpoints"])

    def stops(self, count: int) -> list[int]:
        """Wait for the first `count` stops; return their threads."""

        def threads() -> list[int]:
            return [each["body"]["threadId"] for each in self.cell.events if each["event"] == "stopped"]

        self.cell.until(lambda _: len(threads()) >= count)
        return threads()[:count]

    def top(self, thread: int) -> dict[str, Any]:
        """The innermost frame of a stopped thread, as the extension asks for it at each stop."""
        return dict(self.ask("stackTrace", threadId=thread, startFrame=0, levels=1)["stackFrames"][0])

    def variables(self, frame: int) -> dict[str, str]:
        """The variables of the frame's scopes, the first scope winning."""
        found: dict[str, str] = {}
        for scope in self.ask("scopes", frameId=frame)["scopes"]:
            listed = self.ask("variables", variablesReference=scope["variablesReference"])["variables"]
            found = {**{each["name"]: each["value"] for each in listed}, **found}
        return found

    def evaluate(self, frame: int, expression: str) -> Any:
        """The result of the extension's own expressions, which it parses."""
        options = {"frameId": frame, "context": "repl", "format": {"rawString": True}}
        return self.ask("evaluate", expression=expression, **options)["result"]

    def finish(self) -> Outcome:
        """Wait for the end of the cell, which must succeed."""
        self._outcome = self._outcome or self.cell.ok()
        return self._outcome

    def end(self) -> Outcome:
        """Leave: the extension removes the files of the cells, and disconnects at the same time."""
        files = ", ".join(f'"{file}"' for file in self._files.values())
        removing = self.window.send_hidden(
            f"import os\n_VSCODE_fileList = [{files}]\n"
            "for file in _VSCODE_fileList:\n    try:\n        os.remove(file)\n    except:\n        pass\n"
            "del _VSCODE_fileList"
        )
        self.ask("disconnect", restart=False)
        self.finish()
        out = removing.wait()
        assert (out.status, out.stdout, out.stderr) == ("ok", "", ""), out
        assert not any(os.path.exists(file) for file in self._files.values())
        return self.finish()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel that VS Code has started, with a mesh."""
    kernel = harness.start_kernel(env={**os.environ, **ENVIRONMENT})
    try:
        Window(kernel).open()
        kernel.ok(f"%mesh up --procs {RANKS}")
        yield kernel
    finally:
        stop_kernel(kernel)


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Window]:
    """A notebook with an ordinary cell and a `%%mesh` cell; a session that a failed test has left is ended."""
    yield Window(kernel, PLAIN, WORK)
    kernel.debug("disconnect", {"restart": False})


def test_a_cell_of_the_kernel(notebook: Window) -> None:
    debugged = DebuggedCell(notebook, 0, {0: [3]})
    assert [(each["verified"], each["line"]) for each in debugged.made[0]] == [(True, 3)]
    (thread,) = debugged.stops(1)
    frame = debugged.top(thread)
    assert (frame["line"], frame["source"]["path"]) == (3, debugged.dump(0))
    assert debugged.variables(frame["id"])["total"] == "0"
    assert debugged.set_breakpoints(0, []) == []
    debugged.ask("continue", threadId=thread)
    assert debugged.finish().text == "3", "the breakpoint that was removed stops no more"
    debugged.end()


def test_a_mesh_cell_stops_on_each_rank_again_and_again(notebook: Window) -> None:
    for _ in range(2):  # the files of the cells are removed in between
        debugged = DebuggedCell(notebook, 1, {1: [4]}, foreign=[1])
        assert [(each["verified"], each["line"]) for each in debugged.made[1]] == [(True, 4)]
        stopped = debugged.stops(RANKS)
        assert len(set(stopped)) == RANKS and min(stopped) >= BASE
        named = {each["id"]: each["name"] for each in debugged.ask("threads")["threads"]}
        for thread in stopped:
            frame = debugged.top(thread)
            rank = int(named[thread].removeprefix("rank ").split(" ")[0])
            assert (frame["line"], frame["name"], frame["source"]["path"]) == (4, "work", debugged.dump(1))
            found = debugged.variables(frame["id"])
            assert (found["x"], found["rank"]) == (str(rank + 1), str(rank))
        for thread in stopped:
            debugged.ask("continue", threadId=thread)
        assert text(debugged.finish()) == "[0] 10\n[1] 20"
        debugged.end()


def test_a_breakpoint_that_is_removed_stops_no_rank(notebook: Window) -> None:
    notebook.cells[1] = "%%mesh\nfor n in range(3):\n    x = n\n'through'"
    debugged = DebuggedCell(notebook, 1, {1: [3]})
    stopped = debugged.stops(RANKS)
    assert debugged.set_breakpoints(1, []) == []
    assert debugged.ask("debugInfo")["breakpoints"] == []
    for thread in stopped:
        debugged.ask("continue", threadId=thread)
    assert text(debugged.finish()) == "[0-1] 'through'"
    assert len([each for each in debugged.cell.events if each["event"] == "stopped"]) == RANKS
    debugged.end()


def test_breakpoints_of_other_notebooks_reach_no_rank(notebook: Window) -> None:
    debugged = DebuggedCell(notebook, 1, {1: [4]}, foreign=[1, 7])
    assert [each["verified"] for each in debugged.foreign] == [False, False]
    assert "not part of the notebook" in debugged.foreign[0]["message"]
    listed = [each["source"] for each in debugged.ask("debugInfo")["breakpoints"]]
    assert listed == [debugged.dump(1)]
    debugged.stops(RANKS)
    assert text(debugged.end()) == "[0] 10\n[1] 20", "the ranks go on without the debugger"


def test_run_by_line(notebook: Window) -> None:
    notebook.cells[1] = "%%mesh -r 0\nx = 1\ny = x + 1\ny"
    debugged = DebuggedCell(notebook, 1, by_line=True)
    path, seen = debugged.dump(1), []
    while True:
        thread = debugged.stops(len(seen) + 1)[-1]
        frame = debugged.top(thread)
        assert frame["source"]["path"] == path, "the extension steps on elsewhere"
        seen.append(frame["line"])
        if frame["line"] == 4:
            break
        debugged.ask("stepIn", threadId=thread)
    assert seen == [1, 2, 3, 4], "the kernel, at the line of the magic, then the rank"
    assert thread >= BASE
    assert debugged.variables(frame["id"])["y"] == "2"
    assert text(debugged.end()) == "[0] 2"


def test_the_view_of_variables_at_a_stop(notebook: Window) -> None:
    debugged = DebuggedCell(notebook, 1, {1: [4]})
    for thread in debugged.stops(RANKS):
        frame = debugged.top(thread)["id"]
        rank = int(debugged.evaluate(frame, "rank"))
        # Definitions, an expression, and the removal of the definitions.
        debugged.evaluate(
            frame,
            "def _VSCODE_getVariable(what, var):\n    import json as _VSCODE_json\n"
            "    return _VSCODE_json.dumps({'type': type(var).__name__, 'value': str(var), 'rows': ['r' * 100] * 500})",
        )
        told = json.loads(debugged.evaluate(frame, '_VSCODE_getVariable("info", x)'))
        assert (told["type"], told["value"], len(told["rows"])) == ("int", str(rank + 1), 500)
        debugged.evaluate(frame, "try:\n    del _VSCODE_getVariable\nexcept:\n    pass")
        assert "_VSCODE_getVariable" not in debugged.variables(frame)
        # A person's own input is shown as Python shows it.
        assert debugged.ask("evaluate", expression="'a'", frameId=frame, context="repl")["result"] == "'a'"
    debugged.end()


def test_an_interrupt_while_ranks_are_stopped(notebook: Window) -> None:
    notebook.cells[1] = "%%mesh\nimport time\ntime.sleep(0.01)\ntime.sleep(300)"
    debugged = DebuggedCell(notebook, 1, {1: [3]})
    debugged.stops(RANKS)
    notebook.kernel.debug("disconnect", {"restart": False})  # the extension leaves before it interrupts
    os.kill(notebook.kernel.pid, signal.SIGINT)
    assert debugged.cell.wait().ename == "MeshCellInterrupt"
    assert text(notebook.ok("%%mesh\n'alive'")) == "[0-1] 'alive'"
