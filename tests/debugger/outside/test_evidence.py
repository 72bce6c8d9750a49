"""Evidence and verdicts from dumps that are made up. No processes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from monarch_kernel.debugger.controller.hang import verdict
from monarch_kernel.debugger.model.evidence import DEAD, LOADS, RUNS, STANDS, UNASKED, UNREAD, WAITS
from monarch_kernel.debugger.outside.outside_report import evidence_of, verdict_from_outside, woken
from monarch_kernel.debugger.outside.processes import Figures, LaunchedRank, Moment, OutsideProcess
from monarch_kernel.debugger.outside.slurm import ranks_of_job

TORCH = "/venv/lib/python3.12/site-packages/torch"
C10D, LOGGER = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/distributed/c10d_logger.py"

Frame = dict[str, Any]


def frame(file: str, name: str, line: int = 1, **values: str) -> Frame:
    found = [{"name": key, "repr": text} for key, text in values.items()]
    return {"filename": file, "name": name, "line": line, "module": None, "locals": found}


def user(line: int, name: str = "main") -> Frame:
    return frame("/w/train.py", name, line)


def collective(name: str, line: int, kwargs: str = "{}", **values: str) -> list[Frame]:
    """A call of torch.distributed from a line of user code, the outermost frame first."""
    wrapper = frame(LOGGER, "_exception_logger.<locals>.wrapper", args="(<Tensor at 0x1>)", kwargs=kwargs)
    return [user(line), wrapper, frame(C10D, name, 1, **values)]


NAMED = "{'group': <torch._C._distributed_c10d.ProcessGroup at 0x2>}"
LOADER = [user(8), frame(f"{TORCH}/utils/data/dataloader.py", "next"), user(30, "Data.__getitem__")]


def moment(frames: list[Frame], ticks: int = 0, state: str = "S") -> Moment:
    thread = {"thread_name": "MainThread", "thread_id": 1, "os_thread_id": 7, "frames": list(reversed(frames))}
    return Moment(Figures(state, ticks={7: ticks}), json.dumps([thread]))


def process(
    rank: int, *frames: list[Frame], world: int = 4, ticks: int = 0, local: tuple[int, ...] = ()
) -> OutsideProcess:
    first, second = moment(frames[0]), moment(frames[-1], ticks)
    return OutsideProcess("n1", 7, LaunchedRank(rank, world, local, "job"), "python train.py", first, second, 1.0)


def judged(*processes: OutsideProcess, world: int = 4) -> verdict.Verdict:
    found = evidence_of({each.place.rank: each for each in processes}, world)
    return verdict_from_outside(found, "job", "Evidence: made up.")


def test_states() -> None:
    found = evidence_of(
        {
            0: process(0, collective("all_reduce", 9)),
            1: process(1, LOADER),
            2: process(2, [user(3)]),
            3: process(3, [user(3)], ticks=50),
        },
        4,
    )
    assert [found[rank].state for rank in range(4)] == [WAITS, LOADS, STANDS, RUNS]
    assert found[0].waits[0].operation.group == "0"
    assert found[1].place is not None and found[1].place.line == 30


def test_a_rank_that_moves_does_not_wait() -> None:
    assert evidence_of({0: process(0, collective("all_reduce", 9), collective("broadcast", 10))}, 1)[0].state == RUNS


def test_the_group_of_a_call_that_names_one_is_unknown() -> None:
    found = judged(*(process(rank, collective("all_reduce", 9, NAMED)) for rank in range(3)), process(3, LOADER))
    assert found.kind == verdict.LOADER and found.ranks == (3,) and found.likely
    assert "that of all ranks is assumed" in " ".join(found.notes)
    # Two pairs wait in two groups: which waits for which cannot be told.
    apart = [process(rank, collective("all_reduce" if rank < 2 else "all_gather", 9, NAMED)) for rank in range(4)]
    found = judged(*apart)
    assert found.kind == verdict.UNDECIDED and "cannot be seen from outside" in found.sentence


def test_another_collective_of_the_default_group() -> None:
    found = judged(*(process(rank, collective("broadcast" if rank == 2 else "all_reduce", 9)) for rank in range(4)))
    assert found.decided and found.ranks == (2,)
    assert found.sentence.startswith("It seems that rank 2 called broadcast")


def test_the_same_collective_at_different_lines_is_undecided() -> None:
    found = judged(*(process(rank, collective("all_reduce", 12 if rank == 2 else 9)) for rank in range(4)))
    assert found.kind == verdict.UNDECIDED and "a call behind" in found.sentence


def test_a_receive_names_its_peer() -> None:
    found = judged(process(0, collective("recv", 5, src="1")), process(1, [user(3)], world=2), world=2)
    assert found.ranks == (1,) and "recv from rank 1" in found.sentence


def test_backward_counts_as_a_wait_if_it_stands() -> None:
    backward = [user(4), frame(f"{TORCH}/autograd/graph.py", "_engine_run_backward")]
    assert evidence_of({0: process(0, backward)}, 1)[0].state == WAITS
    assert evidence_of({0: process(0, backward, ticks=9)}, 1)[0].state == RUNS


def test_a_job_that_makes_progress() -> None:
    def woke(rank: int, frames: list[Frame], switches: int) -> OutsideProcess:
        first, second = (
            msgspec.structs.replace(moment(frames), figures=Figures("S", ticks={7: 0}, switches={7: count}))
            for count in (4, 4 + switches)
        )
        return OutsideProcess("n1", 7, LaunchedRank(rank, 3, (), "job"), "python", first, second, 1.0)

    def seen(*switches: int) -> verdict.Verdict:
        read = {at: woke(at, collective("all_reduce", 9), each) for at, each in enumerate(switches[:2])}
        read[2] = woke(2, LOADER, switches[2])
        return verdict_from_outside(evidence_of(read, 3), "job", "Evidence: made up.", woken=woken(read))

    assert seen(0, 0, 5).ranks == (2,)
    moving = seen(3, 1, 5)
    assert moving.kind == verdict.NOTHING and not moving.ranks
    assert moving.sentence.startswith("The job seems to make progress, as ranks 0-1 moved between the readings. At the")
    assert seen(3, 0, 5).decided  # rank 1 has slept all the time


def test_ranks_without_a_process() -> None:
    waits = [process(rank, collective("all_reduce", 9), local=(0, 1, 2)) for rank in range(2)]
    found = evidence_of({0: waits[0], 1: waits[1]}, 4)
    assert found[2].state == DEAD and found[3].state == UNASKED  # rank 3 is on another host
    found = evidence_of({0: waits[0], 1: waits[1]}, 4, complete=False)  # as they were named by their pids
    assert found[2].state == UNASKED
    said = judged(*waits)
    assert said.kind == verdict.DEAD and said.ranks == (2,)


def test_a_process_that_could_not_be_read() -> None:
    denied = OutsideProcess(
        *("n1", 7, LaunchedRank(1, 2, (), "job"), "python"),
        *(Moment(Figures("S"), "", "the system said no"), Moment(Figures("S"), "", "the system said no"), 1.0),
    )
    assert evidence_of({1: denied}, 2)[1].state == UNREAD
    found = judged(process(0, collective("all_reduce", 9), world=2), denied, world=2)
    assert found.kind == verdict.UNDECIDED and "rank 1 could not be read (the system said no)" in found.sentence


def test_which_processes_of_a_slurm_job_are_ranks() -> None:
    batch, task = LaunchedRank(0, 1, (), "job", str(0xFFFFFFFB)), LaunchedRank(0, 2, (), "job", "0")
    worker = LaunchedRank(1, 2, (), "job", "0", True)
    places = {10: batch, 11: task, 12: LaunchedRank(-1)}
    assert set(ranks_of_job(places, "", {10, 11, 12})) == {11}
    assert set(ranks_of_job({**places, 13: worker}, "", {10, 11, 12, 13})) == {13}
    assert set(ranks_of_job(places, "", {10, 12})) == {10}
    assert ranks_of_job(places, "", set()) == {}
