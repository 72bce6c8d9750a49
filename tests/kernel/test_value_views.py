"""Values of ranks as HTML: charts of numbers, summaries of arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from monarch_kernel.actor import Extent, ValueMesh
from monarch_kernel.kernel.output.formatters import MOST_ELEMENTS, summary_of, value_mesh_html, value_mesh_table


def html_of(held: list[Any]) -> str:
    values = ValueMesh(Extent(("gpus",), (len(held),)), held)
    return value_mesh_html(values, value_mesh_table(values))


def test_numbers_have_a_chart_and_those_that_stand_out_are_named() -> None:
    html = html_of([0.5, 0.51, 0.49, 0.5, 7.25])
    assert "<svg" in html
    assert "rank 4 (gpus=4): 7.25 stands out" in html
    assert "<td" in html


@pytest.mark.parametrize("held", [["a"] * 5, [True] * 5, [1.0, 2.0], [3.0] * 6, [1.0, None, 2.0, 3.0], [10**400] * 5])
def test_what_is_no_chart_is_a_table(held: list[Any]) -> None:
    html = html_of(held)
    assert "<svg" not in html
    assert "<table" in html


def test_a_long_table_opens_below_the_chart() -> None:
    html = html_of([rank * 1.0 for rank in range(64)])
    assert "<summary" in html
    assert "64 rows" in html


def test_scalars_of_torch_are_numbers() -> None:
    assert "<svg" in html_of([torch.tensor(rank / 7) for rank in range(8)])


def test_arrays_are_summaries_with_histograms() -> None:
    held = [torch.ones(4, 3) * rank for rank in range(3)]
    held[1][0, 0] = math.nan
    html = html_of(held)
    assert html.count("<svg") == 3
    assert "float32 [4, 3]" in html
    assert "8.33%" in html


def test_the_summary_of_an_array() -> None:
    found = summary_of(numpy.array([[1.0, 2.0], [3.0, math.inf]], "float32"))
    assert found is not None
    assert (found.kind, found.low, found.mean, found.high, found.bad) == ("float32 [2, 2]", 1.0, 2.0, 3.0, 0.25)
    assert sum(found.counts) == 3


@pytest.mark.parametrize(
    "value, kind",
    [
        (torch.zeros(2, 2, dtype=torch.bfloat16), "bfloat16 [2, 2]"),
        (torch.zeros(3, device="meta"), "float32 [3]"),
        (torch.zeros(0), "float32 [0]"),
        (numpy.array(["a", "b"]), "<U1 [2]"),
        (torch.tensor([True, False]), "bool [2]"),
    ],
)
def test_arrays_of_any_kind_have_a_summary(value: Any, kind: str) -> None:
    found = summary_of(value)
    assert found is not None
    assert found.kind == kind


def test_of_a_large_array_only_a_sample_is_read() -> None:
    found = summary_of(numpy.arange(4 * MOST_ELEMENTS))
    assert found is not None
    assert found.sampled
    assert sum(found.counts) <= MOST_ELEMENTS + 1


def test_what_is_no_array_has_none() -> None:
    assert summary_of("text") is None
    assert summary_of(torch.tensor(1.0)) is None


def test_data_frames_are_tables_with_their_ranks() -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame({"loss": [rank // 2]}) for rank in range(4)]
    html = html_of(frames)
    assert html.count("<table") == 2 and html.index("[0-1]") < html.index("[2-3]")
    assert "<th>loss</th>" in html
