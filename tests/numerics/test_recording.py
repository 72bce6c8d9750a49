"""Recordings of one process and of ranks in each parallelism: what is in them, and what ends them."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which DDP imports: once here is quicker than in each rank
import torch.distributed as dist
from torch import nn

from monarch_kernel.numerics.observer import observer
from monarch_kernel.numerics.recording import Entry, Recording, record
from monarch_kernel.numerics.summaries import Shard
from tests.numerics.ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Words in, words out. A pipeline's stage has only some of the parts."""

    def __init__(self, blocks: range = range(4), first: bool = True, last: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, layers, head = nn.Embedding(WORDS, WIDTH), [Block() for _ in range(4)], nn.Linear(WIDTH, WORDS)
        self.embed = embed if first else None
        self.layers = nn.ModuleDict({str(at): layers[at] for at in blocks})
        self.head = head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    words, wanted = torch.randint(0, WORDS, (2, 8, 6))
    rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    return words[rows], wanted[rows]


def loss_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


def train(model: nn.Module, rank: int = 0, ranks: int = 1, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        words, wanted = batch(step, rank, ranks)
        loss_of(model(words), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


Key = tuple[int, int, int, str, str, str, str]


def keyed(entries: list[Entry]) -> dict[Key, Entry]:
    """Entries by what they are, without collectives and generators."""
    found: dict[Key, Entry] = {}
    for each in entries:
        if each.kind not in ("collective", "generator"):
            key = (each.step, each.micro, each.call, each.phase, each.kind, each.name, each.tensor)
            assert key not in found, key
            found[key] = each
    return found


def joined(shards: list[Entry]) -> tuple[float, float]:
    """Norm and projection of a whole, from the entries of the ranks."""
    if shards[0].placement is not None and shards[0].placement.partial:
        return -1.0, sum(each.projection for each in shards)
    parts = {each.placement.offsets if each.placement is not None else (): each for each in shards}
    return sum(each.sum_of_squares for each in parts.values()) ** 0.5, sum(each.projection for each in parts.values())


def differing(alone: Recording, ranks: Recording) -> set[str]:
    """The kinds whose tensors differ from those of one process by more than rounding."""
    shards: dict[Key, list[Entry]] = {}
    for rank in ranks.ranks:
        for key, entry in keyed(ranks.entries(rank)).items():
            shards.setdefault(key, []).append(entry)
    whole = keyed(alone.entries())
    assert shards.keys() == whole.keys()
    found: set[str] = set()
    for key, entry in whole.items():
        norm, projection = joined(shards[key])
        near = 1e-4 * entry.norm + 1e-6
        if abs(projection - entry.projection) > near or (norm >= 0 and abs(norm - entry.norm) > near):
            found.add(entry.kind)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "recording"
    with record("alone", folder=folder) as recorder:
        train(Net())
    assert recorder.reason == "done"
    return Recording.open(folder)


def test_a_recording_is_plain_data(alone: Recording) -> None:
    assert (alone.ranks, alone.steps, alone.finished, alone.notes) == ((0,), 2, True, [])
    assert alone.description["what"] == ["modules", "optimizer"]
    assert (os.stat(alone.folder).st_mode & 0o777, os.stat(alone.folder / "rank_00000.jsonl").st_mode & 0o777) == (
        0o700,
        0o600,
    )
    lines = [json.loads(line) for line in (alone.folder / "rank_00000.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "rank" and lines[-1] == {"kind": "end", "rank": 0, "reason": "done"}
    names = {name for name, _ in Net().named_parameters()}
    entries = alone.entries()
    for kind in ("gradient", "reduced_gradient", "update", "parameter"):
        assert {each.name for each in entries if each.kind == kind} == names, kind
    modules = {name for name, module in Net().named_modules() if not isinstance(module, nn.ModuleDict)}
    assert {each.name for each in entries if each.kind == "output"} == modules
    assert {each.name for each in entries if each.kind == "generator"} >= {"torch.cpu", "python"}
    assert [each.sequence for each in entries] == list(range(len(entries)))
    up = next(each for each in entries if each.kind == "output" and each.name == "layers.1.up")
    assert (up.shape, up.dtype, up.phase, up.line) == ((8, 6, 2 * WIDTH), "float32", "forward", "test_recording.py:41")


def test_the_same_run_is_bit_equal_again(alone: Recording, tmp_path: Path) -> None:
    with record("again", folder=tmp_path / "again"):
        train(Net())
    again = keyed(Recording.open(tmp_path / "again").entries())
    assert {key: each.hash for key, each in keyed(alone.entries()).items()} == {
        key: each.hash for key, each in again.items()
    }


def data_parallel(rank: int, folder: Path) -> None:
    with record("ranks", folder=folder):
        train(nn.parallel.DistributedDataParallel(Net()), rank, 2)


def fully_sharded(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for layer in net.layers.values():
        fully_shard(layer)
    fully_shard(net)
    with record("ranks", folder=folder):
        train(net, rank, 2)


def tensor_parallel(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = Net()
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    # Between the two, tensors are plain parts.
    inner = {name: Shard(-1) for name in ("*.act:output", "*.act:input:0", "*.up:output", "*.down:input:0")}
    with record("ranks", folder=folder, placements=inner):
        train(net)


def both(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    with record("ranks", folder=folder, what="optimizer"):
        train(net, rank // 2, 2)


BATCHES = {"input", "output", "grad_input", "grad_output", "gradient"}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "program, size, local",
    [(data_parallel, 2, BATCHES), (fully_sharded, 2, BATCHES), (tensor_parallel, 2, set[str]())],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_ranks_add_up_to_one_process(
    program: Callable[[int, Path], None], size: int, local: set[str], alone: Recording, tmp_path: Path
) -> None:
    run_ranks(program, size, tmp_path, tmp_path / "ranks")
    found = Recording.open(tmp_path / "ranks")
    assert found.finished, found.notes
    assert differing(alone, found) == local  # what a rank computes of its part of the batch


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_two_kinds_of_shards_add_up(alone: Recording, tmp_path: Path) -> None:
    run_ranks(both, 4, tmp_path, tmp_path / "ranks")
    entries: dict[Key, list[Entry]] = {}
    recording = Recording.open(tmp_path / "ranks")
    for rank in range(4):
        for key, entry in keyed(recording.entries(rank)).items():
            entries.setdefault(key, []).append(entry)
    whole = keyed(alone.entries())
    compared = [key for key in entries if key[4] in ("reduced_gradient", "parameter", "update")]
    assert len(compared) == 7 * len(list(Net().parameters()))
    for key in compared:
        norm, projection = joined(entries[key])
        assert norm == pytest.approx(whole[key].norm, rel=1e-4), key
        assert projection == pytest.approx(whole[key].projection, abs=1e-4 * whole[key].norm), key


def pipeline(rank: int, folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    net = Net(range(2), last=False) if rank == 0 else Net(range(2, 4), first=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = Schedule1F1B(PipelineStage(net, rank, 2, torch.device("cpu")), 2, loss_fn=loss_of)
    with record("ranks", folder=folder):
        for step in range(2):
            words, wanted = batch(step)
            schedule.step(*((words,) if rank == 0 else ()), **({} if rank == 0 else {"target": wanted, "losses": []}))
            optimizer.step()
            optimizer.zero_grad()


def test_stages_of_a_pipeline_add_up_to_the_micro_batches_of_one_process(tmp_path: Path) -> None:
    run_ranks(pipeline, 2, tmp_path, tmp_path / "ranks")
    with record("accumulates", folder=tmp_path / "alone"):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(2):
            for micro in range(2):
                words, wanted = batch(step, micro, 2)
                (loss_of(net(words), wanted) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    # The schedule divides gradients at the end of a step, not the loss.
    assert differing(Recording.open(tmp_path / "alone"), Recording.open(tmp_path / "ranks")) == {
        "gradient",
        "grad_input",
        "grad_output",
    }


def by_hand(rank: int, folder: Path) -> list[tuple[Any, ...]]:
    with record("hand", folder=folder, what="collectives", steps=1):
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        y = net(torch.ones(2, 4) * (rank + 1))
        dist.all_reduce(total := y.detach().clone())
        y.sum().backward()
        optimizer.step()
    return [(float(total.double().square().sum()), float(y.detach().double().square().sum()))]


def test_collectives_have_inputs_and_outputs(tmp_path: Path) -> None:
    found = run_ranks(by_hand, 2, tmp_path, tmp_path / "hand")
    recording = Recording.open(tmp_path / "hand")
    for rank in range(2):
        before, after = (each for each in recording.entries(rank) if each.kind == "collective")
        assert (before.tensor, after.tensor) == ("input.0", "output.0")
        assert (after.name, after.op, after.group, after.phase) == ("all_reduce", "sum", (0, 1), "forward")
        total, own = found[rank][0]
        assert after.sum_of_squares == pytest.approx(total, rel=1e-5)
        assert before.sum_of_squares == pytest.approx(own, rel=1e-5)


def test_tensors_are_kept_by_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with record(name, folder=tmp_path / name, full=True, keep=0.3):
            train(Net())
    one, two = (Recording.open(tmp_path / name) for name in ("one", "two"))
    kept = [each for each in one.entries() if each.full]
    assert 0.1 < len(kept) / len(one.entries()) < 0.5
    assert [each.sequence for each in kept] == [each.sequence for each in two.entries() if each.full]
    for each in kept:
        tensor = one.tensor(each)
        assert tensor is not None and tuple(tensor.shape) == each.shape
        if each.kind != "generator":
            assert float(tensor.double().norm()) == pytest.approx(each.norm, rel=1e-5)
    assert one.tensor(next(each for each in one.entries() if not each.full)) is None


def test_perturbing_moves_tensors_by_rounding(alone: Recording, tmp_path: Path) -> None:
    with record("moved", folder=tmp_path / "moved", perturb=1):
        train(Net())
    whole, moved = keyed(alone.entries()), keyed(Recording.open(tmp_path / "moved").entries())
    for kind in ("output", "grad_input", "gradient"):
        keys = [key for key in whole if key[0] == 0 and key[4] == kind]
        assert any(whole[key].hash != moved[key].hash for key in keys)
        for key in keys:
            assert moved[key].norm == pytest.approx(whole[key].norm, rel=1e-4, abs=1e-6)


class OwnEmbedding(nn.Module):
    """Makes numbers of words as one in a sharded vocabulary does, without `nn.Embedding`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(words, self.weight)


def test_perturbing_moves_what_the_first_modules_make_of_words(tmp_path: Path) -> None:
    """The inputs are integers: what moves is the output of each module that has only these, and of none around it."""
    found: list[dict[Key, Entry]] = []
    for units in (0, 1):
        net = Net()
        net.embed = nn.Sequential(OwnEmbedding())  # type: ignore[assignment]
        with record("moved", folder=tmp_path / str(units), perturb=units):
            train(net, steps=1)
        found.append(keyed(Recording.open(tmp_path / str(units)).entries()))
    whole, moved = found
    outputs = {key[5]: key for key in whole if key[0] == 0 and key[4] == "output"}
    for name in ("embed.0", "embed", "layers.0", "head"):
        key = outputs[name]
        assert whole[key].hash != moved[key].hash, name
        assert moved[key].norm == pytest.approx(whole[key].norm, rel=1e-4)
    # The outer module did not move it once more.
    assert moved[outputs["embed.0"]].hash == moved[outputs["embed"]].hash


# -- ends ----------------------------------------------------------------------------------------


def in_a_fork(function: Callable[[], None]) -> int:
    """Exit code of a forked process that runs a function."""

    def run() -> None:
        torch.set_num_threads(1)  # those of the parent are not in a fork
        function()

    process = get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    def program() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        net = Net()
        said = "the recording 'full' has ended, training continues: OSError"
        with pytest.warns(RuntimeWarning, match=said), record("full", folder=tmp_path / "full") as recorder:
            train(net)
        assert recorder.reason.startswith("OSError: [Errno 27]")
        assert not observer().is_installed
        plain = Net()
        train(plain)
        assert all(torch.equal(*each) for each in zip(net.parameters(), plain.parameters(), strict=True))

    assert in_a_fork(program) == 0
    found = Recording.open(tmp_path / "full")
    assert len(found.entries()) > 20
    assert found.notes == ["rank 0 has not finished: it still runs, or it died"]


def test_a_rank_that_dies_leaves_what_it_has_written(tmp_path: Path) -> None:
    def program() -> None:
        net = Net()
        net.layers["2"].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        record("dies", folder=tmp_path / "dies")
        train(net)

    assert in_a_fork(program) == -signal.SIGKILL
    found = Recording.open(tmp_path / "dies")
    assert found.entries()[-1].name == "layers.2"  # torch runs global hooks first
    assert not found.finished
    with (tmp_path / "dies" / "rank_00000.jsonl").open("a") as file:
        file.write('{"step":0,"mi')
    assert len(Recording.open(tmp_path / "dies").entries()) == len(found.entries())


def test_a_damaged_line_is_named(alone: Recording, tmp_path: Path) -> None:
    for file in alone.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "rank_00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], '{"step": 1}\n', *lines[5:]]))
    with pytest.raises(ValueError, match=r"rank_00000.jsonl:5 is damaged: KeyError: 'kind'"):
        Recording.open(tmp_path).entries()
    description = json.loads((tmp_path / "recording.json").read_text())
    (tmp_path / "recording.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(ValueError, match="has format 99; this version of monarch_kernel reads formats up to"):
        Recording.open(tmp_path)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of recordings of its own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    yield
    assert not observer().is_installed


def test_names_of_recordings(data: None) -> None:
    with pytest.raises(FileNotFoundError, match="there is no recording 'first' .*; there are no recordings"):
        Recording.open("first")
    record("first").stop()
    assert Recording.open("first").entries() == []
    with pytest.raises(FileNotFoundError, match="there are: first"):
        Recording.open("second")
    with pytest.raises(FileExistsError, match="already has a recording of rank 0: choose another name, or pass"):
        record("first")
    record("first", replace=True).stop()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"name": "../x"}, "'../x' is no name of a recording"),
        ({"what": "words"}, r"what=\['words'\] cannot be recorded: choose from modules, optimizer, collectives"),
        ({"steps": 0}, "steps=0: record at least 1 step"),
        ({"keep": 0.0}, "keep=0.0: it is a fraction above 0"),
        ({"model": 3}, "the model is int, not a torch.nn.Module"),
        ({"placements": {"*": "0"}}, r"placements\['\*'\] is '0': give Shard"),
    ],
)
def test_bad_input_is_named(data: None, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        record(**{"name": "bad", **options})


def test_a_placement_that_does_not_fit_ends_the_recording_alone(data: None) -> None:
    net = Net()
    said = r"placement '\*.up.bias' of layers.0.up.bias: Shard\(1\) does not fit"
    with pytest.warns(RuntimeWarning, match=said), record("misfit", placements={"*.up.bias": Shard(1)}):
        train(net)
    assert "does not fit" in Recording.open("misfit").notes[0]
