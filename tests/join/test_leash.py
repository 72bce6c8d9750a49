"""No rank waits for a viewer that is gone; of two viewers, one has control; what viewers change is put back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.join.chaos import ROOT
from tests.join.conftest import Job
from tests.waiting import patience

TURN = Path(__file__).with_name("fork_train.py")
LINE = TURN.read_text().split("\n").index("    return number + 1") + 1
CONTROLLER = """
import sys
from monarch_kernel.debug import get_debugger
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank.executor import CellExecutor
jobs = tool_runtime().joined_jobs()
told = []
jobs.notices.subscribe(lambda job, text: told.append(text))
for line in sys.stdin:
    try:
        print(*repr(eval(line)).split(), flush=True)
    except Exception as error:
        print("!", type(error).__name__, " ".join(str(error).split()), flush=True)
"""
BREAK = f"get_debugger().break_at({str(TURN)!r}, {LINE}, mesh=procs) and len(get_debugger().wait(timeout=20))"


class Viewer:
    """A controller in a process of its own, without a notebook."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def ask(self, expression: str) -> str:
        """What an expression is there; "! ERROR ..." if it raises."""
        self.tell(expression)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, expression: str) -> None:
        """Evaluate, and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def join(self, job: str, **how: Any) -> str:
        """Join a job; returns who else has control."""
        return self.ask(
            f"(jobs.driver_of(procs := jobs.join({job!r}, **{how!r})), cells := procs.spawn('c', CellExecutor))[0]"
        )

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for each in (self.process.stdin, self.process.stdout):
            assert each is not None
            each.close()


@pytest.fixture
def viewers() -> Iterator[Callable[[], Viewer]]:
    """Start viewers, which end with the test."""
    started: list[Viewer] = []

    def start() -> Viewer:
        started.append(Viewer())
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def process(start_job: Callable[..., Job]) -> Job:
    """A single prepared process, which turns."""
    return start_job("turns", ranks=0, script=TURN)


def test_stops_last_as_long_as_their_viewer_and_a_sleeping_one_is_told(
    process: Job, viewers: Callable[[], Viewer]
) -> None:
    sleeper, killed, looker = viewers(), viewers(), viewers()
    assert sleeper.join("turns") == "''"
    assert sleeper.ask(BREAK) == "1"
    # Others only look on, and are told why.
    assert f"pid {sleeper.process.pid} on" in looker.join("turns")
    assert "! DriverError" in (said := looker.ask(BREAK)) and "--drive" in said
    assert "! ActorError" in looker.ask("cells.run.call(Cell('1', '1', '<1>', '1')).get(20)")
    assert "count" in looker.ask("cells.pull.call(['count']).get(20)")
    # Asleep: the process goes on, and the breakpoint is gone.
    sleeper.process.send_signal(signal.SIGSTOP)
    assert goes_on(looker), "it goes on without the sleeper"
    # Awake: it is told, has control again, and its breakpoint holds.
    sleeper.process.send_signal(signal.SIGCONT)
    assert sleeper.ask("len(get_debugger().wait(lambda stops: any(at.stop.id > 1 for at in stops), 20))") == "1"
    assert "was silent" in sleeper.ask("told")
    # Taken over: the stop passes on, the former driver is told, and the breakpoint is not the new one's.
    assert killed.join("turns", drive=True) == "''"
    assert killed.ask("get_debugger().watch(procs) and len(get_debugger().wait(timeout=20))") == "1"
    wait_until(lambda: "looks on" in sleeper.ask("told") or None, "the former driver is told", 10)
    assert sleeper.ask("len(get_debugger().wait(lambda stops: not stops, 10))") == "0"
    assert f"pid {killed.process.pid} on" in sleeper.ask("jobs.driver_of(procs)")
    killed.end()
    assert goes_on(looker), "it goes on after the driver was killed"


COUNTS = "cells.pull.call(['count']).get(20).item(ranks=0)['count']"


def goes_on(viewer: Viewer) -> bool:
    """Whether the process turns, before long."""
    before = int(viewer.ask(COUNTS))
    deadline = time.monotonic() + patience(20)
    while time.monotonic() < deadline:
        if int(viewer.ask(COUNTS)) > before + 2:
            return True
        time.sleep(0.05)
    return False


def test_what_a_viewer_has_changed_is_put_back_and_forks_have_none_of_it(
    process: Job, viewers: Callable[[], Viewer]
) -> None:
    viewer = viewers()
    reads = "cells.pull.call(['forked']).get(20).item(ranks=0)['forked']"
    for _ in range(2):  # what was put back is changed again
        viewer.join("turns")
        assert viewer.ask("cells.run.call(Cell('1', '1', '<1>', '1')).get(20)")
        assert viewer.ask(BREAK) == "1"
        viewer.ask("cells.run.call(Cell('2', 'asked = True', '<2>', '')).get(20)")
        viewer.ask("get_debugger().clear(), get_debugger().resume(get_debugger().stops())")
        wait_until(lambda: viewer.ask(reads) == "0" or None, "its child has no socket, and is not stopped", 20)
        viewer.ask("cells.run.call(Cell('3', 'forked = None', '<3>', '')).get(20)")
        viewer.ask("jobs.leave(procs)")
    text = process.end()
    assert "as before" in text and "child prints" in text, text


def test_faults_of_the_tools_and_other_versions_are_told_and_the_program_goes_on(
    process: Job, viewers: Callable[[], Viewer]
) -> None:
    viewer = viewers()
    viewer.join("turns")
    # A message that no tool understands.
    viewer.ask("[link.send(b'nonsense') for link in jobs._jobs[procs._mesh_uid].carrier.links.values()]")
    wait_until(lambda: "a fault of the tools" in viewer.ask("told") or None, "the fault is told", 10)
    assert goes_on(viewer)
    viewer.ask("jobs.leave(procs)")
    module = "__import__('sys').modules['monarch_kernel.engines.join.controller']"
    version = viewer.ask(f"{module}.__version__")
    viewer.ask(f"setattr({module}, '__version__', '0.0.1')")
    said = viewer.join("turns")
    assert "! JoinError" in said and "and this notebook 0.0.1" in said
    viewer.ask(f"setattr({module}, '__version__', {version})")
    assert viewer.join("turns") == "''" and "1" in viewer.ask("jobs.faults_of(procs)")


def test_a_rank_that_cannot_load_the_tools_says_so(
    start_job: Callable[..., Job], tmp_path: Path, viewers: Callable[[], Viewer]
) -> None:
    (tmp_path / "broken.py").write_text("import sys\nsys.modules['msgspec'] = None\n" + TURN.read_text())
    process = start_job("broken", ranks=0, script=tmp_path / "broken.py")
    viewer = viewers()
    # It refuses, which the viewer does not take for silence: it is told at once, and not after its patience.
    assert "! JoinError job 'broken': no rank has let the tools in: rank 0: it refuses" in viewer.join("broken")
    assert "refuses viewers" in (said := viewer.ask("told")) and "msgspec" in said and "monarch_kernel" in said
    assert process.process.poll() is None
