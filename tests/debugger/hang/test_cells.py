"""`%mesh hang`, and the verdict that comes by itself under a cell, in a real kernel."""

from __future__ import annotations

import pytest

from tests.conftest import needs
from tests.kernel.harness import Kernel
from tests.kernel.screen import ever, text

needs("torch")

STUCK = """%%mesh
import torch, torch.distributed as dist
for step in range(3):
    dist.all_reduce(torch.ones(5))
    if not (rank == 2 and step == 1):
        dist.broadcast(torch.ones(7), src=0)
dist.barrier()"""


@pytest.fixture(scope="module")
def mesh(runtime: None, kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of four ranks in a process group."""
    kernel.ok("%mesh up --procs 4 --dist gloo")
    return kernel


def test_a_cell_without_progress_names_the_guilty_rank_unasked(mesh: Kernel) -> None:
    cell = mesh.send(STUCK)
    cell.until(lambda out: "called" in ever(out))
    shown = ever(cell.outcome)
    assert "Rank 2" in shown, shown
    assert "broadcast" in shown
    assert "Cell In[" in shown
    subshell = mesh.control("create_subshell_request")["subshell_id"]
    asked = mesh.send("%mesh hang", subshell)  # the cell still runs
    said = asked.wait()
    assert "Rank 2 skipped broadcast" in said.text, said
    mesh.control("delete_subshell_request", {"subshell_id": subshell})
    mesh.interrupt()
    assert cell.wait().ename == "MeshCellInterrupt"
    assert "killed" not in cell.outcome.evalue + cell.outcome.traceback


def test_an_ordinary_cell_that_waits_for_actors_says_it_too(mesh: Kernel) -> None:
    mesh.ok(
        "from monarch_kernel import get_mesh\nfrom monarch_kernel.actor import Actor, current_rank, endpoint\n"
        "from monarch_kernel.kernel import call_progress\n"
        "class Trainer(Actor):\n    @endpoint\n    def step(self):\n"
        "        import time\n        import torch.distributed as dist\n"
        "        while current_rank().rank == 1:\n            time.sleep(0.01)\n"
        "        dist.barrier()\n"
        "trainers = get_mesh('m').spawn('trainers', Trainer)\n"
        "still, call_progress.STILL = call_progress.STILL, 3.0"
    )
    cell = mesh.send("await trainers.step.call()")
    cell.until(lambda out: "rank 1" in ever(out))
    shown = ever(cell.outcome)
    assert "trainers.step: 0 of 4 ranks done · waiting for " in shown, shown
    assert "Ranks 0, 2-3 wait in barrier" in shown, shown
    mesh.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert not text(cell.outcome)
    mesh.ok("call_progress.STILL = still")
    mesh.ok("%mesh restart")


def test_hang_tells_while_a_cell_runs_in_the_background(mesh: Kernel) -> None:
    mesh.ok(
        "%%mesh --no-wait\nimport time\nimport torch, torch.distributed as dist\n"
        "if rank == 1:\n    time.sleep(600)\ndist.barrier()"
    )
    found = mesh.ok(
        "from monarch_kernel.debug import hang\nfrom monarch_kernel.meshes import get_mesh\n"
        "while True:\n    found = hang(get_mesh('m'))\n    if found.decided: break\nfound.kind, found.ranks"
    )
    assert found.text == "('standing', (1,))"
    said = mesh.ok("%mesh hang")
    assert "time.sleep" not in said.text
    assert "barrier" in said.text and "rank 1" in said.text
    assert said.result is not None and "<table>" in said.result["text/html"]
    mesh.ok("%mesh restart")
    assert "No rank waits" in mesh.ok("%mesh hang").text


FAILS = """%%mesh
import torch, torch.distributed as dist
if rank == 2:
    raise ValueError("no batch")
dist.all_reduce(torch.ones(64))"""
OTHER_SIZE = """%%mesh
t = torch.ones(4 if rank != 3 else 5)
dist.all_reduce(t)"""
LEAVES_EARLY = """%%mesh
for step in range(4):
    if rank == 1 and step == 2:
        break
    dist.all_reduce(torch.ones(3))"""


@pytest.mark.parametrize("again", [False, True], ids=["one failure", "two failures"])
def test_earlier_cells_are_evidence_of_nothing(mesh: Kernel, again: bool) -> None:
    """Records of the process group before, and exceptions of cells that are over."""
    for code, right in ((OTHER_SIZE, "Rank 3 called all_reduce with 5 elements"), (LEAVES_EARLY, "rank 1")):
        for _ in range(1 + again):
            assert mesh.run(FAILS).status == "error"
        cell = mesh.send(code)
        subshell = mesh.control("create_subshell_request")["subshell_id"]
        said = ""
        while right not in said:
            said = mesh.send("%mesh hang", subshell).wait().text
            assert "64" not in said and "ValueError" not in said and "RuntimeError" not in said, said
        mesh.control("delete_subshell_request", {"subshell_id": subshell})
        mesh.interrupt()
        assert cell.wait().status == "error"
