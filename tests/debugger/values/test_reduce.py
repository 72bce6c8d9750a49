"""Values taken apart: what counts as equal, and what is said about it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
from collections import OrderedDict, deque, namedtuple
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debugger.model.readings import Leaf, Reading
from monarch_kernel.debugger.rank.values import reduce
from monarch_kernel.debugger.rank.values.blocks import Deadline, TimeLimitError
from monarch_kernel.debugger.rank.values.probe import on_cpu, sendable
from monarch_kernel.debugger.rank.values.reduce import Parts, digest


def parts_of(value: Any, **options: Any) -> Parts:
    return Parts(value, Deadline(60), **options)


def read(value: Any, **options: Any) -> Reading:
    return parts_of(value, **options).reading()


def leaves(value: Any, **options: Any) -> dict[str, Leaf]:
    found = parts_of(value, **options).leaves
    named = {leaf.path: leaf for leaf in found}
    assert len(named) == len(found), "two parts have one path"
    return named


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float
    layers: list[int]


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a", "unset")

    def __init__(self, a: Any) -> None:
        self.a = a


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (0.1 + 0.2, 0.3),
        ("1", 1),
        ("a" * 999 + "b", "a" * 1000),
        (b"a", "a"),
        (None, False),
        ([1, 2], [2, 1]),
        ([1], (1, 2)),
        ([], {}),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (Config(0.1, [1]), Config(0.1, [2])),
        (Plain(a=1), Plain(a=2)),
        (Plain(a=1), Slotted(1)),
        (Slotted(1), Slotted(2)),
        (Pair(1, 2), Pair(1, 3)),
        (Fraction(1, 2), Fraction(1, 3)),
        (Path("a"), Path("b")),
        (len, print),
        (int, float),
        (lambda: 1, lambda: 2),
        (list(range(1000)), [*range(999), 0]),
        ([0.5] * 999 + [float("nan")], [0.5] * 1000),
        (2**100, 2**100 + 1),
        (deque([1]), deque([2])),
        ({1: 2}.items(), {1: 3}.items()),
        (functools.partial(print, 1), functools.partial(print, 2)),
    ],
)
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert read(one).digest != read(other).digest
    assert read(one).digest == read(one).digest
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        (OrderedDict(a=1), {"a": 1}),
        (OrderedDict(), {}),
        (float("nan"), float("nan")),
        (Plain(a=[1, "x"]), Plain(a=[1, "x"])),
        (object(), object()),
        (threading.Lock(), threading.Lock()),
        (Colour.RED, Colour(1)),
        (lambda x: x + 1, lambda x: x + 1),
        (Path("a/b"), Path("a") / "b"),
    ],
)
def test_what_is_equal_has_one_digest(one: Any, other: Any) -> None:
    assert read(one).digest == read(other).digest


def test_paths_are_those_one_would_write() -> None:
    value = {"net": Plain(layers=[Config(0.1, [1, 2])]), 3: Pair("a", None)}
    assert set(leaves(value)) == {
        *("['net'] (type)", "['net'].layers (length)", "['net'].layers[0] (type)", "['net'].layers[0].lr"),
        *("['net'].layers[0].layers (length)", "['net'].layers[0].layers[0]", "['net'].layers[0].layers[1]"),
        *("[3] (type)", "[3].x", "[3].y"),
    }


def test_small_values_are_shown_whole() -> None:
    assert read([1, {"a": (2, "x")}]).text == "[1, {'a': (2, 'x')}]"
    assert read("it").text == "'it'"
    assert read(Plain(a=1, b="x")).text == "Plain(a=1, b='x')"
    assert read(Config(0.1, [1])).text == "Config(lr=0.1, layers=[1])"
    assert read(0.1).text == "0.1"
    assert read(0.1).number == 0.1
    assert read({"a": list(range(100))}).text.startswith("dict of 1")
    assert "length 5,000" in read("x" * 5000).text
    assert len(read("x" * 5000).text) < 300


def test_what_holds_itself_ends() -> None:
    value: list[Any] = [1]
    value.append(value)
    again: list[Any] = [1]
    again.append(again)
    assert leaves(value)["[1]"].text == "refers back to the whole"
    assert read(value).digest == read(again).digest
    node = Plain(name="root")
    node.child = Plain(parent=node)
    assert leaves(node)[".child.parent"].text == "refers back to the whole"


def test_very_deep_values_end() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert "levels deep" in read(deep).unread[0]


def test_very_many_parts_are_cut_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "MOST_LEAVES", 100)
    found = read([str(at) for at in range(1000)])
    assert found.leaves == 100
    assert "only its first 100 parts were read" in found.sampled


def test_reading_ends_when_the_time_is_over() -> None:
    with pytest.raises(TimeLimitError):
        Parts([[1]], Deadline(-1))


class Hostile:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Grumpy(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("not now")


def test_what_cannot_be_read_is_said_and_the_rest_is_read() -> None:
    found = leaves([Grumpy(a=1), 5, Hostile()])
    assert found["[0]"].kind == "unread"
    assert "RuntimeError: not now" in found["[0]"].text
    assert found["[1]"].text == "5"
    assert "[2]" in {path.split(" ")[0].split(".")[0] for path in found}
    assert "not now" in read([Grumpy(a=1)]).unread[0]


def test_iterators_are_left_to_their_owner() -> None:
    numbers = iter([1, 2, 3])
    assert "compare list(...) of it" in read(numbers).unread[0]
    assert "compare list(...) of it" in read(at for at in numbers).unread[0]
    assert list(numbers) == [1, 2, 3]


def test_long_lists_of_numbers_are_arrays() -> None:
    (leaf,) = parts_of([0.5] * 100_000).leaves
    assert leaf.text == "list of 100,000 float: norm 158.114, min 0.5, max 0.5"
    one, other = parts_of([float(at) for at in range(100_000)]), parts_of([float(at) for at in range(100_000)])
    other.arrays[""]._numbers[70_000] = -1.0  # type: ignore[attr-defined]
    start = 2 * one.arrays[""].block
    found = other.arrays[""].contrast(start, one.arrays[""].piece(start, 10_000))
    assert (found.index, found.ours, found.theirs, found.count) == ((70_000,), "-1", "70000", 1)
    assert found.most == 70_001
    assert {leaf.kind for leaf in parts_of([True] * 100).leaves} == {"text"}


def test_numpy_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(120_000, dtype="f4").reshape(300, 400)
    assert read(values).digest == read(numpy.asfortranarray(values)).digest == read(values.astype(">f4")).digest
    assert read(values).digest != read(values.astype("f8")).digest
    other = values.copy()
    other[250, 3] = numpy.nan
    assert read(other).stats is not None
    assert read(other).text.endswith("NaN 1")
    one, two = parts_of(values).arrays[""], parts_of(other).arrays[""]
    start = one.block
    found = two.contrasts([(start, one.piece(start, 120_000 - start))])
    assert (found.index, found.ours, found.theirs, found.count, found.most) == ((250, 3), "nan", "100003", 1, None)
    assert read(numpy.float32(2)).number == 2
    assert read(numpy.array(["a", None], dtype=object)).digest != read(numpy.array(["a", 1], dtype=object)).digest
    assert read(numpy.ma.masked_equal([1, 2], 2)).digest != read(numpy.ma.masked_equal([1, 2], 1)).digest
    assert read(numpy.zeros(3, dtype=[("a", "i4"), ("b", "f8")])).digest
    assert read(numpy.array(["ab", "c"])).text.startswith("str64 [2]")
    assert read(numpy.zeros((0, 3))).text == "float64 [0, 3]"
    assert read(numpy.array([1 + 2j])).stats


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def net(torch: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))


@pytest.mark.torch
def test_modules_are_their_parameters_buffers_and_settings(torch: Any) -> None:
    found = leaves(net(torch))
    assert {"0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked", "2 (module)"} <= set(found)
    assert found["0.weight"].facts == "float32 [4, 3], needs grad"
    assert read(net(torch)).text.startswith("Sequential, 7 parameters and buffers, 33 elements: norm ")
    assert read(net(torch)).digest == read(net(torch)).digest
    assert set(leaves({"a": net(torch)})) >= {"['a'].0.weight", "['a'].2 (module)"}


@pytest.mark.torch
@pytest.mark.parametrize(
    "path, change",
    [
        ("0.weight", lambda n: n[0].weight.data[3, 1].add_(1)),
        ("1.running_var", lambda n: n[1].running_var.mul_(2)),
        ("2 (module)", lambda n: setattr(n[2], "p", 0.2)),
        ("1 (module)", lambda n: n[1].eval()),
        ("0.bias", lambda n: n[0].bias.requires_grad_(False)),
        ("0.bias", lambda n: setattr(n[0], "bias", None)),
    ],
)
def test_any_difference_of_modules_is_named(torch: Any, path: str, change: Any) -> None:
    one, other = net(torch), net(torch)
    with torch.no_grad():
        change(other)
    before, after = leaves(one), leaves(other)
    differing = {name for name in before if name not in after or before[name].digest != after[name].digest}
    assert path in differing
    assert differing <= {path, "(order of parameters)", "0 (module)"}


@pytest.mark.torch
def test_the_order_of_parameters_counts(torch: Any) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))

    one, other = leaves(Net("ab")), leaves(Net("ba"))
    assert {name for name in one if one[name].digest != other[name].digest} == {"(order of parameters)"}


@pytest.mark.torch
def test_gradients_instead_of_parameters(torch: Any) -> None:
    module = torch.nn.Linear(2, 1)
    assert leaves(module, grads=True)["weight"].text == "None"
    module(torch.ones(2)).sum().backward()
    assert leaves(module, grads=True)["weight"].facts == "float32 [1, 2]"


@pytest.mark.torch
def test_optimizers(torch: Any) -> None:
    def made(lr: float, grad: float) -> Any:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.full((3,), grad)
        optimizer = torch.optim.Adam([parameter], lr=lr)
        optimizer.step()
        return optimizer

    def differing(one: Any, other: Any) -> set[str]:
        before, after = leaves(one), leaves(other)
        return {name for name in before if before[name].digest != after[name].digest}

    assert differing(made(0.1, 1.0), made(0.1, 1.0)) == set()
    assert differing(made(0.1, 1.0), made(0.2, 1.0)) == {".param_groups[0]['lr']"}
    assert differing(made(0.1, 1.0), made(0.1, 2.0)) == {".state[0]['exp_avg']", ".state[0]['exp_avg_sq']"}


@pytest.mark.torch
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:torch.quantize:UserWarning",
    "ignore:The PyTorch API of nested:UserWarning",
)
def test_tensors_of_every_kind(torch: Any) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    kinds = {
        "meta": torch.ones(2, 2, device="meta"),
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([dense, dense]),
        "jagged": torch.nested.nested_tensor([dense, dense], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8),
        "lazy": torch.nn.UninitializedParameter(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.5),
        "generator": torch.Generator().manual_seed(1),
    }
    found = {name: read(value) for name, value in kinds.items()}
    assert not any(each.unread for each in found.values()), found
    assert len({each.digest for each in found.values()}) == len(kinds)
    assert found["meta"].text == "float32 [2, 2], meta, no data"
    assert found["scalar"].number == 3.5
    assert leaves(kinds["coo"])["(kind)"].text == "sparse_coo float32 [2, 2], elements stored: 2"
    assert read(dense.double().float().to_sparse()).digest == found["coo"].digest
    assert read((dense * 2).to_sparse()).digest != found["coo"].digest
    assert "scale 0.1" in found["quantized"].text
    assert "uninit" in found["lazy"].text.lower() or "not initialized" in found["lazy"].text


@pytest.mark.torch
def test_a_sharded_tensor_is_the_part_that_is_here(torch: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    distributed.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 3)
        (shard,) = parts_of(DTensor.from_local(local, mesh, [Shard(0)])).leaves
        (whole,) = parts_of(DTensor.from_local(local, mesh, [Replicate()])).leaves
        module = torch.nn.Linear(3, 4)
        module.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        reading = read(module)
    finally:
        distributed.destroy_process_group()
    assert shard.facts == "float32 [4, 3], DTensor(S(0))" or "Shard" in shard.facts
    assert "1 of 2" in shard.part
    assert shard.shape == (2, 3)
    assert whole.part == ""
    assert "1 of 2" in reading.part
    assert reading.elements == 10


@pytest.mark.torch
def test_where_a_tensor_needs_a_gradient_counts(torch: Any) -> None:
    assert read(torch.ones(2)).digest != read(torch.ones(2, requires_grad=True)).digest
    assert read(torch.nn.Parameter(torch.ones(2))).digest == read(torch.ones(2, requires_grad=True)).digest


@pytest.mark.torch
def test_tied_weights_are_read_once(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_kernel.debugger.rank.values.tensors import TensorArray

    count = 0
    original = TensorArray.read

    def counting(self: Any, deadline: Any) -> None:
        nonlocal count
        count += 1
        original(self, deadline)

    monkeypatch.setattr(TensorArray, "read", counting)
    shared = torch.ones(5)
    assert read([shared, shared]).digest == read([shared.clone(), shared.clone()]).digest
    assert count == 3


@pytest.mark.torch
def test_what_is_sent_keeps_its_values(torch: Any) -> None:
    value = {"a": torch.ones(2, requires_grad=True) * 2, "b": [torch.zeros(1)], "c": 3}
    sent = sendable(value)
    assert not sent["a"].requires_grad
    assert sent["a"].tolist() == [2.0, 2.0]
    assert sent["c"] == 3
    module = torch.nn.Linear(2, 2)
    assert sendable(module) is module


@pytest.mark.torch
def test_a_module_is_copied_to_the_cpu_with_what_it_shares(torch: Any) -> None:
    module = net(torch)
    module.tied = module[0].weight
    copied = on_cpu(module)
    assert copied.tied is copied[0].weight is not module[0].weight
    assert isinstance(copied.tied, torch.nn.Parameter)
    assert read(copied).digest == read(module).digest


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "c8", "i4", "u8", "?"])
def test_figures_of_numpy_arrays(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(-500, 500).clip(-2, 3).astype(kind)
    stats = read(values).stats
    assert stats is not None
    if kind[0] in "fc":
        assert stats.norm == pytest.approx(float(numpy.linalg.norm(values.astype("c16"))), rel=1e-5)
        huge = read((numpy.ones(1000, kind) * 1e3).astype(kind) * numpy.array(30, kind)).stats
        assert huge is not None
        assert huge.norm == pytest.approx(3e4 * 1000**0.5, rel=1e-3)
    if kind[0] != "c":
        assert (stats.low, stats.high) == (values.min().item(), values.max().item())


def test_norms_of_numpy_arrays_neither_overflow_nor_vanish() -> None:
    numpy = pytest.importorskip("numpy")
    for kind, size in (("f4", 1e30), ("f4", 1e-30), ("f8", 1e300), ("f8", 1e-300)):
        stats = read(numpy.full(10_000, size, kind)).stats
        assert stats is not None
        assert stats.norm == pytest.approx(size * 100, rel=1e-4)
    stats = read(numpy.array([numpy.nan, 3, numpy.inf, -4])).stats
    assert stats is not None
    assert (stats.norm, stats.low, stats.high, stats.nans, stats.infs) == (5, -4, 3, 1, 1)
