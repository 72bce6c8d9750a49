"""`diff` and `pull` over real ranks: in namespaces, on actors, in stopped frames; with dead, late and failing ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.controller.values import diff, pull
from tests.actor.actors import PATIENCE
from tests.actor.conftest import script as script
from tests.conftest import wait_until
from tests.debugger.values.trainers import Slow, Trainer, kept, proceed


@pytest.fixture
def mesh(procs: Any) -> ProcMesh:
    """Four ranks."""
    return procs(4)


@pytest.fixture
def trainers(mesh: ProcMesh) -> ActorMesh[Trainer]:
    """An actor on each of them."""
    actors = mesh.spawn("trainer", Trainer)
    actors.initialized.get(PATIENCE)
    return actors


def lines(text: object) -> list[str]:
    return repr(text).split("\n")


def nothing_is_kept(mesh: ProcMesh) -> bool:
    return set(map(repr, ask(mesh, kept, timeout=PATIENCE).values.values())) == {"(0, [])"}


def test_one_line_for_each_distinct_value(mesh: ProcMesh, trainers: ActorMesh[Trainer]) -> None:
    found = diff(trainers, "self.loss")
    assert [each.ranks for each in found.groups] == [(3,), (0, 1, 2)]
    assert lines(found)[1:] == ["[3]    0.7", "[0-2]  0.5"]
    assert ", on the actors trainer (" in lines(found)[0]
    assert not found.same
    assert diff(trainers, "self.config").same
    assert lines(diff(trainers, "self.config"))[1] == "[0-3]  {'lr': 0.1, 'layers': [1, 2, 3]}"
    wait_until(lambda: nothing_is_kept(mesh), "the ranks have let go of the values")


def test_the_expression_sees_what_methods_see(trainers: ActorMesh[Trainer]) -> None:
    assert [each.reading.number for each in diff(trainers, "SCALE").groups] == [3]
    assert [each.ranks for each in diff(trainers, "self.scaled() > 2").groups] == [(3,), (0, 1, 2)]
    assert [each.ranks for each in diff(trainers, "[self.loss for _ in range(2)]").groups] == [(3,), (0, 1, 2)]


def test_it_is_evaluated_once_however_much_is_compared(trainers: ActorMesh[Trainer]) -> None:
    assert len(diff(trainers, "[self.counted] * 100").groups) == 4
    assert [each.reading.number for each in diff(trainers, "self.reads").groups] == [1]


def test_self_is_the_only_actor_there_is(mesh: ProcMesh, trainers: ActorMesh[Trainer]) -> None:
    found = diff(mesh, "self.loss")
    assert len(found.groups) == 2
    assert found.where == "on actor trainer"
    failed = diff(mesh, "loss").failed
    assert len(failed) == 1
    assert "the attributes of actor trainer are under self" in failed[0].why
    mesh.spawn("other", Trainer).initialized.get(PATIENCE)
    failed = diff(mesh, "self.loss").failed
    assert "there are several actors here (other, trainer)" in failed[0].why


def test_slices_and_chosen_ranks_are_named_as_in_the_whole_mesh(mesh: ProcMesh, trainers: ActorMesh[Trainer]) -> None:
    assert [each.ranks for each in diff(trainers.slice(gpus=slice(2, 4)), "self.loss").groups] == [(2,), (3,)]
    assert [each.ranks for each in diff(mesh.slice(gpus=slice(2, 4)), "self.loss", ranks=[1]).groups] == [(3,)]
    assert [each.ranks for each in diff(mesh, "self.loss", ranks=[0, 3]).groups] == [(0,), (3,)]
    assert pull(mesh.slice(gpus=slice(2, 4)), "self.rank", rank=1) == 3


def test_ranks_that_fail_are_grouped_by_what_they_say(trainers: ActorMesh[Trainer]) -> None:
    found = diff(trainers, "1 / (self.rank // 2)")
    assert [each.ranks for each in found.groups] == [(2, 3)]
    assert [(each.kind, each.why, each.ranks) for each in found.failed] == [
        ("error", "ZeroDivisionError: division by zero", (0, 1))
    ]
    assert not found.same
    assert "[0-1]  cannot evaluate it: ZeroDivisionError: division by zero" in lines(found)


def test_a_dead_and_a_silent_rank_do_not_delay_the_others(
    mesh: ProcMesh, trainers: ActorMesh[Trainer], faults: Any
) -> None:
    pids = pull(trainers, "__import__('os').getpid()", rank=1), pull(trainers, "__import__('os').getpid()", rank=2)
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        found = diff(mesh, "self.loss", timeout=1.0)
        assert [each.ranks for each in found.groups] == [(0,), (3,)]
        assert {each.kind: each.ranks for each in found.failed} == {"dead": (1,), "late": (2,)}
        with pytest.raises(RuntimeError, match="rank 1 of mesh .* cannot send self.loss: killed by SIGKILL"):
            pull(mesh, "self.loss", rank=1)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert faults.get(timeout=PATIENCE)


def test_an_actor_that_is_still_being_made(mesh: ProcMesh) -> None:
    ask(mesh, kept, timeout=PATIENCE)
    actors = mesh.spawn("slow", Slow)
    failed = diff(actors, "self.rank").failed
    assert [each.why for each in failed] == ["LookupError: the actor is not there yet: its __init__ is still running"]
    ask(mesh, proceed, timeout=PATIENCE)
    actors.initialized.get(PATIENCE)
    assert diff(actors, "self.done").same


def test_what_is_no_expression_is_refused_at_once(mesh: ProcMesh) -> None:
    with pytest.raises(ValueError, match="'x = 3' is no expression"):
        diff(mesh, "x = 3")
    with pytest.raises(ValueError, match="there is no rank 7"):
        diff(mesh, "1", ranks=[7])
    with pytest.raises(ValueError, match="no stopped frame to evaluate in"):
        diff(mesh, "1", in_frame=True)
    with pytest.raises(TypeError):
        diff("m", "1")


def test_torch_and_numpy_are_not_imported_for_values_that_are_not_theirs(script: Any) -> None:
    # A process of its own: ranks have from the start what their controller has imported.
    done = script(
        """
        from monarch_kernel.actor import this_host
        from monarch_kernel.debugger.controller.values import diff
        mesh = this_host().spawn_procs(per_host={"gpus": 2})
        print(len(diff(mesh, "[float(__import__('os').getpid()) for _ in range(1000)]").groups))
        (group,) = diff(mesh, "sorted(__import__('sys').modules.keys() & {'numpy', 'torch'})").groups
        print(group.reading.text)
        """
    )
    assert done.finish() == (0, "2\n[]\n", "")


def test_long_lists_are_compared_by_element(trainers: ActorMesh[Trainer]) -> None:
    found = diff(trainers, "[self.loss if at == 70000 else 0.25 for at in range(100000)]")
    (row,) = found.differences
    assert row.contrast is not None
    assert (row.contrast.index, row.contrast.ours, row.contrast.theirs) == ((70000,), "0.7", "0.5")
    assert row.contrast.most == pytest.approx(0.2)


@pytest.fixture
def nets(mesh: ProcMesh) -> ActorMesh[Trainer]:
    """The same actors, with a module."""
    pytest.importorskip("torch")
    actors = mesh.spawn("trainer", Trainer, torch=True)
    actors.initialized.get(PATIENCE)
    return actors


@pytest.mark.torch
def test_of_modules_only_differences_are_reported_with_the_first_index_and_the_size(nets: ActorMesh[Trainer]) -> None:
    found = diff(nets, "self.net")
    assert [each.ranks for each in found.groups] == [(3,), (0, 1, 2)]
    assert "6 parameters and buffers, 114,110 elements" in lines(found)[1]
    assert [each.path for each in found.differences] == ["1.weight", "2.bias"]
    weight, bias = (each.contrast for each in found.differences)
    assert weight is not None
    assert bias is not None
    assert (weight.index, weight.ours, weight.count) == ((17, 3), "1.5", 1)
    assert weight.most == pytest.approx(1.5 - float(weight.theirs), rel=1e-4)
    assert (bias.index, bias.ours, bias.count, bias.most) == ((9,), "nan", 1, None)
    assert all(each.is_complete for each in found.differences)
    assert "2 of 6 arrays differ, compared with [0-2]" in lines(found)
    assert any(line.startswith("2.bias") and line.endswith("1 NaN") for line in lines(found))


@pytest.mark.torch
def test_gradients_of_a_module(nets: ActorMesh[Trainer]) -> None:
    diff(nets, "self.net[2](__import__('torch').ones(1000) * self.rank).sum().backward()")
    found = diff(nets, "self.net[2]", grads=True)
    assert {each.path for each in found.differences} == {"weight"}
    assert len(found.groups) == 4


@pytest.mark.torch
def test_pull_moves_a_value(nets: ActorMesh[Trainer]) -> None:
    torch = pytest.importorskip("torch")
    weight = pull(nets, "self.net[1].weight", rank=3)
    assert tuple(weight.shape) == (1000, 100)
    assert float(weight[17, 3]) == 1.5
    assert not weight.requires_grad
    assert isinstance(pull(nets, "self.net", rank=0), torch.nn.Sequential)
    assert pull(nets, "self.config") == {"lr": 0.1, "layers": [1, 2, 3]}
    with pytest.raises(RuntimeError, match="rank 2 .*AttributeError: 'Trainer' object has no attribute 'nothing'"):
        pull(nets, "self.nothing", rank=2)


@pytest.fixture
def stopped(mesh: ProcMesh, trainers: ActorMesh[Trainer]) -> Iterator[ActorMesh[Trainer]]:
    """The actors, stopped in `step`."""
    debugger = get_debugger()
    future = trainers.step.call(10)
    stops = debugger.wait(lambda stops: len(stops) == 4, PATIENCE)
    assert len(stops) == 4
    yield trainers
    debugger.resume(debugger.stops())
    assert list(future.get(PATIENCE).values()) == [5.0, 5.0, 5.0, pytest.approx(7.7)]


def test_stopped_frames_are_looked_into(mesh: ProcMesh, stopped: ActorMesh[Trainer]) -> None:
    found = diff(mesh, "[here + amount for _ in range(2)]")
    assert [(each.ranks, each.reading.text) for each in found.groups] == [((3,), "[21, 21]"), ((0, 1, 2), "[20, 20]")]
    assert found.where.startswith("in the stopped frame trainers.py:")
    assert found.where.endswith(" in Trainer.step")
    assert pull(mesh, "here", rank=3) == 11
    with pytest.raises(ValueError, match="rank 0 has 1 frames of user code, so none that is 1 up"):
        diff(mesh, "here", up=1)
    failed = diff(mesh, "nothing").failed
    assert [(each.why, each.ranks) for each in failed] == [("NameError: name 'nothing' is not defined", (0, 1, 2, 3))]
    wait_until(lambda: nothing_is_kept(mesh), "the ranks have let go of the values")


def test_actors_and_namespaces_can_be_asked_while_ranks_are_stopped(
    mesh: ProcMesh, stopped: ActorMesh[Trainer]
) -> None:
    assert diff(stopped, "self.rank").where == "on the actors trainer"
    assert diff(mesh, "self.rank", in_frame=False).where == "on actor trainer"
    assert [each.ranks for each in diff(stopped, "here", in_frame=True).groups] == [(3,), (0, 1, 2)]


def test_ranks_that_run_are_left_out_while_others_are_stopped(mesh: ProcMesh, stopped: ActorMesh[Trainer]) -> None:
    debugger = get_debugger()
    debugger.resume([at for at in debugger.stops() if at.rank < 2])
    debugger.wait(lambda stops: len(stops) == 2, PATIENCE)
    found = diff(mesh, "here")
    assert [each.ranks for each in found.groups] == [(2,), (3,)]
    assert found.running == (0, 1)
    assert lines(found)[-1].split() == ["[0-1]", "not", "stopped,", "left", "out"]
    assert diff(mesh, "self.rank", ranks=[0, 1]).where == "on actor trainer"
