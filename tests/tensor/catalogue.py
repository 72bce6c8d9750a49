"""The operations of the correctness matrix: what each takes, at sizes that divide among the ranks or do not.

The oracle is always one process with plain tensors. An `Operation` is a function of tensors; its inputs are described
by letters (`"mn"`: a matrix of m × n), so that the same operation runs at even and at uneven sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it

#: Sizes by letter: all divide by 4 (and by 2 × 2); the others do not, and `m` and `n` leave one of four ranks with
#: nothing.
EVEN = {"m": 8, "n": 12, "k": 4, "b": 4, "c": 8, "s": 8, "h": 4, "d": 4, "1": 1}
UNEVEN = {"m": 5, "n": 6, "k": 6, "b": 3, "c": 5, "s": 6, "h": 3, "d": 5, "1": 1}
SIZES = {"even": EVEN, "uneven": UNEVEN}


@dataclass(frozen=True)
class Input:
    """One tensor: its sizes by letter, and what it holds.

    `kind`: normal, positive (0.5 to 1.5), unit (0.1 to 0.9), bool, a letter (integers below that size), or distinct
    (no two equal).
    """

    sizes: str
    kind: str = "normal"
    learned: bool = True  # whether its gradient is asked for

    def make(self, sizes: dict[str, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        shape = tuple(sizes[letter] for letter in self.sizes)
        if self.kind == "normal":
            return torch.randn(shape, generator=generator).to(dtype)
        if self.kind == "positive":
            return (0.5 + torch.rand(shape, generator=generator)).to(dtype)
        if self.kind == "unit":
            return (0.1 + 0.8 * torch.rand(shape, generator=generator)).to(dtype)
        if self.kind == "bool":
            return torch.rand(shape, generator=generator) > 0.5
        if self.kind == "distinct":
            count = max(1, torch.Size(shape).numel())
            return ((torch.randperm(count, generator=generator).float() - count / 2) / 16).view(shape).to(dtype)
        return torch.randint(0, sizes[self.kind], shape, generator=generator)


@dataclass(frozen=True)
class Operation:
    """One row of the matrix. `backward`: gradients are compared, too. `dtypes`: what it exists for."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[Input, ...]
    backward: bool = True
    bfloat16: bool = True

    def make(self, sizes: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
        """The inputs: the same at each call, whatever else is drawn."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return [i.make(sizes, dtype, generator) for i in self.inputs]


def op(
    name: str, run: Callable[..., Any], *inputs: str | Input, backward: bool = True, bfloat16: bool = True
) -> Operation:
    return Operation(name, run, tuple(i if isinstance(i, Input) else Input(i) for i in inputs), backward, bfloat16)


def pos(sizes: str) -> Input:
    return Input(sizes, "positive")


def unit(sizes: str) -> Input:
    return Input(sizes, "unit")


def mask(sizes: str) -> Input:
    return Input(sizes, "bool")


def below(letter: str, sizes: str) -> Input:
    return Input(sizes, letter)


def fixed(sizes: str, kind: str = "normal") -> Input:
    """An input that the operation has no gradient for."""
    return Input(sizes, kind, learned=False)


def distinct(sizes: str) -> Input:
    return Input(sizes, "distinct")


def _where_all(c: Any, a: Any, b: Any) -> Any:
    return torch.where(c, a, b)


def _inplace(change: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that writes into a copy of its first input."""

    def run(x: Any, *rest: Any) -> Any:
        y = x.clone()
        change(y, *rest)
        return y

    return run


def _assign_row(y: Any) -> None:
    y[1] = 2.0


def _assign_column(y: Any) -> None:
    y[:, 2] = -1.0


POINTWISE = [
    op("neg", lambda x: -x, "mn"),
    op("abs", torch.abs, "mn"),
    op("exp", torch.exp, "mn"),
    op("log", torch.log, pos("mn")),
    op("sqrt", torch.sqrt, pos("mn")),
    op("rsqrt", torch.rsqrt, pos("mn")),
    op("sin", torch.sin, "mn"),
    op("cos", torch.cos, "mn"),
    op("tanh", torch.tanh, "mn"),
    op("sigmoid", torch.sigmoid, "mn"),
    op("erf", torch.erf, "mn"),
    op("reciprocal", torch.reciprocal, pos("mn")),
    op("pow", lambda x: x**3, "mn"),
    op("pow_tensor", torch.pow, pos("mn"), "mn"),
    op("clamp", lambda x: x.clamp(-0.5, 0.5), "mn"),
    op("relu", F.relu, "mn"),
    op("gelu", F.gelu, "mn"),
    op("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), "mn"),
    op("silu", F.silu, "mn"),
    op("elu", F.elu, "mn"),
    op("leaky_relu", F.leaky_relu, "mn"),
    op("softplus", F.softplus, "mn"),
    op("logsigmoid", F.logsigmoid, "mn"),
    op("hardswish", F.hardswish, "mn"),
    op("mish", F.mish, "mn"),
    op("glu", lambda x: F.glu(x, 0), "kn", bfloat16=False),
    op("add", torch.add, "mn", "mn"),
    op("add_alpha", lambda a, b: torch.add(a, b, alpha=0.5), "mn", "mn"),
    op("add_scalar", lambda a: a + 1, "mn"),
    op("add_row", torch.add, "mn", "n"),
    op("add_column", torch.add, "mn", "m1"),
    op("sub", torch.sub, "mn", "mn"),
    op("rsub", lambda a: 1 - a, "mn"),
    op("mul", torch.mul, "mn", "mn"),
    op("mul_row", torch.mul, "mn", "n"),
    op("div", torch.div, "mn", pos("mn")),
    op("maximum", torch.maximum, distinct("mn"), "mn"),
    op("atan2", torch.atan2, "mn", pos("mn"), bfloat16=False),
    op("where", _where_all, mask("mn"), "mn", "mn"),
    op("masked_fill", lambda x, c: x.masked_fill(c, -3.0), "mn", mask("mn")),
    op("lerp", lambda a, b: torch.lerp(a, b, 0.3), "mn", "mn"),
    op("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), "mn", "mn", "mn"),
    op("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), "mn", "mn", pos("mn")),
    op("to_double", lambda x: x.to(torch.float64), "mn"),
    op("compare", lambda a, b: (a > b, a == b, a <= 0.0), "mn", "mn", backward=False),
    op("logical", lambda a, b: (a & b, a | ~b, a ^ b, a.logical_not()), mask("mn"), mask("mn"), backward=False),
    op("round", lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.sign()), "mn", backward=False),
    op("isfinite", lambda x: (x.isnan(), x.isinf(), x.isfinite()), "mn", backward=False),
    op(
        "integers",
        lambda a, b: (a + b, a * b, a // (b + 1), a % (b + 1)),
        below("m", "mn"),
        below("n", "mn"),
        backward=False,
    ),
    op(
        "zeros_like", lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.5)), "mn", backward=False
    ),
]

INPLACE = [
    op("add_", _inplace(lambda y, b: y.add_(b)), "mn", "mn"),
    op("mul_", _inplace(lambda y: y.mul_(0.5)), "mn"),
    op("addcmul_", _inplace(lambda y, b, c: y.addcmul_(b, c, value=0.1)), "mn", "mn", "mn"),
    op("copy_", _inplace(lambda y, b: y.copy_(b)), "mn", "mn"),
    op("zero_", _inplace(lambda y: y.zero_()), "mn", backward=False),
    op("fill_", _inplace(lambda y: y.fill_(1.5)), "mn", backward=False),
    op("masked_fill_", _inplace(lambda y, c: y.masked_fill_(c, 0.0)), "mn", mask("mn")),
    op("assign_row", _inplace(_assign_row), "mn"),
    op("assign_column", _inplace(_assign_column), "mn"),
    op("index_add_", _inplace(lambda y, i, v: y.index_add_(0, i, v)), "mn", below("m", "k"), "kn"),
]

REDUCTIONS = [
    op("sum", lambda x: x.sum(), "mn"),
    op("sum_0", lambda x: x.sum(0), "mn"),
    op("sum_1", lambda x: x.sum(1, keepdim=True), "mn"),
    op("mean", lambda x: x.mean(), "mn"),
    op("mean_0", lambda x: x.mean(0), "mn"),
    op("mean_1", lambda x: x.mean(-1), "mn"),
    op("prod", lambda x: x.prod(0), unit("mn"), bfloat16=False),
    op("amax", lambda x: x.amax(0), distinct("mn")),
    op("max_all", lambda x: x.max(), distinct("mn")),
    op("min_dim", lambda x: x.min(0).values, distinct("mn"), bfloat16=False),
    op("max_dim", lambda x: x.max(1), distinct("mn"), backward=False),
    op("argmax", lambda x: (x.argmax(), x.argmax(0), x.argmax(1)), distinct("mn"), backward=False),
    op("argmin", lambda x: (x.argmin(), x.argmin(0)), distinct("mn"), backward=False),
    op("var", lambda x: x.var(), "mn"),
    op("var_0", lambda x: x.var(0), "mn"),
    op("std_1", lambda x: x.std(1), "mn"),
    op("norm", lambda x: x.norm(), "mn"),
    op("vector_norm", lambda x: torch.linalg.vector_norm(x, 2, dim=0), "mn"),
    op("norm_1", lambda x: torch.linalg.vector_norm(x, 1), "mn"),
    op("norm_inf", lambda x: torch.linalg.vector_norm(x, float("inf")), distinct("mn")),
    op("logsumexp", lambda x: x.logsumexp(0), "mn"),
    op("all_any", lambda x: (x.all(), x.any(), x.all(0), x.any(1)), mask("mn"), backward=False),
    op("cumsum", lambda x: x.cumsum(0), "mn"),
    op("cumprod", lambda x: x.cumprod(1), unit("mn"), bfloat16=False),
    op("sort", lambda x: x.sort(0).values, distinct("mn")),
    op("topk", lambda x: x.topk(2, 0).values, distinct("mn")),
    op("median", lambda x: x.median(0).values, distinct("mn"), bfloat16=False),
    op("count_nonzero", lambda x: x.count_nonzero(), mask("mn"), backward=False),
    op("trace", torch.trace, "mn", bfloat16=False),
]

SHAPES = [
    op("t", lambda x: x.t(), "mn"),
    op("transpose", lambda x: x.transpose(1, 2), "bsh"),
    op("permute", lambda x: x.permute(2, 0, 1), "bsh"),
    op("view", lambda x: x.view(-1), "mn"),
    op("reshape", lambda x: x.reshape(x.shape[0], -1), "bsh"),
    op("flatten", lambda x: x.flatten(0, 1), "bsh"),
    op("unflatten", lambda x: x.unflatten(1, (2, -1)), "bs"),
    op("unsqueeze", lambda x: x.unsqueeze(1), "mn"),
    op("squeeze", lambda x: x.squeeze(1), "m1"),
    op("expand", lambda x: x.expand(3, *x.shape), "mn"),
    op("repeat", lambda x: x.repeat(2, 1), "mn"),
    op("cat", lambda a, b: torch.cat([a, b]), "mn", "kn"),
    op("cat_1", lambda a, b: torch.cat([a, b], 1), "mn", "mk"),
    op("stack", lambda a, b: torch.stack([a, b]), "mn", "mn"),
    op("split", lambda x: x.split(2), "mn"),
    op("chunk", lambda x: x.chunk(3, -1), "mn"),
    op("unbind", lambda x: x.unbind(0), "kn"),
    op("slice", lambda x: x[1:4], "mn"),
    op("slice_step", lambda x: x[::2, 1:], "mn"),
    op("select", lambda x: x[1], "mn"),
    op("narrow", lambda x: x.narrow(1, 1, 3), "mn"),
    op("flip", lambda x: x.flip(0), "mn"),
    op("roll", lambda x: x.roll(1, 0), "mn"),
    op("tril", torch.tril, "mn"),
    op("triu", lambda x: x.triu(1), "mn"),
    op("diagonal", lambda x: x.diagonal(), "mn"),
    op("pad", lambda x: F.pad(x, (1, 1)), "mn"),
    op("gather", lambda x, i: x.gather(0, i), "mn", below("m", "kn")),
    op("scatter", lambda x, i, v: x.scatter(0, i, v), "mn", below("m", "1n"), "1n", bfloat16=False),
    op("scatter_add", lambda x, i, v: x.scatter_add(0, i, v), "mn", below("m", "kn"), "kn"),
    op("index_select", lambda x, i: x.index_select(0, i), "mn", below("m", "k")),
    op("index", lambda x, i: x[i], "mn", below("m", "k")),
    op("index_1", lambda x, i: x[:, i], "mn", below("n", "k")),
    op("index_put", lambda x, i, v: x.index_put((i,), v, accumulate=True), "mn", below("m", "k"), "kn"),
    op("take_along", lambda x, i: torch.take_along_dim(x, i, 1), "mn", below("n", "mk")),
    op("one_hot", lambda i: F.one_hot(i, 12), below("n", "m"), backward=False),
    op("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="ij"), "m", "n"),
    op("clone", lambda x: x.clone(), "mn"),
    op("contiguous", lambda x: x.t().contiguous(), "mn"),
]

MATRICES = [
    op("mm", torch.mm, "mk", "kn"),
    op("matmul_t", lambda a: a @ a.T, "mn"),
    op("addmm", torch.addmm, "n", "mk", "kn"),
    op("linear", F.linear, "mk", "nk", "n"),
    op("linear_3d", F.linear, "bsk", "nk", "n"),
    op("bmm", torch.bmm, "bmk", "bkn"),
    op("baddbmm", torch.baddbmm, "bmn", "bmk", "bkn"),
    op("mv", torch.mv, "mn", "n"),
    op("dot", torch.dot, "m", "m"),
    op("outer", torch.outer, "m", "n"),
    op("einsum", lambda a, b: torch.einsum("bmk,bkn->bmn", a, b), "bmk", "bkn"),
    op("einsum_sum", lambda a, b: torch.einsum("mk,nk->m", a, b), "mk", "nk"),
    op("conv1d", lambda x, w: F.conv1d(x, w, padding=1), "bcs", Input("hck"), bfloat16=False),
    op("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), "bcsm", Input("hckk"), "h", bfloat16=False),
    op("max_pool2d", lambda x: F.max_pool2d(x, 2), distinct("bcsm"), bfloat16=False),
    op("avg_pool2d", lambda x: F.avg_pool2d(x, 2), "bcsm", bfloat16=False),
    op("adaptive_pool", lambda x: F.adaptive_avg_pool2d(x, 1), "bcsm", bfloat16=False),
    op("interpolate", lambda x: F.interpolate(x, scale_factor=2.0), "bcs", bfloat16=False),
    op("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "bhsd", "bhsd", "bhsd"),
    op(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "bhsd",
        "bhsd",
        "bhsd",
    ),
    op("embedding", lambda i, w: F.embedding(i, w), below("n", "ms"), "nd"),
    op("cdist", torch.cdist, "mk", "nk", bfloat16=False),
    op("inverse", lambda x: torch.linalg.inv(x @ x.T + 4 * torch.ones_like(x).sum(1).diag()), "mn", bfloat16=False),
]

NORMS = [
    op("softmax", lambda x: F.softmax(x, -1), "mn"),
    op("softmax_0", lambda x: F.softmax(x, 0), "mn"),
    op("log_softmax", lambda x: F.log_softmax(x, 1), "mn"),
    op("layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "mn", "n", "n"),
    op("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w), "mn", "n"),
    op("group_norm", lambda x, w, b: F.group_norm(x, 1, w, b), "bcs", "c", "c", bfloat16=False),
    op("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "mc", "c", "c", bfloat16=False),
    op("instance_norm", lambda x: F.instance_norm(x), "bcs", bfloat16=False),
    op("normalize", lambda x: F.normalize(x, dim=1), "mn"),
    op("cosine_similarity", lambda a, b: F.cosine_similarity(a, b), "mn", "mn"),
]

LOSSES = [
    op("mse_loss", F.mse_loss, "mn", "mn"),
    op("mse_loss_sum", lambda a, b: F.mse_loss(a, b, reduction="sum"), "mn", "mn"),
    op("mse_loss_none", lambda a, b: F.mse_loss(a, b, reduction="none"), "mn", "mn"),
    op("l1_loss", F.l1_loss, "mn", "mn"),
    op("smooth_l1_loss", F.smooth_l1_loss, "mn", "mn"),
    op("huber_loss", F.huber_loss, "mn", "mn"),
    op("bce", F.binary_cross_entropy, unit("mn"), unit("mn")),
    op("bce_weight", lambda a, b, w: F.binary_cross_entropy(a, b, w), unit("mn"), unit("mn"), fixed("mn", "positive")),
    op("bce_with_logits", F.binary_cross_entropy_with_logits, "mn", unit("mn")),
    op("cross_entropy", F.cross_entropy, "mn", below("n", "m")),
    op("cross_entropy_sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), "mn", below("n", "m")),
    op("cross_entropy_weight", F.cross_entropy, "mn", below("n", "m"), fixed("n", "positive")),
    op("cross_entropy_smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), "mn", below("n", "m")),
    op("cross_entropy_ignore", lambda x, t: F.cross_entropy(x, t, ignore_index=1), "mn", below("n", "m")),
    op("cross_entropy_soft", lambda x, t: F.cross_entropy(x, t.softmax(1)), "mn", "mn"),
    op("cross_entropy_3d", F.cross_entropy, "bcs", below("c", "bs")),
    op("nll_loss", lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), "mn", below("n", "m")),
    op("kl_div", lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"), "mn", "mn"),
    op("soft_margin", lambda a, b: F.soft_margin_loss(a, b.sign()), "mn", fixed("mn")),
    op("cosine_embedding", lambda a, b, y: F.cosine_embedding_loss(a, b, y.sign()), "mn", "mn", fixed("m")),
    op("poisson_nll", F.poisson_nll_loss, "mn", pos("mn")),
    op("gaussian_nll", F.gaussian_nll_loss, "mn", "mn", pos("mn"), bfloat16=False),
    op("margin_ranking", lambda a, b, y: F.margin_ranking_loss(a, b, y.sign()), "m", "m", fixed("m")),
    op("triplet", F.triplet_margin_loss, "mn", "mn", "mn", bfloat16=False),
]

OPERATIONS = [*POINTWISE, *INPLACE, *REDUCTIONS, *SHAPES, *MATRICES, *NORMS, *LOSSES]
