"""Meshes, their status and plots as cells show them: a live view, HTML that tells the state by itself, text."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.widgets.open_views import OUTPUT_MIME, VIEW_MIME
from tests.kernel.harness import Kernel
from tests.kernel.views.page import Page


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel, with a mesh `m` of 4 ranks in use."""
    kernel.ok("%mesh up --procs 4\nfrom monarch_kernel import get_mesh\nm = get_mesh('m')")
    return kernel


@pytest.fixture
def page(mesh: Kernel) -> Iterator[Page]:
    """A page that shows the kernel's meshes."""
    page = Page(mesh)
    yield page
    page.close()


@pytest.mark.parametrize("shown", ["m", "m.show()", "%mesh status"])
def test_a_mesh_shows_itself(mesh: Kernel, shown: str) -> None:
    result = mesh.ok(shown).result
    assert result is not None
    assert set(result) == {"text/plain", "text/html", VIEW_MIME, OUTPUT_MIME}
    assert result[OUTPUT_MIME] == {"model_id": result[VIEW_MIME]["model_id"]}
    html = result["text/html"]
    assert "mesh m" in html
    assert "4 idle" in html
    assert html.count("<svg") >= 5  # a cell for each rank, and the legend
    assert "<script" not in html


def test_the_html_tells_who_died_and_why(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 3\nown = get_mesh('own')")
    pid = int(mesh.ok("[status.pid for status in own.status().get().values()][1]").text)
    os.kill(pid, signal.SIGKILL)
    html = mesh.ok("import time\nwhile not own.dead(): time.sleep(0.01)\nown.show()").result["text/html"]
    mesh.ok("%mesh down own\n%mesh use m")
    assert "1 dead" in html
    assert "2 idle" in html
    assert "<b>rank 1</b> dead: killed by SIGKILL" in html


def test_hosts_actors_and_slices_show_their_meshes(mesh: Kernel) -> None:
    mesh.ok(
        "from monarch_kernel.actor import Actor, endpoint, this_host\n"
        "class Shows(Actor):\n"
        "    @endpoint\n"
        "    def show(self): return 'mine'\n"
        "class Plain(Actor):\n"
        "    @endpoint\n"
        "    def step(self): return 1"
    )
    mesh.ok("shows, plain = m.spawn('shows', Shows), m.spawn('plain', Plain)")
    assert mesh.ok("shows.slice(gpus=0).show.call_one().get()").text == "'mine'"
    assert "mesh m" in mesh.ok("plain.show()").result["text/html"]
    assert "step" in mesh.ok("plain").result["text/html"]
    some = mesh.ok("m.slice(gpus=slice(1, 3)).show()").result["text/html"]
    assert "2 ranks" in some
    assert 'aria-label="rank 3 ' not in some
    assert "mesh m" in mesh.ok("this_host().show()").result["text/html"]


def test_a_stopped_mesh_says_so(mesh: Kernel) -> None:
    mesh.ok("%mesh up gone --procs 1\ngone = get_mesh('gone')\n%mesh down gone\n%mesh use m")
    assert mesh.ok("gone").result is not None
    assert "was stopped" in mesh.run("gone.show()").evalue


def test_a_view_that_is_shown_again_in_its_cell_replaces_the_earlier_one(mesh: Kernel) -> None:
    count = "from monarch_kernel.widgets.open_views import _views\nlen(_views)"
    mesh.ok("from monarch_kernel.widgets import open_views\nopen_views.close_views()")
    for _ in range(40):
        mesh.ok("m.show()")
    assert int(mesh.ok(count).text) <= mesh_most(mesh)
    alive = (
        "import ipywidgets.widgets.widget as w\nlen([1 for each in w._instances.values() if hasattr(each, 'is_seen')])"
    )
    assert int(mesh.ok(alive).text) <= mesh_most(mesh)


def mesh_most(mesh: Kernel) -> int:
    return int(mesh.ok("open_views.MOST_UNSEEN").text)


def test_a_live_view_speaks_the_messages_of_the_feed(mesh: Kernel, page: Page) -> None:
    bundle = mesh.ok("m.show()").result
    page.use_widget(bundle[VIEW_MIME]["model_id"])
    page.lease()
    page.rank("m", 2, state="idle")
    page.statuses.clear()
    assert page.ask("code", page.key("m"), action="heal") == {"code": "%mesh heal m"}
    assert page.statuses == []  # the kernel is not busy with what a view sends


def test_an_idle_mesh_is_shown_as_idle_while_a_page_looks_on(mesh: Kernel, tmp_path: Path) -> None:
    slow = Page(mesh, period=2.0)  # what it has been told is old when the cell ends
    slow.lease()
    for shown in ("%mesh status", "m", "m.show()"):
        done = tmp_path / shown
        cell = mesh.send(f"%%mesh\nimport os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)")
        slow.rank("m", 1, state="running")
        done.touch()
        assert cell.wait().status == "ok"
        html = mesh.ok(shown).result["text/html"]
        assert "4 idle" in html and "running" not in html
    slow.close()


# -- plots --------------------------------------------------------------------------------------------


def test_a_plot_of_a_cell(mesh: Kernel) -> None:
    shown = mesh.ok("%mesh plot loss --period 0.2")
    assert "no numbers yet" in shown.displays[0]["text/plain"]
    assert {VIEW_MIME, OUTPUT_MIME} < set(shown.displays[0])
    outcome = mesh.ok(
        "%%mesh\nimport time\nfor step in range(60):\n    loss = (step + 1) * (100 if rank == 2 else 1 + rank / 100)\n"
        "    time.sleep(0.01)"
    )
    final = outcome.updates[-1]
    assert "<svg" in final["text/html"]
    assert final["text/plain"].startswith("loss on 4 ranks of mesh m: median 6")
    assert "rank 2 (6,000) stands out" in final["text/plain"]
    assert mesh.ok("%mesh plot --stop").stdout == "There are no plots.\n"


def test_a_plot_goes_on_over_numbers_that_are_nan(mesh: Kernel) -> None:
    mesh.ok("%%mesh\nnumber = float('nan') if rank == 1 else 2.0")
    mesh.ok("plot = m.plot('number')")
    mesh.ok("%%mesh\npass")
    assert mesh.ok("plot.ended").text == "False"
    assert "number on 4 ranks of mesh m: 2; rank 1 (nan) stands out" in mesh.ok("print(plot)").stdout
    final = mesh.ok("%%mesh\nnumber = 3.0 if rank == 1 else float('nan') if rank == 2 else 2.0").updates[-1]
    assert mesh.ok("plot.ended").text == "True"
    assert "rank 2 has no finite number; rank 1 had no finite number at times" in final["text/plain"]
    assert final["text/html"].count("<polyline") >= 4  # rank 2 has a line too: up to its gap
    assert "nan" not in final["text/html"].partition("<svg")[2].partition("</svg>")[0]


def test_the_numbers_of_a_plot(mesh: Kernel) -> None:
    mesh.ok(
        "class Trainer(Actor):\n"
        "    loss = 0.0\n"
        "    @endpoint\n"
        "    def train(self):\n"
        "        import time\n"
        "        for step in range(100):\n"
        "            self.loss = float(step)\n"
        "            time.sleep(0.01)\n"
        "trainer = m.spawn('trainer', Trainer)"
    )
    mesh.ok("plot = m.plot('trainer.loss', ranks=[1, 3])\ntrainer.train.call().get()")
    assert mesh.ok("plot.ended").text == "True"
    data = mesh.ok("{rank: [number for _, number in points] for rank, points in plot.data().items()}").text
    found = eval(data)
    assert sorted(found) == [1, 3]
    assert found[1][-1] == 99.0
    assert found[1] == sorted(found[1])
    assert len(set(found[1])) > 2


def test_what_has_no_number_is_said_once(mesh: Kernel) -> None:
    mesh.ok("other = m.plot('nowhere')")
    assert "NameError: name 'nowhere' is not defined" in mesh.ok("other").displays[0]["text/plain"]
    assert mesh.ok("%mesh plot --stop").stdout == "1 plot stopped.\n"
    assert "is no expression" in mesh.run("%mesh plot 1 +").evalue
    assert "there is no rank 7" in mesh.run("m.plot('loss', ranks=[7])").evalue


def test_a_kernel_without_a_view_says_so_once(fresh_kernel: Kernel) -> None:
    said = "No panel or live view has connected to this kernel so far."
    fresh_kernel.ok("%mesh up --procs 1")
    first = fresh_kernel.ok("%mesh status")
    assert said in first.stdout and first.stdout.endswith("monarch-kernel doctor server\n")
    assert said not in fresh_kernel.ok("%mesh status").stdout


def test_a_kernel_with_a_view_says_nothing(fresh_kernel: Kernel) -> None:
    page = Page(fresh_kernel)
    try:
        page.lease()
        page.until(lambda: page.messages)
        fresh_kernel.ok("%mesh up --procs 1")
        assert fresh_kernel.ok("%mesh status").stdout == ""
    finally:
        page.close()
