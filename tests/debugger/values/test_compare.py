"""Readings compared: groups, references, parts that differ, and which blocks are looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.values import (
    MOST_COMPARED,
    MOST_SHOWN,
    Diff,
    Difference,
    ValueFailure,
    chosen_blocks,
    differences,
    differing_blocks,
    families,
    group,
)
from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading, Stats, root_digest
from monarch_kernel.debugger.rank.values.reduce import plain_leaf


def reading(value: float | str, part: str = "", stats: Stats | None = None) -> Reading:
    leaf = plain_leaf(value)
    return Reading(root_digest([leaf]), leaf.text, 1, number=leaf.number, part=part, stats=stats)


def ranks_of(readings: dict[int, Reading]) -> list[tuple[int, ...]]:
    return [each.ranks for each in group(readings)]


def tensor(path: str, content: bytes, facts: str = "float32 [4]", stats: Stats | None = None) -> Leaf:
    return Leaf(path, "tensor", facts, facts, content, 4, (4,), None, stats)


def test_the_smallest_group_comes_first() -> None:
    assert ranks_of({0: reading(1.0), 1: reading(1.0), 2: reading(2.0), 3: reading(1.0)}) == [(2,), (0, 1, 3)]


def test_where_all_differ_the_outlier_comes_first_and_the_others_by_rank() -> None:
    losses = dict(enumerate(map(reading, (0.51, 0.52, 0.5, 7.0, 0.53, 0.49))))
    assert ranks_of(losses) == [(3,), (0,), (1,), (2,), (4,), (5,)]
    assert ranks_of(dict(enumerate(map(reading, (0, 1, 2, 3))))) == [(0,), (1,), (2,), (3,)]


def test_what_is_no_number_comes_first() -> None:
    values = (0.5, 0.6, float("nan"), 0.7)
    assert ranks_of(dict(enumerate(map(reading, values))))[0] == (2,)
    assert ranks_of({0: reading("a"), 1: reading("b", stats=Stats(nans=3))})[0] == (1,)


def test_what_the_others_are_compared_with() -> None:
    (family,) = families(group({0: reading(1), 1: reading(2), 2: reading(1), 3: reading(2)}))
    assert [each.ranks for each in family] == [(1, 3), (0, 2)]  # of groups of one size, that of the lowest rank
    (family,) = families(group({0: reading("x", stats=Stats(nans=1)), 1: reading("y")}))
    assert family[-1].ranks == (1,)
    (family,) = families(group({rank: reading(rank) for rank in range(100)}))
    assert len(family) == MOST_COMPARED
    assert family[-1].ranks == (0,)


def test_shards_are_compared_only_with_the_same_shard_elsewhere() -> None:
    readings = {rank: reading(rank if rank == 3 else rank // 2, part=f"part {rank % 2}") for rank in range(4)}
    found = families(group(readings))
    assert sorted(tuple(each.ranks for each in family) for family in found) == [((2,), (0,)), ((3,), (1,))]
    assert families(group({0: reading(1, part="a"), 1: reading(2, part="b")})) == []


def rows(leaves: dict[int, list[Leaf]], values: dict[int, Reading]) -> list[Difference]:
    (family,) = families(group(values))
    return differences(family, leaves)


def test_parts_that_differ_are_found_by_path() -> None:
    whole = [tensor("a", b"1"), tensor("b", b"2"), tensor("c", b"3")]
    one = [tensor("a", b"1"), tensor("b", b"x"), tensor("d", b"4")]
    found = rows({0: whole, 3: one}, {0: reading(1), 1: reading(1), 2: reading(1), 3: reading(2)})
    assert [(each.path, each.ranks, each.against) for each in found] == [
        ("b", (3,), (0, 1, 2)),
        ("c", (3,), (0, 1, 2)),
        ("d", (3,), (0, 1, 2)),
    ]
    assert found[0].has_elements
    assert found[1].ours is None
    assert found[2].theirs is None


def test_groups_that_agree_on_a_part_share_a_row() -> None:
    leaves = {
        0: [tensor("a", b"1"), tensor("b", b"1")],
        3: [tensor("a", b"2"), tensor("b", b"2")],
        4: [tensor("a", b"1"), tensor("b", b"2")],
    }
    values = {rank: reading(rank if rank > 2 else 0) for rank in range(5)}
    found = rows(leaves, values)
    assert [(each.path, each.ranks, each.against) for each in found] == [
        ("a", (3,), (0, 1, 2, 4)),
        ("b", (3, 4), (0, 1, 2)),
    ]


def test_elements_are_compared_only_where_type_and_shape_agree() -> None:
    def row(ours: Leaf, theirs: Leaf) -> Difference:
        return Difference("w", (1,), (0,), ours, theirs)

    assert row(tensor("w", b"1"), tensor("w", b"2")).has_elements
    assert row(tensor("w", b"1", "float32 [4], needs grad"), tensor("w", b"2")).has_elements
    assert not row(tensor("w", b"1", "float64 [4]"), tensor("w", b"2")).has_elements
    assert not row(tensor("w", b"1", "float32 [4], needs grad"), tensor("w", b"1")).has_elements


def test_differing_blocks() -> None:
    ours = b"a" * 16 + b"b" * 16 + b"c" * 16
    theirs = b"a" * 16 + b"B" * 16 + b"C" * 16
    assert differing_blocks(ours, theirs) == [1, 2]


def test_every_array_gets_its_first_block_and_the_rest_is_spread() -> None:
    assert chosen_blocks([[3, 4, 5], [7]], [10, 10], budget=100) == [[3, 4, 5], [7]]
    assert chosen_blocks([list(range(100)), [7]], [10, 10], budget=40) == [[0, 50, 99], [7]]
    assert chosen_blocks([[1], [2], [3]], [10, 10, 10], budget=20) == [[1], [2], []]


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 300), max_size=40), st.integers(1, 50)), max_size=12),
    st.integers(0, 2000),
)
def test_a_budget_is_kept(arrays: list[tuple[set[int], int]], budget: int) -> None:
    differing = [sorted(blocks) for blocks, _ in arrays]
    sizes = [size for _, size in arrays]
    chosen = chosen_blocks(differing, sizes, budget)
    assert sum(len(blocks) * size for blocks, size in zip(chosen, sizes, strict=True)) <= budget
    for blocks, all_blocks in zip(chosen, differing, strict=True):
        assert set(blocks) <= set(all_blocks)
        assert len(set(blocks)) == len(blocks)
        assert blocks[:1] == all_blocks[:1] or not blocks


def diff_of(values: dict[int, Reading], found: tuple[Difference, ...] = (), **more: object) -> Diff:
    size = max(values, default=0) + 1
    options: dict[str, object] = {"asked": tuple(range(size)), "where": "in the ranks' namespaces", **more}
    return Diff("x", "m", Extent(("gpus",), (size,)), groups=tuple(group(values)), differences=found, **options)  # type: ignore[arg-type]


def test_the_same_everywhere_is_one_line() -> None:
    shown = diff_of({rank: reading(0.5) for rank in range(4)})
    assert repr(shown) == "x: the same on all 4 ranks of mesh m, in the ranks' namespaces (0.00 s)\n[0-3]  0.5"
    assert shown.same


def test_distinct_values_have_a_line_each() -> None:
    values = {0: reading(0.5), 1: reading(0.5), 2: reading(0.7)}
    failed = (
        ValueFailure("error", "NameError: name 'x' is not defined", (3, 4)),
        ValueFailure("late", "no answer within 1 s", (5,)),
    )
    shown = diff_of(values, failed=failed, asked=tuple(range(6)))
    assert repr(shown).split("\n") == [
        "x: 2 distinct values on 3 ranks of mesh m, in the ranks' namespaces (0.00 s)",
        "[2]    0.7",
        "[0-1]  0.5",
        "[3-4]  cannot evaluate it: NameError: name 'x' is not defined",
        "[5]    no answer within 1 s",
    ]
    assert not shown.same
    assert shown.ranks_of(1) == (0, 1)
    assert "NameError" in shown._repr_html_()
    assert shown.to_dict()["groups"][0]["ranks"] == [2]


def test_many_distinct_values_are_cut() -> None:
    lines = repr(diff_of({rank: reading(float(rank)) for rank in range(100)})).split("\n")
    assert len(lines) == MOST_SHOWN + 2
    assert lines[-2].endswith(f"… {100 - MOST_SHOWN} more distinct values, from 19 to 98")
    assert lines[-1] == "[99]" + lines[-1][4:]


def test_values_that_look_alike_are_told_apart() -> None:
    long = "x" * 500
    lines = repr(diff_of({0: reading(f"{long}a"), 1: reading(f"{long}b")})).split("\n")[1:]
    assert len({line.rsplit("#", 1)[1] for line in lines}) == 2


def test_a_table_tells_where_arrays_differ() -> None:
    ours, theirs = tensor("fc.w", b"1", stats=Stats(1.0, 0.0, 1.0, nans=2)), tensor("fc.w", b"2")
    contrast = Contrast((1, 2), "nan", "0.25", 2, 0.5, 0.1, 4)
    row = Difference("fc.w", (2,), (0, 1), ours, theirs, contrast, blocks=3, compared=2)
    other = Difference("scale", (2,), (0, 1), plain_leaf(0.5, "scale"), plain_leaf(0.25, "scale"))
    shown = diff_of({0: reading(1), 1: reading(1), 2: reading(2)}, (row, other))
    table = repr(shown).split("\n")[-3:]
    said = [" ".join(line.split()) for line in table]
    assert said[0] == "differs type ranks first at there others elements max |Δ| relative not finite"
    assert said[1] == "fc.w float32 [4] [2] [1, 2] nan 0.25 ≥ 2 of 4 ≥ 0.5 ≥ 0.1 2 NaN"
    assert said[2] == "scale float [2] 0.5 0.25 0.25 0.5"
    html = shown._repr_html_()
    assert html.count("<details>") == 2  # each row opens
    assert "2 of 4 compared elements differ, first at [1, 2]: nan and 0.25" in html
    assert "2 of the 3 blocks that differ were compared" in html
    assert shown.to_dict()["differences"][0]["contrast"]["index"] == [1, 2]


def test_more_rows_than_a_screen_holds_fold_in_a_notebook() -> None:
    found = tuple(Difference(f"w{at}", (1,), (0,), tensor(f"w{at}", b"1"), tensor(f"w{at}", b"2")) for at in range(30))
    shown = diff_of({0: reading(1), 1: reading(2)}, found)
    assert repr(shown).endswith("… 10 more differ; they are in .differences")
    assert "<summary" in shown._repr_html_()
    assert "10 more</summary>" in shown._repr_html_()


def test_html_is_escaped() -> None:
    shown = diff_of({0: reading("<b>&"), 1: reading("<script>")})
    assert "<script>" not in shown._repr_html_()
