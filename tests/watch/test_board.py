"""The board without any I/O: states of ranks, and snapshot plus changes is the next snapshot, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from monarch_kernel.watch import Board, RankState, advanced, board
from monarch_kernel.watch.board import (
    ActorsFact,
    CellFact,
    CellName,
    Condition,
    CurrentMesh,
    Fact,
    FailureFact,
    HostFact,
    JobsFact,
    MeshFact,
    MeshGone,
    MeshMark,
    ProcFact,
    StopFact,
)
from monarch_kernel.watch.model import ActorView, JobView, RankView, StopView

STATES = [RankState.STARTING, RankState.DEAD, RankState.ENDED, RankState.UNRESPONSIVE, RankState.HEALING]


def mesh(key: str = "m", ranks: int = 2, host: str = "h", life: int = 0) -> MeshFact:
    """A mesh whose procs are named by their mesh, rank and life."""
    procs = tuple(f"{key}.{rank}~{life}" for rank in range(ranks))
    return MeshFact(key, key, ("gpus",), (ranks,), procs, (host,) * ranks, {host: f"host of {host}"})


def up(filled: Board, *procs: str) -> None:
    for proc in procs:
        filled.apply(Condition(proc, RankState.STARTING, False), 1.0)


def rank_of(filled: Board, rank: int = 0, key: str = "m") -> RankView:
    return filled.snapshot().ranks[key][rank]


@pytest.fixture
def filled() -> Board:
    """A mesh of two ranks that are up."""
    filled = Board()
    filled.apply(mesh(), 1.0)
    up(filled, "m.0~0", "m.1~0")
    return filled


KEYS = some.sampled_from(["m", "n"])
PROCS = some.builds(lambda key, rank, life: f"{key}.{rank}~{life}", KEYS, some.integers(0, 3), some.integers(0, 1))
TIMES = some.floats(0, 10)
ACTORS = some.dictionaries(
    some.sampled_from(["a", "b"]),
    some.builds(
        ActorView,
        some.just("a"),
        endpoint=some.sampled_from(["", "step"]),
        since=TIMES,
        waiting=some.integers(0, 2),
        calls=some.integers(0, 3),
    ),
)
JOBS = some.lists(some.builds(JobView, KEYS, some.just("ssh"), up=some.integers(0, 2)), max_size=2)
FACTS: some.SearchStrategy[Fact] = some.one_of(
    some.builds(mesh, KEYS, some.integers(1, 4), some.sampled_from(["h", "k"]), some.integers(0, 1)),
    some.builds(MeshGone, KEYS),
    some.builds(MeshMark, KEYS, some.fixed_dictionaries({"hang": some.sampled_from(["", "rank 1 skipped it"])})),
    some.builds(CurrentMesh, some.sampled_from(["", "m", "n"])),
    some.builds(HostFact, some.sampled_from(["h", "k"]), some.fixed_dictionaries({"cpu": TIMES})),
    some.builds(ProcFact, PROCS, some.fixed_dictionaries({"rss": some.integers(0, 2), "cpu": TIMES})),
    some.builds(ActorsFact, PROCS, ACTORS, some.sampled_from([(), ("a",), ("b",)])),
    some.builds(CellFact, PROCS, some.sampled_from(["", "c.1"]), TIMES),
    some.builds(CellName, some.just("c"), some.sampled_from(["cell [1]", "cell [2]"])),
    some.builds(Condition, PROCS, some.sampled_from(STATES), some.booleans(), TIMES, some.sampled_from(["", "why"])),
    some.builds(StopFact, KEYS, some.integers(0, 3), some.sampled_from([None, StopView("pause", "x.py", 3)]), TIMES),
    some.builds(JobsFact, JOBS.map(tuple)),
    some.builds(FailureFact, some.just("death"), some.sampled_from(["x", "y"]), some.tuples(PROCS), KEYS),
)


@settings(max_examples=300, deadline=None)
@given(some.lists(some.tuples(FACTS, some.booleans()), max_size=40), some.sampled_from([4, 100_000]))
def test_a_snapshot_and_its_changes_are_the_next_snapshot(facts: list[tuple[Fact, bool]], kept: int) -> None:
    filled = Board()
    seen = first = filled.snapshot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "MAX_CHANGES", kept)  # a reader that is far behind gets everything
        for at, (fact, read) in enumerate(facts):
            before = filled.snapshot()
            changed = filled.apply(fact, float(at))
            assert changed == (filled.version != before.version)
            if not changed:
                assert filled.snapshot() == before
            if read:
                delta = filled.since(seen.version)
                for key, names in delta.fields.items():
                    old, new = seen.ranks[key[0]][key[1]], delta.ranks[key]
                    differs = {n for n in RankView.__struct_fields__ if getattr(old, n) != getattr(new, n)}
                    assert differs <= names  # and what has changed back may be among them
                seen = advanced(seen, delta)
                assert seen == filled.snapshot()
        assert advanced(first, filled.since(0)) == filled.snapshot()


def test_the_worst_condition_is_the_state(filled: Board) -> None:
    proc = "m.0~0"
    assert rank_of(filled).state is RankState.IDLE
    filled.apply(ActorsFact(proc, {"a": ActorView("trainer", endpoint="step", since=5.0)}), 6.0)
    assert (rank_of(filled).state, rank_of(filled).since) == (RankState.RUNNING, 5.0)
    filled.apply(StopFact("m", 0, StopView("breakpoint", "/srv/train.py", 7), 8.0), 8.0)
    assert (rank_of(filled).state, rank_of(filled).since) == (RankState.STOPPED, 8.0)
    assert rank_of(filled).stop == StopView("breakpoint", "train.py", 7)
    filled.apply(Condition(proc, RankState.UNRESPONSIVE, True, cause="stopped by a signal"), 9.0)
    assert (rank_of(filled).state, rank_of(filled).cause) == (RankState.UNRESPONSIVE, "stopped by a signal")
    filled.apply(Condition(proc, RankState.UNRESPONSIVE, False), 10.0)
    filled.apply(StopFact("m", 0, None), 11.0)
    assert (rank_of(filled).state, rank_of(filled).doing) == (RankState.RUNNING, "trainer.step")
    assert rank_of(filled, 1).state is RankState.IDLE


def test_a_dead_rank_has_nothing_left_and_is_healed_by_a_successor(filled: Board) -> None:
    filled.apply(ActorsFact("m.1~0", {"a": ActorView("trainer", endpoint="step", waiting=3)}), 2.0)
    filled.apply(Condition("m.1~0", RankState.DEAD, True, cause="killed by SIGKILL"), 3.0)
    dead = rank_of(filled, 1)
    assert (dead.state, dead.cause, dead.doing, dead.waiting, dead.actors) == (
        RankState.DEAD,
        "killed by SIGKILL",
        "",
        0,
        (),
    )
    filled.apply(ProcFact("m.1~0", {"rss": 7}), 4.0)  # a report that was on its way
    assert rank_of(filled, 1) == dead
    filled.apply(Condition("m.1~0", RankState.HEALING, True), 5.0)
    assert (rank_of(filled, 1).state, rank_of(filled, 1).cause) == (RankState.HEALING, "killed by SIGKILL")
    filled.apply(MeshFact("m", "m", ("gpus",), (2,), ("m.0~0", "m.1~1"), ("h", "k"), {"h": "h", "k": "spare"}), 6.0)
    new = rank_of(filled, 1)
    assert (new.state, new.host, new.proc, new.cause, new.since) == (RankState.STARTING, "k", "m.1~1", "", 6.0)
    assert rank_of(filled, 0).state is RankState.IDLE
    assert set(filled.snapshot().hosts) == {"h", "k"}


def test_a_failed_heal_leaves_the_rank_dead(filled: Board) -> None:
    filled.apply(Condition("m.0~0", RankState.DEAD, True, cause="out of memory"), 2.0)
    filled.apply(Condition("m.0~0", RankState.HEALING, True), 3.0)
    filled.apply(Condition("m.0~0", RankState.HEALING, False), 4.0)
    assert (rank_of(filled).state, rank_of(filled).cause, rank_of(filled).since) == (
        RankState.DEAD,
        "out of memory",
        2.0,
    )


def test_a_cell_has_the_name_that_people_know(filled: Board) -> None:
    filled.apply(CellFact("m.0~0", "cell-abc-4.9", 2.0), 2.0)
    assert rank_of(filled).doing == "a cell"
    filled.apply(CellName("cell-abc-4", "cell [7]"), 2.0)
    assert (rank_of(filled).doing, rank_of(filled).doing_since) == ("cell [7]", 2.0)
    filled.apply(CellFact("m.0~0", "", 0.0), 3.0)
    assert (rank_of(filled).state, rank_of(filled).doing) == (RankState.IDLE, "")


def test_one_failure_concerns_all_ranks_that_have_it_at_once(filled: Board) -> None:
    for at, proc in enumerate(("m.0~0", "m.1~0")):
        filled.apply(FailureFact("death", "the host was lost", (proc,)), 5.0 + at / 10)
    filled.apply(FailureFact("death", "the host was lost", ("m.1~0",)), 60.0)
    assert [failure.ranks for failure in filled.snapshot().failures] == [(0, 1), (1,)]


def test_a_hang_is_over_when_nothing_runs(filled: Board) -> None:
    filled.apply(CellFact("m.0~0", "c", 2.0), 2.0)
    filled.apply(MeshMark("m", {"hang": "rank 1 skipped all_reduce"}), 3.0)
    assert filled.snapshot().meshes["m"].hang
    filled.apply(CellFact("m.0~0", "", 0.0), 4.0)
    assert not filled.snapshot().meshes["m"].hang


def test_jobs_are_there_as_long_as_they_are_waited_for(filled: Board) -> None:
    waiting = JobView("j", "slurm", "m", 4, reason="Resources")
    before = filled.version
    assert filled.apply(JobsFact((waiting,)), 2.0) and not filled.apply(JobsFact((waiting,)), 3.0)
    assert filled.since(before).jobs == filled.snapshot().jobs == {"j": waiting}
    between = filled.version
    assert filled.apply(JobsFact(()), 4.0)
    assert filled.since(between).gone_jobs == ("j",) and not filled.snapshot().jobs


def test_the_mesh_in_use_is_marked_when_it_comes(filled: Board) -> None:
    filled.apply(CurrentMesh("n"), 2.0)
    filled.apply(mesh("n"), 3.0)
    assert {key: view.current for key, view in filled.snapshot().meshes.items()} == {"m": False, "n": True}


@pytest.mark.parametrize("fact", [ProcFact("m.0~0", {"state": "idle"}), HostFact("h", {"weather": 3})])
def test_a_field_that_no_source_may_set_is_refused(filled: Board, fact: Fact) -> None:
    with pytest.raises(ValueError, match="no source may set"):
        filled.apply(fact, 2.0)
