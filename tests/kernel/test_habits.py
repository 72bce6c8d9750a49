"""What a user of other notebooks expects of ranks, in one kernel: figures, progress bars, long output, widgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernel.harness import Kernel
from tests.kernel.screen import shown, text
from tests.waiting import wait_until

ACTOR = """from monarch.actor import Actor, endpoint, this_host
class Shows(Actor):
    @endpoint
    def figure(self):
        import matplotlib.pyplot as plt
        plt.plot([0, 1]); plt.show()
    @endpoint
    def table(self):
        import pandas as pd
        display(pd.DataFrame({'a': [17]}))
    @endpoint
    def live(self):
        from IPython.display import clear_output
        for step in range(3):
            clear_output(wait=True); print('step', step)
procs = this_host().spawn_procs(per_host={'gpus': 1}, name='coded')
shows = procs.spawn('shows', Shows)"""


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks."""
    kernel.ok("%mesh up --procs 2")
    return kernel


def test_procs_that_code_spawned_show_figures_and_tables(mesh: Kernel) -> None:
    mesh.ok(ACTOR)
    figure = mesh.ok("shows.figure.call_one().get(60)")
    assert any("image/png" in shown for shown in (*figure.displays, *figure.updates))
    table = mesh.ok("shows.table.call_one().get(60)")
    assert any("<table" in shown.get("text/html", "") for shown in (*table.displays, *table.updates))
    live = text(mesh.ok("shows.live.call_one().get(60)"))
    assert "step 2" in live and "step 1" not in live
    # Cells have their own namespace there, in the same shell.
    assert "(3, True)" in text(mesh.ok("%%mesh coded\nx = 3\nget_ipython().user_ns['x'], 'procs' not in globals()"))
    assert any("<table" in str(shown) for shown in mesh.ok("shows.table.call_one().get(60)").messages)
    mesh.ok("%mesh down coded")
    mesh.ok("%mesh use m")


def test_a_cells_value_is_shown_without_rebuilding_it(mesh: Kernel) -> None:
    mesh.ok("%%mesh -o out\nfrom wsgiref.headers import Headers\nHeaders([('of', str(rank))])")
    mesh.ok("import sys\nbefore = set(sys.modules)")
    shown = mesh.ok("out")
    assert "Headers([('of', '1')])" in shown.text and "Headers([" in shown.result["text/html"]  # type: ignore[index]
    failed = mesh.run("%%mesh\nif rank:\n    1 / 0\nHeaders([('at', 'healthy')])")
    assert failed.ename == "MeshCellError"
    assert "healthy" in mesh.ok("error = sys.last_value\nerror.values").text
    assert mesh.ok("'wsgiref.headers' in sys.modules").text == "False"
    assert mesh.ok("out[1]['of'], error.values[0]['at'], list(error.values)").text == "('1', 'healthy', [0])"
    assert mesh.ok("'wsgiref.headers' in sys.modules").text == "True"
    assert mesh.ok("%%mesh -o none\nNone").status == "ok"
    assert mesh.ok("none is None").text == "True"


def test_a_new_rank_says_so_and_gets_the_cells_of_its_predecessor(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 3")
    mesh.ok("%%mesh\na = 1\ndef f():\n    return a + rank")
    mesh.ok("%%mesh --setup\nb = 2\nprint('sets up')")
    mesh.ok("%mesh kill -r 2")
    mesh.ok("%mesh heal")
    failed = mesh.run("%%mesh\nf()")
    assert "Rank 2 is new" in failed.traceback and "define a, b, f." in failed.traceback
    assert "%mesh heal own --replay" in failed.traceback
    # The marked cell alone, and on the new rank alone; then what is left.
    again = mesh.ok("%mesh heal --replay")
    assert "on rank 2 run again: In[" in again.stdout and text(again) == "[2] sets up"
    assert text(mesh.ok("%%mesh\nb")) == "[0-2] 2"
    assert text(mesh.ok("%mesh heal --replay")) == ""
    assert text(mesh.ok("%%mesh\nf()")) == "[0] 1\n[1] 2\n[2] 3"
    assert "no cell that this notebook knows" in mesh.ok("%mesh heal --replay").stdout
    assert "is new" not in mesh.run("%%mesh\nnot_there").traceback
    debugged = mesh.ok("%debug")
    assert "%mesh pm --on own" in debugged.stdout and "not_there" in debugged.stdout
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


def comms(kernel: Kernel) -> set[str]:
    """The comms that the kernel has with the front end."""
    message = kernel.client.session.msg("comm_info_request", {"target_name": "jupyter.widget"})
    kernel.client.shell_channel.send(message)
    while True:
        reply = kernel.client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return set(reply["content"]["comms"])


def test_widgets_of_ranks_reach_the_front_end_and_values_come_back(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 2")
    cell = mesh.ok(
        "%%mesh\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3 + rank)\n"
        "seen = []\nslider.observe(lambda change: seen.append(change.new), 'value')\nslider"
    )
    opened = {
        each["content"]["comm_id"]: each["content"]["data"]["state"]
        for each in cell.messages
        if each["msg_type"] == "comm_open"
    }
    views = [view for each in shown(cell) if (view := each.get("application/vnd.jupyter.widget-view+json"))]
    assert [opened[view["model_id"]]["value"] for view in views] == [3, 4]
    assert "IntSlider(value=3)" in text(cell)
    # The front end's models exist before their views.
    kinds = [each["msg_type"] for each in cell.messages]
    assert max(at for at, kind in enumerate(kinds) if kind == "comm_open") < len(kinds) - kinds[::-1].index(
        "display_data"
    )
    assert opened.keys() <= comms(mesh)
    # One is moved in the front end.
    moved = {"comm_id": views[1]["model_id"], "data": {"method": "update", "state": {"value": 42}}}
    mesh.client.shell_channel.send(mesh.client.session.msg("comm_msg", moved))
    wait_until(lambda: "[1] (42, [42])" in text(mesh.ok("%%mesh\nslider.value, seen")), "the rank has the value")
    assert "[0] (3, [])" in text(mesh.ok("%%mesh\nslider.value, seen"))
    # One is moved on its rank, often: the last state arrives.
    cell = mesh.ok("%%mesh -r 0\nimport time\nfor number in range(50):\n    slider.value = number\ntime.sleep(0.5)")
    told = [each["content"] for each in cell.messages if each["msg_type"] == "comm_msg"]
    assert {each["comm_id"] for each in told} == {views[0]["model_id"]}
    assert told[-1]["data"]["state"]["value"] == 49 and len(told) < 25
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")
    wait_until(lambda: not opened.keys() & comms(mesh), "the widgets of the mesh have ended")


def test_a_page_that_is_loaded_again_gets_the_widgets_of_ranks(mesh: Kernel) -> None:
    mesh.ok("import ipywidgets\nown = ipywidgets.Image(value=b'own')")
    cell = mesh.ok(
        "%%mesh\nimport ipywidgets\npicture = ipywidgets.Image(value=b'first', width=1)\npicture.value = b'picture'\n"
        "picture.width = 2 + rank\npicture"
    )
    models = [
        view["model_id"] for each in shown(cell) if (view := each.get("application/vnd.jupyter.widget-view+json"))
    ]
    # As JupyterLab asks.
    session, shell = mesh.client.session, mesh.client.shell_channel
    opened = {"comm_id": "page", "target_name": "jupyter.widget.control", "data": {}}
    shell.send(session.msg("comm_open", opened, metadata={"version": "1.0.0"}))
    shell.send(session.msg("comm_msg", {"comm_id": "page", "data": {"method": "request_states"}}))
    while (told := mesh.client.get_iopub_msg(timeout=60))["content"].get("comm_id") != "page":
        pass
    data = told["content"]["data"]
    assert data["method"] == "update_states"
    contents = {path[0]: bytes(each) for path, each in zip(data["buffer_paths"], told["buffers"], strict=True)}
    own = mesh.ok("own.model_id").text.strip("'")
    assert [contents[each] for each in (own, *models)] == [b"own", b"picture", b"picture"]
    assert [data["states"][each]["model_name"] for each in (own, *models)] == ["ImageModel"] * 3
    assert [data["states"][each]["state"]["width"] for each in models] == ["2", "3"]


def test_a_widgets_text_is_that_of_the_cells_end_and_a_closed_one_has_none(mesh: Kernel) -> None:
    cell = mesh.ok(
        "%%mesh\nfrom tqdm.notebook import tqdm\nfor step in tqdm(range(7)):\n"
        "    for part in tqdm(range(2), leave=False):\n        pass"
    )
    assert re.fullmatch(r"\[0\]\n100%.* 7/7 .*\n\[1\]\n100%.* 7/7 .*", text(cell).strip())
    assert len(cell.displays) < 12
    mesh.ok("%%mesh\nslider = ipywidgets.IntSlider()\nslider")
    assert "IntSlider(value=5)" in text(mesh.ok("%%mesh\nslider.value = 5\nslider"))


def test_a_pause_stops_in_a_line_of_the_user(mesh: Kernel) -> None:
    mesh.ok(
        "%%mesh -a -o job\nfrom dataclasses import make_dataclass\n"
        "Part = make_dataclass('Part', [f'field{number}' for number in range(60)])\n"
        "going = True\nwhile going:\n    Part(*range(60))"
    )
    for _ in range(3):
        stopped = mesh.ok("%mesh debug -r 0 pause")
        told = stopped.stdout + stopped.stderr
        assert "In[" in told and "<string>" not in told, told
        mesh.ok("%mesh debug continue")
    # A mesh on which a cell runs is not stopped by the way.
    refused = mesh.run("%mesh down").stderr
    assert "runs on ranks 0-1 of mesh m: %mesh interrupt m ends it, --force stops the mesh all the same" in refused
    mesh.ok("%mesh interrupt")
    assert mesh.run("job.result(60)").ename == "MeshCellInterrupt"


def test_a_pause_is_cancelled_before_the_rank_has_stopped(mesh: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    mesh.ok(
        f"%%mesh -a -o job\nimport os, subprocess\nwait = ['sh', '-c', 'until test -e {go}; do sleep 0.05; done']\n"
        "subprocess.run(wait)\nrank"
    )
    told = mesh.ok("%mesh debug -r 0 pause").stdout
    assert "Rank 0 will stop at the next line of user code; unpause cancels that." in told
    assert mesh.ok("%mesh debug -r 0 unpause").stdout.strip() == "Rank 0 will not stop."
    go.touch()
    assert mesh.ok("job.result(60)").text.startswith("ValueMesh")
    assert "No rank is stopped" in mesh.ok("%mesh debug").stdout


def test_a_cell_stays_itself_while_another_runs_in_a_subshell(mesh: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    cell = mesh.send(f"{waits}get_ipython().run_cell_magic('mesh', '', 'print(rank); 1 // 0')")
    subshell = mesh.control("create_subshell_request")["subshell_id"]
    assert mesh.send("print('beside')", subshell).wait().stdout == "beside\n"
    gate.touch()
    outcome = cell.wait()
    mesh.control("delete_subshell_request", {"subshell_id": subshell})
    assert outcome.ename == "MeshCellError"
    assert re.search(r"Cell In\[\d+\], line 3", re.sub(r"\x1b\[[\d;]*m", "", outcome.traceback))
