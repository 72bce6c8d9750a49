"""Ranks' output in the kernel: in the right cell, live, in order, folded, bounded, and never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.harness import Bell, Kernel
from tests.kernel.screen import ever, shown, text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of four ranks."""
    kernel.ok("%mesh up --procs 4")
    return kernel


def test_output_of_a_thread_goes_to_its_cell_while_another_runs(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    cell = mesh.send(
        "%%mesh -r 0\nimport os, threading\ngo = threading.Event()\n"
        "def late():\n    go.wait(60)\n    print('late')\n    ring()\n"
        "threading.Thread(target=late).start()\nprint('early')"
    )
    cell.wait()
    assert text(cell.outcome) == "[0] early"
    other = mesh.send("%%mesh -r 0\ngo.set()\nprint('other')\nring()")
    bell.wait(2)
    seen = {cell.msg_id: cell, other.msg_id: other}
    while "late" not in text(cell.outcome) or "other" not in text(other.outcome):
        message = mesh.client.get_iopub_msg(timeout=60)
        owner = seen.get(message["parent_header"].get("msg_id"))
        if owner is not None:
            owner.outcome.messages.append(message)
    assert text(cell.outcome) == "[0] early\n    late"
    assert text(other.outcome) == "[0] other"


def test_output_is_live(mesh: Kernel, bell: Bell) -> None:
    mesh.ok("import os\n" + bell.code("hold"))
    gate = f"{bell.path}.gate"
    cell = mesh.send(
        "%%mesh\nimport os, time\nprint('begun')\n"
        f"while not os.path.exists({gate!r}):\n    time.sleep(0.01)\nprint('ended')"
    )
    while "[0-3] begun" not in text(cell.outcome):
        cell.read()
    assert "ended" not in text(cell.outcome)
    open(gate, "w").close()
    assert text(cell.wait()) == "[0-3] begun\n      ended"


def test_c_level_writes_and_subprocesses_are_captured(mesh: Kernel) -> None:
    outcome = mesh.ok(
        "%%mesh -r 1\nimport os, subprocess, sys\nprint('python')\nos.write(1, b'fd one\\n')\n"
        "subprocess.run(['echo', 'child'])\nos.write(2, b'fd two\\n')\nprint('err', file=sys.stderr);"
    )
    lines = set(text(outcome).replace("[1]", "").split("\n"))
    assert {"python", "fd one", "child", "fd two", "err"} <= {line.strip() for line in lines}


def test_different_output_is_labelled_and_common_output_folds(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh\nprint('start')\nprint('loss', rank)\nprint('end')")
    assert text(outcome) == "[0-3] start\n[0]   loss 0\n[1]   loss 1\n[2]   loss 2\n[3]   loss 3\n[0-3] end"


def test_html_has_labels_that_say_where(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh\nprint('<a> & b')")
    html = shown(outcome)[0]["text/html"]
    assert "&lt;a&gt; &amp; b" in html
    assert "[0-3]" in html
    assert "gpus=0-3" in html


def test_output_is_bounded_and_the_rest_is_in_the_logs(mesh: Kernel, tmp_path: Path) -> None:
    outcome = mesh.ok("%%mesh\nfor i in range(3000):\n    print('line', i)")
    told = text(outcome)
    assert "line 1999" in told
    assert "line 2500" not in told
    assert "1,000 lines" in told
    assert told.endswith("line 2999")
    assert "%mesh logs -r 0,1,2,3" in told
    logs = mesh.ok("%mesh logs -r 2").stdout
    assert "--all shows more" in logs and "[2] line 2800\n" in logs
    assert "line 2799" not in logs and "[3]" not in logs
    assert mesh.ok("%mesh logs -r 2 -n 1").stdout == "[2] line 2999\n"
    assert "[2] line 0\n" in mesh.ok("%mesh logs -r 2 --all").stdout
    file = tmp_path / "log"
    assert f"the output of rank 2 (29 kB) is in {file}" in mesh.ok(f"%mesh logs -r 2 --to {file}").stdout
    assert [*map("line {}".format, range(3000))] == file.read_text().splitlines()[-3000:]
    assert "cannot be written" in mesh.run(f"%mesh logs --to {tmp_path}").evalue


def test_what_was_cut_stands_among_the_outputs_that_jupyterlab_shows(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh -r 0-2\nfor i in range(1900):\n    print(f'line {i} of {rank}')")
    bundles = [bundle for bundle in shown(outcome) if bundle.get("text/plain")]
    assert len(bundles) <= 50
    assert "not shown" in bundles[-1]["text/plain"]
    assert "the last lines were:" in bundles[-1]["text/plain"]
    assert all(f"line 1899 of {rank}" in text(outcome) for rank in range(3))
    # A line of five megabytes is one line. The notebook's server is not sent more than it passes on.
    outcome = mesh.ok("%%mesh -r 0\nprint('x' * 5_000_000 + 'end')")
    assert "… 1 line (4.0 MB) not shown" in text(outcome) and text(outcome).endswith("end")
    said = mesh.ok("%mesh logs --all").stdout
    assert len(said) < 600_000 and said.count("xxxend\n") == 1


def test_nothing_is_lost_on_error(mesh: Kernel) -> None:
    outcome = mesh.run("%%mesh\nfor i in range(500):\n    print(i)\nprint('last', end='')\n1 / 0")
    assert outcome.status == "error"
    assert [line.split()[-1] for line in text(outcome).split("\n")] == [*map(str, range(500)), "last"]


def test_raw_lines(mesh: Kernel) -> None:
    outcome = mesh.ok("%%mesh --raw\nprint('a')\nprint('b', rank)")
    assert sorted(outcome.stdout.split("\n")[:-1]) == sorted(
        line for rank in range(4) for line in (f"[{rank}] a", f"[{rank}] b {rank}")
    )
    for rank in range(4):
        own = [line for line in outcome.stdout.split("\n") if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] a", f"[{rank}] b {rank}"]
    assert outcome.displays == []


def test_a_long_cell_says_who_is_done_and_where_the_others_are(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    cell = mesh.send(
        "%%mesh\nimport os, time\n\ndef step():\n"
        f"    while not os.path.exists({gate!r}):\n        time.sleep(0.01)\n\nif rank in (1, 3):\n    step()"
    )
    while "In[" not in ever(cell.outcome):
        cell.read()
    assert "2 of 4 ranks done · waiting for 1, 3" in ever(cell.outcome)
    assert " in step" in ever(cell.outcome)
    open(gate, "w").close()
    assert text(cell.wait()) == ""


def test_progress_bars_stay_one_line(mesh: Kernel) -> None:
    outcome = mesh.ok(
        "%%mesh -r 0\nimport sys\nfor i in range(101):\n    print(f'\\r{i:3d}%', end='', file=sys.stderr)\n"
        "print(file=sys.stderr)"
    )
    assert text(outcome) == "[0] 100%"


def test_clear_output_and_updates(mesh: Kernel) -> None:
    outcome = mesh.ok(
        "%%mesh\nfrom IPython.display import clear_output, display, HTML\nprint('gone')\nclear_output()\n"
        "handle = display(HTML('<i>one</i>'), display_id=True)\nhandle.update(HTML('<i>two</i>'))\nprint('stays')"
    )
    assert "gone" not in text(outcome)
    assert "[0-3] stays" in text(outcome)
    assert [bundle["text/html"] for bundle in shown(outcome) if "<i>" in bundle.get("text/html", "")] == ["<i>two</i>"]


TALKER = """
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel import get_mesh

class Talker(Actor):
    def __init__(self):
        print('born')

    @endpoint
    def talk(self, text, ring=None):
        print(text)
        if ring:
            ring()

    @endpoint
    def pass_on(self, other, text):
        other.talk.call(text).get()
"""


def test_actors_that_an_ordinary_cell_calls_print_there(mesh: Kernel) -> None:
    mesh.ok(TALKER)
    outcome = mesh.ok("talkers = get_mesh('m').spawn('talkers', Talker)\nawait talkers;")
    assert text(outcome) == "[0-3] born"
    assert text(mesh.ok("talkers.talk.call('spoken').get();")) == "[0-3] spoken"
    assert text(mesh.ok("await talkers.talk.call('awaited');")) == "[0-3] awaited"
    assert text(mesh.ok("talkers.slice(gpus=0).pass_on.call_one(talkers.slice(gpus=2), 'passed on').get()")) == (
        "[2] passed on"
    )
    mesh.ok("talkers.stop().get(30);")


def test_what_an_actor_prints_late_goes_to_the_cell_that_asked(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    wait = f"while not os.path.exists({gate!r}): time.sleep(0.01)\n        print(text)"
    mesh.ok("import os, time\n" + TALKER.replace("print(text)", wait))
    mesh.ok(bell.code())
    mesh.ok("slow = get_mesh('m').slice(gpus=1).spawn('slow', Talker)\nslow.initialized.get(30)")
    cell = mesh.send("slow.talk.broadcast('late', ring)")
    cell.wait()
    other = mesh.send(f"open({gate!r}, 'w').close(); slow.talk.call('next').get();")
    seen = {cell.msg_id: cell, other.msg_id: other}
    while "late" not in text(cell.outcome) or "next" not in text(other.outcome):
        message = mesh.client.get_iopub_msg(timeout=60)
        owner = seen.get(message["parent_header"].get("msg_id"))
        if owner is not None:
            owner.outcome.messages.append(message)
    assert text(cell.outcome) == "[1] late"
    assert text(other.outcome) == "[1] next"
    bell.wait()
    mesh.ok("slow.stop().get(30);")


def test_capture_keeps_what_the_cell_shows(mesh: Kernel) -> None:
    outcome = mesh.ok("%%capture kept\n%%mesh\nprint('captured')")
    assert outcome.displays == []
    assert "captured" in mesh.ok("kept.outputs[0].data['text/plain']").text
