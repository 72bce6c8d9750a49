"""The notebook that is a tour of the actor API."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.fixture(scope="module")
def actors(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    return run(ROOT / "notebooks" / "02_actors.ipynb")


def test_the_tour_runs(actors: Run) -> None:
    assert actors.status == 0, actors.printed


def test_calls_reach_the_slice_that_was_addressed(actors: Run) -> None:
    assert actors.text("call").endswith("replicas=0-1,gpus=0-1  15")
    assert actors.text("slice-call") == "ValueMesh({gpus: 2}):\n  gpus=0-1  115"
    assert actors.text("slice-all").splitlines()[1:] == ["  replicas=0,gpus=0-1  15", "  replicas=1,gpus=0-1  115"]
    assert actors.text("values").startswith("115 115 15 115\n")
    assert actors.text("two-ranks").splitlines()[1:] == ["  gpus=0  (0, 2)", "  gpus=1  (1, 3)"]
    assert actors.text("reshape").splitlines()[0] == "{'rank': 4}"


def test_prints_of_actors_belong_to_the_cell(actors: Run) -> None:
    assert actors.text("print").splitlines() == [
        "[0-3] hello from an actor",
        "[1]   I am at {'replicas': 0, 'gpus': 1}",
        "[3]   I am at {'replicas': 1, 'gpus': 1}",
    ]


def test_every_verb_answers(actors: Run) -> None:
    assert actors.text("call-one") == "1015"
    assert actors.error("call-one-many") == "ValueError"
    assert actors.text("stream") == "[3, 2, 1, 0]"
    assert [line.split()[-1] for line in actors.text("broadcast").splitlines()[1:]] == ["115", "1115", "215"]
    assert actors.text("accumulate") == "1660"


def test_futures_and_ports(actors: Run) -> None:
    assert "TimeoutError: no answer to worker.work" in actors.text("futures")
    assert actors.text("futures").endswith("slow: [0, 1, 2, 3] True")
    assert actors.text("gate") == "['first is through', 'second is through']"
    assert ast.literal_eval(actors.text("ports"))[3] == [0.25, 0.2, 0.17]
    assert actors.text("queue") == "('bread', 'butter')"
    assert actors.text("ring") == "[2, 3, 0, 1]"


def test_one_error_names_all_failing_ranks(actors: Run) -> None:
    assert actors.error("error") == "ActorError[ValueError]"
    text = actors.text("error")
    assert "failed on ranks 1,3 of 4 (replicas=0-1,gpus=1)" in text
    assert 'raise ValueError(f"rank {self.rank} is above {limit}")' in text
    handled = actors.text("error-handled")
    assert "the others said {0: 'fine', 2: 'fine'}" in handled
    assert "rank 3 at {'replicas': 1, 'gpus': 1}: ValueError: rank 3 is above 0" in handled


def test_mistakes_are_told_at_the_caller(actors: Run) -> None:
    kinds = [line.partition(":")[0] for line in actors.text("mistakes").splitlines()]
    wrong_call = ["TypeError", "TypeError", "TypeError"]
    assert kinds == [*wrong_call, "UnknownDimensionError", "IndexError", "AttributeError", "ValueError", "ValueError"]


def test_a_death_is_told_and_the_others_go_on(actors: Run) -> None:
    death = actors.text("death")
    assert "rank 3 of 4 of mesh 'loop' (gpus=3)" in death
    assert "killed by SIGKILL" in death
    after = actors.text("after-death")
    assert "went on training: True" in after
    assert [line.split()[-1] for line in after.splitlines()[-4:]] == ["alive", "alive", "alive", "dead"]


def test_an_owner_replaces_what_it_lost(actors: Run) -> None:
    assert "Mesh 'worker' lost rank 1 of 2 (gpus=1)" in actors.text("supervise")
    before, after = (ast.literal_eval(text) for text in re.findall(r"\[.*?\]", actors.text("supervised")))
    assert len(after) == 2
    assert not set(before) & set(after)
    assert actors.error("after-end") == "SupervisionError"
