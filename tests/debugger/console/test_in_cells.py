"""Stopped ranks in a notebook: prompts and notices in the right cells, and the magics, on real ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.debugger.console.person import Asking, ask, run
from tests.kernel.harness import Kernel
from tests.kernel.screen import ever, text

SPLIT = """%%mesh
def f(x):
    breakpoint()
    if x == 3:
        x = -1
    y = x + 1
    return y
f(rank)
"""


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """A kernel with a mesh of four ranks and an actor on each."""
    kernel.ok("%mesh up --procs 4")
    kernel.ok(
        "from monarch_kernel.debug import get_debugger\n"
        "from monarch_kernel.actor import Actor, endpoint\nfrom monarch_kernel.meshes import get_mesh\n"
        "class Adder(Actor):\n"
        "    @endpoint\n"
        "    def add(self, n):\n"
        "        total = 0\n"
        "        for i in range(n):\n"
        "            total += i\n"
        "        return total\n"
        "    @endpoint\n"
        "    def halt(self):\n"
        "        breakpoint()\n"
        "        return 'went on'\n"
        "adders = get_mesh('m').spawn('adders', Adder)"
    )
    # Every rank loads what it needs to stop now, so that on a busy machine all stop at about the same time.
    kernel.ok("%mesh break /nowhere.py:1")
    kernel.ok("%mesh clear all")
    return kernel


@pytest.fixture(autouse=True)
def nothing_left(mesh: Kernel) -> Iterator[None]:
    """What a test leaves stopped goes on, and its breakpoints are gone, before the next one."""
    yield
    try:
        mesh.ok(
            "_d = get_debugger()\n"
            "_d.clear()\n"
            "_d.resume(_d.stops())\n"
            "assert _d.wait(lambda stops: not stops, timeout=10) == []\n"
            "assert _d.viewers.names() == [], _d.viewers.names()"
        )
    except AssertionError:
        mesh.interrupt()  # of a prompt that holds the notebook, so that no later test waits for it
        raise


def refused(kernel: Kernel, code: str, said: str) -> None:
    """A cell that must be refused in one sentence."""
    outcome = kernel.run(code)
    assert outcome.ename == "UsageError", outcome.traceback
    assert said in outcome.evalue


# -- the prompt in the cell --------------------------------------------------------------------


def test_the_prompt_opens_in_the_cell_that_waits(mesh: Kernel) -> None:
    cell = ask(mesh, SPLIT)
    assert cell.asked() == "(m 0-3) "
    cell.printed(":3 in f  (breakpoint())")
    assert cell.outcome.stdout.startswith("This cell holds the notebook")
    cell.says("p x", "0  x = 0", "3  x = 3")
    cell.says("n", ":4 in f\n         if x == 3:")
    assert cell.says("n", "The set has split", "1: 0-2  In[", "2: 3    In[") == "(m 0-2, group 1/2) "
    cell.says("where", "f(rank)", "y = x + 1")
    assert cell.says("group 2", ":5 in f") == "(m 3, group 2/2) "
    cell.says("x = 7")
    assert cell.says("all") == "(m 0-3) "
    cell.type("c")
    outcome = cell.wait()
    assert outcome.status == "ok"
    assert text(outcome) == "[0] 1\n[1] 2\n[2] 3\n[3] 0"


def test_the_prompt_opens_in_a_plain_cell_that_waits_for_an_endpoint(mesh: Kernel) -> None:
    cell = ask(mesh, "adders.halt.call().get(timeout=20)")
    assert cell.asked() == "(m 0-3) "
    assert cell.says("ranks 0") == "(m 0) "
    cell.says("n", "return 'went on'")
    cell.says("all")
    cell.type("continue")
    assert "went on" in cell.wait().text


def test_the_prompt_opens_in_a_cell_that_awaits(mesh: Kernel) -> None:
    cell = ask(mesh, "await adders.halt.call()")
    assert cell.asked() == "(m 0-3) "
    cell.says("n", "return 'went on'")
    cell.type("continue")
    assert "went on" in cell.wait().text


def test_time_at_the_prompt_does_not_count_for_the_cells_own_timeouts(mesh: Kernel) -> None:
    cell = ask(mesh, "adders.halt.call().get(timeout=3)")
    cell.asked()
    time.sleep(3.5)  # what is tested is that this much time does no harm
    cell.type("c")
    outcome = cell.wait()
    assert outcome.status == "ok", outcome.evalue


def test_a_detached_cell_ends_and_its_output_still_comes_to_it(mesh: Kernel) -> None:
    cell = ask(mesh, "%%mesh\nbreakpoint()\nprint('later', rank)")
    cell.asked()
    cell.type("detach")
    cell.printed("The cell keeps running on mesh m")
    assert cell.wait().status == "ok"
    assert run(mesh, "1 + 1").text == "2"
    assert "0-3" in run(mesh, "%mesh debug where").stdout
    again = ask(mesh, "%mesh debug")
    assert again.asked() == "(m 0-3) "
    again.type("c")
    out = again.wait()
    assert "later" not in out.stdout + ever(out)
    while "later 3" not in ever(cell.outcome):
        cell.read()


def test_an_interrupt_at_the_prompt_ends_the_cell_and_the_stops(mesh: Kernel) -> None:
    for code in ("%%mesh\nbreakpoint()\nprint('on')", "adders.halt.call().get()", "await adders.halt.call()"):
        cell = ask(mesh, code)
        cell.asked()
        mesh.interrupt()
        assert cell.wait().ename in ("KeyboardInterrupt", "MeshCellInterrupt")
        mesh.ok("assert get_debugger().wait(lambda stops: not stops, timeout=10) == []")


def test_the_prompt_closes_when_somebody_else_moves_the_ranks_on(mesh: Kernel) -> None:
    subshell = mesh.control("create_subshell_request")["subshell_id"]
    cell = ask(mesh, "%%mesh\nbreakpoint()\nrank")
    cell.asked()
    run(mesh, "%mesh debug continue", subshell)
    outcome = cell.wait()
    assert "The prompt has closed" in outcome.stdout
    assert text(outcome) == "[0] 0\n[1] 1\n[2] 2\n[3] 3"
    assert mesh.control("delete_subshell_request", {"subshell_id": subshell})["status"] == "ok"


def test_reports_over_the_mesh_are_commands_of_the_prompt(mesh: Kernel) -> None:
    cell = ask(mesh, "%%mesh\nvalues = [1, rank // 3]\nbreakpoint()\n")
    cell.asked()
    cell.says("diff values", "2 distinct values on 4 ranks of mesh m")
    cell.says("ranks 0")
    cell.says("stacks", "[0-3]", "breakpoint()", "stopped: breakpoint()")
    cell.says("hang", "stopped in the debugger")
    cell.says("all")
    cell.type("c")
    assert cell.wait().status == "ok"


def test_a_rank_that_dies_at_the_prompt_closes_it(mesh: Kernel) -> None:
    mesh.ok("%mesh up short --procs 2")
    cell = ask(mesh, "%%mesh\nimport os\nprint('pid', os.getpid())\nbreakpoint()")
    cell.asked()
    cell.says("ranks 0")
    said = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    cell.says("all")
    cell.type(said)
    outcome = cell.wait()
    assert outcome.ename == "MeshCellError"
    assert "killed by SIGKILL" in outcome.evalue
    mesh.ok("%mesh down short")
    mesh.ok("%mesh use m")


@pytest.mark.torch
def test_the_prompt_shows_when_a_collective_gives_up_on_the_stopped_rank(mesh: Kernel) -> None:
    needs("torch")
    mesh.ok("%mesh up group --procs 2 --dist gloo")
    code = (
        "%%mesh\nimport torch.distributed as dist, torch\nx = torch.ones(1)\n"
        "if rank == 1:\n    breakpoint()\ndist.all_reduce(x)\nx"
    )
    cell = ask(mesh, code)
    prompt = cell.asked()
    while "left" not in prompt:  # the other rank may not be there yet
        prompt = cell.says("all")
    assert re.fullmatch(r"\(group 1, 29:\d\d left\) ", prompt)
    cell.says("all", "0 of group wait in all_reduce for stopped ranks, and give up in 29:")
    cell.type("c")
    assert text(cell.wait()) == "[0-1] tensor([2.])"
    mesh.ok("%mesh down group")
    mesh.ok("%mesh use m")


def test_with_the_front_ends_own_debugger_on_no_prompt_opens(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("%mesh up --procs 2")
    assert fresh_kernel.debug("initialize", {"clientID": "test", "adapterID": ""})["success"]
    assert fresh_kernel.debug("attach")["success"]
    cell = ask(fresh_kernel, "%%mesh\nbreakpoint()\nrank")
    cell.until(lambda out: "Stopped:\n0-1  In[" in ever(out))
    assert "a prompt" not in ever(cell.outcome)
    subshell = fresh_kernel.control("create_subshell_request")["subshell_id"]
    run(fresh_kernel, "%mesh debug drive --force", subshell)
    run(fresh_kernel, "from monarch_kernel.debug import get_debugger as g; g().resume(g().stops())", subshell)
    assert text(cell.wait()) == "[0] 0\n[1] 1"


# -- notices -----------------------------------------------------------------------------------


def test_where_nobody_can_be_asked_a_cell_does_not_wait_for_its_stopped_ranks(mesh: Kernel) -> None:
    cell = Asking(mesh.client, SPLIT, stdin=False)
    assert cell.wait().status == "ok"
    assert "this front end takes no input, so no prompt opens here" in cell.outcome.stdout
    assert f"monarch-kernel debug {mesh.pid} in a terminal" in cell.outcome.stdout
    while "0-3  In[" not in ever(cell.outcome):
        cell.read()
    # One command at a time works in other cells.
    assert ":3 in f" in run(mesh, "%mesh debug where").stdout
    assert ":4 in f" in run(mesh, "%mesh debug -r 1-2 next").stdout
    assert run(mesh, "%mesh debug -r 1-2 print x").stdout == "1  x = 1\n2  x = 2\n"
    assert run(mesh, "%mesh debug continue").stdout == "Ranks 0-3 continue.\n"
    while text(cell.outcome) != "[0] 1\n[1] 2\n[2] 3\n[3] 0":
        cell.read()


def test_run_all_is_not_held_up_by_a_prompt(mesh: Kernel, tmp_path: Path) -> None:
    assert mesh.run("%%mesh\ndef h(x):\n    return 1 // x\nh(rank - 2)").ename == "MeshCellError"
    # As "Run All" does it: everything is sent before the first has ended.
    all_sent = tmp_path / "all sent"
    code = f"import os, time\nwhile not os.path.exists({str(all_sent)!r}): time.sleep(0.1)\n%mesh pm -r 2"
    mortem = ask(mesh, code)
    stopping = ask(mesh, "%%mesh\nbreakpoint()\nprint('on')")
    last = ask(mesh, "%mesh debug print rank")
    all_sent.touch()
    assert mortem.wait().status == "ok"
    assert mortem.outcome.stdout.startswith(
        "Other cells are already waiting, so no prompt opens here; %mesh pm -r 2 in another cell"
    )
    assert "ZeroDivisionError" in mortem.outcome.stdout
    assert stopping.wait().status == "ok"
    assert "other cells are already waiting, so no prompt opens here" in stopping.outcome.stdout
    assert last.wait().status == "ok"
    assert last.outcome.stdout == "rank = 2\n"
    assert run(mesh, "%mesh debug continue").stdout == "2: closed.\n"
    prompt = ask(mesh, "%mesh debug")
    assert prompt.asked() == "(m 0-3) "
    prompt.type("c")
    prompt.wait()
    while text(stopping.outcome) != "[0-3] on":
        stopping.read()


def test_no_prompt_opens_in_a_cell_that_waits_for_stops_only(mesh: Kernel) -> None:
    code = "going = adders.halt.call()\nlen(get_debugger().wait(lambda stops: len(stops) == 4, 30))"
    cell = ask(mesh, code)
    outcome = cell.wait()
    assert (outcome.text, outcome.stdout) == ("4", "")
    assert "return 'went on'" in run(mesh, "%mesh debug next").stdout
    run(mesh, "%mesh debug continue")
    assert "went on" in run(mesh, "going.get()").text


def test_a_notice_never_stands_in_an_innocent_cell(mesh: Kernel) -> None:
    background = ask(mesh, "%%mesh --no-wait\nimport time\ntime.sleep(0.3)\nbreakpoint()\nprint('done')")
    assert background.wait().status == "ok"
    out = run(mesh, "import time\ntime.sleep(1.5)\n'mine'")
    assert out.text == "'mine'"
    assert "topped" not in out.stdout + ever(out)
    while "Stopped:" not in ever(background.outcome):
        background.read()
    assert "%mesh debug opens a prompt" in ever(background.outcome)
    run(mesh, "%mesh debug continue")
    while text(background.outcome) != "[0-3] done":
        background.read()


# -- the magics --------------------------------------------------------------------------------


def test_breakpoints_of_cells_by_their_number(mesh: Kernel) -> None:
    mesh.ok("%%mesh\ndef g(i):\n    j = i + 1\n    return j")
    number = int(mesh.ok("len(In) - 2").text)
    said = mesh.ok(f"%mesh break {number}:4 -r 1-3 --if j > 2 and rank != 3").stdout
    assert said.startswith("Breakpoint ")
    assert f"In[{number}]:4, on m 1-3, if j > 2 and rank != 3" in said
    assert f"In[{number}]:4" in mesh.ok("%mesh break").stdout
    cell = ask(mesh, "%%mesh\ng(rank)")
    assert cell.asked() == "(m 2) "
    cell.says("p j", "j = 3")
    cell.type("c")
    assert text(cell.wait()) == "[0] 1\n[1] 2\n[2] 3\n[3] 4"
    assert "1 breakpoint cleared" in mesh.ok("%mesh clear all").stdout
    assert text(ask(mesh, "%%mesh\ng(rank)").wait()) == "[0] 1\n[1] 2\n[2] 3\n[3] 4"


def test_the_last_cell_run_again_stops_at_its_line(mesh: Kernel) -> None:
    code = "%%mesh\na = rank\na + 1"
    mesh.ok(code)
    mesh.ok("%mesh break :3 --hits 1")
    cell = ask(mesh, code)
    assert cell.asked() == "(m 0-3) "
    cell.type("c")
    assert cell.wait().status == "ok"


def test_a_stop_on_an_exception_shows_its_frames(mesh: Kernel) -> None:
    mesh.ok("%mesh break --on-error ZeroDivisionError")
    cell = ask(mesh, "%%mesh\ndef h(x):\n    return 1 // x\nh(rank)")
    assert cell.asked() == "(m 0) "
    cell.printed("ZeroDivisionError")
    cell.says("p x", "x = 0")
    cell.says("n", "cannot be stepped")
    cell.type("c")
    assert cell.wait().ename == "MeshCellError"


def test_post_mortem_without_any_breakpoint(mesh: Kernel) -> None:
    assert mesh.run("%%mesh\ndef h(x):\n    return 1 // x\nh(rank % 2)").ename == "MeshCellError"
    cell = ask(mesh, "%mesh pm")
    assert cell.asked() == "(m 0,2) "
    cell.printed("ZeroDivisionError")
    cell.says("p x", "0,2  x = 0")
    cell.says("up", "h(rank % 2)")
    cell.says("p rank", "0  rank = 0", "2  rank = 2")
    cell.type("q")
    assert cell.wait().status == "ok"
    assert cell.outcome.stdout.startswith("This cell holds the notebook")
    assert mesh.ok("%mesh debug print rank").stdout == "0  rank = 0\n2  rank = 2\n"  # the frames that were left
    one = mesh.ok("%mesh pm -r 2")
    assert "return 1 // x" in one.stdout
    assert mesh.ok("%mesh debug print x").stdout == "x = 0\n"
    assert "closed" in mesh.ok("%mesh debug continue").stdout
    assert "There is no exception" in mesh.ok("%mesh pm -r 1").stdout


def test_post_mortem_is_of_the_last_failure_and_offers_earlier_ones_by_name(mesh: Kernel) -> None:
    mesh.run("%%mesh -r 0-1\nearly = rank\n{}['first']")
    mesh.run("adders.slice(gpus=3).add.call_one('three').get()")
    mesh.run("%%mesh -r 2\nlate = 5\n1 // 0")
    told = mesh.ok("%mesh pm").stdout
    assert re.search(r"^In\[\d+\] failed [0-9.]+ (ms|s) ago:$", told, re.MULTILINE)
    assert "ZeroDivisionError" in told and "TypeError" in told.partition("Earlier failures:")[2]
    offered = re.search(r"^%mesh pm (In\[\d+\]) +KeyError: 'first', on ranks 0-1, .* ago$", told, re.MULTILINE)
    assert offered, told
    named = offered[1]
    assert mesh.ok("%mesh debug print late").stdout == "late = 5\n"
    earlier = mesh.ok(f"%mesh pm {named}").stdout
    assert earlier.startswith(f"{named} failed ") and "ZeroDivisionError" not in earlier.partition("Earlier")[0]
    assert mesh.ok("%mesh debug print early").stdout == "0  early = 0\n1  early = 1\n"
    assert "TypeError" in mesh.ok("%mesh pm -r 3").stdout.partition("Earlier")[0]
    assert mesh.ok(f"%mesh pm {named} -r 2").stdout.startswith(
        f"No exception of {named} is kept on these ranks of mesh m"
    )
    cell = ask(mesh, "%mesh pm")
    cell.printed("ZeroDivisionError")
    cell.asked()  # a line that is typed before is not for this question
    cell.says(f"pm {named}", "KeyError: 'first'")
    cell.type("c")
    assert cell.wait().status == "ok"


@pytest.mark.parametrize(
    "code, said",
    [
        ("%mesh break train.py", "names no line"),
        ("%mesh break 9999:1", "there is no cell In[9999]"),
        ("%mesh break :99", "so no line 99"),
        ("%mesh break :1 --iff x", "there is no option --iff"),
        ("%mesh break :1 --if x >", "is not an expression"),
        ("%mesh break :1 -r 7", "out of range"),
        ("%mesh clear 77", "there is no breakpoint 77"),
        ("%mesh debug -x where", "there is no option -x"),
        ("%mesh debug -r 9 where", "out of range"),
        ("%mesh pm extra more", "one argument too many"),
    ],
)
def test_mistakes_are_one_sentence(mesh: Kernel, code: str, said: str) -> None:
    mesh.ok("%%mesh\n1")
    refused(mesh, code, said)


def test_help_and_completion(mesh: Kernel) -> None:
    for word in ("break", "clear", "debug", "pm"):
        assert f"%mesh {word}" in mesh.ok(f"%mesh {word} --help").stdout
    assert "  debugger   break, clear" in mesh.ok("%mesh").stdout
    assert "  break " in mesh.ok("%mesh help debugger").stdout
    reply = mesh.client.complete("%mesh debug gro", reply=True, timeout=20)
    assert reply["content"]["matches"] == ["group", "groups"]
    assert "next" in mesh.ok("%mesh debug help").stdout


def test_ranks_have_nothing_of_the_debugger_before_it_is_asked(mesh: Kernel) -> None:
    mesh.ok("%mesh up fresh --procs 1")
    code = "%%mesh\nimport sys\n[name for name in sys.modules if 'monarch_kernel.debug' in name], sys.gettrace()"
    assert text(mesh.ok(code)) == "[0] ([], None)"
    mesh.ok("%mesh down fresh")
    mesh.ok("%mesh use m")
