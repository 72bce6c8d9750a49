"""Comparisons of recorded runs: alignment of ranks and shards, tolerances, verdicts and guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from monarch_kernel.numerics.alignment import Run
from monarch_kernel.numerics.comparison import AlignmentError, Comparison, compare, compare_runs
from monarch_kernel.numerics.comparison_view import grid_data
from monarch_kernel.numerics.recording import Entry, record
from monarch_kernel.numerics.summaries import Placement, summarize

Change = Callable[[nn.Module], None]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(
    folder: Path, change: Change | None = None, *, perturb: int = 0, full: bool = False, steps: int = 2, micros: int = 1
) -> Path:
    """Train a small model, and record it in a folder."""
    torch.manual_seed(0)
    model = Net()
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with record(folder.name, model, optimizer, steps=steps, folder=folder, perturb=perturb, full=full):
        for _ in range(steps):
            inputs, targets = (torch.randn(8, width, generator=generator) for width in (16, 4))
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(micros), targets.chunk(micros), strict=True):
                (F.mse_loss(model(x), y) / micros).backward()
            optimizer.step()
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recording of a run, and one with perturbed inputs."""
    folder = tmp_path_factory.mktemp("reference")
    return train(folder / "right"), train(folder / "perturbed", perturb=1)


def hooked(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return what changes the output of a module."""

    def apply(model: nn.Module) -> None:
        model.get_submodule(name).register_forward_hook(lambda _module, _args, output: change(output))

    return apply


def test_the_same_program_is_equal_in_every_bit(reference: tuple[Path, Path], tmp_path: Path) -> None:
    found = compare(reference[0], train(tmp_path / "again"))
    assert found.equal is True
    assert found.first is None
    assert found.identical == found.compared > 100
    assert str(found).startswith("Equal in every bit: ")


def test_rounding_is_within_measured_tolerances(reference: tuple[Path, Path], tmp_path: Path) -> None:
    """Another order of sums moves every tensor, and the perturbed run says how far rounding may move it."""
    split = train(tmp_path / "split", micros=2)
    found = compare(reference[0], split, noise=reference[1])
    assert found.equal is True, str(found)
    assert found.identical < found.compared
    assert found.worst is not None and 0 < found.worst.ratio <= 1
    assert not found.is_estimate
    assert "within rounding" in found.sentence and "micro-batches" in str(found)


def test_the_first_wrong_tensor_is_named_and_the_rest_is_folded(reference: tuple[Path, Path], tmp_path: Path) -> None:
    def scales_its_norm(model: nn.Module) -> None:
        block = model.get_submodule("blocks.1")
        block.forward = lambda x: x + block.down(F.gelu(block.up(block.norm(x) * 1.01)))  # type: ignore[method-assign]

    found = compare(reference[0], train(tmp_path / "wrong", scales_its_norm), noise=reference[1])
    first = found.first
    assert found.equal is False and first is not None
    assert (first.step, first.phase, first.module, first.tensor) == (0, "forward", "blocks.1.up", "input 0")
    assert first.ratio > 100 and first.ranks == (0,)
    assert first.line.startswith("test_comparison.py:")
    assert "1.01 times" in first.suggests
    assert len(found.causes) == 1 and len(found.differences) > 50
    assert "as a consequence" in str(found)


def test_a_wrong_learning_rate_is_found_in_the_optimizer(reference: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    torch.manual_seed(0)
    model = Net()
    slow = [model.blocks[1].up.weight]
    rest = [each for each in model.parameters() if each is not slow[0]]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 0.005}], lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with record("wrong", model, optimizer, steps=2, folder=folder):
        for _ in range(2):
            inputs, targets = (torch.randn(8, width, generator=generator) for width in (16, 4))
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for noise in (reference[1], None):
        found = compare(reference[0], folder, noise=noise)
        first = found.first
        assert found.equal is False and first is not None
        assert (first.phase, first.kind, first.module, first.tensor) == ("optimizer", "update", "blocks.1.up", "weight")
        assert "0.5 times" in first.suggests


def test_non_finite_elements_are_certain_without_noise(reference: tuple[Path, Path], tmp_path: Path) -> None:
    def overflow(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, 0] = float("inf")
        return output

    found = compare(reference[0], train(tmp_path / "wrong", hooked("blocks.0.up", overflow)))
    first = found.first
    assert found.equal is False and first is not None and first.phase == "forward"
    assert first.module in ("blocks.0.up", "blocks.0.down", "blocks.0")
    assert "NaN or infinite" in first.suggests


def test_small_differences_are_doubtful_without_noise(reference: tuple[Path, Path], tmp_path: Path) -> None:
    """Thirty spacings of float32 may be rounding, as long as no perturbed run measures it."""
    nudged = hooked("blocks.0.norm", lambda output: output * (1 + 30 * 2.0**-23))
    wrong = train(tmp_path / "wrong", nudged, steps=1)
    found = compare(train(tmp_path / "one", steps=1), wrong)
    assert found.equal is None, str(found)
    assert found.sentence.startswith("Unsure: ")
    assert "perturb=1" in found.sentence


def test_other_names_are_listed(reference: tuple[Path, Path], tmp_path: Path) -> None:
    def rename(model: nn.Module) -> None:
        model.output = model.head
        model.forward = lambda x: model.output(model.blocks[1](model.blocks[0](x)))  # type: ignore[method-assign]
        del model.head

    with pytest.raises(AlignmentError, match=r"Only right has head\..*Only renamed has output\."):
        compare(reference[0], train(tmp_path / "renamed", rename))


def test_noise_of_another_run_is_refused(reference: tuple[Path, Path], tmp_path: Path) -> None:
    other = train(tmp_path / "other", micros=2, perturb=1)
    with pytest.raises(ValueError, match="other is not a recording of the same run as right"):
        compare(reference[0], reference[0], noise=other)


def test_a_recording_that_ends_early_compares_what_it_has(reference: tuple[Path, Path], tmp_path: Path) -> None:
    """A rank that died leaves a file without an end, and perhaps with half a line."""
    cut = train(tmp_path / "cut")
    file = cut / "rank_00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]) + lines[-2][:20])
    found = compare(reference[0], cut)
    assert found.equal is True, str(found)
    assert 20 < found.compared < len(lines) // 2 + 1


def test_full_recordings_name_the_flipped_bit(tmp_path: Path) -> None:
    def flip(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output.view(torch.int32)[2, 3] ^= 1 << 24
        return output

    right = train(tmp_path / "right", full=True, steps=1)
    wrong = train(tmp_path / "wrong", hooked("blocks.0.down", flip), full=True, steps=1)
    found = compare(right, wrong)
    first = found.first
    assert found.equal is False and first is not None and first.module == "blocks.0"
    # The residual sum moves the bits, but no other element.
    assert "element [2, 3] differs" in first.suggests


# -- alignment of ranks ------------------------------------------------------------------------------


def entry(
    name: str,
    tensor: torch.Tensor,
    rank: int = 0,
    *,
    phase: str = "reduction",
    kind: str = "reduced_gradient",
    placement: Placement | None = None,
    sequence: int = 0,
    line: str = "train.py:7",
) -> Entry:
    """Summarize a tensor as a rank records it."""
    found = summarize(tensor, placement)
    return Entry(
        step=0,
        micro=0,
        call=0,
        phase=phase,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        name=name,
        tensor="",
        rank=rank,
        sequence=sequence,
        line=line,
        shape=found.shape,
        dtype=found.dtype,
        sum_of_squares=found.sum_of_squares,
        maximum=found.maximum,
        nonfinite=found.nonfinite,
        hash=found.hash,
        projection=found.projection,
        placement=placement,
    )


def compared(one: Sequence[Entry], two: Sequence[Entry]) -> Comparison:
    """Compare entries of a reference with those of a run."""
    return compare_runs(Run.of(one, "one"), Run.of(two, "two"))


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a random tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_placed_shards_make_up_the_whole(ranks: int, dim: int) -> None:
    gradient = whole(8, 12)
    size = gradient.shape[dim] // ranks
    shards = [
        entry("w", part, rank, placement=Placement((8, 12), (rank * size, 0) if dim == 0 else (0, rank * size)))
        for rank, part in enumerate(gradient.chunk(ranks, dim))
    ]
    assert compared([entry("w", gradient)], shards).equal is True
    swapped = [
        entry("w", part, rank, placement=shards[rank].placement)
        for rank, part in enumerate(reversed(gradient.chunk(ranks, dim)))
    ]
    found = compared([entry("w", gradient)], swapped)
    assert found.equal is False and found.first is not None
    assert "another order" in found.first.suggests


def test_shards_with_replicas_compare_and_a_wrong_replica_is_named() -> None:
    """Two shards on four ranks, as of tensor parallelism under data parallelism."""
    gradient = whole(8, 4)
    placements = [Placement((8, 4), (4 * (rank % 2), 0), replicas=2) for rank in range(4)]
    parts = [gradient.chunk(2)[rank % 2] for rank in range(4)]
    right = [entry("w", part, rank, placement=placements[rank]) for rank, part in enumerate(parts)]
    assert compared([entry("w", gradient)], right).equal is True
    local = [
        entry("w", part + (1 if rank < 2 else -1) * whole(4, 4, seed=5), rank, placement=placements[rank])
        for rank, part in enumerate(parts)
    ]
    found = compared([entry("w", gradient)], local)
    assert found.equal is False and found.first is not None
    assert "the mean over ranks 0-3 is the reference's" in found.first.suggests


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (lambda g: [g / 4 + d for d in _offsets(4)], "the sum over ranks 0-3 is the reference's"),
        (lambda g: [g + d for d in _offsets(4)], "the mean over ranks 0-3 is the reference's"),
        (lambda g: [4 * g] * 4, "4 times that of the reference: summed instead of averaged"),
        (lambda g: [g / 4] * 4, "1/4 times that of the reference"),
        (lambda g: [2 * g] * 4, "√4 times that of the reference"),
        (lambda g: [-g] * 4, "opposite sign"),
        (lambda g: [g, g, g, g * 1.5], "rank 3 alone differs"),
        (lambda g: [g.flip(0)] * 4, "another order"),
        (
            lambda g: [g + _offsets(2)[rank // 2] for rank in range(4)],
            "reduced over ranks 0-1 and ranks 2-3 separately",
        ),
        (lambda g: [torch.zeros_like(g)] * 4, "all its elements are zero"),
    ],
)
def test_figures_suggest_what_happened(parts: Callable[[torch.Tensor], list[torch.Tensor]], text: str) -> None:
    gradient = whole(8, 12)
    ranks = [entry("layer.weight", part, rank) for rank, part in enumerate(parts(gradient))]
    found = compared([entry("layer.weight", gradient)], ranks)
    first = found.first
    assert found.equal is False and first is not None
    assert (first.phase, first.module, first.tensor, first.line) == ("reduction", "layer", "weight", "train.py:7")
    assert text in first.suggests
    assert "(a guess)" in str(found)
    if "alone" in text:
        assert first.ranks == (3,)


def test_one_factor_for_all_elements_is_no_single_one() -> None:
    """In a tensor with one large element, a factor of all is close to a change of that one."""
    gradient = torch.tensor([0.01, -0.02, 1.0, 0.03])
    first = compared([entry("bias", gradient)], [entry("bias", 2.115 * gradient)]).first
    assert first is not None
    assert first.suggests == "every element is 2.115 times that of the reference"
    changed = gradient.clone()
    changed[1] = 50
    first = compared([entry("bias", gradient)], [entry("bias", changed)]).first
    assert first is not None and "a single element explains it" in first.suggests


def _offsets(count: int) -> list[torch.Tensor]:
    """Return tensors whose sum is zero."""
    found = [whole(8, 12, seed=10 + at) for at in range(count)]
    mean = sum(found) / count  # type: ignore[operator]
    return [each - mean for each in found]


def test_a_batch_split_over_ranks_is_the_same_batch() -> None:
    batch = whole(8, 6)
    kind = {"phase": "forward", "kind": "input"}
    ranks = [entry("", part, rank, **kind) for rank, part in enumerate(batch.chunk(4))]
    assert compared([entry("", batch, **kind)], ranks).equal is True
    # interleaved, as a DistributedSampler splits
    ranks = [entry("", batch[rank::4], rank, **kind) for rank in range(4)]
    assert compared([entry("", batch, **kind)], ranks).equal is True
    same = [entry("", batch[:2], rank, **kind) for rank in range(4)]
    found = compared([entry("", batch, **kind)], same)
    assert found.equal is False and found.first is not None
    assert "ranks 0-3 have the same part" in found.first.suggests


@pytest.mark.parametrize("is_placed", [False, True])
def test_integers_in_parts_are_the_same_integers(is_placed: bool) -> None:
    """Figures of parts add up to those of the whole but for the rounding of sums; one wrong token is more than that."""
    kind = {"phase": "forward", "kind": "input"}
    for seed in range(60):
        tokens = torch.randint(32_000, (4, 8), generator=torch.Generator().manual_seed(seed))
        wrong = tokens.clone()
        wrong[seed % 4, seed % 8] += 1
        verdicts: list[bool | None] = []
        for batch in (tokens, wrong):
            ranks: list[Entry] = []
            for rank in range(4):
                row, column = 2 * (rank // 2), 4 * (rank % 2)
                placement = Placement((4, 8), (row, column)) if is_placed else None
                part = batch[row : row + 2, column : column + 4]
                ranks.append(entry("", part, rank, placement=placement, **kind))
            verdicts.append(compared([entry("", tokens, **kind)], ranks).equal)
        assert verdicts == [True, False], seed


def test_a_missing_reduction_of_an_activation_is_named_at_its_source() -> None:
    """Row-parallel output that nobody sums is right as a sum over ranks; what follows is wrong."""
    part = [whole(4, 6, seed=seed) for seed in (1, 2)]
    x = whole(4, 6)
    total = part[0] + part[1]

    def forward(name: str, tensor: torch.Tensor, rank: int, sequence: int) -> Entry:
        return entry(name, tensor, rank, phase="forward", kind="output", sequence=sequence, line=f"{name}.py:1")

    one = [forward("mlp.down", total, 0, 0), forward("mlp", total, 0, 1), forward("", x + total, 0, 2)]
    right = [forward("mlp.down", part[rank], rank, 0) for rank in range(2)]
    right += [forward("mlp", total, rank, 1) for rank in range(2)]
    right += [forward("", x + total, rank, 2) for rank in range(2)]
    assert compared(one, right).equal is True
    wrong = [forward("mlp.down", part[rank], rank, 0) for rank in range(2)]
    wrong += [forward("mlp", part[rank], rank, 1) for rank in range(2)]
    wrong += [forward("", x + part[rank], rank, 2) for rank in range(2)]
    found = compared(one, wrong)
    assert found.equal is False and found.first is not None
    assert (found.first.module, found.first.line) == ("mlp.down", "mlp.down.py:1")
    assert "a reduction is missing" in found.first.suggests


def test_a_difference_without_consequences_is_no_error() -> None:
    """Ranks may hold other inner tensors, as of a masked embedding, if the results are right."""

    def forward(name: str, tensor: torch.Tensor, rank: int, sequence: int, kind: str = "output") -> Entry:
        return entry(name, tensor, rank, phase="forward", kind=kind, sequence=sequence)

    result = whole(3, 4)
    one = [forward("embed", torch.arange(3), 0, 0, "input"), forward("embed", result, 0, 1)]
    two = [
        forward("embed", torch.arange(3) - 2 * rank, rank, 0, "input") for rank in range(2)
    ] + [forward("embed", result, rank, 1) for rank in range(2)]  # fmt: skip
    assert compared(one, two).equal is True


def test_a_parameter_without_a_gradient_is_a_difference() -> None:
    def run(*names: str) -> list[Entry]:
        parameters = [entry(name, whole(4), kind="parameter", phase="forward") for name in ("a.w", "b.w")]
        calls = [entry(name, whole(4), kind="output", phase="forward") for name in ("a", "b")]
        return [*parameters, *calls, *(entry(name, whole(4)) for name in names)]

    found = compared(run("a.w", "b.w"), run("a.w"))
    assert found.equal is False and found.first is not None
    assert found.first.title == "gradient of b.w"
    assert "it has no gradient in two" in found.first.suggests


def test_a_parameter_that_no_optimizer_has_is_a_difference() -> None:
    """An optimizer made before the model was wrapped steps other tensors."""

    def run(own: bool) -> list[Entry]:
        entries = [entry("a.w", whole(4), kind="parameter", phase="forward"), entry("a.w", whole(4), kind="gradient")]
        name = "a.w" if own else "optimizer.0.0"
        entries += [entry("a.w", whole(4))] if own else []
        return entries + [entry(name, whole(4), kind=kind, phase="optimizer") for kind in ("update", "parameter")]

    found = compared(run(True), run(False))
    assert found.equal is False and found.first is not None
    assert (found.first.phase, found.first.title) == ("optimizer", "update of a.w")
    assert "no optimizer of two has it" in found.first.suggests


def test_one_module_in_lower_precision_differs() -> None:
    def run(dtype: torch.dtype) -> list[Entry]:
        names = [f"layers.{at}" for at in range(4)]
        values = [whole(16, 16, seed=at) for at in range(4)]
        values[2] = values[2].to(dtype)
        return [
            entry(name, value, kind="output", phase="forward", sequence=at)
            for at, (name, value) in enumerate(zip(names, values, strict=True))
        ]

    found = compared(run(torch.float32), run(torch.bfloat16))
    assert found.equal is False and found.first is not None
    assert found.first.module == "layers.2"
    assert "it is computed in bfloat16" in found.first.suggests


def test_half_precision_is_not_called_equal_without_noise() -> None:
    """Estimated tolerances of half precision would hide errors."""

    def run(scale: float) -> list[Entry]:
        return [entry("layer", (whole(16, 16) * scale).bfloat16(), kind="output", phase="forward")]

    found = compared(run(1.0), run(1.01))
    assert found.equal is None and not found.differences
    assert found.sentence.startswith("Unsure: ") and "half precision" in found.sentence
    assert compared(run(1.0), run(1.0)).equal is True


# -- what it shows -----------------------------------------------------------------------------------


def test_views_and_data(reference: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = train(tmp_path / "wrong", hooked("blocks.1.down", lambda output: 2 * output))
    found = compare(reference[0], wrong, noise=[reference[1]])
    table = found.to_dataframe()
    assert len(table) == len(found.differences)
    assert next(iter(table["module"])) == found.differences[0].module
    assert {"step", "phase", "ranks", "line", "ratio", "suggests"} <= set(table.columns)
    page = found._repr_html_()
    assert page.count("outline:3px") == 1
    assert "blocks.1.down" in page and "modules × steps" in page
    # the outlined cell is the one of the first wrong tensor
    cell = page[: page.index("outline:3px")].rpartition("<td")[2]
    assert found.first is not None and f"{found.first.module or 'the model'}, step 0" in cell
    assert json.dumps({"text/html": page})
    grid = grid_data(found)
    assert json.loads(json.dumps(grid, allow_nan=False)) == grid
    row, column = grid["first"]
    assert (grid["modules"][row], grid["steps"][column]) == (found.first.module, 0)
    (chosen,) = (each for each in grid["cells"] if (each["row"], each["column"]) == (row, column))
    assert chosen["ratio"] > 1000 and chosen["tensors"][0]["line"].startswith("test_comparison.py:")
    assert sum(len(each["tensors"]) + each["more"] for each in grid["cells"]) == found.compared
    equal = compare(reference[0], reference[0])
    assert grid_data(equal)["first"] is None
    assert "outline:3px" not in equal._repr_html_()


# -- where less is known -----------------------------------------------------------------------------


def test_stages_of_other_types_are_compared_each_by_its_own() -> None:
    """The first stage of a pipeline takes integers, which must be equal; the next one's numbers may be rounded."""
    tokens, x = torch.arange(32), whole(4, 6)
    kind = {"phase": "forward", "kind": "input"}
    one = [entry("", tokens, 0, **kind), entry("", x, 1, **kind)]
    assert compared(one, [entry("", tokens, 0, **kind), entry("", x * (1 + 2e-7), 1, **kind)]).equal is True
    found = compared(one, [entry("", tokens + (tokens == 7), 0, **kind), entry("", x, 1, **kind)])
    assert found.equal is False and found.first is not None
    assert found.first.ranks == (0,)
    found = compared(one, [entry("", tokens, 0, **kind), entry("", x * 1.1, 1, **kind)])
    assert found.first is not None and found.first.ranks == (1,)


def test_a_gradient_that_cancels_is_no_difference_without_its_module() -> None:
    """The bias of keys has a gradient of rounding alone: it is measured by the other gradients."""
    weight = whole(8, 8)
    noise = [1e-8 * whole(8, seed=seed) for seed in (1, 2)]
    runs = [[entry("k.weight", weight, sequence=0), entry("k.bias", each, sequence=1)] for each in noise]
    assert compared(*runs).equal is True
    wrong = [entry("k.weight", 2 * weight, sequence=0), entry("k.bias", noise[0], sequence=1)]
    assert compared(runs[0], wrong).equal is False


def test_gradients_of_an_unknown_precision_are_not_called_different_for_a_thousandth() -> None:
    """They may have been computed in half precision, which only recorded modules show."""
    gradient = whole(8, 8)
    run = [entry("w", gradient)]
    found = compared(run, [entry("w", gradient + 1e-3 * whole(8, 8, seed=1))])
    assert found.equal is None and "unknown in which precision" in str(found)
    output = {"phase": "forward", "kind": "output"}
    known = [entry("", whole(4, 8), **output), entry("w", gradient, sequence=1)]
    other = [known[0], entry("w", gradient + 1e-3 * whole(8, 8, seed=1), sequence=1)]
    assert compared(known, other).equal is False


def test_the_scale_of_gradients_is_not_that_of_a_scalar_of_all_ranks() -> None:
    """A balancing loss of all ranks together has one gradient; those of the ranks' own losses are twice as large."""
    batch, upper = whole(4, 6), whole(4, 6, seed=3)

    def run(ranks: int) -> list[Entry]:
        found: list[Entry] = []
        for rank in range(ranks):
            rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
            found += [
                entry("", batch[rows], rank, phase="forward", kind="input", sequence=0),
                entry("balance", torch.tensor(0.1), rank, phase="backward", kind="grad_output", sequence=1),
                entry("head", ranks * upper[rows], rank, phase="backward", kind="grad_output", sequence=2),
            ]
        return found

    assert compared(run(1), run(2)).equal is True


def test_runs_that_begin_with_different_parameters_say_so() -> None:
    weight = whole(8, 8)
    kind = {"phase": "forward", "kind": "parameter"}
    found = compared([entry("w", weight, **kind)], [entry("w", 1.01 * weight, **kind)])
    assert found.sentence.endswith("The runs begin with different parameters.")


def test_a_parameter_without_a_gradient_may_drift_where_nothing_depends_on_it() -> None:
    """The bias of keys moves by the signs of rounding; keys differ by it in the next step, and attention does not."""
    x, keys = whole(4, 8), whole(4, 8, seed=1)
    output = {"phase": "forward", "kind": "output"}

    def run(sign: float, result: torch.Tensor) -> list[Entry]:
        later = [
            entry("k", keys + 0.05 * sign, sequence=10, **output),
            entry("", result, sequence=11, **output),
        ]
        return [
            entry("", x, sequence=0, **output),
            entry("k.weight", whole(8, 8), sequence=1),
            entry("k.bias", 1e-8 * sign * whole(8), sequence=2),
            entry("k.weight", 0.01 * whole(8, 8), phase="optimizer", kind="update", sequence=3),
            entry("k.bias", 0.05 * sign * torch.ones(8), phase="optimizer", kind="update", sequence=4),
            *(replace(each, step=1) for each in later),
        ]

    assert compared(run(1, x), run(-1, x)).equal is True
    found = compared(run(1, x), run(-1, 1.5 * x))
    assert found.equal is False and found.first is not None and found.first.step == 1
