"""Sharded tensors feel local: layouts, values here, control flow, errors, randomness, training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from monarch_kernel.distributed import FallbackWarning, Mesh, distribute
from monarch_kernel.tensor import MixedTensorsError, RemoteException


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Iterator[Mesh]:
    """Two by two ranks."""
    with Mesh(shape=(2, 2), mesh_dim_names=("data", "model")) as made:
        yield made


@pytest.fixture
def table() -> torch.Tensor:
    """Seven by five, which no number of ranks divides."""
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(1))


# -- meshes -------------------------------------------------------------------------------------------


def test_mesh_tells_its_shape(mesh: Mesh) -> None:
    assert (mesh.size(), mesh.size("data"), mesh.size(-1), mesh.ndim) == (4, 2, 2, 2)
    assert mesh.shape == (2, 2) and mesh.mesh_dim_names == ("data", "model")
    assert repr(mesh) == "Mesh(data=2, model=2)"
    with pytest.raises(KeyError, match="'data', 'model'"):
        mesh.size("pipeline")
    with pytest.raises(IndexError, match="has 2"):
        mesh.size(2)


def test_mesh_of_processes_is_one_object_for_one_shape(mesh: Mesh) -> None:
    line = Mesh.of(mesh.procs, ("x",), (4,))
    assert line.shape == (4,) and Mesh.of(line.procs) is line and Mesh.of(mesh.procs) is mesh
    with pytest.raises(ValueError, match="6 ranks, and .* has 4"):
        Mesh.of(mesh.procs, ("a", "b"), (2, 3))


@pytest.mark.parametrize(
    ("shape", "names", "error"),
    [((0,), None, "at least 1"), ((), None, "at least one dimension"), ((2, 2), ("a", "a"), "different names")],
)
def test_impossible_meshes_are_refused_at_once(shape: Any, names: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Mesh(shape, names)


# -- layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        (None, (Replicate(), Replicate())),
        (["data", None], (Shard(0), Replicate())),
        (["model"], (Replicate(), Shard(0))),
        (["model", "data"], (Shard(1), Shard(0))),
        ([("data", "model")], (Shard(0), Shard(0))),
        ([Shard(-1), Replicate()], (Shard(1), Replicate())),
        ([Partial(), Shard(0)], (Partial(), Shard(0))),
    ],
)
def test_layouts_by_name_and_by_placement(mesh: Mesh, table: torch.Tensor, spec: Any, placements: Any) -> None:
    t = distribute(table, mesh, sharding_spec=spec)
    assert t.placements == placements
    assert t.shape == table.shape and t.device_mesh is mesh
    torch.testing.assert_close(t.full_tensor(), table)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (["pipeline"], ValueError, "no dimension 'pipeline': it has data, model"),
        (["data", "data"], ValueError, "twice"),
        ([None, None, "data"], IndexError, "2 dimensions"),
        ([Shard(2), Replicate()], IndexError, r"Shard\(2\)"),
        ([Shard(0)], ValueError, "one for each"),
        (3, TypeError, "sharding_spec=3"),
    ],
)
def test_impossible_layouts_are_refused_at_once(
    mesh: Mesh, table: torch.Tensor, spec: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        distribute(table, mesh, spec)


def test_what_is_no_tensor_or_no_mesh_is_refused(mesh: Mesh, table: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="list is no tensor"):
        distribute([1.0], mesh)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str is no mesh"):
        distribute(table, "mesh")


def test_redistributed_tensor_is_the_same(mesh: Mesh, table: torch.Tensor) -> None:
    rows = distribute(table, mesh, ["data", None])
    for spec in (None, ["model", "data"], [Replicate(), Shard(1)]):
        other = rows.redistribute(spec)
        torch.testing.assert_close(other.full_tensor(), table)
    assert rows.redistribute(placements=[Shard(1), Shard(0)]).placements == (Shard(1), Shard(0))


def test_parts_are_where_the_layout_says(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data", "model"])
    torch.testing.assert_close(t.to_local(), table[:4, :3])
    torch.testing.assert_close(t.to_local(data=1, model=1), table[4:, 3:])
    with pytest.raises(IndexError, match="data=2"):
        t.to_local(data=2)


def test_printing_tells_shape_dtype_and_layout(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data"])
    assert repr(t) == "Tensor([7, 5], float32, [Shard(0), Replicate()], mesh=mesh(data=2, model=2))"
    shown = distribute(torch.arange(3), mesh).preview(2)
    assert shown.endswith("\n[0, 1, ...]") and shown.startswith("Tensor([3], int64")
    assert f"{t.sum():.3f}" == f"{table.sum():.3f}"


# -- values here --------------------------------------------------------------------------------------


def test_values_come_by_one_synchronisation_each_which_is_counted(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data", "model"])
    first = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    assert t.sum().item() == pytest.approx(table.sum().item(), abs=1e-4)
    assert bool((t > -100).all()) and not bool((t > 100).any())
    assert t.tolist() == table.tolist()
    last = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    counted: dict[str, int] = {}
    for (file, line, _), cost in mesh.costs().lines.items():
        if file == __file__ and first <= line <= last:
            for why, count in cost.synchronisations.items():
                counted[why] = counted.get(why, 0) + count
    assert counted == {"item()": 3, "tolist()": 1}


def test_operations_whose_shapes_depend_on_values(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data", "model"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert t.nonzero().shape == (35, 2)
        torch.testing.assert_close(t[t > 0].full_tensor(), table[table > 0])
        torch.testing.assert_close((t > 0).nonzero().full_tensor(), (table > 0).nonzero())
        numbers = torch.tensor([3, 1, 3, 2, 1])
        assert torch.unique(distribute(numbers, mesh, ["data"])).tolist() == [1, 2, 3]
        assert torch.equal(t, distribute(table, mesh)) and not torch.equal(t, t + 1)


def test_control_flow_follows_values(mesh: Mesh) -> None:
    x = distribute(torch.full((6,), 100.0), mesh, ["data"])
    steps = 0
    while x.norm() > 10:
        x = x / 2
        steps += 1
    assert steps == 5


def test_errors_of_shapes_dtypes_and_dims_raise_at_once(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data"])
    with pytest.raises(RuntimeError, match="broadcast"):
        _ = t + distribute(torch.ones(4), mesh)
    with pytest.raises(RuntimeError, match="mat1|shapes|same reduction dim"):
        _ = t @ t
    with pytest.raises(IndexError, match="Dimension out of range"):
        t.sum(2)
    with pytest.raises(RuntimeError, match="dtype|scalar type"):
        _ = t @ t.T.long()


# -- mixing -------------------------------------------------------------------------------------------


def test_small_local_tensors_and_numbers_are_taken_along(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data", "model"])
    for other in (2, 0.5, torch.tensor(3.0), torch.arange(5.0), torch.ones(7, 1)):
        torch.testing.assert_close((t * other).full_tensor(), table * other)
        torch.testing.assert_close((other - t).full_tensor(), other - table)


def test_mixing_that_would_be_a_mistake_says_what_to_write(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data"])
    with pytest.raises(MixedTensorsError, match="(?s)its gradient would be lost.*distribute"):
        _ = t * torch.ones(5, requires_grad=True)
    with pytest.raises(MixedTensorsError, match=r"full_tensor\(\)"):
        table.clone().add_(t)
    large = distribute(torch.ones(5000), mesh)
    with pytest.raises(MixedTensorsError, match="(?s)too large.*sharding_spec"):
        _ = large + torch.ones(5000)


def test_gradients_pass_to_the_mesh_and_back(mesh: Mesh, table: torch.Tensor) -> None:
    w = torch.ones(5, requires_grad=True)
    t = distribute(table, mesh, ["data", "model"])
    (t * distribute(w * 2, mesh, ["model"])).redistribute(None).full_tensor().pow(2).sum().backward()
    expected = torch.ones(5, requires_grad=True)
    (table * (expected * 2)).pow(2).sum().backward()
    torch.testing.assert_close(w.grad, expected.grad)


# -- random numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, ["data", "model"], [("data", "model")]])
def test_random_numbers_are_those_of_one_device(mesh: Mesh, table: torch.Tensor, spec: Any) -> None:
    def draw(x: Any) -> list[Any]:
        torch.manual_seed(7)
        weight = torch.empty(3)
        nn.init.normal_(weight)  # what is drawn here comes first
        dropped = F.dropout(x, 0.4)
        noise = torch.randn_like(x), torch.rand_like(x), torch.randint_like(x, 9)
        grown = nn.init.xavier_uniform_(x.clone()), nn.init.trunc_normal_(x.clone())
        return [weight, dropped, *noise, *grown, x.bernoulli(0.5)]

    expected = draw(table)
    for got, wanted in zip(draw(distribute(table, mesh, spec)), expected, strict=True):
        torch.testing.assert_close(got if type(got) is torch.Tensor else got.full_tensor(), wanted)


def test_the_same_seed_again_gives_the_same_numbers(mesh: Mesh) -> None:
    x = distribute(torch.zeros(6), mesh, ["data"])
    drawn: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append((torch.randn_like(x).tolist(), torch.randn_like(x).tolist(), torch.randn(2).tolist()))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


# -- operations without a rule --------------------------------------------------------------------------


def test_fallback_is_said_once_at_the_programs_line_and_counted(mesh: Mesh, table: torch.Tensor) -> None:
    t = distribute(table, mesh, ["data", "model"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        q = torch.linalg.qr(t).R
        torch.testing.assert_close(q.full_tensor(), torch.linalg.qr(table).R)
        torch.linalg.qr(t + 1).R.full_tensor()
    said = [w for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(said) == 1 and "aten::linalg_qr.default" in str(said[0].message)
    assert (said[0].filename, said[0].lineno) == (__file__, line)
    lines = mesh.costs().lines
    assert lines[__file__, line, test_fallback_is_said_once_at_the_programs_line_and_counted.__name__].fallbacks == {
        "aten::linalg_qr.default": 1
    }


def test_strict_mesh_refuses_what_has_no_rule(mesh: Mesh, table: torch.Tensor) -> None:
    strict = Mesh.of(mesh.procs, ("data", "model"), (2, 2), strict=True)
    try:
        t = distribute(table, strict, ["data"])
        with pytest.raises(RemoteException, match=r"linalg_qr.*no rule(.|\n)*Redistribute"):
            torch.linalg.qr(t)
        torch.testing.assert_close((t @ t.T).full_tensor(), table @ table.T)
    finally:
        Mesh.of(mesh.procs, strict=False)


# -- programs -----------------------------------------------------------------------------------------


def test_execute_gives_the_batch_in_parts_and_raises_there(mesh: Mesh, table: torch.Tensor) -> None:
    def step(batch: Any) -> Any:
        assert batch["x"].placements == (Shard(0), Replicate()) and batch["name"] == "first"
        return batch["x"].sum()

    assert mesh.execute(step, {"x": table, "name": "first"}).item() == pytest.approx(table.sum().item(), abs=1e-4)
    with pytest.raises(RemoteException, match="out of range"):
        mesh.execute(lambda i: F.embedding(i, torch.ones(4, 2)), torch.tensor([0, 1, 2, 9]), None)


@pytest.mark.parametrize(("first", "second"), [(None, None), (["model", None], [None, "model"]), (["data"], ["data"])])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_as_in_one_process(mesh: Mesh, first: Any, second: Any, optimizer: Any) -> None:
    def losses(place: Any, place_data: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Dropout(0.2), nn.Linear(10, 3))
        x, y = torch.randn(7, 6), torch.randn(7, 3)
        for layer, spec in ((model[0], first), (model[3], second)):
            for name, p in list(layer.named_parameters()):
                layer._parameters[name] = nn.Parameter(place(p.detach(), spec if p.dim() == 2 else None))
        x, y = place_data(x), place_data(y)
        stepper = optimizer(model.parameters(), lr=0.05)
        found: list[Any] = []
        for _ in range(4):
            stepper.zero_grad()
            loss = nn.MSELoss()(model(x), y)
            loss.backward()
            stepper.step()
            found.append(loss)
        return [loss.item() for loss in found]

    expected = losses(lambda t, _: t, lambda t: t)
    got = losses(lambda t, spec: distribute(t, mesh, spec), lambda t: distribute(t, mesh, ["data"]))
    assert got == pytest.approx(expected, abs=1e-6)
