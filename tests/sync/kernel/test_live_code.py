"""Ranks and live actors that follow a sync, on request, at every save, and by the mode of `%autoreload`."""

from __future__ import annotations

import re

from monarch_kernel.display import tables
from tests.kernel.harness import Cell, Kernel
from tests.kernel.screen import text
from tests.sync.kernel.project import Project

USE = "%%mesh\nimport model\nmodel.VERSION"
ACTORS = """
from monarch_kernel.actor import this_host
from worker import Worker
workers = this_host().spawn_procs(per_host={"gpus": 2}, name="w").spawn("workers", Worker)
print(*workers.add.call(5).get().values())
"""
WORKER = """
from monarch_kernel.actor import Actor, endpoint
class Worker(Actor):
    def __init__(self):
        self.total = 0
    @endpoint
    def add(self, n):
        self.total += n
        return self.total
"""


def begin(kernel: Kernel, name: str = "m") -> None:
    """Sync, and have two ranks import the module."""
    kernel.ok("%mesh sync")
    kernel.ok(f"%mesh up {name} --procs 2")
    assert text(kernel.ok(USE)) == "[0-1] 'first'"


def test_stale_modules_are_named_with_three_ways_out(kernel: Kernel, project: Project) -> None:
    begin(kernel)
    project.write("model.py", "VERSION = 'second'\n")
    said = kernel.ok("%mesh sync").text
    assert "ranks 0-1 have imported another version of model: %mesh sync --reload" in said, said
    assert "--respawn creates the actors again, --restart restarts the ranks" in said
    assert text(kernel.ok(USE)) == "[0-1] 'first'"
    assert "reloaded: model" in kernel.ok("%mesh sync --reload").text
    assert text(kernel.ok(USE)) == "[0-1] 'second'"
    assert "older" not in kernel.ok("%mesh sync").text


def test_ranks_run_the_tree_that_a_rollback_goes_to(kernel: Kernel, project: Project) -> None:
    def listed() -> list[list[str]]:
        shown = kernel.ok("%mesh sync --rollback --list").stdout.splitlines()
        return [re.split(r"  +", line) for line in shown if re.match("[0-9a-f]{8} ", line)]

    begin(kernel)
    assert "--list goes with --rollback" in kernel.run("%mesh sync --list").evalue
    project.write("model.py", "VERSION = 'second'\n")
    project.write("other.py", "")
    assert "reloaded: model" in kernel.ok("%mesh sync --reload").text
    first = listed()[-1][0]
    assert [row[0] for row in listed()][1:] == [first] and "model.py and 1 more" in listed()[0]
    project.write("model.py", "VERSION = 'half way\n")  # as a save in the middle of an edit
    broken = kernel.ok("%mesh sync --reload")
    assert "model has an error, and ranks 0-1 keep what they have: " in broken.text
    html = broken.result["text/html"]
    assert re.search(rf'<div style="{re.escape(tables.BAD)}">model has an error.*SyntaxError.*</div>', html), html
    assert "cannot be imported" in " ".join(listed()[0])
    project.write("model.py", "VERSION = 'third'\n")
    kernel.ok("%mesh sync --reload")
    assert text(kernel.ok(USE)) == "[0-1] 'third'"
    assert (
        len(listed()) == 3
        and "left out: 1 tree that ranks could not" in kernel.ok("%mesh sync --rollback --list").stdout
    )
    back = kernel.ok("%mesh sync --rollback").text
    assert "1 host went back to tree" in back and "reloaded: model" in back and "%mesh sync --reload" not in back
    assert text(kernel.ok(USE)) == "[0-1] 'second'"  # not the tree that could not be imported
    back = kernel.ok(f"%mesh sync --rollback --to {first}").text
    assert f"1 host went back to tree {first}" in back
    assert text(kernel.ok(USE)) == "[0-1] 'first'"
    again = kernel.ok(f"%mesh sync --rollback --to {first} --restart")
    assert f"1 host has tree {first}" in again.text and not again.stdout  # ranks run it already
    assert "keeps no tree 0123abcd" in kernel.run("%mesh sync --rollback --to 0123abcd").evalue


def test_a_rollback_says_why_ranks_do_not_run_the_old_tree(kernel: Kernel, project: Project) -> None:
    kernel.ok("%mesh up early --procs 2")  # before the first sync: it runs in the folder itself
    assert text(kernel.ok(USE)) == "[0-1] 'first'"
    kernel.ok("%mesh sync")
    project.write("model.py", "VERSION = 'second'\n")
    kernel.ok("%mesh sync")
    back = kernel.ok("%mesh sync --rollback").text
    advice = re.search(
        r"ranks 0-1 of mesh early do not run this tree: .*; (%mesh sync --rollback --to [0-9a-f]{8}) --restart", back
    )
    assert advice, back
    assert "restarted: ranks 0-1" in kernel.ok(f"{advice[1]} --restart").stdout
    assert text(kernel.ok(USE)) == "[0-1] 'first'"


def test_live_actors_keep_their_state(kernel: Kernel, project: Project) -> None:
    project.write("worker.py", WORKER)
    kernel.ok("%mesh sync")
    assert "5 5" in kernel.ok(ACTORS).stdout
    project.write("worker.py", WORKER.replace("+= n", "+= 100 * n"))
    kernel.ok("%mesh sync --reload")
    assert kernel.ok("list(workers.add.call(1).get().values())").text == "[105, 105]"
    project.write("worker.py", WORKER.replace("+= n", "-= n"))
    out = kernel.ok("%mesh sync --respawn")
    assert "created again: workers" in out.stdout
    assert kernel.ok("list(workers.add.call(1).get().values())").text == "[-1, -1]"
    pids = kernel.ok("import monarch_kernel; list(monarch_kernel.get_mesh('w').pids().values())").text
    project.write("worker.py", WORKER.replace("+= n", "+= 2 * n"))
    said = kernel.ok("%mesh sync --restart").stdout
    assert (
        "restarted: ranks" in said
        and "created again: workers" in said
        and "reloader" not in said
        and "monitor" not in said
    )
    assert kernel.ok("list(workers.add.call(1).get().values())").text == "[2, 2]"
    assert kernel.ok("list(monarch_kernel.get_mesh('w').pids().values())").text != pids


def test_the_mode_of_autoreload_holds_on_ranks(kernel: Kernel, project: Project) -> None:
    begin(kernel)
    kernel.ok("%load_ext autoreload\n%autoreload 2")
    project.write("model.py", "VERSION = 'second'\n")
    assert "reloaded: model" in kernel.ok("%mesh sync").text
    assert text(kernel.ok(USE)) == "[0-1] 'second'"
    kernel.ok("%autoreload 0")
    project.write("model.py", "VERSION = 'third'\n")
    assert "another version of model" in kernel.ok("%mesh sync").text
    kernel.ok("%autoreload 1\n%aimport data.load")
    assert "reloaded" not in kernel.ok("%mesh sync").text
    kernel.ok("%aimport model")
    assert "reloaded: model" in kernel.ok("%mesh sync").text


def test_a_watch_shows_one_line(kernel: Kernel, project: Project) -> None:
    begin(kernel)
    cell = kernel.send("%mesh sync --watch")
    cell.wait()
    project.write("model.py", "VERSION = 'saved'\n")
    line = said_by(cell, "reloaded model")
    assert re.fullmatch(r"\d\d:\d\d:\d\d synced 1 file to 1 host, reloaded model \(\d+\.\d\d s\)", line), line
    assert text(kernel.ok(USE)) == "[0-1] 'saved'"
    project.write("model.py", "VERSION = (\n")
    assert "model.py" in said_by(cell, "SyntaxError")
    assert text(kernel.ok(USE)) == "[0-1] 'saved'"
    project.write("model.py", "VERSION = 'mended'\n")
    said_by(cell, "reloaded model")
    assert text(kernel.ok(USE)) == "[0-1] 'mended'"
    assert len(cell.outcome.displays) <= 1, "one line, which is updated"
    out = kernel.ok("%mesh sync --unwatch")
    assert f"no longer watched: {project.folder}" in out.stdout
    assert "Nothing is being watched" in kernel.ok("%mesh sync --unwatch").stdout
    project.write("model.py", "VERSION = 'unseen'\n")
    assert "another version of model" in kernel.ok("%mesh sync").text


def said_by(cell: Cell, words: str) -> str:
    """Read what the watch shows until its line has these words."""
    while True:
        shown = cell.outcome.updates or cell.outcome.displays
        line = shown[-1].get("text/plain", "") if shown else ""
        if words in line:
            return str(line).strip()
        cell.read()


def test_status_shows_trees_and_ranks_with_older_modules(kernel: Kernel, project: Project) -> None:
    kernel.ok("%mesh up --procs 1")
    assert "tree" not in kernel.ok("%mesh status").text
    begin(kernel, name="own")
    assert re.search(r"\ntree [0-9a-f]{8}, \d+\.\d s old$", kernel.ok("%mesh status own").text)
    project.write("model.py", "VERSION = 'second'\n")
    kernel.ok("%mesh sync")
    kernel.ok("%%mesh own -r 1\nimport importlib, sys; del sys.modules['model']; import model")
    out = kernel.ok("state = %mesh status own\nstate")
    assert re.search(r"^rank .* doing +older modules$", out.text, re.MULTILINE), out.text
    assert re.search(r"^ +0 .* model$", out.text, re.MULTILINE), out.text
    assert re.search(r"^ +1 .* idle$", out.text, re.MULTILINE), out.text
    assert re.search(r"\ntree [0-9a-f]{8}, \d+\.\d s old, 1 earlier$", out.text), out.text
    assert (
        kernel.ok("[list(rank.older) for rank in state.ranks], state.trees[0].earlier").text == "([['model'], []], 1)"
    )
