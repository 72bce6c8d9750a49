"""`%mesh` and `%%mesh` in the kernel, on real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.harness import Bell, Kernel, Outcome
from tests.kernel.screen import shown, text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of four ranks."""
    kernel.ok("%mesh up --procs 4")
    return kernel


@pytest.fixture
def fresh(mesh: Kernel) -> Iterator[Kernel]:
    """The same, with a mesh of the test's own in use, `own`, which it may spoil."""
    mesh.ok("%mesh up own --procs 4")
    yield mesh
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


def plain(outcome: Outcome) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)


def refused(kernel: Kernel, code: str, said: str) -> None:
    """A cell that must be refused in one sentence."""
    outcome = kernel.run(code)
    assert outcome.status == "error"
    assert outcome.ename == "UsageError", outcome.traceback
    assert said in outcome.evalue
    assert outcome.stderr.strip().count("\n") == 0


# -- cells ------------------------------------------------------------------------------------


def test_a_cell_runs_on_all_ranks_and_its_value_is_a_value_mesh(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh\nprint('same')\nrank * 10")
    assert text(outcome).startswith("[0-3] same")
    assert text(outcome).endswith("[0]   0\n[1]   10\n[2]   20\n[3]   30")
    assert outcome.result is None  # the ranks have shown it
    assert "gpus=2  20" in mesh.ok("_").text
    assert mesh.ok("from monarch_kernel.actor import ValueMesh\n_[3], isinstance(_, ValueMesh)").text == "(30, True)"


def test_each_rank_keeps_its_variables(mesh: Kernel) -> None:
    mesh.ok("%%mesh\nkept = rank + 1\ndef f(x):\n    return x * kept")
    assert text(mesh.ok("%%mesh -r 1,3\nf(10)")) == "[1] 20\n[3] 40"
    assert text(mesh.ok("%%mesh --where gpus=0:2\nkept")) == "[0] 1\n[1] 2"
    assert text(mesh.ok("%%mesh m -r 0,1,3\n'x'")) == "[0-1,3] 'x'"


def test_what_is_there_from_the_start(mesh: Kernel) -> None:
    mesh.ok(
        "%%mesh -o facts\nimport os\n"
        "[rank, world_size, dict(point), __name__, *(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', "
        "'LOCAL_WORLD_SIZE', 'MASTER_ADDR'))]"
    )
    assert mesh.ok("facts[2]").text == ("[2, 4, {'gpus': 2}, '__main__', '2', '2', '4', '4', '127.0.0.1']")


def test_out_keeps_the_value(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh -o got\nrank ** 2")
    assert outcome.result is None
    assert mesh.ok("list(got.values())").text == "[0, 1, 4, 9]"
    mesh.ok("%%mesh -r 1,3 -o some\nrank")
    assert mesh.ok("some.sizes, list(some.values())").text == "({'gpus': 2}, [1, 3])"
    mesh.ok("%%mesh -o nothing\nx = 1")
    assert mesh.ok("nothing is None").text == "True"


def test_values_that_cannot_come_say_why(mesh: Kernel) -> None:
    mesh.ok("%%mesh -o kept\n(i for i in range(3))")
    assert "cannot be pickled" in mesh.ok("kept[0]").text
    mesh.ok("%%mesh -o large -r 0\nb'x' * 20_000_000;")
    assert "%mesh pull" in mesh.ok("large[0]").text


def test_ipython_syntax(mesh: Kernel) -> None:
    assert text(mesh.ok("%%mesh\nx = !echo $RANK\nx[0]")).endswith("[3] '3'")
    assert text(mesh.ok("%%mesh\n!echo from a shell")) == "[0-3] from a shell"
    assert "CPU times" in text(mesh.ok("%%mesh -r 0\n%time y = 1"))
    assert "CPU times" in text(mesh.ok("%%mesh -r 0\n%%time\ny = 1"))
    assert "Return the number of items" in text(mesh.ok("%%mesh -r 0\nlen?"))
    assert text(mesh.ok("%%mesh\nimport asyncio\nawait asyncio.sleep(0, 'slept')")) == "[0-3] 'slept'"
    assert text(mesh.ok("%%mesh\n5;")) == ""


def test_rich_results(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh\nfrom IPython.display import HTML\nHTML('<b>bold</b>')")
    assert [bundle.get("text/html") for bundle in shown(outcome)][1] == "<b>bold</b>"
    assert text(outcome).startswith("[0-3]")
    assert len(shown(outcome)) == 2
    outcome = mesh.ok("%%mesh -r 0\ndisplay({'text/plain': 'raw', 'image/png': 'AAAA'}, raw=True)\nprint('after')")
    assert {"image/png", "text/plain"} <= shown(outcome)[1].keys()
    assert shown(outcome)[2]["text/plain"] == "[0] after"


def test_figures_come_as_images_at_the_end_of_the_cell(mesh: Kernel) -> None:
    pytest.importorskip("matplotlib")
    outcome = mesh.ok("%%mesh -r 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint('plotted')")
    assert any("image/png" in bundle for bundle in shown(outcome))
    assert "plotted" in text(outcome)


# -- errors -----------------------------------------------------------------------------------


def test_a_failed_rank_is_named_and_the_others_results_are_shown(mesh: Kernel) -> None:
    outcome = mesh.run(
        "%%mesh\ndef check(n):\n    if n in (1, 2):\n        raise ValueError('boom')\n    return n\ncheck(rank)"
    )
    assert outcome.status == "error"
    assert outcome.ename == "MeshCellError"
    assert text(outcome) == "[0] 0\n[3] 3"
    told = plain(outcome)
    assert "Failed on ranks 1-2 (gpus=1-2) of the 4" in told
    assert "[1-2]" in told
    assert re.search(r"Cell In\[\d+\], line 6\n.*", told)
    assert "----> 4         raise ValueError('boom')" in told
    assert told.count("ValueError: boom") == 1
    assert "monarch_kernel" not in told
    assert mesh.ok("import sys\nsys.last_value.values").text == "{0: 0, 3: 3}"


def test_syntax_errors_never_reach_a_rank(mesh: Kernel) -> None:
    mesh.ok("%%mesh\nmark = 'before'")
    outcome = mesh.run("%%mesh\nmark = 'after'\n\nx = (")
    assert outcome.ename == "CellSyntaxError"
    assert "line 4" in plain(outcome)
    assert "was never closed" in plain(outcome)
    assert "magics.py" not in plain(outcome)
    assert text(mesh.ok("%%mesh\nmark")) == "[0-3] 'before'"


def test_a_cells_code_has_the_file_name_that_debuggers_compute(mesh: Kernel) -> None:
    body = "%%mesh -r 0 -o where\n\nimport sys\n\ndef here():\n    return sys._getframe()\n\n"
    body += "frame = here(); [frame.f_code.co_filename, frame.f_lineno]"
    mesh.ok(body)
    mesh.ok("from ipykernel.compiler import get_file_name")
    assert mesh.ok(f"where[0] == [get_file_name({body!r}), 6]").text == "True"


def test_system_exit_and_input_do_not_end_a_rank(mesh: Kernel) -> None:
    assert "SystemExit: 3" in plain(mesh.run("%%mesh\nimport sys\nsys.exit(3)"))
    assert "input() does not work on ranks" in plain(mesh.run("%%mesh -r 0\ninput()"))
    assert text(mesh.ok("%%mesh\nrank >= 0")) == "[0-3] True"


def test_a_dead_rank_is_named_and_nothing_it_wrote_is_lost(fresh: Kernel) -> None:
    outcome = fresh.run("%%mesh\nimport os\nprint('alive')\nif rank == 2:\n    os.kill(os.getpid(), 9)\nrank")
    assert outcome.status == "error"
    assert text(outcome).startswith("[0-3] alive")
    assert "[2]" in plain(outcome)
    assert "SIGKILL" in plain(outcome)
    assert "%mesh heal own" in plain(outcome)
    assert text(fresh.ok("%%mesh -r 0,1,3\nrank * 0")) == "[0-1,3] 0"
    again = fresh.run("%%mesh\n'still'")
    assert text(again) == "[0-1,3] 'still'"
    assert "Failed on rank 2" in plain(again)
    assert "dead" in fresh.ok("%mesh status").text
    fresh.ok("%%mesh -r 0,1,3\nkept = 7")
    healed = fresh.ok("%mesh heal").stdout
    assert "1 healed" in healed and "rank 2" in healed and "SIGKILL" in healed
    assert text(fresh.ok("%%mesh\n'kept' in globals(), world_size")) == "[0-1,3] (True, 4)\n[2]     (False, 4)"
    assert "all ranks are alive" in fresh.ok("%mesh heal").stdout


def test_a_stopped_rank_is_told_of_and_goes_on(fresh: Kernel) -> None:
    fresh.ok("%%mesh -o pids\nimport os, signal\nos.getpid()")
    fresh.ok(
        "import os, signal, threading, time\n"
        "from monarch_kernel import get_mesh\n"
        "seen = []\n"
        "def wake(pid):\n"
        "    while not (silent := get_mesh('own').unresponsive()):\n"
        "        time.sleep(0.02)\n"
        "    seen.append(silent)\n"
        "    os.kill(pid, signal.SIGCONT)\n"
        "threading.Thread(target=wake, args=(pids.get(1),)).start()"
    )
    assert text(fresh.ok("%%mesh\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n'on'")) == "[0-3] 'on'"
    assert "SIGSTOP" in fresh.ok("seen[0][1]").text


def test_kill_ends_ranks_at_once_and_heal_replaces_them(fresh: Kernel) -> None:
    assert "say which ranks" in fresh.run("%mesh kill").evalue
    said = fresh.ok("%mesh kill -r 2-3").stdout
    assert said == "mesh own: killed ranks 2-3; %mesh heal own replaces them\n"
    assert fresh.ok("%mesh kill -r 1-3").stdout.startswith("mesh own: killed rank 1; ranks 2-3 had died before")
    fresh.ok("%mesh heal")
    assert text(fresh.ok("%%mesh\nrank")) != ""


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, said",
    [
        ("%mesh up --procs 2", "there is a mesh 'm' already"),
        ("%mesh up x --procs 0", "at least 1"),
        ("%mesh up x", "--procs 4"),
        ("%mesh up x --procs 2 --nonsense", "there is no option --nonsense"),
        ("%mesh upp", "there is no subcommand 'upp' (did you mean up?)"),
        ("%mesh use other", "there is no mesh 'other'"),
        ("%mesh down nn", "there is no mesh 'nn'"),
        ("%mesh push nowhere", "there is no variable 'nowhere'"),
        ("%mesh pull nowhere", "there is no variable 'nowhere' on any rank"),
        ("%mesh pull x --as 1y", "cannot name a variable"),
        ("%mesh status -r 9", "out of range"),
        ("%mesh logs -n 0", "at least 1"),
        ("%%mesh other\n1", "there is no mesh 'other'"),
        ("%%mesh -r 7\n1", "out of range"),
        ("%%mesh -r nodes=1\n1", "does not have a dimension"),
        ("%%mesh --frobnicate\n1", "there is no option --frobnicate"),
        ("%%mesh m --on m\n1", "give the mesh once"),
        ("%%mesh -o 1x\n1", "cannot name a variable"),
        ("%%mesh\n\n  \n", "the cell is empty"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(mesh: Kernel, code: str, said: str) -> None:
    refused(mesh, code, said)
    assert "*  m     gpus=4          4      4" in mesh.ok("%mesh ls").text


def test_what_cannot_be_pickled_is_named(mesh: Kernel) -> None:
    mesh.ok("import threading\nlock = threading.Lock(); fine = 1")
    refused(mesh, "%mesh push fine lock", "lock (a lock) cannot be sent")
    refused(mesh, "%mesh pull fine", "no variable 'fine'")
    mesh.ok("%%mesh\nimport threading\nrank_lock = threading.Lock()")
    refused(mesh, "%mesh pull rank_lock", "rank 0 cannot send it")


# -- meshes -----------------------------------------------------------------------------------


def test_meshes_come_and_go(mesh: Kernel) -> None:
    outcome = mesh.ok("%mesh up two hosts_=1 gpus=2 --env GREETING='hello there'")
    assert re.match(r"mesh two: 2 ranks \(hosts_=1, gpus=2\) on this host, ready in [\d.]+ m?s\n", outcome.stdout)
    assert text(mesh.ok("%%mesh\nimport os\nos.environ['GREETING']")) == "[0-1] 'hello there'"
    assert text(mesh.ok("%%mesh --on m -r 3\nrank")) == "[3] 3"
    assert mesh.ok("%mesh use m").stdout.startswith("mesh m: 4 ranks (gpus=4), in use")
    mesh.ok("%mesh use two")
    mesh.ok("%%mesh\nforgotten = 1")
    assert mesh.ok("%mesh restart").stdout.startswith("mesh two: 2 ranks")
    assert "NameError" in plain(mesh.run("%%mesh\nforgotten"))
    assert text(mesh.ok("%%mesh -r 0\nos = __import__('os'); os.environ['GREETING']")) == "[0] 'hello there'"
    assert mesh.ok("%mesh down").stdout == "mesh two: 2 ranks stopped; m is in use now\n"
    assert "two" not in mesh.ok("%mesh ls").text


def test_meshes_of_the_users_own_code_can_be_used(mesh: Kernel) -> None:
    mesh.ok(
        "from monarch_kernel.actor import this_host\nmine = this_host().spawn_procs(per_host={'gpus': 2}, name='mine')"
    )
    assert "mine" in mesh.ok("%mesh ls").text
    assert text(mesh.ok("%%mesh mine\nworld_size")) == "[0-1] 2"
    refused(mesh, "%mesh restart mine", "not started by %mesh up")
    mesh.ok("mine.stop().get(30)")
    refused(mesh, "%%mesh mine\n1", "there is no mesh 'mine'")
    mesh.ok("%mesh use m")


def test_status_tells_of_every_rank(mesh: Kernel) -> None:
    outcome = mesh.ok("%mesh status -r 1,2")
    lines = outcome.text.splitlines()
    assert lines[0] == "mesh m"
    assert [line.split()[:3] for line in lines[2:]] == [["1", "gpus=1", "alive"], ["2", "gpus=2", "alive"]]
    assert outcome.result is not None
    assert outcome.result["text/html"].count("<tr>") == 3


def test_help_tells_what_there_is(mesh: Kernel) -> None:
    overview = mesh.ok("%mesh --help").stdout
    for word in ("up", "ls", "status", "use", "down", "heal", "restart", "push", "pull", "logs", "%%mesh"):
        assert word in overview
    assert "debugger   break, clear, debug, pm, focus, debugpy" in overview
    told = mesh.ok("%mesh help debugger recordings").stdout
    assert "  pm         Open the frames of the last failure" in told
    assert "  trace " in told and "  up " not in told
    assert "did you mean tensors?" in mesh.run("%mesh help tensor").evalue
    assert "--dist" in mesh.ok("%mesh up --help").stdout
    assert "--raw" in mesh.ok("%%mesh --help\npass").stdout


def test_completion_in_the_kernel(mesh: Kernel) -> None:
    def complete(code: str) -> list[str]:
        reply = mesh.client.complete(code, reply=True, timeout=20)
        content = reply["content"]
        return [code[: content["cursor_start"]] + match for match in content["matches"]]

    assert complete("%mesh stat") == ["%mesh status"]
    assert complete("%%mesh --o") == ["%%mesh --on", "%%mesh --out"]
    assert complete("%%mesh -r g") == ["%%mesh -r gpus="]
    assert complete("%mesh use ") == ["%mesh use m"]
    assert "print(mesh" not in complete("print(me")


def test_meshes_as_objects(mesh: Kernel) -> None:
    mesh.ok("from monarch_kernel import get_mesh\nfrom monarch_kernel.kernel import current_mesh")
    assert mesh.ok("current_mesh() is get_mesh('m'), get_mesh('m').sizes").text == "(True, {'gpus': 4})"


def test_the_notebooks_names_are_the_users(mesh: Kernel) -> None:
    mesh.ok("mesh = 'mine'; m = 'too'; rank = 'three'")
    mesh.ok("%mesh ls")
    mesh.ok("%%mesh\nrank")
    assert mesh.ok("mesh, m, rank").text == "('mine', 'too', 'three')"


# -- variables --------------------------------------------------------------------------------


def test_push_and_pull(mesh: Kernel) -> None:
    mesh.ok(
        "class Thing:\n    def __init__(self, n): self.n = n\nnumbers = [1, 2]; thing = Thing(5)\nf = lambda x: x + 1"
    )
    assert mesh.ok("%mesh push numbers thing f").stdout == ""
    mesh.ok("%%mesh\nresult = f(thing.n) + rank + numbers[1]")
    mesh.ok("%mesh pull result")
    assert mesh.ok("list(result.values())").text == "[8, 9, 10, 11]"
    mesh.ok("%mesh pull result -r 0,3 --as other")
    assert mesh.ok("list(other.values())").text == "[8, 11]"
    mesh.ok("%mesh push numbers -r 0")


def test_redefining_a_class_or_function_is_enough(mesh: Kernel) -> None:
    for version in (1, 2):
        mesh.ok(
            "from monarch_kernel.actor import Actor, endpoint\nfrom monarch_kernel import get_mesh\n"
            f"def helper():\n    return {version}\n"
            "class Counter(Actor):\n"
            f"    @endpoint\n    def version(self, f):\n        return {version}, f()\n"
        )
        mesh.ok("counters = get_mesh('m').spawn('counters', Counter)")
        assert mesh.ok("counters.version.call(helper).get()[3]").text == str((version, version))
        mesh.ok("counters.stop().get(30);")


# -- interrupts -------------------------------------------------------------------------------


def test_an_interrupt_stops_the_cell_on_all_ranks(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    cell = mesh.send("%%mesh\nimport os, time\nprint('before')\nring()\ntime.sleep(120)")
    bell.wait(4)
    mesh.interrupt()
    outcome = cell.wait()
    assert outcome.ename == "MeshCellInterrupt"
    assert "[0-3] before" in text(outcome)
    assert "KeyboardInterrupt" in plain(outcome)
    assert text(mesh.ok("%%mesh\nrank < 4")) == "[0-3] True"


def test_an_interrupt_that_the_ranks_have_answered_does_not_come_again(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    # As if the press came while a message was sent: the handler runs again later, here after the ranks have answered.
    mesh.ok(
        "import time\n"
        "from monarch_kernel.kernel.interrupts import sigint_handler\n"
        "before = sigint_handler._sends_or_receives, sigint_handler.RETRY_AFTER\n"
        "answers = iter([True])\n"
        "sigint_handler._sends_or_receives = lambda frame: next(answers, False)\n"
        "sigint_handler.RETRY_AFTER = 0.5"
    )
    cell = mesh.send(
        "try:\n"
        "    get_ipython().run_cell_magic('mesh', '', 'import time\\nring()\\ntime.sleep(120)')\n"
        "except KeyboardInterrupt as error:\n"
        "    print(type(error).__name__)\n"
        "time.sleep(1)\n"
        "print('calm', next(answers, 'used'))"
    )
    bell.wait(4)
    mesh.interrupt()
    outcome = cell.wait()
    mesh.ok("sigint_handler._sends_or_receives, sigint_handler.RETRY_AFTER = before")
    assert outcome.stdout == "MeshCellInterrupt\ncalm used\n", outcome


def test_a_second_interrupt_kills_what_does_not_answer(fresh: Kernel, bell: Bell) -> None:
    fresh.ok(bell.code())
    fresh.ok("%mesh push ring")
    cell = fresh.send(
        "%%mesh\nimport os, time\nif rank == 1:\n"
        "    said = False\n"
        "    while True:\n"
        "        try:\n"
        "            if not said:\n"
        "                said = True\n"
        "                ring('asleep')\n"
        "            time.sleep(120)\n"
        "        except KeyboardInterrupt:\n"
        "            ring('ignored')\n"
        "rank\nring('done')"
    )
    bell.wait(4)
    fresh.interrupt()
    bell.wait(1)
    fresh.interrupt()
    outcome = cell.wait()
    assert "Killed rank 1" in outcome.stderr
    assert "[1]" in plain(outcome)
    assert "did not answer" in plain(outcome)


def test_no_wait_goes_on_and_its_output_comes_later(mesh: Kernel, tmp_path_factory: pytest.TempPathFactory) -> None:
    gate = tmp_path_factory.mktemp("gate") / "gate"
    cell = mesh.send(
        f"%%mesh -a -o handle\nimport os, time\nprint('begun')\n"
        f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nprint('ended')\nrank * 2"
    )
    cell.wait()
    while "begun" not in text(cell.outcome):
        cell.read()
    assert mesh.ok("handle.done()").text == "False"
    gate.touch()
    while "[0-3] begun\n      ended" not in text(cell.outcome):
        cell.read()
    assert mesh.ok("list(handle.result(30).values())").text == "[0, 2, 4, 6]"


def test_an_interrupt_while_the_kernel_is_idle_stops_what_runs_in_the_background(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    cell = mesh.send("%%mesh -a\nimport os, time\nring()\ntime.sleep(120)")
    cell.wait()
    bell.wait(4)
    mesh.interrupt()
    while "KeyboardInterrupt" not in cell.outcome.stderr:
        cell.read()
    assert text(mesh.ok("%%mesh\n'free'")) == "[0-3] 'free'"


def test_an_interrupt_stops_a_cell_that_has_not_begun_and_no_other(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    first = mesh.send(
        "%%mesh -a -o first\nimport os, time\nring()\n"
        f"while not os.path.exists({gate!r}):\n    time.sleep(0.01)\n'whole'"
    )
    first.wait()
    bell.wait(4)
    cell = mesh.send("%%mesh\nprint('begun')")
    while "queued behind Cell In[" not in text(cell.outcome):
        cell.read()
    mesh.interrupt()
    outcome = cell.wait()  # at once
    assert outcome.ename == "MeshCellInterrupt"
    assert text(outcome) == ""
    open(gate, "w").close()
    assert mesh.ok("first.result(30)[3]").text == "'whole'"


def test_no_wait_shows_its_error_in_its_own_cell(mesh: Kernel) -> None:
    cell = mesh.send("%%mesh -a -o handle\n1 / 0")
    cell.wait()
    while "ZeroDivisionError" not in cell.outcome.stderr:
        cell.read()
    outcome = mesh.run("handle.result(30)")
    assert outcome.ename == "MeshCellError"


def test_ends_clean(mesh: Kernel, start_kernel: Callable[..., Kernel]) -> None:
    other = start_kernel()
    other.ok("%mesh up a --procs 1")
    other.ok("%mesh up b --procs 1")
    assert other.ok("%mesh down --all").stdout.count("stopped") == 2
    assert "No mesh is up" in other.ok("%mesh ls").stdout
    refused(other, "%%mesh\n1", "start one with %mesh up --procs 4")
