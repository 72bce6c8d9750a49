"""IPython's magics and asyncio in `%%mesh` cells, as in a kernel of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.harness import Bell, Kernel, Outcome
from tests.kernel.screen import shown, text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks."""
    kernel.ok("%mesh up --procs 2")
    return kernel


def test_autoreload_takes_what_was_edited_from_the_next_cell_on(mesh: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "edited_between_cells.py"
    module.write_text("def answer():\n    return 1\n")
    mesh.ok(f"%%mesh\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2")
    assert text(mesh.ok("%%mesh\nfrom edited_between_cells import answer\nanswer()")) == "[0-1] 1"
    module.write_text("def answer():\n    return 'another'\n")
    assert text(mesh.ok("%%mesh\nanswer()")) == "[0-1] 'another'"


def test_matplotlib_inline_shows_figures_and_a_backend_with_a_window_is_refused(mesh: Kernel) -> None:
    pytest.importorskip("matplotlib")
    outcome = mesh.ok("%%mesh -r 0\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert any("image/png" in bundle for bundle in shown(outcome))
    assert "a rank has no screen for 'qt'" in mesh.run("%%mesh -r 0\n%matplotlib qt").traceback


def test_cd_changes_the_folder_of_each_rank_and_goes_back(mesh: Kernel, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    mesh.ok(f"%%mesh\nimport os\nbefore = os.getcwd()\n%cd -q {tmp_path}/$rank")
    assert text(mesh.ok("%%mesh\nos.path.basename(os.getcwd())")) == "[0] '0'\n[1] '1'"
    mesh.ok("%%mesh\n%cd -q -\nassert os.getcwd() == before")
    mesh.ok(f"%%mesh\n%pushd {tmp_path}\n%popd\nassert os.getcwd() == before")


def test_who_lists_the_users_own_names(mesh: Kernel) -> None:
    told = text(mesh.ok("%%mesh -r 0\nmine = 1\n%who"))
    assert "mine" in told
    assert "world_size" not in told


TASK = """
import asyncio
async def work(n):
    await asyncio.sleep(0)
    return n
"""


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("task = asyncio.create_task(work(5))\nawait task", "5"),
        ("loop = asyncio.get_running_loop()\nawait loop.create_task(work(6))", "6"),
        ("asyncio.run(work(7))", "7"),
        ("asyncio.new_event_loop().run_until_complete(work(8))", "8"),
    ],
)
def test_tasks_are_made_and_awaited_in_one_cell(mesh: Kernel, body: str, result: str) -> None:
    assert text(mesh.ok(f"%%mesh{TASK}{body}")) == f"[0-1] {result}"


def test_a_task_goes_on_between_cells_and_its_output_is_its_cells(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    first = mesh.send(
        "%%mesh -r 0\nimport asyncio\nasync def later():\n    await asyncio.sleep(0.05)\n"
        "    print('done later')\n    ring()\n    return 3\ntask = asyncio.create_task(later())"
    )
    assert first.wait().status == "ok"
    bell.wait()  # no cell runs
    while "done later" not in text(first.outcome):  # before another cell, whose reading drops it
        first.read()
    assert text(mesh.ok("%%mesh -r 0\nawait task")) == "[0] 3"


def test_a_rank_with_tasks_is_interrupted_and_ends_like_any_other(
    start_kernel: Callable[..., Kernel], bell: Bell
) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 2")
    kernel.ok(bell.code())
    kernel.ok("%mesh push ring")
    kernel.ok(
        "%%mesh\nimport asyncio\nasync def forever():\n    await asyncio.Event().wait()\n"
        "task = asyncio.create_task(forever())"
    )
    cell = kernel.send("%%mesh\nring()\nawait asyncio.sleep(600)")
    bell.wait(2)
    kernel.interrupt()
    outcome: Outcome = cell.wait()
    assert outcome.ename in ("KeyboardInterrupt", "MeshCellInterrupt")  # before or after the rank has answered
    assert text(kernel.ok("%%mesh\ntask.done()")) == "[0-1] False"
    assert "2 ranks stopped" in kernel.ok("%mesh down").stdout
