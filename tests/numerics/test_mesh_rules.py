"""`%mesh watch --rules` on jobs of torchrun that were joined while they ran, and on a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import (  # fixtures
    Job,
    notebook,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    start_module_job,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    torch_loaded,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
from tests.kernel.harness import Kernel
from tests.numerics.programs import FOLDER

pytestmark = pytest.mark.torch

SCRIPT = FOLDER / "data_parallel.py"


@pytest.fixture(scope="module")
def jobs(start_module_job: Callable[..., Job], notebook: Kernel) -> dict[str, Job]:  # noqa: F811
    """A right job and one in which a parameter is not reduced, both joined."""
    found = {
        "right": start_module_job("right", script=SCRIPT),
        "wrong": start_module_job("wrong", "--bug", "1", script=SCRIPT),
    }
    for name in found:
        notebook.ok(f"%mesh join {name}")
    return found


def checked(kernel: Kernel) -> int:
    """The steps that the report says were checked."""
    said = kernel.ok("%mesh watch --rules").stdout
    assert "not compared" not in said and "process group" not in said, said
    return int(said.split(" step")[0].split()[-1])


def test_a_running_job_that_is_right_breaks_no_rule(jobs: dict[str, Job], notebook: Kernel) -> None:  # noqa: F811
    said = notebook.ok("%mesh use right\n%mesh watch --rules --every 3").stdout
    assert "check replicas, updates, data, random, grads, lr, buffers, memory on one step in 3" in said
    wait_until(lambda: checked(notebook) > 20, "it checks", 60)
    said = notebook.ok("%mesh watch --off").stdout
    assert "Rules are no longer checked." in said and "no rule broken." in said, said
    assert "No rules were checked." in notebook.ok("%mesh watch --rules --off").stdout


def test_a_running_job_names_rank_parameter_and_line(jobs: dict[str, Job], notebook: Kernel) -> None:  # noqa: F811
    notebook.ok("%mesh use wrong\n%mesh watch --rules [replicas,grads] --every 2")
    wait_until(lambda: "1 broken" in notebook.ok("%mesh watch --rules").stdout, "it is found", 60)
    said = notebook.ok(
        "from monarch_kernel.kernel.magics.value_magics import ValueMagics\n"
        "ValueMagics._rules._count = 0\n%mesh watch --off"
    ).stdout  # shown again
    assert "Rule replicas broken at step" in said and ", rank 1 (data_parallel.py:" in said, said
    assert "values of temperature differ from those of rank 0; DistributedDataParallel replicates it" in said


def test_a_broken_rule_stops_all_ranks_in_the_debugger(jobs: dict[str, Job], notebook: Kernel) -> None:  # noqa: F811
    notebook.ok("%mesh use wrong\n%mesh watch --rules replicas --every 2 --stop")
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    assert "data_parallel.py" in shown(notebook.ok("%mesh debug list"))
    notebook.ok("%mesh watch --off\n%mesh debug continue")


@pytest.mark.parametrize(
    "line, error",
    [
        ("%mesh watch --rules nothing", "no rule nothing; there are replicas, updates, data"),
        ("%mesh watch --rules --every 0", "--every takes a number of steps from 1 on, not 0"),
        ("%mesh watch --rules --placements missing", "no variable missing has placements"),
    ],
)
def test_wrong_options_say_what_is_possible(jobs: dict[str, Job], notebook: Kernel, line: str, error: str) -> None:  # noqa: F811
    notebook.ok("%mesh use right")
    assert error in notebook.run(line).evalue
