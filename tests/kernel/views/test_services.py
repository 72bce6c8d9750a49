"""What a page asks and does, in a real kernel, while cells run and while none does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.kernel.harness import Bell, Kernel
from tests.kernel.views.page import Message, Page

THREADS = "import threading\n[thread.name for thread in threading.enumerate()]"
LOOP = "import time\ndef work(step):\n    while True:\n        time.sleep(0.01)\nring()\nloss = 0.5\nwork(7)"


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel, with a mesh `m` of 3 ranks in use."""
    kernel.ok("%mesh up --procs 3")
    return kernel


@pytest.fixture(scope="module")
def page(mesh: Kernel) -> Iterator[Page]:
    """A page that shows the kernel's meshes."""
    page = Page(mesh)
    page.lease()
    yield page
    page.close()


@pytest.fixture
def key(page: Page) -> str:
    """The key of the mesh."""
    return page.key("m")


@pytest.fixture
def busy(mesh: Kernel, bell: Bell) -> Iterator[None]:
    """A cell that runs on all ranks."""
    mesh.ok(f"%%mesh\n{bell.code()}")
    cell = mesh.send(f"%%mesh\n{LOOP}")
    bell.wait(3)
    yield
    mesh.interrupt()
    cell.wait()


# -- asking ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("busy")
def test_stacks_of_a_running_cell(page: Page, key: str) -> None:
    (group,) = page.ask("stack", key)["stacks"]
    assert group["ranks"] == [0, 1, 2]
    innermost = group["frames"][-1]
    assert (innermost["function"], innermost["line"], innermost["text"]) == ("work", 5, "time.sleep(0.01)")
    assert innermost["file"].startswith("In[")


def test_stacks_of_idle_ranks(page: Page, key: str) -> None:
    page.rank("m", 0, state="idle")
    assert page.ask("stack", key, (1,)) == {
        "stacks": [{"ranks": [1], "frames": [], "note": "idle: waiting for a message"}]
    }


@pytest.mark.usefixtures("busy")
def test_variables_while_a_cell_runs(page: Page, key: str) -> None:
    told = page.ask("variables", key, (1,))
    assert told["frame"] is None
    assert {"name": "loss", "type": "float", "text": "0.5"} in told["variables"]


def test_variables_of_tensors_are_not_read(mesh: Kernel, page: Page, key: str) -> None:
    mesh.ok("%%mesh -r 0\nimport numpy\nweights = numpy.zeros((2, 3), 'float32')")
    told = page.ask("variables", key, (0,))["variables"]
    assert {"name": "weights", "type": "ndarray", "text": "float32 [2, 3]"} in told


def test_variables_are_of_one_rank(page: Page, key: str) -> None:
    refused = page.request("ask", "variables", key)["error"]
    assert refused == {"message": "variables are shown of one rank at a time", "hint": "choose a rank"}


def test_the_end_of_logs(mesh: Kernel, page: Page, key: str) -> None:
    mesh.ok("%%mesh\nfor step in range(5): print('step', step, 'of', rank)")
    assert page.ask("log", key, (1, 2), lines=2) == {
        "lines": [[rank, "stdout", f"step {step} of {rank}"] for rank in (1, 2) for step in (3, 4)],
        "dropped": 0,
    }


def test_breakpoints(mesh: Kernel, page: Page) -> None:
    assert page.ask("breakpoints") == {"breakpoints": []}
    mesh.ok("%mesh break train.py:12 -r 0-1 --if step > 3")
    (told,) = page.ask("breakpoints")["breakpoints"]
    mesh.ok("%mesh clear all")
    assert told["file"].endswith("train.py")
    assert (told["line"], told["condition"], told["ranks"]) == (12, "step > 3", [0, 1])


def test_a_mesh_that_does_not_hang(page: Page, key: str) -> None:
    told = page.ask("hang", key)
    assert not told["hangs"]
    assert told["text"]


@pytest.mark.parametrize(
    "action, ranks, more, code",
    [
        ("heal", (1,), {}, "%mesh heal m -r 1"),
        ("kill", (0, 1), {}, "%mesh kill m -r 0-1"),
        ("interrupt", (), {}, "%mesh interrupt m"),
        ("debug", (2,), {}, "%mesh debug --on m -r 2 pause"),
        ("resume", (), {}, "%mesh debug --on m continue"),
        ("focus", (2,), {}, "%mesh focus 2 --on m"),
        ("stack", (0,), {}, "%mesh stacks m -r 0"),
        ("log", (0,), {"lines": 9}, "%mesh logs m -r 0 -n 9"),
        ("sync", (), {"options": {"env": True, "dirs": ["a b"]}}, "%mesh sync 'a b' --env --on m"),
        ("attach", (), {"name": "big", "force": True}, "%mesh attach big --force"),
        (
            "up",
            (),
            {"options": {"name": "t", "dims": {"hosts": 2, "gpus": 4}, "env": {"A": "x y"}, "keep": True}},
            "%mesh up t hosts=2 gpus=4 --env 'A=x y' --keep",
        ),
    ],
)
def test_the_line_that_does_the_same(
    page: Page, key: str, action: str, ranks: tuple[int, ...], more: dict, code: str
) -> None:
    assert page.ask("code", key, ranks, action=action, **more) == {"code": code}


def test_frames_of_an_error_are_no_stop(mesh: Kernel, page: Page, key: str, bell: Bell) -> None:
    mesh.ok(f"%%mesh\n{bell.code()}")
    assert mesh.run("%%mesh\n1 // (rank - 1)").ename == "MeshCellError"
    assert "ZeroDivisionError" in mesh.ok("%mesh pm").stdout  # as after `q`: the frames stay open
    cell = mesh.send(f"%%mesh\n{LOOP}")
    bell.wait(3)
    assert not page.rank("m", 1, state="running").get("stop")
    page.do("interrupt", key)
    assert cell.wait().status == "error"
    assert "closed" in mesh.ok("%mesh debug continue").stdout
    page.rank("m", 1, state="idle")


# -- doing ----------------------------------------------------------------------------------------


def test_interrupting_a_running_cell(mesh: Kernel, page: Page, key: str, bell: Bell) -> None:
    mesh.ok(f"%%mesh\n{bell.code()}")
    cell = mesh.send(f"%%mesh\n{LOOP}")
    bell.wait(3)
    assert page.do("interrupt", key) == "mesh m: interrupted a cell on ranks 0-2"
    assert "KeyboardInterrupt" in cell.wait().traceback


def test_interrupting_at_a_breakpoint(mesh: Kernel, page: Page, key: str, bell: Bell) -> None:
    mesh.ok(f"%%mesh\n{bell.code()}")
    mesh.send("%%mesh -a\n" + LOOP).wait()
    bell.wait(3)
    page.do("debug", key)
    for rank in range(3):
        page.until(lambda rank=rank: page.rank("m", rank, state="stopped")["doing"].startswith("cell ["))
    assert page.do("interrupt", key) == "mesh m: interrupted a cell on ranks 0-2"
    for rank in range(3):
        page.rank("m", rank, state="idle")


def test_failed_cells_are_news(mesh: Kernel, page: Page) -> None:
    def told(page: Page) -> dict[str, list[int]]:
        found = [each for message in page.messages for each in message.get("failures", ())]
        return {each["text"]: each["ranks"] for each in found if each["kind"] == "error"}

    assert mesh.run("%%mesh\nif rank: raise ValueError(f'no {rank}')").ename == "MeshCellError"
    mesh.ok("from monarch_kernel.actor import Actor, endpoint\nfrom monarch_kernel.meshes import get_mesh")
    mesh.ok("class Failing(Actor):\n    @endpoint\n    def fail(self): raise KeyError('lost')")
    mesh.run("get_mesh('m').spawn('failing', Failing).slice(gpus=1).fail.call_one().get()")
    found = page.until(lambda: any("KeyError" in text for text in told(page)) and told(page))
    ends = {text.partition(" failed: ")[2]: ranks for text, ranks in found.items()}
    assert ends["ValueError: no 1"] == [1] and ends["ValueError: no 2"] == [2] and ends["KeyError: 'lost'"] == [1]
    assert all(text.startswith("cell [") for text in found)
    later = Page(mesh)  # a panel that is opened after the cell does not say that nothing has failed
    later.lease()
    assert later.until(lambda: told(later)) == found
    later.close()


def test_a_rank_is_stopped_looked_at_and_goes_on(mesh: Kernel, page: Page, key: str, bell: Bell) -> None:
    mesh.ok(f"%%mesh\n{bell.code()}")
    cell = mesh.send("%%mesh -a\n" + LOOP)
    cell.wait()
    bell.wait(3)
    assert "work" in page.do("debug", key, (1,))
    assert page.rank("m", 1, state="stopped")["stop"]["function"] == "work"
    told = page.ask("variables", key, (1,), frame=0)
    assert told["frame"]["function"] == "work"
    assert {"name": "step", "type": "int", "text": "7"} in told["variables"]
    assert page.ask("variables", key, (1,), frame=1)["frame"]["function"] == "<module>"
    refused = page.request("do", "focus", key, (1,))["error"]
    assert "debugger is off" in refused["message"]
    assert "bug button" in refused["hint"]
    assert page.do("resume", key, (1,)) == "Rank 1 continues."
    assert "interrupted a cell" in page.do("interrupt", key)
    page.rank("m", 1, state="idle")


@pytest.fixture
def own(mesh: Kernel, page: Page) -> Iterator[str]:
    """A mesh of the test's own, `own`, which it may spoil."""
    mesh.ok("%mesh up own --procs 3")
    key = page.key("own")
    yield "own"
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")
    page.until(lambda: key not in page.state()[0])


def test_a_rank_is_killed_and_healed(page: Page, own: str) -> None:
    key = page.key(own)
    assert page.do("kill", key, (2,)) == "mesh own: killed rank 2; %mesh heal own replaces it"
    page.until(lambda: page.state()[1][key][2]["state"] in ("dead", "ended"))
    assert "rank 2" in page.do("heal", key, (2,))
    page.rank(own, 2, state="idle")


def test_a_death_is_a_notice(page: Page, own: str) -> None:
    key = page.key(own)
    begin = len(page.messages)
    os.kill(page.rank(own, 0, state="idle")["pid"], signal.SIGKILL)
    notice = page.until(lambda: page.of_kind("notice", begin))[0]
    assert (notice["level"], notice["mesh"]) == ("error", key)
    assert "SIGKILL" in notice["text"]


def test_meshes_come_and_go(mesh: Kernel, page: Page, key: str) -> None:
    assert "mesh t: 2 ranks" in page.do("up", options={"name": "t", "procs": 2})
    other = page.key("t")
    assert page.do("use", key) == "mesh m: 3 ranks (gpus=3), in use"
    assert mesh.ok("%mesh ls").text
    assert "mesh t: 2 ranks stopped" in page.do("down", other)
    page.until(lambda: other not in page.state()[0])
    refused = page.request("do", "heal", other)["error"]
    assert "stopped" in refused["message"]


def test_what_nobody_knows_is_refused(page: Page, key: str) -> None:
    assert "nothing called 'explode'" in page.request("do", "explode", key)["error"]["message"]
    assert "nothing called 'soul'" in page.request("ask", "soul", key)["error"]["message"]
    assert "no rank 9" in page.request("do", "kill", key, (9,))["error"]["message"]
    refused = page.request("do", "up", options={"name": "m", "procs": 1})["error"]
    assert "there is a mesh 'm' already" in refused["message"]
    assert "--replace" in refused["hint"]


# -- following ------------------------------------------------------------------------------------


def log_lines(page: Page) -> list[list[Any]]:
    return [line for each in page.of_kind("log") for line in each["lines"]]


def numbers(page: Page) -> list[Message]:
    return [each for each in page.of_kind("points") if each["values"]]


def test_following_a_log(mesh: Kernel, page: Page, key: str) -> None:
    page.send({"kind": "follow", "id": "f", "mesh": key, "ranks": [0, 2], "search": "LOSS"})
    wait_until(lambda: "monarch-log" in mesh.ok(THREADS).text, "the log is followed")
    mesh.ok("%%mesh\nimport sys\nprint('loss', rank)\nprint('other')\nprint('loss!', file=sys.stderr)")
    lines = page.until(
        lambda: (
            (found := [line for each in page.of_kind("log") for line in each["lines"]]) and len(found) >= 4 and found
        )
    )
    assert sorted(map(tuple, lines)) == [
        (0, "stderr", "loss!"),
        (0, "stdout", "loss 0"),
        (2, "stderr", "loss!"),
        (2, "stdout", "loss 2"),
    ]
    page.send({"kind": "unfollow", "id": "f"})
    wait_until(lambda: "monarch-log" not in mesh.ok(THREADS).text, "the log is no longer followed")
    begin = len(page.messages)
    mesh.ok("%%mesh\nprint('loss again')")
    page.ask("hang", key)
    assert not page.of_kind("log", begin)


def test_plotting_an_expression_while_a_cell_runs(mesh: Kernel, page: Page, key: str, bell: Bell) -> None:
    mesh.ok(f"%%mesh\n{bell.code()}")
    cell = mesh.send("%%mesh\nimport time\nring()\nstep = 0\nwhile True:\n    step += 1\n    time.sleep(0.01)")
    bell.wait(3)
    page.send({"kind": "plot", "id": "p", "mesh": key, "expression": "step * (rank + 1)", "period": 0.2})
    points = page.until(lambda: len(found := numbers(page)) >= 3 and found)
    page.send({"kind": "unplot", "id": "p"})
    mesh.interrupt()
    cell.wait()
    assert [rank for rank, _ in points[-1]["values"]] == [0, 1, 2]
    assert points[-1]["values"][0][1] > points[0]["values"][0][1]
    assert points[-1]["values"][2][1] > points[-1]["values"][0][1]


def test_an_expression_that_fails_is_said_once(page: Page, key: str) -> None:
    begin = len(page.messages)
    page.send({"kind": "plot", "id": "q", "mesh": key, "expression": "nowhere", "period": 0.2})
    told = page.until(lambda: page.of_kind("points", begin))
    assert told[0]["error"] == "ranks 0-2: NameError: name 'nowhere' is not defined"
    page.send({"kind": "unplot", "id": "q"})
    page.send({"kind": "plot", "id": "r", "mesh": key, "expression": "1 +", "period": 0.2})
    answer = page.until(lambda: [each for each in page.of_kind("answer", begin) if each["id"] == "r"])[0]
    assert "is no expression" in answer["error"]["message"]
