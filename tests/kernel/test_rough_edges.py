"""What is in the way in small: names of cells in errors, tracebacks of interrupts, crashes, redefined classes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.kernel.harness import PATIENCE, Bell, Kernel, Outcome
from tests.kernel.screen import text


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks."""
    kernel.ok("%mesh up --procs 2")
    kernel.ok("from monarch_kernel.actor import Actor, endpoint\nfrom monarch_kernel import get_mesh")
    return kernel


def plain(outcome: Outcome) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)


ADDER = "class Adder(Actor):\n    @endpoint\n    def add(self, x):\n        return x + {}\n"


def test_actor_errors_name_the_cell(mesh: Kernel) -> None:
    mesh.ok(ADDER.format("'text'"))
    number = int(mesh.ok("len(In) - 2").text)
    outcome = mesh.run("adders = get_mesh('m').spawn('adders', Adder)\nawait adders.add.call(1)")
    assert f"Cell In[{number}], line 4, in add" in plain(outcome)
    assert "ipykernel_" not in plain(outcome)
    printed = mesh.ok("try:\n    await adders.add.call(1)\nexcept TypeError as error:\n    print(error)").stdout
    assert f"Cell In[{number}], line 4, in add" in printed
    mesh.ok("adders.stop().get(30);")


def test_a_redefined_class_is_told_of_once_where_old_actors_are_used(mesh: Kernel) -> None:
    mesh.ok(ADDER.format(1))
    mesh.ok("adders = get_mesh('m').spawn('adders', Adder)\nawait adders.add.call(1)")
    assert mesh.ok(ADDER.format(1)).stdout == ""
    assert mesh.ok("await adders.add.call(1);").stdout == "", "the same code again is no other class"
    assert mesh.ok(ADDER.format(2)).stdout == ""
    told = mesh.ok("await adders.add.call(1);").stdout
    assert told.startswith("adders: these actors run the class Adder as it was") and told.count("\n") == 1
    assert mesh.ok("await adders.add.call(1);").stdout == ""
    assert mesh.ok("adders = get_mesh('m').spawn('adders', Adder)\nawait adders.add.call(1);").stdout == ""


def test_a_stop_shows_the_users_lines_alone(mesh: Kernel, bell: Bell) -> None:
    mesh.ok(bell.code() + "import asyncio")
    mesh.ok("%mesh push ring asyncio")
    mesh.ok(
        "class Sleeper(Actor):\n    @endpoint\n    def sleep(self):\n        ring()\n        import time\n"
        "        while True:\n            time.sleep(0.01)\nsleepers = get_mesh('m').spawn('sleepers', Sleeper)"
    )
    for code, count in (
        ("%%mesh\nasync def wait():\n    ring()\n    await asyncio.sleep(120)\nawait wait()", 2),
        ("ring()\nawait asyncio.gather(asyncio.sleep(120), asyncio.sleep(121))", 1),
        ("await sleepers.sleep.call()", 2),
        ("sleepers.sleep.call().get()", 2),
    ):
        cell = mesh.send(code)
        bell.wait(count)
        mesh.interrupt()
        outcome = cell.wait()
        # No more than the name is said when the interrupt hits IPython: between two lines of the cell, or while it
        # prepares the traceback.
        told = plain(outcome) or outcome.stderr
        assert "KeyboardInterrupt" in told, code
        assert "Cell In[" in told or told.strip() == "KeyboardInterrupt", code
        assert not re.search(r"File |asyncio/|monarch_kernel/|hidden", told), told


def test_no_interrupt_is_lost_when_a_wait_just_begins(mesh: Kernel, bell: Bell) -> None:
    """A signal that comes before the system call does not end it: about one in thirty came then."""
    mesh.ok(bell.code() + "import asyncio")
    mesh.ok("%mesh push ring asyncio")
    for _ in range(30):
        cell = mesh.send("%%mesh\nring()\nawait asyncio.sleep(120)")
        bell.wait(2)
        mesh.interrupt()
        outcome = cell.wait()
        assert "KeyboardInterrupt" in plain(outcome) + outcome.stderr  # there, if it hits IPython, too


def test_pdb_points_to_breakpoint(mesh: Kernel) -> None:
    assert "use breakpoint()" in plain(mesh.run("%%mesh -r 0\nimport pdb\npdb.set_trace()"))


def test_spawned_processes_know_the_classes_of_cells(mesh: Kernel) -> None:
    outcome = mesh.ok(
        "%%mesh -r 0\nimport multiprocessing\nspawn = multiprocessing.get_context('spawn')\n"
        "class Item:\n    def __init__(self, n):\n        self.n = n\n"
        "def made(n):\n    return Item(n + 1)\n"
        "class Worker:\n    def __call__(self, end):\n        end.send(made(1))\n"
        "ours, theirs = spawn.Pipe()\nprocess = spawn.Process(target=Worker(), args=(theirs,))\nprocess.start()\n"
        f"assert ours.poll({PATIENCE})\ngot = ours.recv()\nprocess.join()\n"
        "from multiprocessing import resource_tracker\nresource_tracker._resource_tracker._stop()\n"
        "got.n, type(got) is Item"
    )
    assert text(outcome) == "[0] (2, True)"


def test_a_crash_shows_the_users_frames(mesh: Kernel) -> None:
    mesh.ok("%mesh up own --procs 1")
    outcome = mesh.run("%%mesh\nimport ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()")
    assert "segmentation fault (SIGSEGV)" in plain(outcome)
    lines = text(outcome).splitlines()
    assert "Fatal Python error: Segmentation fault" in lines[0]
    assert [line.rpartition(" in ")[2] for line in lines if " in " in line] == ["string_at", "crash", "<module>"]
    assert len(lines) == 5
    mesh.ok("%mesh down own")
    mesh.ok("%mesh use m")


def test_a_module_that_cannot_be_preloaded_is_named(mesh: Kernel) -> None:
    outcome = mesh.run("%mesh up own --procs 1 --preload no_such_module")
    assert outcome.ename == "UsageError"
    assert "No module named 'no_such_module'" in outcome.evalue and "heal" not in outcome.evalue
    assert "own" not in mesh.ok("%mesh ls").text


def test_a_kernel_that_ends_says_so_in_the_cell(start_kernel: Callable[..., Kernel], bell: Bell) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 1")
    kernel.ok(bell.code())
    kernel.ok("%mesh push ring")
    cell = kernel.send(
        "%%mesh\nimport time\nring()\nwhile True:\n    try:\n        time.sleep(120)\n"
        "    except KeyboardInterrupt:\n        pass"
    )
    bell.wait()
    cell.until(lambda outcome: "waiting for 0" in text(outcome))
    kernel.client.shutdown()
    while text(cell.outcome) != "the kernel ended before this cell did":
        cell.read()
