"""What tools tell of tensors on meshes: costs by line, the operation that made a NaN, memory, pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_kernel import tensor as tensors
from monarch_kernel.debug import diff
from monarch_kernel.display.quantities import source_line
from monarch_kernel.distributed import Mesh, distribute
from monarch_kernel.runtime.tensor.rank.held import TensorPart
from monarch_kernel.tensor import (
    NonFiniteError,
    TensorPicture,
    clear_plans,
    explain,
    inspect,
    memory,
    remote,
    watch_nan,
)
from tests.tensor.test_operations import engine


def line_of(plan: Any, what: str) -> Any:
    """The line of a plan whose source has this text."""
    return next(each for each in plan.lines if what in source_line(each.file, each.line))


# -- costs by line ----------------------------------------------------------------------------------


def test_a_plan_counts_waits_and_bytes_by_line(four: Any) -> None:
    with four.activate():
        inspect(torch.ones(1))  # not in the block
        with explain() as plan:
            x = torch.tensor([3.0, -1.0, 0.0])
            for _ in range(3):
                x = x + 1
            if x.sum() > 0:
                kept = x[x > 2]
            inspect({"x": x, "kept": kept})
    assert line_of(plan, "x = x + 1").operations == 3
    assert line_of(plan, "torch.tensor").sent == 12
    assert dict(line_of(plan, "if x.sum()").synchronisations) == {"item()": 1}
    assert list(line_of(plan, "kept = x[").synchronisations) == ["index.Tensor"]
    assert line_of(plan, "inspect({").fetched == 12 + 8
    assert plan.synchronisations == 3 and plan.redistributions == plan.fallbacks == 0


def test_a_plan_shows_itself_as_text_and_html(four: Any) -> None:
    clear_plans()
    with four.activate():
        assert float(torch.ones(2).sum()) == 2.0
    plan = explain()
    text = repr(plan)
    assert "wait for values" in text and "assert float(torch.ones(2).sum()) == 2.0" in text
    assert f"test_tools.py:{plan.lines[0].line}" in text
    assert "<table>" in plan._repr_html_()
    clear_plans()
    assert repr(explain()) == "No operation on a mesh has cost anything yet."


# -- the first NaN ----------------------------------------------------------------------------------


def test_a_watch_stops_at_the_line_that_made_the_first_nan(four: Any) -> None:
    with four.activate():
        x = torch.ones(3) * (2 - four.rank_tensor("gpus"))  # 2, 1, 0, -1
        with watch_nan(), pytest.raises(NonFiniteError) as stopped:
            y = x * 2
            y.log_()  # -inf on rank 2, nan on rank 3
            y = y + 1
        assert stopped.value.rank in (2, 3)
        assert "y.log_()" in stopped.value.controller_frames
        assert "aten::log_ made 3 " in stopped.value.worker_error_string
        assert "float32 [3], written in place" in stopped.value.worker_error_string
        assert torch.isnan(inspect(y, gpus=3)).all()  # no longer watched, and y is what it was


def test_a_watch_may_tell_at_the_next_fetch_and_at_the_end(four: Any) -> None:
    with four.activate():
        watch = watch_nan(inf=False, at_once=False)
        try:
            x = torch.zeros(2).log()  # Inf does not count here
            y = x - x
            z = y.sum() * 3
            with pytest.raises(NonFiniteError) as told:
                inspect(z)
            assert "y = x - x" in told.value.controller_frames
            assert torch.isnan(inspect(z))  # it is told once
        finally:
            watch.stop()
        with (
            pytest.raises(NonFiniteError, match=r"aten::log made 2 Inf.*\nof float32 \[2\] from 0 to 0"),
            watch_nan(at_once=False),
        ):
            torch.zeros(2).log()


def test_a_watch_blames_no_masks_and_no_passing_on(four: Any) -> None:
    with four.activate():
        bad = torch.full((2, 2), float("nan"))
        with watch_nan():
            scores = torch.zeros(2, 2).masked_fill(torch.ones(2, 2).bool().triu(1), float("-inf"))
            assert inspect(scores.softmax(1)).tolist() == [[1.0, 0.0], [0.5, 0.5]]
            bad.mul_(2).sum()
            torch.empty(10_000)
            grown = torch.ones(2)
            with pytest.raises(NonFiniteError, match="2 Inf"):
                grown.div_(0)


def test_a_watch_sees_the_steps_of_a_replay(four: Any) -> None:
    @tensors.compile
    def step(t: Any) -> Any:
        u = t * 2
        u = u.sqrt()
        return u + 1

    with four.activate():
        for _ in range(3):
            inspect(step(torch.ones(2)))
        assert step.replayed
        with watch_nan(), pytest.raises(NonFiniteError) as stopped:
            step(-torch.ones(2))
    assert "u = u.sqrt()" in stopped.value.controller_frames
    assert "aten::sqrt made 2 NaN" in stopped.value.worker_error_string


def test_without_a_watch_programs_are_the_compiled_ones(four: Any) -> None:
    kinds = remote(lambda: None)
    with four.activate():
        with watch_nan():
            kinds()
        mesh = engine(four).target
        found = engine(four).ask(mesh, _programs)
    assert found == [("dict", True)] * 4


def _programs() -> tuple[str, bool]:
    from monarch_kernel.runtime.tensor.rank.current_executor import here

    worker = here()
    return type(worker.programs).__name__, worker.nan_check is None


# -- memory -----------------------------------------------------------------------------------------


def test_memory_is_told_by_line_and_by_what_holds_it(four: Any) -> None:
    with four.activate():
        weights = torch.zeros(1000, requires_grad=True)
        kept = [torch.zeros(500) for _ in range(2)]
        view = kept[0][:10]
        loss = (weights * 2).pow(2).sum()
    found = memory([weights, kept, view, loss], names={"model": {"w": weights}, "kept": kept, "view": view})
    lines = {source_line(each.file, each.line).split(" = ")[0]: each for each in found.lines}
    assert lines["weights"].nbytes == (4000,) * 4 and lines["weights"].holders == ("model['w']",)
    assert lines["kept"].nbytes == (4000,) * 4 and lines["kept"].tensors == 2
    assert lines["view"].nbytes == (0,) * 4  # it shares the memory of kept[0]
    assert lines["loss"].tensors == 1
    everything = memory(names={})
    saved = next(each for each in everything.lines if each.line == lines["loss"].line)
    assert saved.holders == ("autograd, or an object without a name",) and saved.tensors >= 2
    assert "weights = torch.zeros(1000" in repr(found)
    with pytest.raises(TypeError, match="no tensor of a mesh"):
        memory([1])


# -- pictures ---------------------------------------------------------------------------------------


def test_a_handle_shows_itself_without_asking_ranks(four: Any) -> None:
    from monarch_kernel.debugger.rank.stopping.expressions import short

    with four.activate(), explain() as plan:
        x = torch.ones(2, 2, requires_grad=True)
        assert short({"x": x}) == "{'x': Tensor([2, 2], float32, mesh=four(gpus=4), requires_grad=True)}"
        assert "Tensor([2, 2], float32" in x._repr_html_()
    assert not plan.synchronisations


def test_the_picture_of_a_tensor_that_every_rank_has(four: Any) -> None:
    with four.split(gpus=("rows", "columns"), rows=2).activate():
        x = torch.ones(6, 4)
    text = repr(x.visualize())
    assert text.split("\n")[0] == (
        "[6, 4] float32 on four (rows=2, columns=2), a separate tensor on every rank: 96 bytes on a rank, cpu"
    )
    assert [line.split() for line in text.split("\n")[1:]] == [
        ["columns=0", "columns=1"],
        ["rows=0", "[0:6,", "0:4]", "[0:6,", "0:4]"],
        ["rows=1", "[0:6,", "0:4]", "[0:6,", "0:4]"],
    ]
    assert x.visualize()._repr_html_().count("<svg") == 4


def test_the_picture_of_a_tensor_in_uneven_parts() -> None:
    parts = tuple(
        TensorPart((rows, 4), (first, 0), ("Shard(0)", "Partial('sum')"), True, rows * 16, "cpu")
        for first, rows in ((0, 3), (0, 3), (3, 2), (3, 2), (5, 0), (5, 0))
    )
    picture = TensorPicture((5, 4), "float32", "m", ("dp", "mp"), (3, 2), parts)
    lines = repr(picture).split("\n")
    assert lines[0] == "[5, 4] float32 on m (dp=3, mp=2), [Shard(0), Partial('sum')]: up to 48 bytes, cpu"
    assert lines[3].split() == ["dp=1", *("[3:5,", "0:4]", "(a", "term)") * 2]
    assert lines[4].split() == ["dp=2", "nothing", "nothing"]
    html = picture._repr_html_()
    assert html.count("fill-opacity") == 4  # the drawings of ranks with nothing are empty
    assert "currentColor" in html  # outlines have the colour of the page


def test_tools_know_tensors_in_parts(four: Any) -> None:
    grid = Mesh.of(four, mesh_dim_names=("dp", "mp"), shape=(2, 2))
    t = distribute(torch.arange(15.0).reshape(5, 3), grid, sharding_spec=["dp", "mp"])
    assert "sharded, mesh=four(dp=2, mp=2)" in t._short_form_()
    picture = t.visualize()
    assert picture.placements == ("Shard(0)", "Shard(1)")
    assert [part.shape for part in picture.parts] == [(3, 2), (3, 1), (2, 2), (2, 1)]
    assert "[Shard(0), Shard(1)]" in t._short_form_()  # known since
    found = diff(t, "t")
    assert not found.failed and not found.differences  # different parts are not compared
    with explain() as plan:
        t.redistribute([None, None])
    assert plan.redistributions == 1 and plan.lines[-1].moved
    with watch_nan(), pytest.raises(NonFiniteError, match="of this rank's part") as stopped:
        (t - 3).log()
    assert "(t - 3).log()" in stopped.value.controller_frames
    assert max(next(each for each in memory([t], names={"t": t}).lines).nbytes) == 24
