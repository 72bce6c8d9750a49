"""What the notebook and the debugger do, on each engine."""

from __future__ import annotations

import re

from tests.kernel.harness import Kernel, Outcome
from tests.waiting import wait_for_text

STEPS = """%%mesh -a
def work(n):
    total = 0
    for i in range(n):
        total += i * (rank + 1)
    return total
breakpoint()
work(3)
"""
BUSY = """%%mesh -a
import time
def wait():
    while True:
        time.sleep(60)
wait()
"""


def shown(out: Outcome) -> str:
    """All that a cell shows, as text."""
    found = [out.stdout, *(each.get("text/plain", "") for each in [*out.displays, *out.updates])]
    return "\n".join([*found, (out.result or {}).get("text/plain", ""), out.traceback])


def until(kernel: Kernel, command: str, said: str) -> str:
    """Repeat a command until it shows that; returns all that it showed then."""
    return wait_for_text(
        lambda: shown(kernel.run(command)), lambda text: re.search(said, text), f"{command} shows {said!r}"
    )


def test_a_cell_has_the_output_and_the_values_of_all_ranks(notebook: Kernel) -> None:
    out = notebook.ok("%%mesh -o doubled\nprint('hello from', rank)\nrank * 2")
    assert "hello from 0" in shown(out) and "hello from 1" in shown(out)
    assert "[0, 2]" in shown(notebook.ok("list(doubled.values())"))


def test_an_error_names_ranks_and_the_exact_line(notebook: Kernel) -> None:
    out = notebook.run("%%mesh\nprint('before')\nif rank == 1:\n    [][3]\nprint('after')")
    assert out.ename == "MeshCellError" and "IndexError" in out.evalue and "rank 1" in out.evalue
    assert "line 4" in out.traceback
    assert "after" in shown(out)  # on rank 0


def test_variables_go_to_ranks_and_back(notebook: Kernel) -> None:
    notebook.ok("%mesh push doubled")
    notebook.ok("%%mesh\nmine = rank + 10")
    notebook.ok("%mesh pull mine")
    assert "[10, 11]" in shown(notebook.ok("list(mine.values())"))
    text = shown(notebook.ok("%mesh diff mine"))
    assert "2 distinct values" in text and "10" in text and "11" in text


def test_stacks_of_ranks_that_are_busy_and_an_interrupt(notebook: Kernel) -> None:
    notebook.ok(BUSY)
    text = until(notebook, "%mesh stacks", "in wait")
    assert "[0-1]" in text
    assert "0-1" in shown(notebook.ok("%mesh interrupt"))
    until(notebook, "%mesh stacks", "idle")
    assert "1" in shown(notebook.ok("%%mesh\nprint(rank)"))


def test_an_interrupt_of_the_cell(notebook: Kernel) -> None:
    cell = notebook.send("%%mesh\nimport time\nprint('asleep', flush=True)\ntime.sleep(600)")
    cell.until(lambda out: "asleep" in shown(out))
    notebook.interrupt()
    out = cell.wait()
    assert "KeyboardInterrupt" in out.evalue and "line 4" in out.traceback


def test_breakpoint_evaluation_and_steps_of_all_ranks_together(notebook: Kernel) -> None:
    notebook.ok(STEPS)
    until(notebook, "%mesh debug list", r"0-1")
    notebook.ok("%mesh break :5")
    notebook.ok("%mesh debug continue")
    until(notebook, "%mesh debug where", r"in work")
    assert "total = 0" in shown(notebook.ok("%mesh debug print total"))
    notebook.ok("%mesh debug next")
    notebook.ok("%mesh clear all")
    until(notebook, "%mesh debug where", r"in work")
    assert "0-1" in shown(notebook.ok("%mesh debug print i"))
    notebook.ok("%mesh debug continue")
    until(notebook, "%mesh stacks", "idle")


def test_a_breakpoint_that_is_set_beforehand_stops_all_ranks(notebook: Kernel) -> None:
    notebook.ok("%%mesh\ndef later(x):\n    y = x + 1\n    return y\n")
    notebook.ok('%mesh break :3 --if "x > 4"')
    notebook.ok("%%mesh -a\nlater(1)\nlater(rank + 5)\n")
    until(notebook, "%mesh debug list", r"0-1")
    assert "5" in shown(notebook.ok("%mesh debug print x"))
    notebook.ok("%mesh clear all")
    notebook.ok("%mesh debug continue")
    until(notebook, "%mesh stacks", "idle")


def test_frames_of_a_failure_are_open_afterwards(notebook: Kernel) -> None:
    notebook.run("%%mesh\nbroken = {'at': rank}\nbroken['none']")
    assert "KeyError" in shown(notebook.ok("%mesh pm"))
    assert "'at': 1" in shown(notebook.ok("%mesh debug print broken"))
    notebook.ok("%mesh debug continue")


def test_the_verdict_of_a_hang(notebook: Kernel) -> None:
    notebook.ok("%%mesh\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    notebook.ok(
        "%%mesh -a\nimport time\nif rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n    time.sleep(600)\n"
    )
    text = until(notebook, "%mesh hang", "all_reduce")
    assert re.search(r"rank 0 waits in all_reduce #1 of the default group at Cell In\[\d+\]:4", text), text
    assert re.search(r"rank 1 makes no progress at Cell In\[\d+\]:6", text), text
    notebook.ok("%mesh interrupt")
    until(notebook, "%mesh stacks", "idle")


def test_status_and_logs(notebook: Kernel) -> None:
    notebook.ok("%%mesh\nprint('for the log of', rank)")
    text = shown(notebook.ok("%mesh status"))
    assert text.count("alive") == 2 and "idle" in text
    assert "for the log of 1" in shown(notebook.ok("%mesh logs -r 1 -n 3"))
