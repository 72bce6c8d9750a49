"""Parts of sharded tensors are views as in torch: what is written through one is in the source and its siblings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.distributed import Mesh, distribute, module_to_mesh

#: Each gives parts of a matrix with four columns.
VIEWS: dict[str, Callable[[Any], Sequence[Any]]] = {
    "chunk rows": lambda x: x.chunk(3, 0),
    "chunk columns": lambda x: x.chunk(2, 1),
    "split": lambda x: x.split(2),
    "split by sizes": lambda x: x.split([1, x.shape[0] - 1]),
    "split columns": lambda x: x.split([1, 3], 1),
    "tensor_split": lambda x: x.tensor_split(2),
    "vsplit": lambda x: x.vsplit([2]),
    "hsplit": lambda x: x.hsplit(2),
    "unbind rows": lambda x: x.unbind(0),
    "unbind columns": lambda x: x.unbind(1),
    "row": lambda x: [x[1]],
    "last row": lambda x: [x[-1]],
    "rows": lambda x: [x[1:4]],
    "every second row": lambda x: [x[::2]],
    "column": lambda x: [x[:, 1]],
    "columns": lambda x: [x[:, 1:3]],
    "narrow": lambda x: [x.narrow(0, 1, 3)],
    "select": lambda x: [x.select(0, 2)],
    "diagonal": lambda x: [x.diagonal()],
    "t": lambda x: [x.t()],
    "permute": lambda x: [x.permute(1, 0)],
    "movedim": lambda x: [x.movedim(0, 1)],
    "view flat": lambda x: [x.view(-1)],
    "view in three dimensions": lambda x: [x.view(x.shape[0], 2, 2)],
    "unflatten": lambda x: [x.unflatten(1, (2, 2))],
    "unflatten rows": lambda x: [x.unflatten(0, (-1, 1))],
    "unsqueeze": lambda x: [x.unsqueeze(0)],
    "squeeze": lambda x: [x.unsqueeze(1).squeeze(1)],
    "expand": lambda x: [x.unsqueeze(0).expand(1, *x.shape)],
    "as_strided": lambda x: [x.as_strided((2, 3), (4, 1), 1)],
    "unfold": lambda x: [x.unfold(0, 2, 2)],
    "detach": lambda x: [x.detach()],
    "new dimension": lambda x: [x[None, 1]],
    "chunks of a view": lambda x: x.t().chunk(2, 0),
    "rows of chunks": lambda x: [part[0] for part in x.chunk(3, 0)],
    "chunks and their view": lambda x: [*x.split(2), x.t()],
    "two families": lambda x: [*x.split(2), *x.split(2, 1)],
}
#: Rows, and how they and the columns are cut; some do not divide.
CASES = [
    (5, ["data", None]),
    (6, [None, "model"]),
    (5, ["data", "model"]),
    (6, [("data", "model"), None]),
    (5, [None, None]),
]


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Iterator[Mesh]:
    with Mesh((2, 2), ("data", "model")) as made:
        yield made


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.parametrize("rows, layout", CASES, ids=str)
def test_writes_reach_the_source_and_all_other_parts(mesh: Mesh, rows: int, layout: Any) -> None:
    wrong: list[str] = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # some gather the whole, and say so
        for name, parts in VIEWS.items():
            begin = torch.arange(rows * 4.0).view(rows, 4)
            count = len(parts(begin))
            for written in {0, count - 1}:
                here = begin.clone()
                there = distribute(begin, mesh, layout)
                ours, theirs = parts(here), parts(there)
                for x in (ours[written], theirs[written]):
                    x.add_(100)
                seen = [torch.equal(whole(there), here)]
                seen += [torch.equal(whole(a), b) for a, b in zip(theirs, ours, strict=True)]
                for x in (here, there):
                    x.mul_(2)
                seen += [torch.equal(whole(a), b) for a, b in zip(theirs, ours, strict=True)]
                if not all(seen):
                    wrong.append(f"{name}, written through part {written}: {seen}")
    assert not wrong


@pytest.mark.parametrize("plan", ["shard", None])
def test_a_fused_weight_is_initialized_part_by_part(mesh: Mesh, plan: Any) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = module_to_mesh(nn.Linear(12, 12), mesh, plan)
        for number, part in enumerate(model.weight.chunk(3, 0)):
            nn.init.constant_(part, float(number))
        for number, part in enumerate(model.weight.split([4, 4, 4], 1)):
            part.add_(10 * number)
    expected = torch.arange(3.0).repeat_interleave(4).view(12, 1) + 10 * torch.arange(3.0).repeat_interleave(4)
    assert torch.equal(whole(model.weight.detach()), expected)


@pytest.mark.filterwarnings("ignore:.*has no rule for the layout")
@pytest.mark.parametrize("batch", range(1, 9))
def test_a_batch_that_two_dimensions_of_the_mesh_cut(mesh: Mesh, batch: int) -> None:
    torch.manual_seed(batch)
    x, weight = torch.randn(batch, 8, 4), torch.randn(6, 4)
    cut = distribute(x, mesh, [("data", "model"), None, None])
    found = nn.functional.linear(cut, distribute(weight, mesh, [None, None]))
    torch.testing.assert_close(whole(found), nn.functional.linear(x, weight))
    assert torch.equal(whole(cut.view(-1)), x.view(-1))
    assert torch.equal(whole(cut.view(batch * 2, 4, 4)), x.view(batch * 2, 4, 4))
