"""The programs with seeded errors: right ones train as one process does and break no rule, wrong ones break theirs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # a file with this line is forked from a process that has loaded it

from bench import silent
from monarch_kernel.numerics.rules import rules
from tests.numerics.programs import BUGS, PROGRAMS, common
from tests.numerics.ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

BY_RULES = [number for number, bug in BUGS.items() if bug.found_by != "compare"]
BY_COMPARISON = [number for number, bug in BUGS.items() if bug.found_by == "compare"]


def train(rank: int, program: str, bug: str, steps: int, every: int) -> dict[str, Any]:
    """Train in this process with all rules; returns the losses and the broken rules."""
    found: list[Any] = []
    script = importlib.import_module(f"tests.numerics.programs.{program}")
    model, optimizer = common.begin(script.build_model, script.build_optimizer, bug)
    with rules(every=every, placements=getattr(script, "PLACEMENTS", None), report=found.append) as check:
        losses = [float(script.step(model, optimizer, number, bug)) for number in range(steps)]
    broken = [(each.rule, each.names, each.ranks, each.line, each.sure, str(each)) for each in found]
    return {"losses": losses, "broken": broken, "summary": check.summary}


def trained(program: str, bug: str, folder: Path, steps: int = 6, every: int = 1) -> list[dict[str, Any]]:
    """Train on the program's ranks."""
    importlib.import_module(f"tests.numerics.programs.{program}")  # once, before the ranks are forked
    return run_ranks(train, PROGRAMS[program], folder, program, bug, steps, every)


def reference(program: str, variant: str, steps: int = 6) -> list[float]:
    """Return the losses of one process that trains the whole model on whole batches."""
    script = importlib.import_module(f"tests.numerics.programs.{program}")
    model, optimizer = common.begin(script.build_model, script.build_optimizer, variant)
    return [float(script.step(model, optimizer, number, variant)) for number in range(steps)]


@pytest.mark.parametrize("program, variant", [*((each, "") for each in PROGRAMS), ("sharded_optimizer", "bf16")])
def test_a_right_program_trains_as_one_process_does_and_breaks_no_rule(
    program: str, variant: str, tmp_path: Path
) -> None:
    ranks = trained(program, variant, tmp_path, steps=12)
    parts = [each["losses"] for each in ranks]
    # Ranks of data have parts of the loss, those of tensors all of it, and of a pipeline only the last one has it.
    whole = [max(step) if 0.0 in step else sum(step) / len(step) for step in zip(*parts)]
    rounding = 2e-2 if program == "precision" or variant == "bf16" else 1e-4
    assert whole == pytest.approx(reference(program, variant, 12), rel=rounding)
    for each in ranks:
        assert each["broken"] == []
        assert "no rule broken" in each["summary"] and "not compared" not in each["summary"], each["summary"]


@pytest.mark.parametrize("number", BY_RULES)
def test_a_seeded_error_breaks_its_rule_at_the_right_parameter(number: str, tmp_path: Path) -> None:
    bug = BUGS[number]
    broken = trained(bug.program, number, tmp_path)[0]["broken"]
    found = [each for each in broken if each[0] == bug.found_by]
    assert found, f"rule {bug.found_by} is not broken, but {broken}"
    assert any(bug.where in name for each in found for name in each[1] or ("",)), found
    assert all(f"{bug.program}.py:" in each[3] for each in broken), broken
    assert {0, 1} >= set(found[0][2]) and found[0][2]


@pytest.mark.parametrize("number", BY_COMPARISON)
def test_an_error_that_only_a_reference_shows_breaks_no_rule_for_certain(number: str, tmp_path: Path) -> None:
    ranks = trained(BUGS[number].program, number, tmp_path)
    assert [each for each in ranks[0]["broken"] if each[4]] == []
    # It does change what is learned.
    (tmp_path / "right").mkdir()
    right = trained(BUGS[number].program, "", tmp_path / "right")
    assert [each["losses"] for each in ranks] != [each["losses"] for each in right]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Path]]]:
    """The folder of recordings, and those of one process that are there already, by program."""
    return tmp_path_factory.mktemp("recordings"), {}


@pytest.mark.parametrize("number", [number for number, bug in BUGS.items() if bug.phase is not None])
def test_a_comparison_with_one_process_names_the_first_wrong_tensor(
    number: str, recordings: tuple[Path, dict[str, list[Path]]]
) -> None:
    named, is_right = silent.compare_with_reference(number, *recordings)
    assert is_right, f"{named}, not {BUGS[number].phase} {BUGS[number].compared or BUGS[number].where}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_right_program_equals_one_process(program: str) -> None:
    assert silent.false_alarms(1, [program]) == {program: []}


def test_every_bug_of_the_list_is_in_a_program() -> None:
    assert {str(number) for number in range(1, 29)} <= BUGS.keys()
    assert {bug.program for bug in BUGS.values()} == PROGRAMS.keys()
