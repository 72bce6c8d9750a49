"""Capture what one rank's training step needs to run again: state, batch, generators, and results of collectives.

`capture` arms this process. Once a step is captured, two files of plain data for each rank lie in a folder:
`rank_00003.json` and `rank_00003.safetensors`. `monarch_kernel.numerics.step_replay` runs the step again from them, in
one ordinary process.

A step begins with the first forward of a model in training and ends with `optimizer.step()`. Weights, buffers and
gradients are those of its begin, because only the optimizer changes weights. The batch is what reaches a model from
outside the step, and the other tensors that the loss reads, such as labels.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from monarch_kernel.debugger.source_locations import outwards, shown_file, user_frame, user_line
from monarch_kernel.numerics.collectives import Collective, observe
from monarch_kernel.numerics.mesh_summaries import ON_RANKS, is_on_mesh, mesh_name
from monarch_kernel.numerics.observer import named_buffers, named_parameters
from monarch_kernel.numerics.recording import data_folder, is_plain, rank_and_size, settings_of
from monarch_kernel.private_files import PrivateFolder, written_whole

FORMAT = 1
#: What a step may keep in memory until it is written or over.
LIMIT_BYTES = 8 << 30
#: How many collectives between two steps are kept, the largest size of each, and how many of its callers are noted.
_BEFORE, _BEFORE_BYTES, _CALLERS = 64, 1 << 16, 6
_NAME = re.compile(r"[\w][\w.-]{0,99}")
_PIPELINE_STAGE = "torch.distributed.pipelining.stage"
_SCALARS = (bool, int, float, str, type(None))
#: The variables of a launcher that tell a process its place. No others are captured.
ENVIRONMENT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"),
)
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    **{
        getattr(torch, name): code
        for name, code in (("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("uint16", "U16"))
        if hasattr(torch, name)
    },
}


#: The captures of this process that wait for an exception.
_waiting: list[Capture] = []


def note_exception(error: BaseException, since: float) -> None:
    """Report an exception that has ended code to the captures that wait for one.

    Args:
        since: when that code began (`time.monotonic`). Steps that began earlier are another program's.
    """
    for each in tuple(_waiting):
        step = each._step
        if isinstance(error, Exception) and step is not None and step.began >= since:
            each.failed(error)


class CaptureError(RuntimeError):
    """A capture cannot be made, found or read."""


def captures_folder() -> str:
    """Return the folder of this user's captures."""
    return data_folder("captures")


def folder_of(name: str, folder: str | os.PathLike[str] | None = None) -> str:
    """Return the folder of a capture.

    Raises:
        CaptureError: the name does not suit a folder.
    """
    if folder is not None:
        return os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if not _NAME.fullmatch(name):
        raise CaptureError(
            f"{name!r} is not a valid name of a capture: use letters, digits, '.', '_' and '-', or pass folder="
        )
    return os.path.join(captures_folder(), name)


def rank_files(rank: int) -> tuple[str, str]:
    """Return the names of the files of a rank: its description, and its tensors."""
    return f"rank_{rank:05}.json", f"rank_{rank:05}.safetensors"


# -- tensors and values ------------------------------------------------------------------------------


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds, without its graph."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if local is None else local.detach()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, contiguous and on the CPU; of a CPU tensor without a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def bits(tensor: torch.Tensor) -> str:
    """Return a digest that is equal for tensors with equal bits."""
    from blake3 import blake3

    return blake3(raw_bytes(local_part(tensor))).hexdigest(16)


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype and shape of a tensor as plain data."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def map_leaves(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Apply a function to the leaves of nested tuples, lists, mappings and data classes, each with its path."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, tuple):
        items = [map_leaves(each, change, f"{path}.{at}") for at, each in enumerate(cast("tuple[Any, ...]", value))]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        made = cast("Any", type(value))
        return made(*items) if hasattr(made, "_fields") else made(items)
    if isinstance(value, list):
        return [map_leaves(each, change, f"{path}.{at}") for at, each in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        changed: dict[Any, Any] = {key: map_leaves(each, change, f"{path}.{key}") for key, each in mapping.items()}
        if all(changed[key] is mapping[key] for key in changed):
            return value
        if type(value) is dict:
            return changed
        copied: Any = cast("Any", mapping).copy()  # such as the batches of tokenizers
        for key, each in changed.items():
            copied[key] = each
        return copied
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            before = getattr(value, name, None)
            after = map_leaves(before, change, f"{path}.{name}")
            if after is not before:
                setattr(value, name, after)
        return value
    return change(path, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings and data classes."""
    found: list[torch.Tensor] = []

    def collect(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_leaves(value, collect)
    return found


class TensorFile:
    """Tensors to write to one safetensors file, each content once. It reads tensors only while it writes."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[tuple[str, str, tuple[int, ...]], str] = {}

    def add(self, key: str, tensor: torch.Tensor) -> str:
        """Add a tensor; return its key in the file, which is another one if an equal tensor has been added."""
        local = local_part(tensor)
        if local.dtype not in _DTYPES or local.layout != torch.strided:
            raise CaptureError(f"{key} cannot be written: {local.dtype}, {local.layout}")
        known = (bits(local), str(local.dtype), tuple(local.shape))
        if known not in self._keys:
            self._keys[known] = key
            self._tensors[key] = local
        return self._keys[known]

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return sum(each.numel() * each.element_size() for each in self._tensors.values())

    def write(self, path: str) -> None:
        """Write the file, one tensor at a time. It appears when it is complete."""
        header: dict[str, Any] = {}
        at = 0
        for key, tensor in self._tensors.items():
            end = at + tensor.numel() * tensor.element_size()
            header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with written_whole(path) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in self._tensors.values():
                file.write(raw_bytes(tensor))


# -- generators --------------------------------------------------------------------------------------


def generator_states() -> dict[str, Any]:
    """Return the states of the generators of torch (tensors), Python and NumPy (lists)."""
    states: dict[str, Any] = {"torch.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            states[f"torch.cuda:{device}"] = torch.cuda.get_rng_state(device)
    version, internal, gauss = random.getstate()
    states["python"] = [version, list(internal), gauss]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set generators to the states that `generator_states` returned."""
    for name, state in states.items():
        if name == "torch.cpu":
            torch.set_rng_state(state)
        elif name.startswith("torch.cuda:"):
            device = int(name.rpartition(":")[2])
            if torch.cuda.is_available() and device < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, device)
        elif name == "python":
            random.setstate((state[0], tuple(state[1]), state[2]))
        elif name == "numpy":
            import numpy

            numpy.random.set_state((state[0], numpy.array(state[1], dtype=numpy.uint32), *state[2:]))


# -- the events of a step ----------------------------------------------------------------------------


class StepHooks:
    """The events of training steps that captures and replays need, from torch's global hooks.

    Subclasses override the methods without an underscore. Everything is installed by `install` and removed by
    `uninstall`. A root is a module that is called while no other is, with autograd enabled.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._active = False
        self._inside = 0  # calls of torch's hooks, which iterate over them
        self._thread_id: int | None = None  # of the program; None until it calls a module
        self._backward: Callable[..., Any] | None = None
        self._thread = threading.local()
        self._modes: list[_LossMode] = []
        #: By id: the tensors that the step has computed, and its parameters and buffers.
        self.known: dict[int, weakref.ref[torch.Tensor]] = {}

    def root_begins(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before the forward of a root. Return other arguments to replace them."""

    def failed(self, error: BaseException) -> None:
        """Called when forward, loss or backward raise. The exception goes on afterwards."""

    def reads(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        """Called when code after a root's forward reads a tensor from outside the step. Return what it gets instead."""
        return tensor

    def backward_begins(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when gradients of these tensors are about to be computed."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Called before `optimizer.step()`."""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Called after `optimizer.step()`."""

    def install(self) -> None:
        """Install the hooks: the first one now, the others when a module is called.

        Torch iterates over the other ones, so only the thread that calls them may change them.
        """
        self._handles = [register_module_forward_pre_hook(self._before_module)]  # pyright: ignore[reportArgumentType]  # may return
        self._active = True
        self._thread_id = None

    def _install_others(self) -> None:
        self._thread_id = threading.get_ident()
        self._handles += [
            register_module_forward_hook(self._after_module, always_call=True),
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_optimizer(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after_optimizer(optimizer)),
        ]
        self._backward = original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._leave_loss()
            if self._active:
                self.backward_begins(list(_flat(tensors)))
            try:
                return original(tensors, *args, **kwargs)
            except Exception as error:
                if self._active:
                    self.failed(error)
                raise

        self._patched = backward
        torch.autograd.backward = backward

    def uninstall(self) -> None:
        """Remove the hooks. What another thread may iterate over is removed at its next forward."""
        self._active = False
        if not self._inside and self._thread_id in (None, threading.get_ident()):
            self._remove_handles()
        if self._backward is not None and torch.autograd.backward is self._patched:
            torch.autograd.backward = self._backward
        self._backward = None
        self._leave_loss()
        for mode in self._modes:  # of other threads, which drop them at their next call
            mode.active = False
        self.known.clear()

    def _remove_handles(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    @contextmanager
    def _hook(self) -> Generator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that do not come from outside the step."""
        for tensor in tensors:
            self.known[id(tensor)] = weakref.ref(tensor)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor does not come from outside the step."""
        found = self.known.get(id(tensor))
        return tensor.grad_fn is not None or (found is not None and found() is tensor)

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not self._active:
            self._remove_handles()  # torch has copied the hooks that it calls here
            self._leave_loss()
            return None
        if self._thread_id is None:
            self._install_others()
        if getattr(self._thread, "root", None) is not None or not _trains_here():
            return None
        self._leave_loss()
        self._thread.root = module
        # torch passes no keyword arguments to global hooks; its frame has them, in a dictionary that it uses afterwards
        found = sys._getframe(1).f_locals.get("kwargs")
        kwargs = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        changed = self.root_begins(module, args, kwargs)
        if changed is None:
            return None
        kwargs.update(changed[1])
        return changed[0]

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if getattr(self._thread, "root", None) is not module or not self._active:
            return
        self._thread.root = None
        error = sys.exc_info()[1]
        with self._hook():
            if error is not None and output is None:
                self.failed(error)
                return
            self.know(tensors_in(output))
            if self._active:
                self._enter_loss()

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        self._thread.root = None  # left by an interrupt, else None already
        self._leave_loss()
        if self._active and not _steps_others(optimizer):
            with self._hook():
                self.optimizer_begins(optimizer)

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if self._active and not _steps_others(optimizer):
            with self._hook():
                self.optimizer_ends(optimizer)

    @contextmanager
    def unseen(self) -> Generator[None]:
        """Compute with tensors without observing it as a part of the step."""
        mode = getattr(self._thread, "mode", None)
        if mode is None or not mode.active:
            yield
            return
        mode.active = False
        try:
            yield
        finally:
            mode.active = self._active

    def _enter_loss(self) -> None:
        mode = getattr(self._thread, "mode", None)
        if mode is None:
            mode = self._thread.mode = _LossMode(self)
            self._modes.append(mode)
        mode.active = True
        _place_at_bottom(mode)

    def _leave_loss(self) -> None:
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            mode.active = False
            _take_away(mode)


class _LossMode(TorchFunctionMode):
    """Sees what code between a forward and its backward reads. It is active nowhere else."""

    def __init__(self, hooks: StepHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.active = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("backward", "__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point"):
            return func(*args, **kwargs)
        hooks = self.hooks
        if getattr(func, "__module__", "").startswith("torch.distributed"):  # results that are captured otherwise
            hooks.know(tensors_in((args, kwargs)))
            return func(*args, **kwargs)

        def read(_: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not hooks.is_known(leaf):
                with hooks._hook():
                    return hooks.reads(leaf, name)
            return leaf

        args = map_leaves(args, read)
        kwargs = cast("dict[str, Any]", map_leaves(kwargs, read))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            with hooks._hook():  # torch has taken this mode off for this call, and puts it back
                hooks.failed(error)
            raise
        hooks.know(tensors_in(result))
        return result


def _place_at_bottom(mode: TorchFunctionMode) -> None:
    """Put a mode below those of the program, so that the program leaves its own modes in their order.

    Only `torch.device` as a context needs to be lower: it expects itself at the bottom.
    """
    from torch._C import _len_torch_function_stack
    from torch.overrides import _pop_mode, _push_mode
    from torch.utils._device import DeviceContext

    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    above.reverse()
    devices = [each for each in above if isinstance(each, DeviceContext)]
    for each in (*devices, mode, *(each for each in above if each is not mode and each not in devices)):
        _push_mode(each)


def _take_away(mode: TorchFunctionMode) -> None:
    from torch._C import _len_torch_function_stack
    from torch.overrides import _pop_mode, _push_mode

    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(above):
        if each is not mode:
            _push_mode(each)


def _trains_here() -> bool:
    """Whether a module that is called now is part of a training step: autograd runs, and nothing only tries it out."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
        return False
    frame = sys._getframe(2)
    for _ in range(12):  # a pipeline tries its stages with empty tensors, just above the module's call
        if frame is None:
            break
        if frame.f_globals.get("__name__") == _PIPELINE_STAGE and "inference" in frame.f_code.co_name:
            return False
        frame = frame.f_back
    return True


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, Sequence):
        yield from (each for each in tensors if isinstance(each, torch.Tensor))


def line_here() -> str:
    """Return the innermost line of user code, such as "train.py:42"; "" if there is none."""
    return user_line(sys._getframe(1))


def callers_here() -> list[list[str | int]]:
    """Return the functions that run, but for torch's and ours, each with its line; the innermost comes first."""
    frames = (each for each in outwards(sys._getframe(1)) if _package(each) not in ("monarch_kernel", "torch"))
    return [
        [f"{each.f_globals.get('__name__')}:{each.f_code.co_qualname}", each.f_lineno]
        for each in itertools.islice(frames, _CALLERS)
    ]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an exception."""
    line = ""
    at = error.__traceback__
    while at is not None:
        if user_frame(at.tb_frame) is at.tb_frame:
            line = f"{shown_file(at.tb_frame.f_code.co_filename)}:{at.tb_lineno}"
        at = at.tb_next
    return line or line_here()


def pipeline_stage() -> Any:
    """Return the pipeline stage that calls a module of this thread; None if none does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _PIPELINE_STAGE and hasattr(frame.f_locals.get("self"), "stage_index"):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


# -- one step ----------------------------------------------------------------------------------------


@dataclass
class _Root:
    """A root with its state at the step's begin. Names of the first root's parameters have no prefix."""

    module: nn.Module
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclass
class _Step:
    """The evidence of a running step."""

    states: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    roots: dict[int, _Root] = field(default_factory=dict[int, _Root])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reads: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    losses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    collectives: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict[tuple[Any, ...], dict[str, Any]])
    before: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict[tuple[Any, ...], dict[str, Any]])
    stages: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    versions: int = 0
    had_backward: bool = False
    kept_bytes: int = 0
    nan: str = ""
    complete: bool = True

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU."""
        copied = local_part(tensor).to("cpu", copy=True)
        self.kept_bytes += copied.numel() * copied.element_size()
        return copied


def buffers_of(root: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return the buffers of a root by name, each once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, _, buffer, _ in named_buffers(root):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            found[prefix + name] = buffer
    return found


def ddp_buckets(root: nn.Module) -> dict[str, list[list[int]]]:
    """Return how each DDP of a root groups its parameters for reduction, by index, in order of their reduction.

    DDP groups them anew after its first step. A replay, in which that step is the first, uses the same groups.
    """
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, list[list[int]]] = {}
    for module in root.modules():
        if isinstance(module, DistributedDataParallel):
            parameters = cast("tuple[list[torch.Tensor], Any]", module._build_params_for_reducer())[0]
            index = {id(parameter): at for at, parameter in enumerate(parameters)}
            buckets = cast("Any", module.reducer)._get_zeros_like_grad_buckets()
            found[str(len(found))] = [
                [index[id(each)] for each in bucket.parameters()]
                for bucket in sorted(buckets, key=lambda bucket: bucket.index())
            ]
    return found


def _stage_description(stage: Any) -> dict[str, Any]:
    """Return what neighbours told a pipeline stage of the tensors that it receives, as plain data."""
    meta = getattr(stage, "_stage_meta", None)
    described: dict[str, Any] = {}
    for field_name in ("inputs", "output_grads"):
        metas = getattr(meta, field_name, None)
        if metas is None or any(hasattr(each, "placements") for each in metas):
            described[field_name] = None
            continue
        described[field_name] = [
            None
            if each is None
            else [list(each.shape), list(each.stride), str(each.dtype).removeprefix("torch."), bool(each.requires_grad)]
            for each in metas
        ]
    return described


def collective_key(collective: Collective) -> tuple[Any, ...]:
    """Return what tells a collective from all others of a process."""
    peer = (collective.kind, collective.peer, collective.tag) if collective.kind in ("send", "recv") else ()
    return (collective.group, collective.group_name, *peer, collective.sequence)


# -- the capture -------------------------------------------------------------------------------------


class Capture(StepHooks):
    """A capture that waits for its step, or has written it. A context manager that ends it. `capture` creates it.

    Attributes:
        name, folder: its name, and where it is written.
        rank, world_size: those of this process.
        state: "waiting", "step begun", "written", "failed" or "ended".
        reason: why it was written: "next step", "ValueError: …", "loss is nan …"; or why it failed.
        size: the bytes of its tensors; before it is written an estimate, from the optimizers of this process.
        seconds: how long the step was held up for writing.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        *,
        next_step: bool,
        on_error: bool,
        on_nan: bool,
        replace: bool,
        after_step: bool,
        rank: int | None,
        world_size: int | None,
        limit: int = LIMIT_BYTES,
    ) -> None:
        super().__init__()
        self.name, self.folder = name, folder
        own_rank, own_size = rank_and_size()
        self.rank = own_rank if rank is None else rank
        self.world_size = own_size if world_size is None else world_size
        self.state, self.reason = "waiting", ""
        self.size = _estimate()
        self.seconds = 0.0
        self._next_step, self._on_error, self._on_nan = next_step, on_error, on_nan
        self._replace, self._after_step, self._limit = replace, after_step, limit
        self._step: _Step | None = None
        self._description: dict[str, Any] | None = None
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._interception: Callable[[], None] | None = None
        self._excepthook = sys.excepthook
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._before: dict[tuple[Any, ...], dict[str, Any]] = {}  # collectives since the last step
        self._buffers: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def start(self) -> None:
        """Begin to wait for the step.

        Raises:
            CaptureError: the folder has a capture of this rank already, or is not private.
        """
        os.makedirs(os.path.dirname(self.folder), 0o700, exist_ok=True)
        try:
            with PrivateFolder.made(self.folder) as folder:
                taken = rank_files(self.rank)[0] in folder.names()
        except OSError as error:
            raise CaptureError(f"captures cannot be written to {self.folder}: {error}") from None
        if taken and not self._replace:
            raise CaptureError(
                f"{self.folder} already has a capture of rank {self.rank}: choose another name, or pass replace=True "
                "(%mesh capture --replace)"
            )
        self.install()
        with self._guard():  # from now on, since a step's collectives may begin before its first module is called
            self._interception = observe(self._collective_ended, self._collective_begins, keep_inputs=False)
        if self._on_error:
            _waiting.append(self)
            self._excepthook = sys.excepthook
            sys.excepthook = self._uncaught

    def end(self) -> None:
        """End it; what is written stays. Ending again has no effect."""
        with self._lock:
            self._end("ended")

    def _end(self, state: str, reason: str = "") -> None:
        if self._done.is_set():
            return
        self.state, self.reason = state, reason or self.reason
        self._step = None
        self._buffers.clear()
        if self in _waiting:
            _waiting.remove(self)
        if self._interception is not None:
            self._interception()
        self.uninstall()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is written, has failed or is ended (seconds); return whether that is so."""
        return self._done.wait(timeout)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self._on_error:
            self.failed(error)
        self.end()

    def __repr__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"capture {self.name!r} of rank {self.rank}: {self.state}{reason}, {megabytes(self.size)} in {self.folder}"
        )

    # -- what happens in the step ----------------------------------------------------------------

    def root_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._guard():
            step = self._running(root)
            if step is None:
                return
            stage = pipeline_stage()
            if stage is not None:
                step.stages[stage.stage_index] = _stage_description(stage)
            if id(root) not in step.roots:
                self._add_root(step, root)
            inputs: dict[str, Any] = {}

            def note(path: str, leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor):
                    inputs[path] = {"computed": True} if self.is_known(leaf) else {"kept": step.keep(leaf)}
                    self.know([leaf])
                elif isinstance(leaf, _SCALARS) and not (isinstance(leaf, float) and not math.isfinite(leaf)):
                    inputs[path] = {"value": leaf}
                else:
                    inputs[path] = {"unknown": type(leaf).__name__}
                return leaf

            map_leaves(args, note, "args")
            map_leaves(kwargs, note, "kwargs")
            at = list(step.roots).index(id(root))
            step.calls.append(
                {"root": at, "class": type(root).__name__, "training": root.training, "line": line_here()}
                | {"inputs": inputs}
            )

    def _running(self, root: nn.Module) -> _Step | None:
        """Return the step in which a root is called, a new one if it is the first call; None if it is not captured."""
        step = self._step
        if step is not None and step.had_backward and self._is_over(step):
            if step.nan:
                self._fail("the program skipped optimizer.step() and changed its gradients before it could be written")
                return None
            step = None
            if self._next_step and not (self._on_error or self._on_nan):
                self._fail(
                    "the step ended without the step() of a torch optimizer, or in its closure, so its weights are gone"
                )
                return None
        if step is None:
            if self._after_step:
                return None
            self.known.clear()
            step = self._step = _Step(generator_states(), before=self._before)
            self._before = {}
            self.state = "step begun"
        if step.kept_bytes > self._limit:
            self._fail(f"the step needs more memory than {megabytes(self._limit)}; raise limit=")
            return None
        return step

    def _is_over(self, step: _Step) -> bool:
        """Whether weights or gradients show that a step has ended without the step() of a torch optimizer."""
        parameters = [each for root in step.roots.values() for each in root.parameters.values() if each.requires_grad]
        if _versions(parameters) != step.versions:
            return True
        return bool(parameters) and all(each.grad is None for each in parameters)

    def _add_root(self, step: _Step, root: nn.Module) -> None:
        on_mesh = next((each for each in root.parameters() if is_on_mesh(each)), None)
        if on_mesh is not None:
            raise TypeError(
                f"the tensors of this model are on mesh {mesh_name(on_mesh)}, and a capture has the step of one "
                f"process: {ON_RANKS}, and capture it there. Recordings and comparisons work here"
            )
        seen = {id(each) for known in step.roots.values() for each in known.parameters.values()}
        prefix = f"{len(step.roots)}:" if step.roots else ""
        parameters = {prefix + name: each for name, each in named_parameters(root) if id(each) not in seen}
        buffers = {name: self._kept_buffer(each) for name, each in buffers_of(root, prefix).items()}
        gradients = {name: step.keep(each.grad) for name, each in parameters.items() if each.grad is not None}
        step.roots[id(root)] = _Root(root, parameters, buffers, gradients)
        step.versions = _versions(
            each for known in step.roots.values() for each in known.parameters.values() if each.requires_grad
        )
        self.know(parameters.values())
        self.know(buffers_of(root, "").values())

    def _kept_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a copy of a buffer: that of an earlier step if it has not changed."""
        known = self._buffers.get(id(buffer))
        if known is not None and known[0]() is buffer and known[1] == buffer._version:
            return known[2]
        copied = local_part(buffer).to("cpu", copy=True)
        self._buffers[id(buffer)] = (weakref.ref(buffer), buffer._version, copied)
        return copied

    def reads(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        with self._guard():
            step = self._step
            if step is not None and tensor.layout == torch.strided and tensor.dtype in _DTYPES:
                step.reads.append({"call": len(step.calls), "reader": reader, "line": line_here()})
                step.reads[-1]["kept"] = step.keep(tensor)
                self.know([tensor])
        return tensor

    def backward_begins(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._guard():
            step = self._step
            if step is None:
                return
            step.had_backward = True
            for tensor in tensors:
                if tensor.numel() == 1:
                    step.losses.append({"kept": step.keep(tensor), "line": line_here()})
                    if self._on_nan and not step.nan and not bool(torch.isfinite(local_part(tensor)).all()):
                        step.nan = f"the loss is {local_part(tensor).item()} at {line_here()}"

    def failed(self, error: BaseException) -> None:
        with self._guard():
            if self._on_error and self._step is not None and self._description is None:
                line = line_of_error(error)
                said = {"type": type(error).__name__, "message": str(error)[:2000], "line": line}
                self._write(f"{type(error).__name__}: {str(error)[:200]}", said)
                self._finish({})

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception):
            self.failed(error)
        self._excepthook(kind, error, trace)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        with self._guard():
            if not any(reference() is optimizer for reference in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))
            step = self._step
            if step is None or self._description is not None or not _shares(optimizer, step):
                return
            if self._on_nan and not step.nan:
                step.nan = _non_finite(step)
            if step.nan:
                self._write(step.nan, None)
            elif self._next_step:
                self._write("next step", None)

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        with self._guard():
            self._after_step = False
            self._before = {}
            step = self._step
            if step is None or not _shares(optimizer, step):
                return
            if self._description is None:
                self._step = None
                self.state = "waiting"
                return
            started = time.perf_counter()
            updated = {
                name: bits(each)
                for root in step.roots.values()
                for name, each in root.parameters.items()
                if _held(each)
            }
            self.seconds += time.perf_counter() - started
            self._finish(updated)

    # -- collectives -----------------------------------------------------------------------------

    def _collective_begins(self, collective: Collective) -> None:
        with self._lock, self.unseen():
            step = self._step
            if step is None and sum(each.numel() * each.element_size() for each in collective.outputs) > _BEFORE_BYTES:
                return
            entry: dict[str, Any] = {
                "kind": collective.kind,
                "group": list(collective.group),
                "group_name": collective.group_name,
                "op": collective.op,
                "peer": collective.peer,
                "tag": collective.tag,
                "line": collective.line,
                "inputs": [described(each) for each in collective.inputs],
                "expects": [described(each) for each in collective.outputs],
                "outputs": None,
            }
            if step is None:  # such as the number of tokens of the batch on all ranks
                entry["callers"] = callers_here()
                self._before[collective_key(collective)] = entry
                if len(self._before) > _BEFORE:
                    del self._before[next(iter(self._before))]
                return
            if not self._on_error and not self._on_nan:  # in every step, it would cost too much
                for each, tensor in zip(entry["inputs"], collective.inputs, strict=True):
                    each["bits"] = bits(tensor)
            step.collectives[collective_key(collective)] = entry

    def _collective_ended(self, collective: Collective) -> None:
        with self._lock, self.unseen():
            step, key = self._step, collective_key(collective)
            if step is not None and (entry := step.collectives.get(key)) is not None:
                entry["outputs"] = [step.keep(each) for each in collective.outputs]
            elif (entry := (self._before if step is None else step.before).get(key)) is not None:
                entry["outputs"] = [local_part(each).to("cpu", copy=True) for each in collective.outputs]

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, reason: str, error: dict[str, Any] | None) -> None:
        """Write the tensors, and prepare the description."""
        step = self._step
        assert step is not None
        started = time.perf_counter()
        self.reason = reason
        file = TensorFile()

        def stored(key: str, entry: dict[str, Any]) -> dict[str, Any]:
            kept = entry.get("kept")
            others = {name: value for name, value in entry.items() if name != "kept"}
            return others if kept is None else others | {"tensor": file.add(key, kept), **described(kept)}

        parameters = {name: each for root in step.roots.values() for name, each in root.parameters.items()}
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        names = {id(each): name for name, each in parameters.items()}
        generators = {
            name: {"tensor": file.add(f"generator/{name}", state)} if isinstance(state, torch.Tensor) else state
            for name, state in step.states.items()
        }
        description: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "reason": reason,
            "rank": self.rank,
            "world_size": self.world_size,
            "created": time.time(),
            "program": program(),
            "environment": {key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
            "setup": setup(parameters.values()),
            "generators": generators,
            "parameters": {name: _placed(file, f"parameter/{name}", each) for name, each in parameters.items()},
            "buffers": {
                name: {"tensor": file.add(f"buffer/{name}", each)}
                for root in step.roots.values()
                for name, each in root.buffers.items()
            },
            "gradients_before": {
                name: {"tensor": file.add(f"gradient_before/{name}", each)}
                for root in step.roots.values()
                for name, each in root.gradients.items()
            },
            "roots": [
                {"class": type(root.module).__name__, "buckets": ddp_buckets(root.module)}
                for root in step.roots.values()
            ],
            "stages": {str(at): each for at, each in step.stages.items()},
            "calls": [
                {
                    **call,
                    "inputs": {
                        path: stored(f"input/{at}/{path}", entry)
                        for path, entry in cast("dict[str, dict[str, Any]]", call["inputs"]).items()
                    },
                }
                for at, call in enumerate(step.calls)
            ],
            "reads": [stored(f"read/{at}", each) for at, each in enumerate(step.reads)],
            "losses": [stored(f"loss/{at}", each) for at, each in enumerate(step.losses)],
            "collectives": _answers(file, "collective", step.collectives.values()),
            "before": _answers(file, "before", step.before.values()),
            "gradients": {}
            if error is not None
            else {name: {"tensor": file.add(f"gradient/{name}", each)} for name, each in gradients.items()},
            "optimizers": [
                _optimizer_state(file, at, each, names) for at, each in enumerate(self._optimizers_of(names))
            ],
            "error": error,
        }
        self.size = file.size
        free = shutil.disk_usage(self.folder).free
        if file.size > free:
            raise CaptureError(f"it needs {megabytes(file.size)}; {self.folder} has {megabytes(free)} left")
        with PrivateFolder.made(self.folder) as folder:
            folder.discard(rank_files(self.rank)[0])  # the description is what makes a capture
        file.write(os.path.join(self.folder, rank_files(self.rank)[1]))
        self._description = description
        self.seconds += time.perf_counter() - started

    def _optimizers_of(self, names: Mapping[int, str]) -> list[Optimizer]:
        """Return the optimizers that update named parameters, in the order of their steps."""

        def updates(optimizer: Optimizer) -> bool:
            return any(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"])

        known = [each for each in (reference() for reference in self._optimizers) if each is not None and updates(each)]
        return known or [each for each in _all_optimizers() if updates(each) and not _steps_others(each)]

    def _finish(self, updated: dict[str, str]) -> None:
        assert self._description is not None
        text = json.dumps({**self._description, "updated": updated, "bytes": self.size, "seconds": self.seconds})
        with written_whole(os.path.join(self.folder, rank_files(self.rank)[0])) as out:
            out.write(text.encode())
        self._end("written")

    def _fail(self, reason: str) -> None:
        self._end("failed", reason)
        warnings.warn(f"capture {self.name!r} failed; the program continues: {reason}", RuntimeWarning, stacklevel=2)

    @contextmanager
    def _guard(self) -> Generator[None]:
        """Keep errors of the capture from the program, and two threads from one step."""
        with self._lock, self.unseen():
            try:
                yield
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")


def _answers(file: TensorFile, key: str, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the results of collectives to a file; returns their descriptions."""
    return [
        {
            **each,
            "outputs": None
            if each["outputs"] is None
            else [
                {"tensor": file.add(f"{key}/{at}/{number}", tensor)} for number, tensor in enumerate(each["outputs"])
            ],
        }
        for at, each in enumerate(entries)
    ]


def capture(
    name: str,
    *,
    next_step: bool = False,
    on_error: bool = False,
    on_nan: bool = False,
    folder: str | os.PathLike[str] | None = None,
    replace: bool = False,
    after_step: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    limit: int = LIMIT_BYTES,
) -> Capture:
    """Capture a training step of this process, so that `replay` can run it again without the other ranks.

    Args:
        name: the name of the capture: a folder in the user's folder of captures.
        next_step: capture the next step that begins. This is the default.
        on_error: keep batch, generators and collectives of each running step, and write the step in which forward, loss
            or backward raise, or whose exception leaves the ``with`` block or the program. An optimizer's own
            exception is too late, because it may have changed weights.
        on_nan: likewise; write the first step whose loss or gradients are not finite.
        folder: another folder.
        replace: replace a capture of this rank.
        after_step: begin with the step after the next `optimizer.step()`, for programs that are inside of a step.
        rank, world_size: those of this process; by default, those of torch.distributed.
        limit: the bytes that a step may keep in memory.

    Returns:
        The capture, which waits for its step. Its `end` ends it, as the end of its ``with`` block does.

    Raises:
        CaptureError: it cannot be written there, or this version of PyTorch cannot report collectives.
    """
    made = Capture(
        name,
        folder_of(name, folder),
        next_step=next_step or not (on_error or on_nan),
        on_error=on_error,
        on_nan=on_nan,
        replace=replace,
        after_step=after_step,
        rank=rank,
        world_size=world_size,
        limit=limit,
    )
    made.start()
    return made


def megabytes(count: int) -> str:
    """Return a number of bytes for people: "0.4 MB", "212 MB", "3.1 GB"."""
    if count >= 10**9:
        return f"{count / 10**9:.1f} GB"
    return f"{count / 10**6:.0f} MB" if count >= 10**7 else f"{count / 10**6:.1f} MB"


def setup(parameters: Iterable[torch.Tensor] = ()) -> dict[str, Any]:
    """Return what else decides the bits of a result: versions, devices, numbers of threads, precision."""
    kinds = sorted({each.device.type for each in parameters})
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "devices": kinds,
        "device_name": torch.cuda.get_device_name() if "cuda" in kinds else torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda if "cuda" in kinds else None,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def program() -> dict[str, Any]:
    """Return how this process runs its program: its script, if it has one, with arguments and folder."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if path is not None and os.path.basename(str(path)) not in ("__main__.py",):
        return {"script": os.path.abspath(str(path)), "arguments": sys.argv[1:], "folder": os.getcwd()}
    return {"module": getattr(spec, "name", None), "arguments": sys.argv[1:], "folder": os.getcwd()}


def _versions(parameters: Iterable[torch.Tensor]) -> int:
    return sum(local_part(each)._version for each in parameters)


def _held(tensor: torch.Tensor) -> bool:
    """Whether a parameter's memory is there; FSDP frees that of unsharded ones."""
    local = local_part(tensor)
    return local.numel() == 0 or local.untyped_storage().size() > 0


def _steps_others(optimizer: Optimizer) -> bool:
    """Return whether an optimizer only holds others with the same parameters, which it steps, as TorchTitan's does."""
    held: list[Optimizer] = []
    for value in vars(optimizer).values():
        items = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
        held += [each for each in items if isinstance(each, Optimizer)]

    def parameters(optimizers: Sequence[Optimizer]) -> set[int]:
        return {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}

    return bool(held) and parameters(held) >= parameters([optimizer])


def _shares(optimizer: Optimizer, step: _Step) -> bool:
    """Whether an optimizer updates parameters of a step, or copies of them that this cannot tell."""
    ids = {id(each) for root in step.roots.values() for each in root.parameters.values()}
    own = [each for group in optimizer.param_groups for each in group["params"]]
    return bool(step.calls) and (any(id(each) in ids for each in own) or step.had_backward)


def _non_finite(step: _Step) -> str:
    for root in step.roots.values():
        for name, each in root.parameters.items():
            if each.grad is not None and not bool(torch.isfinite(local_part(each.grad)).all()):
                return f"the gradient of {name} is not finite"
    return ""


def _all_optimizers() -> list[Optimizer]:
    # isinstance() would ask objects for their __class__, and some of torch's warn of being asked anything.
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def _estimate() -> int:
    """Return about how many bytes a capture needs: parameters, optimizer state, gradients and their reduction."""
    total = 0
    seen: set[int] = set()
    for optimizer in _all_optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen and isinstance(parameter, torch.Tensor):
                    seen.add(id(parameter))
                    local = local_part(parameter)
                    states = [each for each in optimizer.state.get(parameter, {}).values() if _is_tensor(each)]
                    total += local.numel() * local.element_size() * 3
                    total += sum(local_part(each).numel() * each.element_size() for each in states)
    return total


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _placed(file: TensorFile, key: str, tensor: torch.Tensor) -> dict[str, Any]:
    entry: dict[str, Any] = {"tensor": file.add(key, tensor), "requires_grad": tensor.requires_grad}
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        entry["placements"] = [str(each) for each in placements]
        entry["shape"] = list(tensor.shape)
    return entry


def _optimizer_state(file: TensorFile, at: int, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state and the settings of an optimizer as plain data."""
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [names.get(id(parameter), "") for parameter in group["params"]]
        groups.append({"parameters": own, "settings": settings_of(group)})
        for name, parameter in zip(own, group["params"], strict=True):
            if not name:
                continue
            state[name] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state[name][key] = {"tensor": file.add(f"optimizer/{at}/{name}/{key}", value)}
                elif is_plain(value):
                    state[name][key] = {"value": value}
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}
