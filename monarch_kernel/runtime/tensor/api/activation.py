"""Select the mesh and stream of torch operations: ``with mesh.activate():``, ``with coalescing():``."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler  # pyright: ignore[reportUnusedImport]  # registers torch.ops.profiler
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.protocol.serialize import Unpickling
from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
from monarch_kernel.runtime.tensor.controller.handle import mesh_among
from monarch_kernel.runtime.tensor.controller.stream import MAIN, Stream
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh


#: Internal bookkeeping operations of torch, which run locally.
_LOCAL: frozenset[object] = frozenset({torch.ops.profiler._record_function_exit._RecordFunction})
#: The last operation of `torch.tensor(...)`: it turns a local tensor into one on the mesh.
_LIFT = torch.ops.aten.lift_fresh.default


class _Active(threading.local):
    """The active mesh and stream of this thread."""

    mesh: ProcMesh | None = None
    sharded: TensorMesh | None = None
    stream: Stream = MAIN


_active = _Active()


class _Mode(TorchDispatchMode):
    """Sends operations to a mesh, including those that create tensors."""

    def __init__(self, mesh: TensorMesh) -> None:
        super().__init__()
        self._mesh = mesh

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func in _LOCAL:
            return func(*args, **(kwargs or {}))
        mesh = mesh_among(args)
        if mesh is not None:
            return mesh.dispatch(func, args, kwargs)
        if func is not _LIFT and args and _is_local(args):
            return func(*args, **(kwargs or {}))
        return self._mesh.dispatch(func, args, kwargs)


def engine_of(procs: ProcMesh) -> TensorEngine:
    """Return the tensor engine of a proc mesh and its slices. It is created on first use.

    Raises:
        RuntimeError: the mesh was stopped.
    """
    return TensorEngine.of(procs)


def end_tensors(procs: ProcMesh) -> None:
    """Implement ``ProcMesh.exit``."""
    engine_of(procs).exit()


def tensor_mesh(procs: ProcMesh | None = None, stream: Stream | None = None) -> TensorMesh:
    """Return the target for operations on `procs` (default: the active mesh) and `stream` (default: the active stream).

    Raises:
        ValueError: no mesh is given or active.
    """
    if procs is None:
        procs = _active.mesh
        if procs is None:
            raise ValueError("no device mesh is active: write `with mesh.activate():`, or name a mesh")
    return engine_of(procs).mesh_of(procs, _active.stream if stream is None else stream)


def active_target() -> tuple[ProcMesh | None, Stream]:
    """Return the mesh and the stream that are active on this thread."""
    return _active.mesh, _active.stream


@contextmanager
def activate(procs: ProcMesh) -> Generator[ProcMesh]:
    """Run the torch operations of this block on every rank of the mesh. Their results are handles."""
    mesh = tensor_mesh(procs)
    with _active_is(procs, None), _without_modes(), _Mode(mesh):
        yield procs


@contextmanager
def activate_sharded(mesh: TensorMesh) -> Generator[None]:
    """Create the new tensors of this block on a sharded mesh, replicated on every rank."""
    with _active_is(None, mesh), _without_modes(), _Mode(mesh):
        yield


def active_sharded() -> TensorMesh | None:
    """Return the sharded mesh that is active on this thread."""
    return _active.sharded


@contextmanager
def _active_is(procs: ProcMesh | None, sharded: TensorMesh | None) -> Generator[None]:
    before = _active.mesh, _active.sharded
    _active.mesh, _active.sharded = procs, sharded
    try:
        yield
    finally:
        _active.mesh, _active.sharded = before


@contextmanager
def activate_stream(stream: Stream) -> Generator[Stream]:
    """Run the operations of this block in this stream, for meshes activated inside or outside the block."""
    before = _active.stream
    _active.stream = stream
    try:
        if _active.mesh is None:
            yield stream
        else:
            with _without_modes(), _Mode(tensor_mesh(_active.mesh)):
                yield stream
    finally:
        _active.stream = before


Stream._activation = staticmethod(activate_stream)


@contextmanager
def restored(procs: ProcMesh | None, stream: Stream) -> Generator[None]:
    """Make a mesh and stream from `active_target` active in this block."""
    with no_mesh.activate() if procs is None else activate(procs), activate_stream(stream):
        yield


class NoMesh:
    """The absence of a mesh: operations in ``with no_mesh.activate():`` run locally."""

    @contextmanager
    def activate(self) -> Generator[NoMesh]:
        """Run the torch operations of this block here, on local tensors."""
        with _active_is(None, None), _without_modes():
            yield self

    def __repr__(self) -> str:
        return "no_mesh"


no_mesh = NoMesh()


def get_active_mesh() -> ProcMesh:
    """Return the mesh that is active on this thread.

    Raises:
        ValueError: no mesh is active.
    """
    if _active.mesh is None:
        raise ValueError("no device mesh is active: write `with mesh.activate():`")
    return _active.mesh


def get_active_stream() -> Stream:
    """Return the stream that is active on this thread: the main stream by default."""
    return _active.stream


def _is_local(args: tuple[object, ...]) -> bool:
    """Return whether all tensors of an operation are local, such as fetched values."""
    first = args[0]
    if isinstance(first, (list, tuple)):
        return bool(first) and isinstance(first[0], torch.Tensor)
    return isinstance(first, torch.Tensor)


def _unpickled_here(*args: Any, **kwargs: object) -> object:
    """Run ``pickle.loads`` so that it also creates local tensors while a mesh is active."""
    if not torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
        return pickle.loads(*args, **kwargs)
    with _disable_current_modes():
        return pickle.loads(*args, **kwargs)


Unpickling.function = _unpickled_here


@contextmanager
def _without_modes() -> Generator[None]:
    with _disable_current_modes():
        yield


#: The maximum number of records in one message, inside a block.
COALESCED = 4096


@contextmanager
def coalescing() -> Generator[None]:
    """Send the operations of this block in few messages. All are sent by the end of the block.

    Operations are batched anyway, so the effect is small: the controller finishes a long block slightly sooner, and the
    ranks start later. Values can be fetched inside the block. To send a function as one operation, use `compile`.
    """
    before = TensorEngine.batch
    TensorEngine.batch = COALESCED
    try:
        yield
    finally:
        TensorEngine.batch = before
        mesh = active_target()[0]
        if mesh is not None and before != COALESCED:
            engine_of(mesh).flush()
