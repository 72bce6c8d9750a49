"""Errors of calls and cells as values: a line for each kind of failure, which opens to its traceback."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel, with a mesh `m` of 4 ranks in use and actors that fail."""
    kernel.ok(
        "%mesh up --procs 4\n"
        "from monarch_kernel import get_mesh\n"
        "from monarch_kernel.actor import Actor, context, endpoint\n"
        "class Fails(Actor):\n"
        "    @endpoint\n"
        "    def step(self):\n"
        "        rank = context().actor_instance.rank.rank\n"
        "        if rank == 2:\n"
        "            raise KeyError('<here>')\n"
        "        if rank:\n"
        "            raise ValueError(f'bad {rank}')\n"
        "        return 7\n"
        "fails = get_mesh('m').spawn('fails', Fails)"
    )
    return kernel


def html_of(mesh: Kernel, code: str) -> str:
    result = mesh.ok(code).result
    assert result is not None
    return str(result["text/html"])


def test_the_error_of_a_call_has_its_failures_in_groups(mesh: Kernel) -> None:
    html = html_of(mesh, "fails.step.call().exception()")
    assert html.count("<details") == 2
    assert html.index("[2]</span> KeyError") < html.index("[1,3]</span> ValueError: bad 1")
    assert "&lt;here&gt;" in html
    assert ": bad 3</pre>" in html  # all messages stand inside
    assert "In[" in html
    assert "rank 0 did not fail" in html


def test_the_error_of_a_cell(mesh: Kernel) -> None:
    mesh.ok(
        "try:\n"
        "    get_ipython().run_cell_magic('mesh', '', 'if rank: 1 / 0')\n"
        "except Exception as error:\n"
        "    failed = error"
    )
    html = html_of(mesh, "failed")
    assert "Failed on ranks 1-3" in html
    assert html.count("<details open") == 1
    assert "ZeroDivisionError" in html


def test_the_error_of_a_rank_that_died(mesh: Kernel) -> None:
    mesh.ok(
        "%mesh up own --procs 2\n"
        "import os, signal\n"
        "class Dies(Actor):\n"
        "    @endpoint\n"
        "    def go(self): os.kill(os.getpid(), signal.SIGKILL)\n"
        "dies = get_mesh('own').spawn('dies', Dies)"
    )
    html = html_of(mesh, "dies.slice(gpus=1).go.call().exception()")
    mesh.ok("%mesh down own\n%mesh use m")
    assert "SIGKILL" in html
    assert "<details" not in html
