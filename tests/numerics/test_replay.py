"""A step of one rank runs again alone, bit for bit, in every form of parallelism; and says what an edit changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from monarch_kernel.numerics import collectives  # noqa: E402
from monarch_kernel.numerics.step_capture import Capture, CaptureError, capture  # noqa: E402
from monarch_kernel.numerics.step_replay import (  # noqa: E402
    CollectiveMismatchError,
    RankCapture,
    ReplayError,
    ReplayReport,
    replay,
)
from tests.numerics import training  # noqa: E402
from tests.numerics.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),  # names that later versions replace
]


def captured(rank: int, program: str, at: int, folder: Path, kwargs: dict[str, Any]) -> tuple[str, int]:
    """Capture step ``at`` of a program."""
    taken: list[Capture] = []
    ended = 0

    def count(*_: object) -> None:
        nonlocal ended
        ended += 1
        if ended == at:
            taken.append(capture(folder.name, folder=folder))

    if at == 0:
        taken.append(capture(folder.name, folder=folder))
    handle = register_optimizer_step_post_hook(count)
    getattr(training, program)(at + 2, **kwargs)
    handle.remove()
    return taken[0].state, len(json.loads((folder / f"rank_{rank:05}.json").read_text())["collectives"])


def take(folder: Path, program: str, size: int = 2, at: int = 2, **kwargs: Any) -> list[int]:
    """Capture a step of a program on ranks; the number of collectives of each."""
    found = run_ranks(captured, size, folder.parent, program, at, folder, kwargs)
    assert {state for state, _ in found} == {"written"}
    return [count for _, count in found]


def replayed(folder: Path, rank: int, run: Callable[[], object]) -> ReplayReport:
    with replay(folder, rank=rank, quiet=True) as running:
        run()
    assert not dist.is_initialized() and not collectives.is_installed() and "RANK" not in os.environ
    return running.report


@pytest.mark.parametrize(
    "program, size, at, kwargs",
    [
        ("ddp", 2, 0, {}),
        ("ddp", 2, 1, {}),  # DDP groups parameters anew in this step
        ("ddp", 4, 2, {}),
        ("shared_count", 2, 0, {}),
        ("shared_count", 2, 2, {}),
        ("fsdp", 2, 2, {}),
        ("tensor_parallel", 2, 2, {}),
        ("pipeline", 3, 2, {}),
        ("pipeline", 2, 0, {"schedule": "gpipe"}),
    ],
)
def test_a_step_is_bit_equal(tmp_path: Path, program: str, size: int, at: int, kwargs: dict[str, Any]) -> None:
    counts = take(tmp_path / "step", program, size, at, **kwargs)
    for rank in range(size):
        for _ in range(2):
            report = replayed(tmp_path / "step", rank, lambda: getattr(training, program)(1, **kwargs))
            assert report.equal, report.text()
            assert report.gradients > 0 and report.updated > 0 and report.finished
            assert report.collectives > 0 and counts[rank] - report.collectives in (0, 2)  # 2: the new groups of DDP
            assert not report.notes, report.text()


def test_results_of_operations_lie_where_this_rank_is(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    take(tmp_path / "step", "tensor_parallel", 2, 2)
    found: list[tuple[int, ...] | None] = []
    for rank in range(2):
        with replay(tmp_path / "step", rank=rank, quiet=True):
            training.meet()
            tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
            found.append((tensor + tensor).device_mesh.get_coordinate())
    assert found == [(0,), (1,)]


@pytest.mark.parametrize("program", ["nested", "parts", "mixed", "contained"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of global hooks
def test_other_programs_are_bit_equal(tmp_path: Path, program: str) -> None:
    threads = torch.get_num_threads()
    state, count = captured(0, program, 2, tmp_path / "step", {})
    assert state == "written" and count == 0
    for _ in range(2):
        report = replayed(tmp_path / "step", 0, lambda: getattr(training, program)(1))
        assert report.equal and not report.notes, report.text()
    assert torch.get_num_threads() == threads


def test_a_step_of_eight_ranks_is_bit_equal_in_one_of_them(tmp_path: Path) -> None:
    take(tmp_path / "step", "ddp", 8, 1)
    for rank in (0, 7):
        report = replayed(tmp_path / "step", rank, lambda: training.ddp(1))
        assert report.equal and report.world_size == 8, report.text()


def test_edits(tmp_path: Path) -> None:
    take(tmp_path / "step", "ddp")
    folder = tmp_path / "step"
    changed = replayed(folder, 1, lambda: training.ddp(1, edit="scale"))
    assert not changed.equal and len(changed.differing) == changed.gradients == 6
    assert "capture 'step': not equal" in changed.text() and "first.weight: differs by up to" in changed.text()

    with pytest.raises(CollectiveMismatchError) as found:
        replayed(folder, 1, lambda: training.ddp(1, edit="max"))
    assert "this program calls all_reduce (max) of float32[] at training.py:" in str(found.value)
    assert "the captured step calls all_reduce (sum) of float32[] at training.py:" in str(found.value)

    with pytest.raises(CollectiveMismatchError, match="the captured step calls"):
        replayed(folder, 1, lambda: training.ddp(1, edit="sync"))

    fewer = replayed(folder, 1, lambda: training.ddp(1, edit="no log"))
    assert [each.partition(" at ")[0] for each in fewer.uncalled] == ["all_reduce (sum) of float32[]"]
    assert not fewer.equal and not fewer.differing and "not called by this program" in fewer.text()
    assert replayed(folder, 1, lambda: training.ddp(1)).equal


def test_a_model_of_other_names_or_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take(tmp_path / "step", "ddp")

    class Renamed(training.Net):
        def __init__(self) -> None:
            super().__init__()
            self.last = self.second
            del self.second

    with monkeypatch.context() as patch, pytest.raises(ReplayError) as found:
        patch.setattr(training, "Net", Renamed)
        replayed(tmp_path / "step", 0, lambda: training.ddp(1))
    assert "only in this program: last.bias, last.weight; only in the capture: second.bias, second.weight" in str(
        found.value
    )
    monkeypatch.setattr(training, "Net", lambda: torch.nn.Sequential(torch.nn.Linear(8, 3)))
    with pytest.raises(ReplayError, match=r"the parameters of model 0 \(DistributedDataParallel\) differ"):
        replayed(tmp_path / "step", 0, lambda: training.ddp(1))


def failing(rank: int, folder: Path) -> str:
    taken = capture("failed", on_error=True, folder=folder)
    with pytest.raises(IndexError):
        training.ddp(4, fail_at=2)
    return taken.state


def test_an_exception_happens_again(tmp_path: Path) -> None:
    assert run_ranks(failing, 2, tmp_path, tmp_path / "failed") == ["written"] * 2
    with replay(tmp_path / "failed", rank=1, quiet=True) as running, pytest.raises(IndexError, match="out of bounds"):
        training.ddp(1)  # whose own labels are right: the wrong ones are in the capture
    assert running.report.equal
    assert "the same exception at training.py:" in running.report.text()

    with pytest.raises(CollectiveMismatchError, match="the captured step calls no further one there"):
        replayed(tmp_path / "failed", 1, lambda: training.ddp(1, edit="mend"))  # comes to the step's reduction


def test_the_block_ends_with_the_step_or_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take(tmp_path / "step", "ddp")
    with replay(tmp_path / "step", rank=0):
        training.ddp(5, edit="count")
        raise AssertionError("the step has ended the block")
    said = capsys.readouterr().out
    assert "a step has ended" not in said
    assert said.startswith("rank 0 of 2, capture 'step': bit-equal\n  loss 0: ")
    with replay(tmp_path / "step", rank=0, stop=False) as running:
        training.ddp(2, edit="count")
    assert capsys.readouterr().out.count("a step has ended") == 2 and running.report.equal


def test_a_step_without_its_optimizer_is_compared_at_the_end_of_the_block(tmp_path: Path) -> None:
    take(tmp_path / "step", "tensor_parallel")

    def stops() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "__init__", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                training.tensor_parallel(1)

    report = replayed(tmp_path / "step", 0, stops)
    assert not report.equal and "the step did not come to its end" in report.text()


def test_what_cannot_be_bit_equal_is_said(tmp_path: Path) -> None:
    take(tmp_path / "step", "tensor_parallel")
    file = tmp_path / "step" / "rank_00000.json"
    description = json.loads(file.read_text())
    description["setup"] |= {"torch": "2.9.0", "devices": ["cuda"], "device_name": "NVIDIA H100"}
    file.write_text(json.dumps(description))
    report = replayed(tmp_path / "step", 0, lambda: training.tensor_parallel(1))
    assert report.equal
    assert report.notes == [
        f"PyTorch: captured with 2.9.0, replayed with {torch.__version__}; results need not be bit-equal",
        "devices: captured with ['cuda'], replayed with ['cpu']; results need not be bit-equal",
        f"the device: captured with NVIDIA H100, replayed with {torch.backends.cpu.get_cpu_capability()}; results need "
        "not be bit-equal",
    ]


def test_captures_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(CaptureError, match="there is no capture 'nothing'"):
        replay("nothing")
    folder = tmp_path / "monarch_kernel" / "captures" / "step"
    folder.parent.mkdir(parents=True, mode=0o700)
    take(folder, "tensor_parallel")
    with pytest.raises(CaptureError, match=r"has ranks 0, 1: name one with rank="):
        replay("step")
    with pytest.raises(CaptureError, match="has no capture of rank 5; it has ranks 0, 1"):
        replay("step", rank=5)
    with pytest.raises(CaptureError, match="there is no capture 'other' .*; there are step"):
        replay("other")
    (folder / "rank_00001.json").write_text("{")
    with pytest.raises(CaptureError, match=r"rank_00001.json is damaged"):
        replay("step", rank=1)
    (folder / "rank_00001.json").write_text('{"format": 99}')
    with pytest.raises(CaptureError, match="has format 99; this version of monarch_kernel reads format 1"):
        replay("step", rank=1)
    (folder / "rank_00000.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CaptureError, match=r"rank_00000.safetensors cannot be read"):
        replayed(folder, 0, lambda: training.tensor_parallel(1))
    assert RankCapture.open("step", 0).description["world_size"] == 2


def inside_a_group(rank: int, folder: Path) -> str:
    with pytest.raises(ReplayError, match="in a process group already") as found, replay(folder, rank=rank):
        pass
    return str(found.value)


def test_a_process_with_a_group_cannot_replay(tmp_path: Path) -> None:
    take(tmp_path / "step", "tensor_parallel")
    assert len(run_ranks(inside_a_group, 2, tmp_path, tmp_path / "step")) == 2


def test_the_command_runs_a_script_until_its_step_has_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from monarch_kernel.__main__ import main

    take(tmp_path / "step", "ddp")
    folder, script = str(tmp_path / "step"), training.__file__
    assert main(["replay", folder, "--rank", "1", "--", script, "ddp", "3"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("rank 1 of 2, capture 'step': bit-equal\n") and "the program went on" not in said
    assert main(["replay", "--json", folder, "--all", "--", script, "ddp", "1"]) == 0
    first, second = json.loads(capfd.readouterr().out)
    assert first["equal"] and second["equal"] and (first["rank"], second["rank"]) == (0, 1)
    assert main(["replay", folder, "--rank", "0", "--", script, "fsdp", "1"]) == 1
    captured = capfd.readouterr()
    assert "ReplayError: the parameters of model 0 (FSDPSequential) differ: " in captured.err
    assert captured.err.splitlines()[-1].startswith("monarch-kernel replay: the parameters of model 0")
    assert main(["replay", folder, "--rank", "0", "--", str(tmp_path / "none.py")]) == 1
    assert "there is no script" in capfd.readouterr().err
    assert main(["replay", folder]) == 1
    assert "name one with rank=" in capfd.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["replay", folder, "train.py"])
    assert wrong.value.code == 2
