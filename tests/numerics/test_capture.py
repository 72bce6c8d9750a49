"""A capture holds what a step needs, is plain data that only its owner can read, and never harms the program."""

from __future__ import annotations

import json
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.modules import module as hooks  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402

from monarch_kernel.numerics import collectives  # noqa: E402
from monarch_kernel.numerics.capture import Capture, CaptureError, capture  # noqa: E402
from tests.numerics import training  # noqa: E402
from tests.numerics.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),  # names that later versions replace
]


def installed() -> list[str]:
    """What is installed in torch, after a forward: torch iterates over its hooks when most captures end."""
    with torch.no_grad():
        training.Net()(torch.zeros(2, 8))
    found = [
        name
        for name, entries in {
            "before forwards": hooks._global_forward_pre_hooks,
            "after forwards": hooks._global_forward_hooks,
            "before steps": optimizers._global_optimizer_pre_hooks,
            "after steps": optimizers._global_optimizer_post_hooks,
        }.items()
        if entries
    ]
    if torch.autograd.backward.__module__ != "torch.autograd":
        found.append("backward")
    if torch._C._len_torch_function_stack():
        found.append("mode")
    return [*found, "collectives"] if collectives.is_installed() else found


def fit(
    steps: int,
    *,
    data: Callable[[int], Any] = lambda step: training.batch(step, 0),
    after: Callable[[int], object] = id,
) -> torch.nn.Module:
    """Train a network in this process alone."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = data(step)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return model


def read(folder: Path, rank: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The files of a rank, with no code of ours."""
    description = json.loads((folder / f"rank_{rank:05}.json").read_text())
    with safe_open(folder / f"rank_{rank:05}.safetensors", "pt") as file:
        return description, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping


def test_the_files_are_plain_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    done = capture("taken", folder=folder)
    estimate = done.size
    before = {name: value.clone() for name, value in fit(0).state_dict().items()}
    fit(2)
    assert done.state == "written" and done.reason == "next step" and estimate >= 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    description, tensors = read(folder)
    assert (description["rank"], description["world_size"], description["error"]) == (0, 1, None)
    for name, entry in (description["parameters"] | description["buffers"]).items():
        assert torch.equal(tensors[entry["tensor"]], before[name]), name
    x, y = training.batch(0, 0)
    assert torch.equal(tensors[description["calls"][0]["inputs"]["args.0"]["tensor"]], x)
    (label,) = description["reads"]
    assert label["reader"] == "cross_entropy" and torch.equal(tensors[label["tensor"]], y)
    assert label["line"].startswith("test_capture.py:")
    assert description["optimizers"][0]["groups"][0]["settings"]["lr"] == 0.01
    assert len(description["gradients"]) == len(description["updated"]) == 6
    assert sum(each.numel() * each.element_size() for each in tensors.values()) == description["bytes"] == done.size
    assert installed() == []


def captured_on_error(rank: int, folder: Path) -> tuple[str, str, list[str]]:
    taken = capture("failed", on_error=True, folder=folder)
    written_before = ""
    try:
        training.ddp(4, fail_at=2)
    except IndexError:
        written_before = taken.state
    return taken.reason, written_before, installed()


def test_an_exception_is_captured_before_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "failed"
    for reason, state, left in run_ranks(captured_on_error, 2, tmp_path, folder):
        assert reason.startswith("IndexError: Target")
        assert state == "written" and left == []
    description, tensors = read(folder, 1)
    assert description["error"]["type"] == "IndexError"
    assert description["error"]["line"].startswith("training.py:")
    assert description["gradients"] == {} and len(description["calls"]) == 2
    x, _ = training.batch(21, 1)
    assert torch.equal(tensors[description["calls"][1]["inputs"]["args.0"]["tensor"]], x)


def test_an_exception_of_the_programs_own_is_captured_at_the_end_of_the_block(tmp_path: Path) -> None:
    def refuse(step: int) -> Any:
        x, y = training.batch(step, 0)
        if step == 2:
            model = training.Net()
            model(x)
            raise ValueError("no such batch")
        return x, y

    with pytest.raises(ValueError, match="no such batch"), capture("own", on_error=True, folder=tmp_path) as taken:
        fit(4, data=refuse)
    assert taken.state == "written" and taken.reason == "ValueError: no such batch"
    assert read(tmp_path)[0]["error"]["message"] == "no such batch"
    assert installed() == []


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_the_first_step_that_is_not_finite_is_captured(tmp_path: Path, what: str) -> None:
    def data(step: int) -> Any:
        x, y = training.batch(step, 0)
        return (x * float("inf"), y) if step == 2 and what == "loss" else (x, y)

    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = torch.full_like(parameter, float("nan"))

    with capture("nan", on_nan=True, folder=tmp_path) as taken:
        if what == "gradient":
            torch.manual_seed(0)
            model = training.Net()
            model.second.bias.register_post_accumulate_grad_hook(hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            functional.cross_entropy(model(training.batch(0, 0)[0]), training.batch(0, 0)[1]).backward()
            optimizer.step()
        else:
            fit(4, data=data)
    assert taken.state == "written"
    if what == "gradient":
        assert taken.reason == "the gradient of second.bias is not finite"
    else:
        assert taken.reason.startswith("the loss is nan at test_capture.py:")
        description, tensors = read(tmp_path)
        assert not torch.isfinite(tensors[description["calls"][0]["inputs"]["args.0"]["tensor"]]).any()


def test_a_capture_waits_for_the_end_of_a_step_in_progress(tmp_path: Path) -> None:
    taken = capture("later", after_step=True, folder=tmp_path)
    fit(3)
    description, tensors = read(tmp_path)
    assert taken.state == "written"
    assert torch.equal(tensors[description["calls"][0]["inputs"]["args.0"]["tensor"]], training.batch(1, 0)[0])


def test_validation_and_checkpointing_are_no_steps(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.Net()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.net, x, use_reentrant=False)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture("one", folder=tmp_path) as taken:
        with torch.no_grad():
            model(torch.zeros(3, 8))
        x, y = training.batch(0, 0)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert taken.state == "written"
    assert [each["class"] for each in read(tmp_path)[0]["calls"]] == ["Checkpointed"]


def failure(taken: Capture, run: Callable[[], object]) -> str:
    """The warning of a capture that fails; what runs does not fail."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert taken.state == "failed"
    assert len(caught) == 1, [str(each.message) for each in caught]
    message = str(caught[0].message)
    assert message == f"capture {taken.name!r} failed; the program continues: {taken.reason}"
    assert installed() == []
    return taken.reason


def test_a_capture_that_fails_leaves_the_program_alone(tmp_path: Path) -> None:
    small = capture("small", on_error=True, folder=tmp_path / "small", limit=10)
    assert "more memory than 0.0 MB; raise limit=" in failure(small, lambda: fit_twice_a_step())
    gone = capture("gone", folder=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("a file")
    assert failure(gone, lambda: fit(2)).startswith("NotPrivateError: ")

    def by_hand() -> None:
        model = training.Net()
        for _ in range(2):
            functional.cross_entropy(model(training.batch(0, 0)[0]), training.batch(0, 0)[1]).backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad

    hand = capture("hand", folder=tmp_path / "hand")
    assert "without the step() of a torch optimizer" in failure(hand, by_hand)


def fit_twice_a_step() -> None:
    """Two micro-batches."""
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        functional.cross_entropy(model(training.batch(0, 0)[0]), training.batch(0, 0)[1]).backward()
    optimizer.step()


def test_names_and_folders_that_do_not_suit(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="not a valid name"):
        capture("../up")
    capture("one", folder=tmp_path / "one")
    fit(1)
    with pytest.raises(
        CaptureError, match="already has a capture of rank 0: choose another name, or pass replace=True"
    ):
        capture("one", folder=tmp_path / "one")
    again = capture("one", folder=tmp_path / "one", replace=True)
    fit(1)
    assert again.state == "written"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CaptureError, match="cannot be written to"):
        capture("open", folder=tmp_path / "open")
    assert installed() == []
