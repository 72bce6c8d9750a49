"""torch's layers on a mesh, forward and backward, against one process: by `activate()`, and on tensors cut by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.distributed import Mesh, distribute, module_to_mesh
from monarch_kernel.tensor import inspect

Make = Callable[[], nn.Module]

#: What makes the layer, the shape of its input, and which dimension of it is the batch.
LAYERS: dict[str, tuple[Make, tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6), 0),
    "bilinear": (lambda: _Twice(nn.Bilinear(6, 6, 3)), (4, 6), 0),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (4, 3, 9), 0),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2), (4, 3, 9, 9), 0),
    "conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (4, 4, 9, 9), 0),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 4, 4, 4), 0),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (4, 3, 5, 5), 0),
    "lstm": (lambda: _First(nn.LSTM(6, 5)), (7, 4, 6), 1),
    "lstm, deep": (lambda: _First(nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True)), (4, 7, 6), 0),
    "gru": (lambda: _First(nn.GRU(6, 5)), (7, 4, 6), 1),
    "rnn": (lambda: _First(nn.RNN(6, 5, nonlinearity="relu")), (7, 4, 6), 1),
    "lstm cell": (lambda: _First(nn.LSTMCell(6, 5)), (4, 6), 0),
    "gru cell": (lambda: nn.GRUCell(6, 5), (4, 6), 0),
    "batch norm": (lambda: nn.BatchNorm1d(6), (4, 6), 0),
    "batch norm of images": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5), 0),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 3, 6), 0),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 4, 5), 0),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (4, 3, 5, 5), 0),
    "rms norm": (lambda: nn.RMSNorm(6), (4, 3, 6), 0),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (4, 6), 0),
    "attention": (lambda: _Itself(nn.MultiheadAttention(6, 2, batch_first=True)), (4, 5, 6), 0),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), (4, 5, 6), 0),
    "max pool": (lambda: nn.MaxPool2d(2), (4, 3, 6, 6), 0),
    "average pool": (lambda: nn.AvgPool2d(3, stride=2, padding=1), (4, 3, 6, 6), 0),
    "adaptive pools": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2)), (4, 3, 7, 7), 0),
    "upsampled": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 3, 5, 5), 0),
    "padded": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.ReplicationPad2d(2)), (4, 3, 5, 5), 0),
    "shuffled": (lambda: nn.PixelShuffle(2), (4, 4, 3, 3), 0),
    "unfolded": (lambda: nn.Unfold(2), (4, 3, 5, 5), 0),
    "activations": (
        lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.PReLU(), nn.Softplus(), nn.Hardswish(), nn.GLU(), nn.Mish()),
        (4, 6),
        0,
    ),
    "softmax": (lambda: nn.Sequential(nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1)), (4, 6), 0),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 4))), (4, 3, 4), 0),
}


class _First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


class _Itself(_First):
    def forward(self, x: Any) -> Any:
        return self.layer(x, x, x)[0]


class _Twice(_First):
    def forward(self, x: Any) -> Any:
        return self.layer(x, x.sin())


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Any:
    with Mesh(shape=(2,), mesh_dim_names=("data",)) as mesh:
        yield mesh


def _expected(make: Make, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    layer, x = make(), given.clone().requires_grad_()
    y = layer(x)
    (y * y).sum().backward()
    return (y.detach(), x.grad, *(p.grad for p in layer.parameters()))  # type: ignore[return-value]


def _close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_activate(four: Any, name: str) -> None:
    make, shape, _ = LAYERS[name]
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _expected(make, given)
    with four.activate():
        torch.manual_seed(1)
        layer = make()
        torch.manual_seed(0)
        x = torch.randn(shape).requires_grad_()
        y = layer(x)
        (y * y).sum().backward()
        found = [inspect(t.detach()) for t in (y, x.grad, *(p.grad for p in layer.parameters()))]
    _close(found, expected)


@pytest.mark.filterwarnings("ignore::monarch_kernel.runtime.tensor.sharded.controller.sharded_world.FallbackWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_tensors_that_are_cut(mesh: Mesh, name: str) -> None:
    make, shape, batch = LAYERS[name]
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _expected(make, given)
    torch.manual_seed(1)
    layer = module_to_mesh(make(), mesh)
    x = distribute(given.clone(), mesh, ["data" if d == batch else None for d in range(len(shape))]).requires_grad_()
    y = layer(x)
    (y * y).sum().backward()
    _close([t.full_tensor().detach() for t in (y, x.grad, *(p.grad for p in layer.parameters()))], expected)
