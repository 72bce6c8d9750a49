"""Charts without scripts: what is drawn, and what stands out. Parsed, as a browser would."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from monarch_kernel.display.charts import figure, histogram, over_ranks, over_time
from monarch_kernel.display.quantities import outliers


def drawn(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(tag))


def titles(svg: str) -> list[str]:
    return [each.text or "" for each in drawn(svg, "title")]


@pytest.mark.parametrize(
    "number, text", [(0.01234567, "0.01235"), (1234.0, "1,234"), (1.5e12, "1.5e+12"), (math.nan, "nan"), (-3, "-3")]
)
def test_figures_are_short(number: float, text: str) -> None:
    assert figure(number) == text


def test_each_rank_has_a_mark_and_what_stands_out_a_ring_with_its_number() -> None:
    svg = over_ranks({0: 1.0, 1: 1.1, 2: 1.2, 3: 50.0}, [3])
    assert titles(svg) == ["rank 0: 1", "rank 1: 1.1", "rank 2: 1.2", "rank 3: 50", "rank 3: 50"]
    rings = [each for each in drawn(svg, "circle") if each.get("fill") == "none"]
    assert len(rings) == 1
    assert "50" in [each.text for each in drawn(svg, "text")]
    heights = {float(each.get("cy", 0)) for each in drawn(svg, "circle")}
    assert len(heights) == 3  # the others are not flattened: the ring is as high as the highest of them


def test_numbers_that_are_not_finite_are_crosses() -> None:
    svg = over_ranks({0: 1.0, 1: math.nan, 2: 2.0}, [1])
    assert "rank 1: nan" in titles(svg)
    assert over_ranks({0: math.nan}) == ""


def test_many_ranks_are_ranges() -> None:
    svg = over_ranks({rank: rank % 7 for rank in range(4096)})
    assert not drawn(svg, "circle")
    assert len(svg) < 20_000


def test_lines_of_few_ranks_and_the_range_of_many() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 0.5)]
    few = over_time(dict.fromkeys(range(3), points), [1])
    assert [each.get("stroke-width") for each in drawn(few, "polyline")] == ["1.2", "2.2", "1.2"]
    many = over_time(dict.fromkeys(range(100), points), [7])
    assert titles(many) == ["median", "rank 7", "rank 7: 0.5"]
    assert len(drawn(many, "polygon")) == 1
    assert over_time({}) == ""


def test_numbers_that_are_not_finite_are_gaps() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 3.0), (4.0, math.inf), (5.0, 4.0), (6.0, 5.0)]
    svg = over_time({0: points, 1: [(0.0, math.nan)]}, [0, 1])
    lines = [each.get("points", "").split() for each in drawn(svg, "polyline")]
    assert [len(set(line)) for line in lines] == [2, 1, 2]
    assert "nan" not in svg and "inf" not in svg
    assert over_time({0: [(0.0, math.nan)]}) == ""
    many = over_time(dict.fromkeys(range(20), points), [3])
    assert titles(many)[:2] == ["median", "rank 3"]
    assert "nan" not in many


def test_one_point_and_equal_numbers_are_drawn() -> None:
    assert drawn(over_time({0: [(5.0, 3.0)]}), "polyline")
    assert "NaN" not in over_ranks({0: 3.0, 1: 3.0})
    assert "nan" not in over_ranks({0: 3.0, 1: 3.0})


def test_a_histogram_has_a_bar_for_each_part_with_elements() -> None:
    svg = histogram([1, 0, 4], -1.0, 2.0)
    assert titles(svg) == ["1", "4"]
    assert histogram([], 0, 1) == ""


@pytest.mark.parametrize(
    "numbers, out",
    [
        ([1.0, 1.1, 0.9, 1.0, 9.0], [4]),
        ([1.0, 1.1, 0.9, 1.0, 1.2], []),
        ([2.0] * 7 + [2.5], [7]),
        ([2.0] * 7 + [2.0 + 1e-13], []),
        ([1.0, 1.0, 5.0, 5.0], []),
        ([1.0] * 4 + [math.nan], [4]),
        ([math.nan] * 5, []),
        ([1.0, 100.0, 1.0], []),
    ],
)
def test_what_stands_out(numbers: list[float], out: list[int]) -> None:
    assert outliers(dict(enumerate(numbers))) == out
