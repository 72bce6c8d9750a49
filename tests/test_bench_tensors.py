"""The bench of tensors: its bars, and the order of a run."""

from __future__ import annotations

import pytest

from bench import report
from bench.tensors.__main__ import arguments, missed, plan
from bench.tensors.rows import ROWS, TensorRow


def found(**values: float) -> report.Medians:
    """Medians by ``peer__metric__ranks``."""
    parts = ((key.split("__"), value) for key, value in values.items())
    return {(peer, f"{metric}@{ranks}"): value for (peer, metric, ranks), value in parts}


@pytest.mark.parametrize(
    "row, ranks, said",
    [
        (TensorRow("t", "x", most=0.5), 1, "<= 0.5 ok"),
        (TensorRow("t", "x", most=0.1), 1, "<= 0.1 MISS"),
        (TensorRow("t", "x", least=0.1), 1, ">= 0.1 ok"),
        (TensorRow("t", "x", least=0.5), 1, ">= 0.5 MISS"),
        (TensorRow("t", "x", own=20), 1, "own < 20 MISS"),
        (TensorRow("t", "x", most=0.5), 8, "<= 0.5 ?"),
        (TensorRow("t", "x", most=0.5, bar_at=8), 1, ""),
        (TensorRow("t", "x", faster=("slow", 5)), 1, "5 x eager ok"),
        (TensorRow("t", "x", faster=("slow", 6)), 1, "6 x eager MISS"),
        (TensorRow("t", "x", beside="spmd", most=1.2), 1, "<= 1.2 MISS"),
    ],
)
def test_a_bar_knows_its_direction_its_peer_and_its_ranks(row: TensorRow, ranks: int, said: str) -> None:
    medians = found(ours__t__1=20.0, torchmonarch__t__1=100.0, spmd__t__1=10.0, ours__slow__1=100.0)
    assert row.verdict(ranks, lambda peer, metric: medians.get((peer, f"{metric}@{ranks}"))) == said


def test_a_missed_bar_is_named_with_its_ranks() -> None:
    row = next(row for row in ROWS if row.metric == "fetch_us")
    medians = found(ours__fetch_us__4=99.0, torchmonarch__fetch_us__4=100.0, ours__fetch_us__1=1.0)
    assert missed(medians) == [f"{row.label}, 4 ranks"]


def test_peers_take_turns_and_each_has_its_own_groups() -> None:
    assert plan(["engine", "dtensor", "allreduce"], [1, 8], ["ours", "torchmonarch", "spmd"]) == [
        ("engine", 1, "ours"),
        ("engine", 1, "torchmonarch"),
        ("engine", 8, "ours"),
        ("engine", 8, "torchmonarch"),
        ("dtensor", 1, "ours"),
        ("dtensor", 1, "spmd"),
        ("dtensor", 8, "ours"),
        ("dtensor", 8, "spmd"),
        ("allreduce", 4, "ours"),
        ("allreduce", 4, "spmd"),
    ]


def test_ranks_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--ranks", "two"])
    assert "--ranks two: not numbers" in capsys.readouterr().err
