"""What people type every day: `%mesh up` again, an interrupt by name, values that are too large, help, comments."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Bell, Kernel, Outcome
from tests.kernel.screen import shown, text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of four ranks."""
    kernel.ok("%mesh up --procs 4")
    return kernel


def refusal(kernel: Kernel, code: str) -> str:
    """What a refused cell is told."""
    outcome = kernel.run(code)
    assert (outcome.status, outcome.ename) == ("error", "UsageError"), outcome
    return outcome.evalue


def test_run_all_again_reuses_or_replaces_the_mesh(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 2")
    mesh.ok("%%mesh\nkept = 7")
    assert "--reuse takes it" in refusal(mesh, "%mesh up own --procs 2")
    assert "reused with its variables" in mesh.ok("%mesh up own --procs 2 --reuse").stdout
    assert text(mesh.ok("%%mesh\nkept")) == "[0-1] 7"
    told = refusal(mesh, "%mesh up own --procs 1 --reuse --env A=1")
    assert "has 2 ranks (gpus=2), not gpus=1; its --env differs; --replace" in told
    assert "not both" in refusal(mesh, "%mesh up own --procs 2 --reuse --replace")
    told = mesh.ok("%mesh up own --procs 1 --replace").stdout
    assert "own: 2 ranks stopped" in told and "own: 1 rank (gpus=1)" in told
    assert text(mesh.ok("%%mesh\n'kept' in globals()")) == "[0] False"
    mesh.ok("%mesh down own")
    for option in ("--reuse", "--replace"):  # where there is none, it is started
        assert "ready in" in mesh.ok(f"%mesh up own --procs 1 {option}").stdout
        mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


def test_interrupt_by_name(mesh: Kernel, bell: Bell) -> None:
    assert mesh.ok("%mesh interrupt").stdout == "mesh m: nothing is running there\n"
    mesh.ok(bell.code())
    mesh.ok("%mesh push ring")
    first = mesh.send("%%mesh -a\nimport time\nring()\ntime.sleep(120)")
    first.wait()
    second = mesh.send("%%mesh -a -o queued\nprint('never')")
    second.wait()
    bell.wait(4)
    assert mesh.ok("%mesh interrupt m -r 0-3").stdout == "mesh m: interrupted a cell on ranks 0-3\n"
    outcome = mesh.run("queued.result(60)")
    assert outcome.ename == "MeshCellInterrupt"
    assert "never" not in text(second.outcome)
    assert text(mesh.ok("%%mesh\n'free'")) == "[0-3] 'free'"


def test_a_call_that_ends_a_cell_shows_its_answer(mesh: Kernel) -> None:
    mesh.ok("from monarch_kernel import get_mesh")
    answer = mesh.ok("get_mesh('m').interrupt()").text
    assert answer.startswith("<Future m.interrupt done>\nValueMesh({gpus: 4})")
    mesh.ok("from monarch_kernel.actor import Channel\nport, receiver = Channel.open()\nport.send('first')")
    assert "recv()" in mesh.ok("receiver.recv()").text


def test_large_values_are_not_sent_and_shown_by_their_beginning(mesh: Kernel) -> None:
    mesh.ok(
        "%%mesh -r 0\n"
        "class Grown:\n"
        "    def __reduce__(self):\n"
        "        return bytes, (b'x' * 20_000_000,)\n"
        "class Untouched:\n"
        "    def __reduce__(self):\n"
        "        raise AssertionError('a value that is too large was pickled')\n"
    )
    outcome = mesh.ok("%%mesh -r 0 -o large\n'x' * 20_000_000")
    assert text(outcome).startswith("[0] 'xxxx") and text(outcome).endswith("… (20,000,000 characters)")
    assert "20 MB); use %mesh pull" in mesh.ok("large[0]").text
    mesh.ok("%%mesh -r 0 -o large\n[bytearray(20_000_000), Untouched()];")
    assert "20 MB); use %mesh pull" in mesh.ok("large[0]").text
    mesh.ok("%%mesh -r 0 -o large\n[Grown()];")  # how large it is, only its pickle tells
    assert "at least 16 MB); use %mesh pull" in mesh.ok("large[0]").text
    mesh.ok("%%mesh -r 0 -o small\n['z' * 200_000]")
    assert mesh.ok("len(small[0][0])").text == "200000"


def test_help_and_comments(mesh: Kernel) -> None:
    assert "--no-wait" in mesh.ok("%%mesh --help").stdout
    assert "the cell is empty" in refusal(mesh, "%%mesh")
    assert text(mesh.ok("%%mesh -r 0  # only the first\n1")) == "[0] 1"
    assert text(mesh.ok("%%mesh # x\nrank < 4")) == "[0-3] True"
    assert "mesh m" in mesh.ok("%mesh status # how are they").text


def test_figures_of_ranks_in_rank_order(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    outcome: Outcome = mesh.ok(
        "%%mesh\nimport os, time\n"
        f"while not os.path.exists({gate!r} + str(rank + 1)) and rank < 3:\n    time.sleep(0.005)\n"
        "display({'text/html': f'<b>{rank}</b>', 'text/plain': ''}, raw=True)\n"
        f"open({gate!r} + str(rank), 'w').close()"
    )
    figures = [bundle["text/html"] for bundle in shown(outcome) if "<b>" in bundle.get("text/html", "")]
    assert figures == [f"<b>{rank}</b>" for rank in range(4)]


def test_status_says_which_calls_of_actors_run(mesh: Kernel, bell: Bell) -> None:
    gate = f"{bell.path}.gate"
    mesh.ok(
        "from monarch_kernel import get_mesh\nfrom monarch_kernel.actor import Actor, endpoint, this_host\n"
        f"{bell.code()}"
        "class Waiter(Actor):\n    @endpoint\n    def hold(self):\n        import os, time\n        ring()\n"
        f"        while not os.path.exists({gate!r}):\n            time.sleep(0.01)\n"
        "own = this_host().spawn_procs({'gpus': 1}, name='own')\n"
        "waiters = [each.spawn('waiters', Waiter) for each in (get_mesh('m'), own)]\n"
        "calls = [each.hold.call() for each in waiters]"
    )
    bell.wait(5)
    assert mesh.ok("%mesh status m").text.count("waiters.hold, In[") == 4
    assert "called: waiters.hold" in mesh.ok("%mesh status own").text  # no cell has run there
    open(gate, "w").close()
    mesh.ok("for call in calls:\n    call.get(30)")
    assert mesh.ok("%mesh status m").text.count("idle") == 4
    mesh.ok("own.stop().get(30)\nwaiters[0].stop().get(30)")
