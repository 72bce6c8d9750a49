"""What is made of the Flight Recorder's entries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.rank import hang
from monarch_kernel.debugger.rank.hang import collect
from monarch_kernel.debugger.source_locations import USER, SourceLocation
from tests.conftest import needs
from tests.debugger.hang.matrix import Runner
from tests.waiting import patience

C10D = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def entry(record: int, number: int, *, group: str = "0", backend: str = "gloo", **more: Any) -> dict[str, Any]:
    """An entry as PyTorch 2.13 writes it."""
    return {
        "record_id": record,
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"{backend}:all_gather",
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        "frames": [
            {"filename": C10D, "name": "all_gather", "line": 4280},
            {"filename": C10D, "name": "wrapper", "line": 83},
            {"filename": C10D, "name": "all_gather_object", "line": 3513},
            {"filename": "/srv/me/train.py", "name": "step", "line": 12},
            {"filename": "/srv/me/train.py", "name": "<module>", "line": 30},
        ],
        **more,
    }


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the recorder gives."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(hang, "_entries", lambda: iter(found))
    return found


def test_an_entry_has_the_function_and_line_of_user_code(entries: list[dict[str, Any]]) -> None:
    entries.append(entry(0, 1, retired=True))
    (call,) = hang.record(10)["0"]
    assert (call.op, call.name, call.number, call.done) == ("all_gather", "all_gather_object", 1, True)
    assert call.place == SourceLocation("/srv/me/train.py", 12, "step", USER)
    assert (call.shapes, call.dtypes, call.elements) == (((2, 3),), ("Float",), 6)


def test_each_backend_of_a_group_counts_for_itself(entries: list[dict[str, Any]]) -> None:
    entries += [entry(0, 1), entry(1, 2), entry(0, 1, backend="nccl", state="completed"), entry(1, 2, backend="nccl")]
    found = hang.record(10)
    assert [call.number for call in found["0"]] == [1, 2]
    assert [call.done for call in found["0 over nccl"]] == [True, False]


def test_a_group_that_was_made_anew_begins_anew(entries: list[dict[str, Any]]) -> None:
    entries += [entry(at, at + 1, retired=True) for at in range(5)] + [entry(5, 1), entry(6, 2), entry(7, 2)]
    assert [call.number for call in hang.record(10)["0"]] == [1, 2]


def test_a_group_that_was_made_anew_may_have_counted_as_far(entries: list[dict[str, Any]]) -> None:
    entries += [entry(0, 1, pg_id=0, input_sizes=[[64]]), entry(1, 1, pg_id=3, input_sizes=[[4]])]
    (call,) = hang.record(10)["0"]
    assert call.elements == 4


def test_only_the_latest_collectives_are_recorded_and_no_point_to_point(entries: list[dict[str, Any]]) -> None:
    entries += [entry(at, at + 1) for at in range(9)] + [entry(9, 9, is_p2p=True)]
    assert [call.number for call in hang.record(3)["0"]] == [7, 8, 9]


def imported() -> bool:
    """Whether reading the record has imported PyTorch's compiler."""
    return "torch._inductor" in sys.modules


def test_reading_the_record_imports_no_compiler(procs: Callable[..., Any], tmp_path: Path) -> None:
    needs("torch")
    mesh = procs(1, preload=("torch",))
    runner = mesh.spawn("runner", Runner, str(tmp_path / "store"), 1)
    runner.run.call("for _ in range(3): dist.all_reduce(torch.ones(3))", "<three>").get(patience(60))
    evidence = ask(mesh, collect, timeout=20).values[0]
    assert [(call.number, call.done) for call in evidence.history["0"]] == [(1, True), (2, True), (3, True)]
    assert evidence.state == "idle"
    assert ask(mesh, imported, timeout=20).values == {0: False}
    runner.run.call("import torch._inductor\nassert torch._inductor.config is not None", "<compiler>").get(patience(60))
