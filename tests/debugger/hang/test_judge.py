"""Verdicts from evidence that is made up: every kind, many seeds, and what must stay undecided. No processes."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace

import pytest

from monarch_kernel.debugger.controller.hang import verdict
from monarch_kernel.debugger.controller.hang.judge import judge, settle
from monarch_kernel.debugger.controller.hang.phrases import (
    EXTRA,
    REORDERED,
    SAME,
    SKIPPED,
    UNCLEAR,
    divergence,
    starts_apart,
)
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.model.evidence import (
    DEAD,
    IDLE,
    LATE,
    LOADS,
    PAUSED,
    RUNS,
    SILENT,
    STANDS,
    UNASKED,
    WAITS,
    Evidence,
    Operation,
    ProcessGroup,
    UserException,
    Wait,
)
from monarch_kernel.debugger.source_locations import SourceLocation


def at(line: int) -> SourceLocation:
    return SourceLocation("train.py", line, "train")


@dataclass
class Op:
    """A collective in a simulated program."""

    op: str
    size: int
    line: int


@dataclass
class Rank:
    """A simulated rank: what it calls, and what it does when it has called all that."""

    ops: list[Op]
    end: str = IDLE
    place: SourceLocation | None = None
    failure: UserException | None = None
    entered: int = 0
    why: str = ""
    groups: dict[str, ProcessGroup] = field(default_factory=dict)


def simulate(ranks: list[Rank], offset: int = 0) -> dict[int, Evidence]:
    """Run programs in lockstep, as a backend that waits for all does, until nothing moves."""
    moving = True
    done = 0  # collectives that have ended everywhere
    while moving:
        moving = False
        for rank in ranks:
            if rank.entered == done and rank.entered < len(rank.ops):
                rank.entered += 1
                moving = True
        calls = [rank.ops[done] for rank in ranks if rank.entered == done + 1]
        if len(calls) == len(ranks) and len({(call.op, call.size) for call in calls}) == 1:
            done += 1
            moving = True
    return {at + offset: told(rank, at, done, len(ranks), offset) for at, rank in enumerate(ranks)}


def told(rank: Rank, dist_rank: int, done: int, size: int, offset: int = 0) -> Evidence:
    """What a simulated rank tells."""
    if rank.end in (DEAD, SILENT, LATE) and rank.entered == len(rank.ops):
        return Evidence(dist_rank + offset, rank.end, rank.why, answered=False)
    calls = tuple(
        Operation("0", at_ + 1, op.op, op.op, ((op.size,),), ("Float",), at(op.line), at_ < done)
        for at_, op in enumerate(rank.ops[: rank.entered])
    )
    waits: tuple[Wait, ...] = ()
    state, place = rank.end, rank.place
    if rank.entered > done:
        waits = (Wait(calls[-1], place=calls[-1].place),)
        state, place = WAITS, calls[-1].place
    return Evidence(
        dist_rank + offset,
        state,
        dist_rank=dist_rank,
        groups={"0": ProcessGroup("0", "", tuple(range(size)))},
        history={"0": calls} if calls else {},
        waits=waits,
        place=place,
        stack=(place,) if place is not None else (),
        failure=rank.failure if state == IDLE else None,
    )


def steps(chance: random.Random, count: int) -> list[Op]:
    """A program: a loop over a few collectives, with a barrier at its end."""
    body = [
        Op(chance.choice(["all_reduce", "broadcast", "all_gather"]), chance.choice([1, 5, 5, 64]), line)
        for line in range(10, 10 + chance.randint(1, 4))
    ]
    return body * count + [Op("barrier", 0, 50)]


def spoiled(seed: int) -> tuple[str, int, int, list[Rank]]:
    """A kind, the guilty rank, how many ranks there are, and their programs."""
    chance = random.Random(seed)
    kind = chance.choice(["skipped", "extra", "reordered", "shape", "failed", "loader", "standing", "silent", "dead"])
    size = chance.randint(2, 9)
    guilty = chance.randrange(size)
    program = steps(chance, chance.randint(1, 5))
    ranks = [Rank(list(program)) for _ in range(size)]
    wrong, where = ranks[guilty], chance.randrange(len(program))
    if kind == "skipped":
        del wrong.ops[where]
    elif kind == "extra":
        wrong.ops.insert(where, Op(chance.choice(["all_reduce", "broadcast"]), chance.choice([1, 5]), 99))
    elif kind == "reordered":
        where = min(where, len(program) - 2)
        wrong.ops[where : where + 2] = reversed(wrong.ops[where : where + 2])
    elif kind == "shape":
        where = min(where, len(program) - 2)
        old = wrong.ops[where]
        wrong.ops[where] = Op(old.op, old.size + 3, old.line)
    else:
        del wrong.ops[where:]
        wrong.end = {"failed": IDLE, "loader": LOADS, "standing": STANDS, "silent": SILENT, "dead": DEAD}[kind]
        wrong.place = at(5) if kind in ("loader", "standing") else None
        wrong.failure = UserException("ValueError: no", at(6), root="train.py") if kind == "failed" else None
    return kind, guilty, size, ranks


@pytest.mark.parametrize("first", range(0, 4000, 500))
def test_no_rank_is_named_wrongly(first: int) -> None:
    decided = {}
    for seed in range(first, first + 500):
        kind, guilty, size, ranks = spoiled(seed)
        found = judge(simulate(ranks))
        if found.kind == verdict.NOTHING:  # two like calls were exchanged: nothing has come of it
            assert kind in ("reordered", "shape")
            continue
        if found.decided:
            assert found.ranks == (guilty,), f"{seed}: {kind} by {guilty} of {size}: {found}"
        else:
            assert guilty in found.ranks, f"{seed}: {kind} by {guilty} of {size}: {found}"
            assert size == 2, f"{seed}: {kind} by {guilty} of {size}: {found}"
        decided.setdefault(kind, set()).add(found.kind)
    assert decided["failed"] == {"failed"}
    assert decided["silent"] == {"silent"}
    assert decided["dead"] == {"dead"}
    assert decided["loader"] <= {"loader", "undecided"}


def program(*lines: int) -> list[Op]:
    return [Op("all_reduce", 4, line) for line in lines]


def four(odd: Rank, *lines: int) -> Verdict:
    """Ranks 0, 1 and 3 run these lines; rank 2 does not."""
    ranks = [Rank(program(*lines)) for _ in range(3)]
    return judge(simulate([*ranks[:2], odd, ranks[2]]), "m")


def test_a_collective_that_was_left_out_long_ago_is_found_where_histories_part() -> None:
    found = four(Rank(program(10, 11, 10, 10, 11)), 10, 11, 10, 11, 10, 11)
    assert (found.kind, found.ranks) == ("skipped", (2,))
    assert found.culprits[0].place == at(11)
    assert found.sentence == (
        "Ranks 0-1, 3 wait in all_reduce #6 of the default group at train.py:11; "
        "rank 2 skipped all_reduce #4 at train.py:11 and is finished or idle."
    )


def test_one_that_was_called_too_often_is_found_where_histories_part() -> None:
    found = four(Rank(program(10, 11, 12, 10, 11)), 10, 11, 10, 11)
    assert (found.kind, found.ranks) == ("extra", (2,))
    assert found.culprits[0].place == at(12)
    assert "called all_reduce at train.py:12, which no other rank called" in found.sentence


def test_other_sizes_at_the_same_line_are_told_with_both() -> None:
    odd = [*program(10), Op("all_reduce", 6, 11)]
    found = four(Rank(odd), 10, 11)
    assert (found.kind, found.ranks) == ("shape", (2,))
    assert found.sentence == (
        "Rank 2 called all_reduce with 6 elements of Float at train.py:11 where ranks 0-1, 3 called all_reduce with "
        "4 elements of Float at train.py:11 (#2 of the default group)."
    )
    assert found.rows[0].ranks == (2,)


def test_between_two_ranks_a_missing_and_an_added_call_cannot_be_told_apart() -> None:
    found = judge(simulate([Rank(program(10, 11)), Rank(program(10))]))
    assert found.kind == verdict.UNDECIDED
    assert found.ranks == (0, 1)
    assert len(found.alternatives) == 2
    assert "either rank 1 skipped it or will still come, or rank 0 called one too many at train.py:11" in found.sentence


def test_of_two_ranks_one_that_comes_by_that_line_in_every_step_is_only_late() -> None:
    late = Rank(program(10, 11), LOADS, at(9))
    found = judge(simulate([Rank(program(10, 11, 10)), late]))
    assert (found.kind, found.ranks) == ("loader", (1,))
    first = Rank([], STANDS, at(9))  # it has not called anything yet, but stands before the line in the same function
    found = judge(simulate([Rank(program(10)), first]))
    assert (found.kind, found.ranks) == ("standing", (1,))
    after = Rank([], STANDS, at(12))
    assert judge(simulate([Rank(program(10)), after])).kind == verdict.UNDECIDED


def test_of_two_ranks_the_one_that_breaks_the_habit_of_a_loop_has_left_something_out() -> None:
    step = [Op("all_reduce", 4, 10), Op("broadcast", 4, 11), Op("all_gather", 4, 12)]
    found = judge(simulate([Rank(step * 3), Rank([*step * 2, step[0], step[2]])]))
    assert (found.kind, found.ranks, found.likely) == ("order", (1,), True)
    left = [*step * 2, Op("barrier", 0, 20)]  # it has left the loop: who knows whether it should have
    assert judge(simulate([Rank(step * 3), Rank(left)])).kind == verdict.UNDECIDED
    once = [*step, step[0], step[2]]
    assert judge(simulate([Rank(step * 2), Rank(once)])).kind == verdict.UNDECIDED


def test_half_against_half_is_undecided() -> None:
    one, other = [Op("all_reduce", 4, 10)], [Op("barrier", 0, 11)]
    found = judge(simulate([Rank(one), Rank(list(one)), Rank(other), Rank(list(other))]))
    assert found.kind == verdict.UNDECIDED
    assert found.ranks == (0, 1, 2, 3)
    assert "neither side is a clear majority" in found.sentence


def test_ranks_of_which_nothing_is_known_may_be_on_either_side() -> None:
    ranks = simulate([Rank(program(10)), Rank(program(10)), Rank([Op("barrier", 0, 11)]), Rank(program(10))])
    ranks[3] = Evidence(3, LATE, answered=False)
    assert judge(ranks).ranks == (0, 1, 2, 3)
    assert judge(ranks).kind == verdict.UNDECIDED


def test_a_rank_that_does_not_answer_is_not_blamed_for_it() -> None:
    ranks = simulate([Rank(program(10)), Rank(program(10)), Rank([], LATE)])
    found = judge(ranks)
    assert (found.kind, found.ranks) == (verdict.UNDECIDED, (2,))
    assert "does not answer" in found.sentence
    ranks[2] = Evidence(2, UNASKED, answered=False)
    assert "was not asked" in judge(ranks).sentence


@pytest.mark.parametrize("state, kind", [(DEAD, "dead"), (SILENT, "silent")])
def test_what_host_agents_tell_comes_first(state: str, kind: str) -> None:
    ranks = [Rank(program(10)), Rank([], LOADS, at(3)), Rank([], state, why="stopped (SIGSTOP)"), Rank(program(10))]
    found = judge(simulate(ranks, offset=4))  # the mesh's ranks are not those of torch.distributed
    assert (found.kind, found.ranks) == (kind, (6,))
    assert "SIGSTOP" in found.sentence
    assert "ranks 4, 7 wait in all_reduce #1" in found.sentence


def test_a_rank_that_a_debugger_has_stopped_is_reported_as_stopped() -> None:
    found = four(Rank(program(10), PAUSED, at(7)), 10, 11)
    assert (found.kind, found.ranks) == ("paused", (2,))
    assert "is stopped in the debugger at train.py:7 in train" in found.sentence


def test_an_exception_that_only_tells_of_another_rank_is_no_reason() -> None:
    gone = UserException("RuntimeError: Connection closed by peer", at(11), of_peer=True, root="train.py")
    ranks = [Rank(program(10, 11)), Rank(program(10), failure=gone), Rank([], DEAD, why="killed by SIGKILL")]
    found = judge(simulate(ranks))
    assert (found.kind, found.ranks) == ("dead", (2,))
    only = judge(simulate([Rank(program(10, 11)), Rank(program(10), failure=gone), Rank(program(10, 11))]))
    assert only.kind == verdict.UNDECIDED
    assert "not which" in only.sentence


def test_an_exception_of_another_cell_is_no_reason() -> None:
    old = UserException("ValueError: old", SourceLocation("other.py", 1, "f"), root="other.py")
    found = four(Rank(program(10), failure=old), 10, 11)
    assert found.kind == "skipped"
    assert "ValueError" not in found.sentence or found.kind != "failed"


def test_gloo_ends_the_rank_that_receives_too_much_not_the_one_that_sends_it() -> None:
    ranks = simulate([Rank(program(10)) for _ in range(4)])
    aborted = Evidence(1, DEAD, "aborted (SIGABRT)", answered=False, signal=signal.SIGABRT)
    failure = UserException("RuntimeError: Connection closed by peer", at(10), of_peer=True)

    def failed(rank: int, size: int) -> Evidence:
        call = Operation("0", 1, "all_reduce", "all_reduce", ((size,),), ("Float",), at(10))
        return replace(ranks[rank], state=IDLE, waits=(), history={"0": (call,)}, failure=failure)

    found = judge({0: failed(0, 4), 1: aborted, 2: failed(2, 9), 3: failed(3, 4)})
    assert (found.kind, found.ranks, found.likely) == ("shape", (2,), True)
    found = judge({0: failed(0, 4), 1: aborted, 2: failed(2, 4), 3: failed(3, 4)})
    assert (found.kind, found.ranks) == ("dead", (1,))
    segfault = Evidence(2, DEAD, "segmentation fault (SIGSEGV)", answered=False, signal=signal.SIGSEGV)
    found = judge({0: failed(0, 4), 1: aborted, 2: segfault, 3: failed(3, 4)})
    assert (found.kind, found.ranks) == (verdict.UNDECIDED, (1, 2))
    killed = Evidence(1, DEAD, "killed by SIGKILL", answered=False, signal=signal.SIGKILL)
    found = judge({0: failed(0, 4), 1: killed, 2: segfault, 3: failed(3, 4)})
    assert (found.kind, found.ranks) == ("dead", (1,))
    two = {0: replace(failed(0, 4), groups={"0": ProcessGroup("0", "", (0, 1))}), 1: aborted}
    found = judge(two)
    assert (found.kind, found.ranks) == (verdict.UNDECIDED, (0, 1))


# -- more than one group, and point to point ---------------------------------------------------------


def waits(
    rank: int, group: ProcessGroup, number: int, line: int, *more: ProcessGroup, op: str = "all_reduce"
) -> Evidence:
    call = Operation(group.name, number, op, op, ((4,),), ("Float",), at(line))
    return Evidence(
        rank,
        WAITS,
        dist_rank=rank,
        groups={each.name: each for each in (group, *more)},
        history={group.name: (call,)},
        waits=(Wait(call, place=at(line)),),
        place=at(line),
        stack=(at(line),),
    )


def receives(rank: int, peer: int, *groups: ProcessGroup) -> Evidence:
    call = Operation("0", 0, "recv", "recv", ((4,),), place=at(20))
    wait = Wait(call, "recv", peer=peer, place=at(20))
    return Evidence(rank, WAITS, dist_rank=rank, groups={g.name: g for g in groups}, waits=(wait,), place=at(20))


WORLD = ProcessGroup("0", "", (0, 1, 2, 3))


def test_waits_are_followed_through_groups_to_the_rank_that_does_not_wait() -> None:
    pair, other = ProcessGroup("1", "tp", (0, 1)), ProcessGroup("2", "dp", (1, 2))
    busy = Evidence(2, STANDS, dist_rank=2, groups={"2": other}, place=at(30), stack=(at(30),))
    found = judge({0: waits(0, pair, 1, 10), 1: waits(1, other, 1, 11, pair), 2: busy})
    assert 2 in found.ranks
    assert 0 not in found.ranks
    assert "at train.py:30" in found.sentence


def test_two_groups_of_the_same_ranks_in_another_order() -> None:
    one, two = ProcessGroup("1", "a", (0, 1, 2)), ProcessGroup("2", "b", (0, 1, 2))
    found = judge({rank: waits(rank, one, 1, 10, two) for rank in (0, 1)} | {2: waits(2, two, 1, 11, one)})
    assert (found.kind, found.ranks) == ("order", (2,))


def test_a_cycle_names_all_its_ranks() -> None:
    found = judge({0: receives(0, 1, WORLD), 1: receives(1, 2, WORLD), 2: receives(2, 0, WORLD)})
    assert found.kind == "cycle"
    assert not found.decided
    assert "rank 0 waits in recv from rank 1 at train.py:20" in found.sentence


def test_a_receiver_waits_for_its_sender() -> None:
    slow = Evidence(1, LOADS, dist_rank=1, groups={"0": WORLD}, place=at(3))
    found = judge({0: receives(0, 1, WORLD), 1: slow, 2: Evidence(2, RUNS, dist_rank=2, groups={"0": WORLD})})
    assert (found.kind, found.ranks, found.likely) == ("loader", (1,), True)
    done = judge({0: receives(0, 1, WORLD), 1: Evidence(1, IDLE, dist_rank=1, groups={"0": WORLD})})
    assert (done.kind, done.ranks) == (verdict.UNDECIDED, (0, 1))


def test_one_rank_in_an_unnumbered_operation_and_the_others_in_another_one() -> None:
    call = Operation("0", 0, "monitored_barrier", "monitored_barrier", place=at(15))
    odd = Evidence(3, WAITS, dist_rank=3, groups={"0": WORLD}, waits=(Wait(call, place=at(15)),), place=at(15))
    found = judge({rank: waits(rank, WORLD, 1, 10) for rank in range(3)} | {3: odd})
    assert (found.kind, found.ranks) == ("order", (3,))


def rooted(rank: int, root: int, size: int) -> Evidence:
    each = waits(rank, ProcessGroup("0", "", tuple(range(size))), 1, 10, op="broadcast")
    return replace(each, waits=(replace(each.waits[0], root=root),))


def test_another_source_of_a_broadcast_is_reported() -> None:
    found = judge({rank: rooted(rank, 1 if rank == 2 else 0, 3) for rank in range(3)})
    assert (found.kind, found.ranks) == ("root", (2,))
    assert "Rank 2 called broadcast for rank 1 at train.py:10 where ranks 0-1 called broadcast for rank 0" in str(found)
    two = {rank: rooted(rank, rank, 2) for rank in range(2)}
    habit = tuple(replace(two[0].history["0"][0], number=at_ + 1, done=at_ < 3) for at_ in range(4))
    wait = replace(two[0].waits[0], operation=habit[-1])
    same = {rank: replace(each, history={"0": habit}, waits=(replace(wait, root=rank),)) for rank, each in two.items()}
    assert judge(same).kind == verdict.UNDECIDED


def test_a_group_that_reaches_beyond_the_mesh_leaves_room_for_those_outside() -> None:
    wide = ProcessGroup("0", "", (0, 1, 2, 3, 4, 5))
    found = judge({rank: waits(rank, wide, 1, 10) for rank in range(4)})
    assert found.kind == verdict.UNDECIDED
    assert "2 of its ranks are not in this mesh" in found.sentence


def test_a_rank_that_failed_and_has_left_its_group_is_not_taken_for_one_outside() -> None:
    group = ProcessGroup("0", "", (0, 1, 2, 3))
    failure = UserException("ValueError: no", at(7), root="train.py")
    left = Evidence(1, IDLE, failure=failure)  # as after destroy_process_group() in a finally
    found = judge({rank: left if rank == 1 else waits(rank, group, 1, 10) for rank in range(4)})
    assert (found.kind, found.ranks) == (verdict.FAILED, (1,))
    assert found.sentence.startswith("Rank 1 failed with ValueError: no at train.py:7; ranks 0, 2-3 wait")


def test_there_is_no_culprit_where_no_rank_waits() -> None:
    found = judge({0: Evidence(0, RUNS, place=at(3)), 1: Evidence(1, IDLE)})
    assert found.kind == verdict.NOTHING
    assert found.sentence == "No rank waits for another: rank 0 is running at train.py:3 in train."


def test_several_are_spoken_of_as_several() -> None:
    ranks = [Rank(program(10)) for _ in range(4)] + [Rank([], STANDS, at(3)) for _ in range(2)]
    said = judge(simulate(ranks)).sentence
    assert said.endswith("at train.py:10; ranks 4-5 have not entered it: they make no progress at train.py:3 in train.")
    ranks[4:] = [Rank([]) for _ in range(2)]
    assert "ranks 4-5 never entered it and are finished or idle." in judge(simulate(ranks)).sentence
    ranks[4:] = [Rank([], DEAD, why="killed by SIGKILL") for _ in range(2)]
    assert judge(simulate(ranks)).sentence.startswith("Ranks 4-5 are dead (killed by SIGKILL); ranks 0-3 wait in")


# -- two looks -----------------------------------------------------------------------------------------


def test_what_moves_between_two_looks_does_not_wait() -> None:
    before, after = waits(0, WORLD, 1, 10), waits(0, WORLD, 2, 10)
    assert settle({0: before}, {0: after})[0].state == RUNS
    assert settle({0: before}, {0: before})[0].state == WAITS
    still = Evidence(1, RUNS, place=at(3), ident=7, ticks=5)
    assert settle({1: still}, {1: still})[1].state == STANDS
    assert settle({1: still}, {1: replace(still, ticks=6)})[1].state == RUNS
    assert settle({1: still}, {1: replace(still, ident=8)})[1].state == RUNS


def test_a_rank_that_falls_silent_is_remembered() -> None:
    found = settle({0: waits(0, WORLD, 1, 10)}, {0: Evidence(0, SILENT, "stopped", answered=False)})[0]
    assert (found.state, found.dist_rank, found.place) == (SILENT, 0, at(10))
    assert found.last("0") == 1


def test_a_thread_of_its_own_may_wait_while_the_main_one_stands() -> None:
    joins = replace(waits(0, WORLD, 1, 10), state=RUNS)
    assert settle({0: joins}, {0: joins})[0].state == WAITS


# -- histories -----------------------------------------------------------------------------------------


def calls(*lines: int, first: int = 1) -> tuple[Operation, ...]:
    return tuple(
        Operation("0", first + k, "all_reduce", "all_reduce", ((4,),), (), at(line)) for k, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    "mine, reference, kind, found",
    [
        ((1, 2, 3), (1, 2, 3), SAME, ()),
        ((1, 2), (1, 2, 3), SAME, ()),
        ((1, 3, 4), (1, 2, 3, 4), SKIPPED, (2,)),
        ((1, 4, 5), (1, 2, 3, 4, 5), SKIPPED, (2, 3)),
        ((1, 9, 2, 3), (1, 2, 3), EXTRA, (9,)),
        ((1, 3, 2, 4), (1, 2, 3, 4), REORDERED, (3, 2)),
        ((1, 7), (1, 2), UNCLEAR, ()),  # nothing follows that would tell
        ((1, 7, 8, 9), (1, 2, 3, 4), UNCLEAR, ()),
        ((), (1,), SAME, ()),
    ],
)
def test_histories_part(mine: tuple[int, ...], reference: tuple[int, ...], kind: str, found: tuple[int, ...]) -> None:
    parted = divergence(calls(*mine), calls(*reference))
    assert (parted.kind, tuple(call.place.line for call in parted.calls if call.place)) == (kind, found)


def test_only_what_both_still_know_is_compared() -> None:
    mine, reference = calls(5, 6, 8, first=11), calls(4, 5, 6, 7, 8, first=10)
    assert divergence(mine, reference).kind == SKIPPED
    assert not starts_apart(mine, reference)
    assert starts_apart(calls(6, 8, first=11), reference)
    assert not starts_apart(calls(3), calls(4))  # there is nothing further back
