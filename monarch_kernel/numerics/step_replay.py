"""Run one rank's captured training step again, in one ordinary process, without the other ranks.

`replay` is a context manager. Inside it, `torch.distributed` makes process groups that run nothing: their collectives
are answered from the capture. The first training forward gets the captured weights, buffers, generators and batch; the
step ends at `optimizer.step()`, and its losses and gradients are compared bit by bit with the captured ones.

Before that forward, while a program builds its model, collectives are answered as if all ranks had the same data.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from monarch_kernel.display.quantities import few
from monarch_kernel.numerics.collectives import Collective, CollectivesError, answer, title_of
from monarch_kernel.numerics.observer import named_parameters
from monarch_kernel.numerics.step_capture import (
    ENVIRONMENT,
    FORMAT,
    CaptureError,
    StepHooks,
    bits,
    buffers_of,
    callers_here,
    captures_folder,
    described,
    folder_of,
    line_here,
    line_of_error,
    local_part,
    map_leaves,
    rank_files,
    set_generator_states,
    setup,
)

_BACKEND = "monarch_replay"
_SHOWN = 8


class ReplayError(RuntimeError):
    """The program cannot run the captured step."""


class CollectiveMismatchError(ReplayError):
    """The program calls a collective otherwise than the captured step."""


class StepReplayed(BaseException):  # not caught by the program's `except Exception`
    """Ends the program once its step has been replayed."""


# -- reading -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class RankCapture:
    """A captured step of one rank.

    Attributes:
        folder: the folder of the capture.
        rank: the rank.
        description: the content of its JSON file.
    """

    folder: Path
    rank: int
    description: dict[str, Any]
    _file: Any = None

    @classmethod
    def open(cls, name: str | os.PathLike[str], rank: int | None = None) -> RankCapture:
        """Open a rank's part of a capture, by name or folder.

        Args:
            rank: which rank; None: the only one that there is.

        Raises:
            CaptureError: there is none, it is damaged, or has a format that this version cannot read.
        """
        folder = find_folder(name)
        ranks = captured_ranks(folder)
        if rank is None:
            if len(ranks) != 1:
                raise CaptureError(f"{folder} has ranks {_listed(ranks)}: name one with rank=")
            rank = ranks[0]
        if rank not in ranks:
            raise CaptureError(f"{folder} has no capture of rank {rank}; it has ranks {_listed(ranks)}")
        file = folder / rank_files(rank)[0]
        try:
            description = cast("dict[str, Any]", json.loads(file.read_text()))
            version = description["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CaptureError(f"{file} is damaged: {error}") from None
        if version != FORMAT:
            raise CaptureError(f"{file} has format {version}; this version of monarch_kernel reads format {FORMAT}")
        return cls(folder, rank, description)

    def tensor(self, entry: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor that an entry of the description names, as a new one on the CPU."""
        if self._file is None:
            from safetensors import SafetensorError, safe_open

            path = self.folder / rank_files(self.rank)[1]
            try:
                self._file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CaptureError(f"{path} cannot be read: {error}") from None
        try:
            return self._file.get_tensor(entry["tensor"]).clone()
        except Exception as error:
            raise CaptureError(f"{self.folder} has no tensor {entry.get('tensor')!r}: {error}") from None


def find_folder(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a capture, by name or folder.

    Raises:
        CaptureError: there is none; the message lists those that there are.
    """
    path = Path(name).expanduser()
    if path.is_dir() and captured_ranks(path):
        return path
    if path.parent == Path():
        path = Path(folder_of(str(name)))
        if path.is_dir() and captured_ranks(path):
            return path
    base = Path(captures_folder())
    known = sorted(each.name for each in base.iterdir() if each.is_dir()) if base.is_dir() else []
    there = f"; there are {', '.join(known[:20])}" if known else ""
    raise CaptureError(f"there is no capture {str(name)!r} ({path}){there}")


def captured_ranks(folder: Path) -> list[int]:
    """Return the ranks that a folder has captures of."""
    found = (re.fullmatch(r"rank_(\d{5})\.json", each.name) for each in folder.iterdir())
    return sorted(int(each[1]) for each in found if each)


# -- what a replay found -----------------------------------------------------------------------------


@dataclass
class ReplayReport:
    """How a replayed step compares with the captured one.

    Attributes:
        capture, rank, world_size: which step.
        losses: (captured, replayed) of each loss.
        gradients: how many gradients were compared.
        differing: names of gradients whose bits differ, with the largest absolute difference.
        updated: how many updated parameters were compared; `differing_updates` names those that differ.
        collectives: how many collectives were answered; `uncalled` describes those that the program did not call.
        changed_inputs: collectives to which the program contributed other values than the captured step did. Their
            answers are those of the captured step.
        error: the exception of the replayed step, `captured_error` that of the captured one; "" if there was none.
        error_line: the line of user code that raised it, `captured_line` likewise.
        notes: what is not of the capture, or cannot be bit-equal.
        finished: whether the step came to its end.
    """

    capture: str
    rank: int
    world_size: int
    losses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    loss_bits: list[bool] = field(default_factory=list[bool])
    gradients: int = 0
    differing: dict[str, float] = field(default_factory=dict[str, float])
    updated: int = 0
    differing_updates: list[str] = field(default_factory=list[str])
    collectives: int = 0
    uncalled: list[str] = field(default_factory=list[str])
    changed_inputs: list[str] = field(default_factory=list[str])
    error: str = ""
    error_line: str = ""
    captured_error: str = ""
    captured_line: str = ""
    notes: list[str] = field(default_factory=list[str])
    finished: bool = False
    expected_losses: int = 0

    @property
    def equal(self) -> bool:
        """Whether the step is bit-equal: losses, gradients, updates and error, with every collective called."""
        if self.error != self.captured_error or self.differing or self.differing_updates or self.changed_inputs:
            return False
        if not all(self.loss_bits) or len(self.losses) != self.expected_losses or self.uncalled:
            return False
        return bool(self.captured_error) or (self.finished and self.gradients > 0)

    def text(self) -> str:
        """Format the report, its verdict first."""
        who = f"rank {self.rank} of {self.world_size}, capture {self.capture!r}"
        lines: list[str] = []

        def at(line: str) -> str:
            return f" at {line}" if line else ""

        if self.captured_error and self.error == self.captured_error:
            lines.append(f"{who}: the same exception{at(self.error_line)}: {self.error}")
        elif self.captured_error:
            happened = self.error or ("the step ended without one" if self.finished else "the step did not end")
            lines.append(
                f"{who}: not the captured exception{at(self.captured_line)}, {self.captured_error}: {happened}"
            )
        elif self.error:
            lines.append(f"{who}: the captured step ended, this one raised{at(self.error_line)}: {self.error}")
        elif self.equal:
            lines.append(f"{who}: bit-equal")
        elif not self.finished and not self.gradients:
            lines.append(f"{who}: the step did not come to its end, so nothing can be compared")
        else:
            lines.append(f"{who}: not equal")
        for number, ((captured, replayed), same) in enumerate(zip(self.losses, self.loss_bits, strict=True)):
            if len(self.losses) <= 4 or not same:
                shown = f"{replayed!r}" if same else f"{replayed!r}, captured {captured!r}"
                lines.append(f"  loss {number}: {shown}" if len(self.losses) > 1 else f"  loss: {shown}")
        if self.gradients:
            lines.append(f"  gradients: {self.gradients - len(self.differing)} of {self.gradients} bit-equal")
        lines += _some([f"    {name}: differs by up to {worst:.3g}" for name, worst in self.differing.items()])
        if self.updated:
            lines.append(
                f"  updated parameters: {self.updated - len(self.differing_updates)} of {self.updated} bit-equal"
            )
        lines.append(f"  collectives: {self.collectives} answered from the capture")
        lines += _some([f"    not called by this program: {each}" for each in self.uncalled])
        lines += _some([f"    got other values than in the captured step: {each}" for each in self.changed_inputs])
        lines += [f"  note: {each}" for each in dict.fromkeys(self.notes)]
        return "\n".join(lines)

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data; numbers that are not finite as text."""

        def plain(value: float) -> float | str:
            return value if math.isfinite(value) else str(value)

        return {
            **{key: value for key, value in vars(self).items() if key != "loss_bits"},
            "losses": [[plain(captured), plain(replayed)] for captured, replayed in self.losses],
            "differing": {name: plain(worst) for name, worst in self.differing.items()},
            "equal": self.equal,
        }

    def __str__(self) -> str:
        return self.text()


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"    and {len(lines) - _SHOWN} more"]


# -- the replay --------------------------------------------------------------------------------------


class Replay(StepHooks):
    """A replay. A context manager; `replay` creates it.

    Attributes:
        capture: the captured step.
        report: what is known of the replayed step so far.
    """

    def __init__(self, capture: RankCapture, *, stop: bool, quiet: bool) -> None:
        super().__init__()
        self.capture = capture
        self._stop, self._quiet = stop, quiet
        self._undo: list[Callable[[], object]] = []
        self._reset()

    def _reset(self) -> None:
        known = self.capture.description
        error = known["error"]
        self.report = ReplayReport(
            known["name"],
            self.capture.rank,
            known["world_size"],
            captured_error="" if error is None else f"{error['type']}: {error['message']}",
            captured_line="" if error is None else error["line"],
            expected_losses=len(known["losses"]),
        )
        self._roots: list[nn.Module] = []
        self._calls = 0
        self._reads = 0
        self._parameters: dict[str, torch.Tensor] = {}
        self._replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._queues = _queues(known["collectives"])
        self._before: list[dict[str, Any]] = list(known.get("before", ()))
        self._lock = threading.Lock()
        self._buckets = [each for root in known["roots"] for each in root["buckets"].values()]

    @property
    def begun(self) -> bool:
        """Whether the captured step runs."""
        return bool(self._roots) and not self.report.finished

    def __enter__(self) -> Replay:
        if dist.is_initialized():
            raise ReplayError(
                "this process is in a process group already; call torch.distributed.destroy_process_group() first"
            )
        self._reset()
        _forget_layouts()
        try:
            try:
                self._undo.append(answer(self._answer))
            except CollectivesError as error:
                raise ReplayError(str(error)) from None
            self._undo.append(_environment(self.capture.description))
            self._undo.append(_threads(self.capture.description["setup"]))
            self._undo.append(self._patch())
            self.install()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._leave_loss()
        if isinstance(error, StepReplayed):
            error = None
            ended = True
        else:
            ended = False
        if isinstance(error, Exception):
            self.failed(error)
        elif error is None and self.begun and not self.report.error and not self.report.captured_error:
            self._compare_gradients()
        self._leave()
        self._note_uncalled()
        if not self._quiet and not isinstance(error, ReplayError | CaptureError):
            print(self.report.text())
        return ended

    def _leave(self) -> None:
        self.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        _forget_layouts()

    # -- the state of the step -------------------------------------------------------------------

    def root_begins(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.report.finished:
            return None
        known = self.capture.description
        first = not self._roots
        if not any(each is root for each in self._roots):
            self._restore(root)
        if first:
            self._set_generators()
        at = self._calls
        self._calls += 1
        self._reads = next((n for n, each in enumerate(known["reads"]) if each["call"] > at), len(known["reads"]))
        if at >= len(known["calls"]):
            self.report.notes.append(
                f"call {at + 1} of a model ({type(root).__name__} at {line_here()}) has no captured inputs: the "
                f"captured step has {len(known['calls'])} calls"
            )
            return None
        inputs: dict[str, dict[str, Any]] = known["calls"][at]["inputs"]
        used: set[str] = set()

        def substitute(path: str, leaf: Any) -> Any:
            entry = inputs.get(path)
            used.add(path)
            if id(leaf) in self._replaced and self._replaced[id(leaf)][0] is leaf:
                return self._replaced[id(leaf)][1]
            if entry is None:
                self.report.notes.append(f"input {path} of call {at + 1} is the program's: the captured step had none")
                return leaf
            if "unknown" in entry:
                self.report.notes.append(
                    f"input {path} of call {at + 1} is the program's: {entry['unknown']} is no data"
                )
                return leaf
            if "value" in entry:
                return entry["value"] if type(entry["value"]) is type(leaf) else leaf
            if "tensor" not in entry or not isinstance(leaf, torch.Tensor) or leaf.grad_fn is not None:
                return leaf
            return self._given(leaf, self.capture.tensor(entry))

        args = map_leaves(args, substitute, "args")
        kwargs = map_leaves(kwargs, substitute, "kwargs")
        missing = sorted(inputs.keys() - used)
        if missing:
            raise ReplayError(
                f"call {at + 1} of a model ({type(root).__name__} at {line_here()}) lacks inputs of the captured step "
                f"(at {known['calls'][at]['line']}): {', '.join(missing)}"
            )
        return args, kwargs

    def _given(self, own: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the program gets in place of its own. A leaf that collects gradients is filled."""
        if own.requires_grad:
            target = local_part(own)
            if target.shape != captured.shape or target.dtype != captured.dtype:
                raise ReplayError(f"the captured step had {_shown(captured)} where this program has {_shown(own)}")
            target.copy_(captured)
            self.know([own])
            return own
        known = self._replaced.get(id(own))
        if known is not None and known[0] is own:
            return known[1]
        given = captured.to(own.device)
        if type(own) is not torch.Tensor and hasattr(own, "_local_tensor"):
            given = _like(own, given)
        self._replaced[id(own)] = (own, given)
        self.know([given])
        return given

    def _restore(self, root: nn.Module) -> None:
        """Give a root the weights, buffers and gradients of the captured step's begin."""
        known = self.capture.description
        prefix = f"{len(self._roots)}:" if self._roots else ""
        at = len(self._roots)
        self._roots.append(root)
        seen = {id(each) for each in self._parameters.values()}
        parameters = {prefix + name: each for name, each in named_parameters(root) if id(each) not in seen}
        wanted = {
            name
            for name in known["parameters"]
            if name.partition(":")[0] == prefix[:-1] or (not prefix and ":" not in name)
        }
        if parameters.keys() != wanted:
            ours, theirs = sorted(parameters.keys() - wanted), sorted(wanted - parameters.keys())
            sides = [f"only in this program: {_listed(ours)}"] if ours else []
            sides += [f"only in the capture: {_listed(theirs)}"] if theirs else []
            raise ReplayError(f"the parameters of model {at} ({type(root).__name__}) differ: {'; '.join(sides)}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                captured = self.capture.tensor(known["parameters"][name])
                target = local_part(parameter)
                if target.shape != captured.shape:
                    raise ReplayError(
                        f"{name} has the shape {list(target.shape)} in this program, and {list(captured.shape)} in the "
                        "captured step; is it sharded otherwise?"
                    )
                target.copy_(captured)
                before = known["gradients_before"].get(name)
                parameter.grad = None if before is None else _like(parameter, self.capture.tensor(before))
            for name, buffer in buffers_of(root, prefix).items():
                entry = known["buffers"].get(name)
                if entry is not None:
                    captured = self.capture.tensor(entry)
                    if local_part(buffer).shape == captured.shape:
                        local_part(buffer).copy_(captured)
        self._parameters.update(parameters)
        self.know(parameters.values())
        self.know(buffers_of(root, "").values())
        self._note_setup()

    def _note_setup(self) -> None:
        captured: dict[str, Any] = self.capture.description["setup"]
        here = setup(self._parameters.values())
        labels = {"torch": "PyTorch", "devices": "devices", "device_name": "the device", "cuda": "CUDA"}
        for key, label in labels.items():
            if captured[key] != here[key]:
                self.report.notes.append(
                    f"{label}: captured with {captured[key]}, replayed with {here[key]}; results need not be bit-equal"
                )

    def _set_generators(self) -> None:
        states = {
            name: self.capture.tensor(state) if isinstance(state, dict) else state
            for name, state in self.capture.description["generators"].items()
        }
        set_generator_states(states)

    def reads(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        if not self.begun:
            return tensor
        replaced = self._replaced.get(id(tensor))
        if replaced is not None and replaced[0] is tensor:
            return replaced[1]
        known = self.capture.description["reads"]
        entry = known[self._reads] if self._reads < len(known) else None
        if (
            entry is None
            or entry["call"] != self._calls
            or {key: entry[key] for key in ("dtype", "shape")} != described(local_part(tensor))
        ):
            self.know([tensor])
            self.report.notes.append(f"{_shown(tensor)} that {reader} reads at {line_here()} is the program's own")
            return tensor
        self._reads += 1
        return self._given(tensor, self.capture.tensor(entry))

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, ReplayError | CaptureError) and not self.report.error:
            self.report.error = f"{type(error).__name__}: {str(error)[:2000]}"
            self.report.error_line = line_of_error(error)

    # -- comparison ------------------------------------------------------------------------------

    def backward_begins(self, tensors: Sequence[torch.Tensor]) -> None:
        if not self.begun:
            return
        known = self.capture.description["losses"]
        for tensor in tensors:
            if tensor.numel() != 1:
                continue
            at = len(self.report.losses)
            own = local_part(tensor)
            if at >= len(known):
                self.report.losses.append((float("nan"), own.item()))
                self.report.loss_bits.append(False)
                continue
            captured = self.capture.tensor(known[at])
            self.report.losses.append((captured.item(), own.item()))
            self.report.loss_bits.append(bits(captured) == bits(own))

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        if not self.begun:
            return
        self._compare_gradients()
        self._restore_optimizer(optimizer)

    def _compare_gradients(self) -> None:
        known: dict[str, Any] = self.capture.description["gradients"]
        self.report.gradients, self.report.differing = 0, {}
        for name, parameter in self._parameters.items():
            entry = known.get(name)
            if entry is None and parameter.grad is None:
                continue
            self.report.gradients += 1
            if entry is None or parameter.grad is None:
                which = "the captured step" if entry is None else "this step"
                self.report.notes.append(f"{which} has no gradient of {name}")
                self.report.differing[name] = float("inf")
                continue
            captured, own = self.capture.tensor(entry), local_part(parameter.grad)
            if captured.shape != own.shape or bits(captured) != bits(own):
                self.report.differing[name] = _worst(captured, own)

    def _restore_optimizer(self, optimizer: Optimizer) -> None:
        """Give the optimizer the captured state, so that the update can be compared, too."""
        names = {id(each): name for name, each in self._parameters.items()}
        own = {names.get(id(each), "") for group in optimizer.param_groups for each in group["params"]}
        known = next(
            (
                each
                for each in self.capture.description["optimizers"]
                if each["class"] == type(optimizer).__name__
                and own == {n for g in each["groups"] for n in g["parameters"]}
            ),
            None,
        )
        self._compares_updates = known is not None
        if known is None:
            if self.capture.description["optimizers"]:
                self.report.notes.append("updates are not compared: the captured step has no such optimizer")
            return
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state: dict[str, Any] = known["state"].get(names.get(id(parameter), ""), {})
                    optimizer.state[parameter] = {
                        key: _state_value(parameter, self.capture.tensor(entry))
                        if "tensor" in entry
                        else entry["value"]
                        for key, entry in state.items()
                    }
            for group, saved in zip(optimizer.param_groups, known["groups"], strict=False):
                for key, value in saved["settings"].items():
                    if key in group and isinstance(group[key], torch.Tensor):
                        group[key].fill_(value)
                    elif key in group and value != group[key] and key != "initial_lr":
                        group[key] = tuple(value) if isinstance(group[key], tuple) else value

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        if not self.begun:
            return
        known: dict[str, str] = self.capture.description["updated"]
        if self._compares_updates:
            for name, parameter in self._parameters.items():
                if name in known:
                    self.report.updated += 1
                    if bits(parameter) != known[name]:
                        self.report.differing_updates.append(name)
        self.report.finished = True
        if self._stop:
            raise StepReplayed

    def _note_uncalled(self) -> None:
        if self.report.finished or self.report.gradients:
            left = [each for queue in self._queues.values() for each in queue if not _is_rebuild(each)]
            self.report.uncalled = [_described_entry(each) for each in left]

    # -- collectives -----------------------------------------------------------------------------

    def _answer(self, collective: Collective) -> None:
        with torch.no_grad(), self.unseen():
            if not self.begun:
                self._answer_before(collective)
                return
            with self._lock:
                entry = self._next(collective)
                self.report.collectives += 1
            for own, captured in zip(collective.inputs, entry["inputs"], strict=True):
                if "bits" in captured and captured["bits"] != bits(own):
                    self.report.changed_inputs.append(str(collective))
                    break
            if entry["outputs"] is None:
                raise ReplayError(f"the captured step ended before its {_described_entry(entry)} was complete")
            for own, stored in zip(collective.outputs, entry["outputs"], strict=True):
                own.copy_(self.capture.tensor(stored))

    def _answer_before(self, collective: Collective) -> None:
        """Answer a collective outside of the step: one of those just before it as captured, others by a stand-in."""
        callers, group = callers_here(), list(collective.group)
        with self._lock:
            fit = [each for each in self._before if each["group"] == group and each["outputs"]]
            fit = [] if self.report.finished else [each for each in fit if _matches(collective, each)]
            scores = [_common(each["callers"], callers) for each in fit]
            best = max(scores, default=(0, 0))
            if best[1]:
                # Calls of one line follow each other. If lines were edited, the last call is next to the step.
                at = scores.index(best) if best[0] else len(scores) - 1 - scores[::-1].index(best)
                self._before = [each for each in self._before if each is not fit[at]]
                for own, stored in zip(collective.outputs, fit[at]["outputs"], strict=True):
                    own.copy_(self.capture.tensor(stored))
                return
        _stand_in(collective)

    def _next(self, collective: Collective) -> dict[str, Any]:
        """Take the captured collective that answers a call."""
        queue = self._queues.get(_queue_of(collective, collective.group_name))
        if queue is None:  # group names follow the order in which groups are made
            others = [
                key
                for key in self._queues
                if key[:1] + key[2:] == _queue_of(collective, "")[:1] + _queue_of(collective, "")[2:]
            ]
            queue = self._queues[others[0]] if len(others) == 1 else []
        while queue and _is_rebuild(queue[0]) and not _matches(collective, queue[0]):
            queue.pop(0)
        if not queue:
            raise CollectiveMismatchError(
                f"this program calls {collective} in the group of ranks {_listed(list(collective.group))}; the "
                "captured step calls no further one there"
            )
        if not _matches(collective, queue[0]):
            raise CollectiveMismatchError(
                f"this program calls {collective}; the captured step calls {_described_entry(queue[0])} here (group of "
                f"ranks {_listed(list(collective.group))})"
            )
        return queue.pop(0)

    # -- torch.distributed -----------------------------------------------------------------------

    def _patch(self) -> Callable[[], None]:
        """Have torch.distributed make groups that run nothing; return what undoes it."""
        from torch._C._distributed_c10d import HashStore

        rank, size = self.capture.rank, int(self.capture.description["world_size"])
        _register_backend()
        patched: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, value: Any) -> None:
            patched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
            yield HashStore(), rank, size

        make: Any = distributed_c10d._new_process_group_helper

        def make_group(*args: Any, **kwargs: Any) -> Any:
            names = make.__code__.co_varnames[: make.__code__.co_argcount]
            named = dict(zip(names, args, strict=False)) | kwargs
            asked = named.get("backend")
            named |= {"backend": dist.Backend(_BACKEND), "backend_options": None, "device_id": None}
            group, store = make(**named)
            plain = str(asked or "").lower()
            if group in distributed_c10d._world.pg_map and plain in ("gloo", "nccl", "mpi", "ucc", "xccl"):
                distributed_c10d._world.pg_map[group] = (dist.Backend(plain), store)
            return group, store

        compute: Any = cast("Any", dist)._compute_bucket_assignment_by_size

        def assign_buckets(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            indices, limits = compute(tensors, *args, **kwargs)
            for at, buckets in enumerate(self._buckets):
                if sum(len(each) for each in buckets) == len(tensors):
                    del self._buckets[at]
                    # DDP reverses both
                    return list(reversed(buckets)), [limits[-1]] * len(buckets)
            return indices, limits

        patch(distributed_c10d, "rendezvous", rendezvous)
        patch(distributed_c10d, "_new_process_group_helper", make_group)
        patch(dist, "_compute_bucket_assignment_by_size", assign_buckets)
        stages: dict[str, Any] = self.capture.description["stages"]
        if stages:
            from torch.distributed.pipelining import stage as pipelining

            if hasattr(pipelining, "_StageForwardMeta"):
                patch(pipelining.PipelineStage, "_recv_meta", lambda own, source: _stage_message(stages, own, source))

        def undo() -> None:
            for owner, name, value in reversed(patched):
                setattr(owner, name, value)

        return undo


def replay(name: str | os.PathLike[str], rank: int | None = None, *, stop: bool = True, quiet: bool = False) -> Replay:
    """Replay a captured step of one rank in this process: ``with replay("NAME", rank=3): train()``.

    The block runs the program, or the part of it that builds the model and makes one step. Its
    `init_process_group` needs no other process. The block ends when the step has called `optimizer.step()`, and prints
    how it compares with the captured step. `breakpoint()` and other debuggers work in it, and it may be run again.

    Args:
        name: the name of the capture, or its folder.
        rank: the rank; None: the only one captured.
        stop: whether to leave the block after the step; otherwise its code goes on, without collectives.
        quiet: whether to print nothing; the report is in `.report`.

    Raises:
        CaptureError: there is no such capture, or it cannot be read.
        ReplayError: the program cannot run the captured step.
        CollectiveMismatchError: it calls a collective otherwise than the captured step.
    """
    return Replay(RankCapture.open(name, rank), stop=stop, quiet=quiet)


def replay_script(
    capture: RankCapture,
    script: str,
    arguments: Sequence[str],
    on_error: Callable[[BaseException], object] | None = None,
) -> ReplayReport:
    """Replay a captured step by running a script as `__main__`; return the report.

    Args:
        on_error: called with an exception of the script, before the replay ends.

    Raises:
        FileNotFoundError: there is no such script.
        ReplayError: the script cannot run the captured step.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"there is no script {script}")
    running = Replay(capture, stop=True, quiet=True)
    path, argv = list(sys.path), list(sys.argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = [script, *arguments]
    try:
        with running:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as error:
                if not running.report.finished:
                    running.report.notes.append(f"the script exited with {error.code!r} before its step ended")
            except Exception as error:
                running.failed(error)
                if on_error is not None:
                    on_error(error)
                if isinstance(error, ReplayError | CaptureError):
                    raise
    finally:
        sys.path[:], sys.argv = path, argv
    return running.report


# -- parts -------------------------------------------------------------------------------------------


def _forget_layouts() -> None:
    """Clear DTensor's caches: the meshes in them have the coordinates of the rank that this process was before."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _register_backend() -> None:
    if _BACKEND in dist.Backend.backend_list:
        return
    from torch._C import _distributed_c10d

    def create(_: Any, rank: int, size: int, __: Any) -> Any:
        return cast("Any", _distributed_c10d).FakeProcessGroup._create_internal(rank, size)

    dist.Backend.register_backend(_BACKEND, create, devices=["cpu", "cuda"])


def _environment(known: Mapping[str, Any]) -> Callable[[], None]:
    """Set the variables that tell a process its place; return what undoes it."""
    wanted = {"RANK": str(known["rank"]), "WORLD_SIZE": str(known["world_size"]), "LOCAL_RANK": "0"}
    wanted |= {key: str(value) for key, value in known["environment"].items() if key in ENVIRONMENT}
    wanted |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if torch.cuda.is_available() and int(wanted["LOCAL_RANK"]) >= torch.cuda.device_count():
        wanted["LOCAL_RANK"] = "0"  # this machine has fewer devices
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)

    def undo() -> None:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value

    return undo


def _threads(captured: Mapping[str, Any]) -> Callable[[], None]:
    """Compute with as many threads as the captured step: their number decides the order of sums."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(int(captured["threads"]))
    torch.set_float32_matmul_precision(captured["matmul_precision"])

    def undo() -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)

    return undo


def _queue_of(collective: Collective, name: str) -> tuple[Any, ...]:
    if collective.kind in ("send", "recv"):
        return (collective.group, name, collective.kind, collective.peer, collective.tag)
    return (collective.group, name)


def _queues(entries: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group captured collectives by what keeps its order in every run: the group, or the other end of a message."""
    queues: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        key: tuple[Any, ...] = (tuple(entry["group"]), entry["group_name"])
        if entry["kind"] in ("send", "recv"):
            key = (*key, entry["kind"], entry["peer"], entry["tag"])
        queues.setdefault(key, []).append(entry)
    return queues


def _common(captured: Sequence[Sequence[object]], called: Sequence[Sequence[object]]) -> tuple[int, int]:
    """Count the innermost callers that are the same: those at the same line, and those that are the same function."""
    lines = takewhile(lambda pair: list(pair[0]) == list(pair[1]), zip(captured, called))
    functions = takewhile(lambda pair: pair[0][0] == pair[1][0], zip(captured, called))
    return sum(1 for _ in lines), sum(1 for _ in functions)


def _matches(collective: Collective, entry: Mapping[str, Any]) -> bool:
    if (collective.kind, collective.op, collective.peer) != (entry["kind"], entry["op"], entry["peer"]):
        return False
    plain = [{key: each[key] for key in ("dtype", "shape")} for each in entry["inputs"]]
    return plain == [described(each) for each in collective.inputs] and entry["expects"] == [
        described(each) for each in collective.outputs
    ]


def _is_rebuild(entry: Mapping[str, Any]) -> bool:
    """Whether DDP may have sent this to group its parameters anew, which happens once in its second step."""
    return entry["kind"] == "broadcast" and all(each["dtype"] == "int32" for each in entry["expects"])


def _described_entry(entry: Mapping[str, Any]) -> str:
    tensors = [f"{each['dtype']}{each['shape']}" for each in entry["inputs"] or entry["expects"]]
    return title_of(entry["kind"], entry["op"], tensors, entry["line"])


def _stand_in(collective: Collective) -> None:
    """Fill the results of a collective as if every rank contributed what this one does."""
    inputs, outputs = collective.inputs, collective.outputs
    own = collective.group.index(dist.get_rank()) if dist.get_rank() in collective.group else 0
    if collective.kind in ("all_reduce", "broadcast", "reduce", "barrier", "send"):
        return
    if collective.kind in ("all_gather", "gather"):
        for at, output in enumerate(outputs):
            given = inputs[at % len(inputs)] if len(outputs) != len(inputs) else inputs[at]
            if output.numel() == given.numel():
                output.copy_(given.reshape(output.shape))
            else:
                output.view(-1, given.numel()).copy_(given.reshape(1, -1))
        return
    for at, output in enumerate(outputs):
        if not inputs or collective.kind == "recv":
            output.zero_()
        elif len(inputs) == len(outputs) and inputs[at].numel() == output.numel():
            output.copy_(inputs[at].reshape(output.shape))
        elif len(inputs) == len(outputs):
            parts = inputs[at].reshape(-1)
            size = output.numel()
            piece = parts[own * size : (own + 1) * size]
            output.copy_(piece.reshape(output.shape)) if piece.numel() == size else output.zero_()
        else:
            output.copy_(inputs[min(own, len(inputs) - 1)].reshape(output.shape))


def _stage_message(stages: Mapping[str, Any], stage: Any, source: int) -> Any:
    """Return what a neighbour tells a pipeline stage of the tensors that it sends."""
    from torch.distributed.pipelining import stage as pipelining

    parts = cast("Any", pipelining)
    forward = source < stage.stage_index
    found = stages.get(str(stage.stage_index), {}).get("inputs" if forward else "output_grads")
    if found is None:
        raise ReplayError(
            f"the capture lacks what stage {source} sends to pipeline stage {stage.stage_index}: such tensors are "
            "DTensors, or another version of PyTorch made the capture"
        )
    metas = tuple(
        None
        if each is None
        else parts._TensorMeta(torch.Size(each[0]), tuple(each[1]), getattr(torch, each[2]), each[3])
        for each in found
    )
    return parts._StageForwardMeta(metas) if forward else parts._StageBackwardMeta(metas)


def _like(own: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor placed as another one: on its device, and as a DTensor if that is one."""
    local = local.to(own.device)
    if not hasattr(own, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    dtensor = cast("Any", own)
    return DTensor.from_local(
        local, dtensor.device_mesh, dtensor.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def _state_value(parameter: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
    """Return a tensor of an optimizer's state; counters stay on the CPU, where torch has them."""
    return (
        captured
        if captured.dim() == 0 and captured.shape != local_part(parameter).shape
        else _like(parameter, captured)
    )


def _worst(captured: torch.Tensor, own: torch.Tensor) -> float:
    if captured.shape != own.shape:
        return float("inf")
    difference = (captured.to(torch.float64) - own.cpu().to(torch.float64)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(values: Sequence[object]) -> str:
    return few([str(each) for each in values], 12) or "none"
