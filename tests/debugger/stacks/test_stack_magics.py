"""`%mesh stacks` in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.kernel.harness import Cell, Kernel
from tests.waiting import waiters

WAITS = """%%mesh{options}
import fcntl, os
def wait(folder):
    with open(os.path.join(folder, "gate"), "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
def load():
    wait({folder!r})
if rank == 1:
    load()
else:
    wait({folder!r})"""


AWAITS = """%%mesh -a
import asyncio, os
async def waits():
    while not os.path.exists({end!r}):
        await asyncio.sleep(0.05)
await asyncio.gather(waits(), waits())"""


class Scene:
    """A cell on three ranks that waits until it is let go."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self.kernel = kernel
        self.folder = folder
        kernel.ok(f"import fcntl; gate = open({str(folder / 'gate')!r}, 'w'); fcntl.flock(gate, fcntl.LOCK_EX)")

    def start(self, options: str = "") -> Cell:
        """Run the cell until all ranks wait in it."""
        cell = self.kernel.send(WAITS.format(options=options, folder=str(self.folder)))
        wait_until(lambda: waiters(self.folder / "gate") == 3, "all are there")
        return cell


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """A kernel with a mesh of three ranks."""
    kernel.ok("%mesh up --procs 3")
    return kernel


@pytest.fixture
def scene(mesh: Kernel, tmp_path: Path) -> Iterator[Scene]:
    """The cell, let go in the end."""
    yield Scene(mesh, tmp_path)
    mesh.ok("gate.close()")


def test_of_ranks_that_do_nothing(mesh: Kernel) -> None:
    out = mesh.ok("%mesh stacks")
    assert out.text == "3 ranks of mesh m, all at the same place\n\n[0-2] idle: waiting for a message"


def test_of_a_cell_in_the_background(scene: Scene) -> None:
    kernel = scene.kernel
    cell = scene.start(" -a")
    cell.wait()
    number = int(kernel.ok("len(In) - 2").text)
    out = kernel.ok("where = %mesh stacks\nwhere")
    assert out.text.splitlines() == [
        "3 ranks of mesh m: 2 different stacks",
        "",
        f"[0-2] Cell In[{number}]",
        "  ├─ [1]",
        f"  │    Cell In[{number}]:9          load()",
        f"  │    Cell In[{number}]:7 in load  wait({str(scene.folder)!r})",
        f"  │    Cell In[{number}]:5 in wait  fcntl.flock(gate, fcntl.LOCK_SH)",
        "  └─ [0,2]",
        f"       Cell In[{number}]:11         wait({str(scene.folder)!r})",
        f"       Cell In[{number}]:5 in wait  fcntl.flock(gate, fcntl.LOCK_SH)",
    ]
    assert out.result is not None and "<details" in out.result["text/html"]
    assert f"Cell In[{number}]" in out.result["text/html"] and "def load():" in out.result["text/html"]
    assert kernel.ok("[each.ranks for each in where.classes]").text == "[(1,), (0, 2)]"
    # The method of the mesh calls cells by their names, too.
    method = (
        "from monarch_kernel.debugger.controller.stacks import stacks\nfrom monarch_kernel.meshes import get_mesh\n"
    )
    assert f"Cell In[{number}]:5" in kernel.ok(method + "print(stacks(get_mesh('m')))").stdout
    assert kernel.ok("%mesh stacks -r 1").text.startswith("1 rank of mesh m: 1 stack")


def test_while_the_notebook_waits_for_the_cell(scene: Scene) -> None:
    """A subshell answers, as JupyterLab's consoles use them."""
    kernel = scene.kernel
    cell = scene.start()
    subshell = kernel.control("create_subshell_request")["subshell_id"]
    try:
        out = kernel.send("%mesh stacks --values", subshell).wait()
        assert "├─ [1]" in out.text and "fcntl.flock" in out.text and "folder = " in out.text
        kernel.send("gate.close()", subshell)  # not waited for: that would read over the end of the other cell
        assert cell.wait().status == "ok"
    finally:
        kernel.control("delete_subshell_request", {"subshell_id": subshell})


def test_a_cell_that_awaits(mesh: Kernel, tmp_path: Path) -> None:
    texts: list[str] = []

    def stacks() -> str:
        texts.append(mesh.ok("%mesh stacks").text)
        return texts[-1]

    mesh.ok(AWAITS.format(end=str(tmp_path / "end")))
    wait_until(lambda: "  2 of these at once" in stacks(), "all wait")
    assert "await asyncio.gather(waits(), waits())" in texts[-1]
    assert "task " not in texts[-1]
    assert texts[-1].splitlines()[2].startswith("[0-2] Cell In[")
    (tmp_path / "end").touch()
    wait_until(lambda: "[0-2] idle" in stacks(), "the cell ends")


ACTOR = """import fcntl, os
from monarch_kernel.actor import Actor, current_rank, endpoint
from monarch_kernel.meshes import get_mesh
class Waiter(Actor):
    @endpoint
    def wait(self, folder):
        with open(os.path.join(folder, "gate"), "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
waiters = get_mesh("m").spawn("waiter", Waiter)
"""


def test_an_endpoint_and_the_cell_that_has_called_it(scene: Scene) -> None:
    kernel = scene.kernel
    kernel.ok(ACTOR)
    kernel.ok(f"call = waiters.wait.call({str(scene.folder)!r})")
    wait_until(lambda: waiters(scene.folder / "gate") == 3, "all are there")
    out = kernel.ok("%mesh stacks")
    number = next(message["content"]["execution_count"] for message in out.messages if "code" in message["content"])
    assert out.text.splitlines()[2] == f"[0-2] waiter.wait(), called by Cell In[{number - 1}]"
    assert f"Cell In[{number - 2}]:8 in Waiter.wait" in out.text
    kernel.ok("gate.close(); call.get(20)")


@pytest.mark.parametrize(
    "line, said",
    [
        ("-r 7", "rank '7' is out of range"),
        ("--timeout 0", "--timeout takes a number of seconds above 0, not 0"),
        ("--timeout soon", "--timeout takes a number, not 'soon'"),
        ("nowhere", "nowhere"),
        ("--nativ3", "there is no option --nativ3, did you mean --native?"),
    ],
)
def test_mistakes_are_one_sentence(mesh: Kernel, line: str, said: str) -> None:
    out = mesh.run(f"%mesh stacks {line}")
    assert out.status == "error" and out.ename == "UsageError"
    assert said in out.evalue and out.evalue.startswith("%mesh stacks: ")


def test_it_is_completed_and_helps(mesh: Kernel) -> None:
    code = "%mesh sta"
    assert "stacks" in mesh.ok(f"get_ipython().complete('sta', {code!r}, {len(code)})[1]").text
    help_ = mesh.ok("%mesh stacks --help").stdout
    assert "--native" in help_ and "--all-threads" in help_ and "--values" in help_
