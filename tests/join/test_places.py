"""Where cells run in a joined job, and that ranks stop and run cells at the same step."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import TRAIN, Job
from tests.kernel.harness import Kernel

LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1


@pytest.fixture(scope="module")
def job(start_module_job: Callable[..., Job], notebook: Kernel) -> Job:
    """A job that trains, and that the notebook has joined."""
    job = start_module_job("places")
    notebook.ok("%mesh join places")
    wait_until(lambda: notebook.run("%%mesh\nlen(losses)").status == "ok", "it trains", 30)
    return job


def test_a_cell_at_a_step_runs_on_the_main_thread_after_the_same_step_of_all_ranks(job: Job, notebook: Kernel) -> None:
    notebook.ok(
        "%%mesh --at-step -o at\nimport threading\ntotal = torch.tensor([float(dist.get_rank())])\n"
        "dist.all_reduce(total)\nprint('at a step')\n"
        "threading.current_thread() is threading.main_thread(), len(losses), total.item()"
    )
    main, steps, totals = eval(notebook.ok("tuple(zip(*at.values()))").text)
    assert all(main) and len(set(steps)) == 1 and totals == (1.0, 1.0)
    assert "at a step" not in job.log
    # What it changed stays, and the program's own output is not the cell's.
    notebook.ok("%%mesh --at-step\noptimizer.param_groups[0]['lr'] = 0.25")
    assert "0.25" in shown(notebook.ok("%%mesh\noptimizer.param_groups[0]['lr']"))


def test_a_cell_at_a_collective_runs_on_the_main_thread_before_the_same_one_of_all_ranks(
    job: Job, notebook: Kernel
) -> None:
    for _ in range(3):
        notebook.ok(
            "%%mesh --at-collective -o at\nimport threading\ntotal = torch.tensor([float(dist.get_rank())])\n"
            "issued = dist.group.WORLD._get_sequence_number_for_group()\ndist.all_reduce(total)\n"
            "threading.current_thread() is threading.main_thread(), issued, len(losses), total.item()"
        )
        main, issued, steps, totals = eval(notebook.ok("tuple(zip(*at.values()))").text)
        assert all(main) and len(set(issued)) == len(set(steps)) == 1 and totals == (1.0, 1.0)
    out = notebook.run("%%mesh --at-collective\nraise SystemExit('no')")
    assert out.ename == "MeshCellError" and "SystemExit" in out.evalue
    assert "not both" in notebook.run("%%mesh --at-collective --at-step\n1").evalue
    # Breakpoints that are set and cleared meanwhile leave a cell that waits alone, and the other way round.
    notebook.ok(f"%mesh break {TRAIN}:{LINE}")
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    notebook.ok("%%mesh --at-collective --no-wait\nat_last = True")
    notebook.ok("%mesh clear\n%mesh debug continue")
    wait_until(lambda: notebook.run("%%mesh\nat_last").status == "ok", "it has run", 30)
    assert job.process.poll() is None


def test_an_error_at_a_step_is_the_cell_s_and_not_the_program_s(job: Job, notebook: Kernel) -> None:
    out = notebook.run("%%mesh --at-step\nraise SystemExit('no')")
    assert out.ename == "MeshCellError" and "SystemExit" in out.evalue
    assert "True" in shown(notebook.ok("%%mesh\nlen(losses) > 0")) and job.process.poll() is None


def test_an_interrupt_ends_the_cell_and_never_the_program(job: Job, notebook: Kernel) -> None:
    for place in ("--at-step", "--at-collective", ""):
        cell = notebook.send(f"%%mesh {place}\nprint('begun', flush=True)\nwhile True: pass")
        cell.until(lambda out: "begun" in shown(out))
        notebook.interrupt()
        assert "Interrupt" in cell.wait().ename
    before = int(re.findall(r"\d+", shown(notebook.ok("%%mesh -r 0\nlen(losses)")))[-1])
    wait_until(
        lambda: int(re.findall(r"\d+", shown(notebook.ok("%%mesh -r 0\nlen(losses)")))[-1]) > before, "it goes on", 20
    )


def test_breakpoints_begin_at_the_same_step_on_all_ranks(job: Job, notebook: Kernel) -> None:
    for _ in range(5):
        notebook.ok(f"%mesh break {TRAIN}:{LINE}")
        until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
        numbers = re.findall(r"^\[?[^\n]*?(\d+)$", shown(notebook.ok("%mesh debug print number")), re.M)
        assert len(set(numbers)) == 1
        out = notebook.ok("%%mesh --frame 0 -o seen\nnumber, float(loss.detach()) >= 0")
        assert not out.stderr and len(set(eval(notebook.ok("tuple(seen.values())").text))) == 1
        notebook.ok("%mesh clear\n%mesh debug continue")


def test_a_cell_in_a_module_has_its_names(job: Job, notebook: Kernel) -> None:
    assert "torch.float32" in shown(notebook.ok("%%mesh --in torch\nfloat32"))
    assert "'nowhere'" in notebook.run("%%mesh --in nowhere\n1").evalue
    assert "not stopped" in notebook.run("%%mesh --frame 0\n1").evalue


def test_later_collectives_wait_longer(job: Job, notebook: Kernel) -> None:
    said = shown(notebook.ok("%mesh debug --extend-timeout 7200"))
    assert "1 process group on ranks 0-1" in said and "2 h" in said
    limit = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    assert shown(notebook.ok(f"%%mesh\n{limit}")).count("7200") >= 1


@pytest.mark.parametrize("command", ["kill -r 1", "heal", "restart", "sync"])
def test_what_is_the_job_s_own_is_left_to_it(job: Job, notebook: Kernel, command: str) -> None:
    out = notebook.run(f"%mesh {command}")
    assert out.ename == "UsageError" and "places" in out.evalue, out
    assert len(job.pids()) == 2
