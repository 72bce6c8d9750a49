"""Access GPU memory of other processes of this host: it is mapped here through CUDA IPC, and copied by the GPU.

The owner describes the memory once per buffer and process; after that it takes no part. The mapping is PyTorch's, so it
works for every allocator of PyTorch, and the owner's allocator keeps the memory until every mapping is closed.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import threading
from importlib.util import find_spec
from typing import Any

from monarch_kernel.protocol.private_files import remove_torch_memory
from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.backends.interface import BackendContext, StatelessBackend
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Memory, memory_of

#: The interval at which mapped buffers are checked for drops (seconds).
SWEEP = 5.0


class CudaIpc(StatelessBackend):
    """Mapped GPU memory."""

    name = "cuda_ipc"
    inline = -1  # it may have to query the owner
    devices = True

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine
        self._guard = threading.Lock()
        self._mapped: dict[int, tuple[Handle, Memory]] = {}
        self._barred: dict[str, str] = {}  # the reason, by owner
        self._sweeping = False
        self._offered = False  # whether another process has received a mapping description of this process's memory

    @staticmethod
    def available() -> bool:
        return find_spec("torch") is not None

    def bars(self, handle: Handle) -> str:
        if not handle.device:
            return "it is not GPU memory"
        elsewhere = self._engine.elsewhere(handle) or self._barred.get(handle.owner.id, "")
        if elsewhere:
            return elsewhere
        # A process with an open CUDA device has imported torch. For others the import is not worth its time.
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return "this process has not imported torch, or has no CUDA device"
        try:
            self._engine.peer(handle)
        except Gone:
            pass  # move() raises it
        except OSError as e:
            return f"its owner's process cannot be accessed ({os.strerror(e.errno or 0)})"
        return ""

    def move(self, op: Op, deadline: float | None) -> None:
        handle = op.handle
        peer = self._engine.peer(handle)
        if not peer.hold(handle.slot, handle.key):
            with self._guard:
                self._mapped.pop(handle.key, None)
            if not peer.alive():
                raise Gone
            raise self._engine.dropped(op)
        try:
            theirs = self._map(handle, deadline)
            if op.write:
                device.move(theirs, op.offset, op.memory, 0, op.size)
            else:
                device.move(op.memory, 0, theirs, op.offset, op.size)
        except RDMAError:
            raise
        except RuntimeError as e:  # CUDA's
            raise RDMAError(f"{op} failed: {e}", handle.owner.id) from None
        finally:
            peer.release(handle.slot)
        if not peer.alive():
            raise Gone

    def _map(self, handle: Handle, deadline: float | None) -> Memory:
        with self._guard:
            known = self._mapped.get(handle.key)
        if known is not None:
            return known[1]
        try:
            tensor = _rebuilt(self._engine.offer(handle, self.name, b"", deadline))
        except Unfit as e:
            self._barred[handle.owner.id] = str(e)
            raise
        memory = memory_of(tensor)
        with self._guard:
            self._mapped[handle.key] = handle, memory
            if not self._sweeping:
                self._sweeping = True
                self._engine.node.poller.call_later(SWEEP, self._sweep)
        return memory

    def _sweep(self) -> None:
        """Close the mappings of dropped buffers, which returns the memory to their owners."""
        with self._guard:
            for key, (handle, _) in list(self._mapped.items()):
                try:
                    peer = self._engine.peer(handle)
                    live = peer.hold(handle.slot, key)
                except (Gone, OSError):
                    live = False
                else:
                    if live:
                        peer.release(handle.slot)
                if not live:
                    del self._mapped[key]
            self._sweeping = bool(self._mapped)
            if not self._sweeping:
                return
        self._engine.node.poller.call_later(SWEEP, self._sweep)

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        with self._engine.held(key) as registration:
            if not registration.memory.device.startswith("cuda"):
                raise Unfit("it is not GPU memory")
            self._offered = True
            return _described(registration.memory.keep)

    def peer_dead(self, proc: str) -> None:
        with self._guard:
            for key in [key for key, (handle, _) in self._mapped.items() if handle.owner.id == proc]:
                del self._mapped[key]

    def close(self) -> None:
        with self._guard:
            self._mapped.clear()
        if self._offered:
            remove_torch_memory(os.getpid())


def _described(tensor: Any) -> bytes:
    """Describe the memory of a tensor so that another process can map it."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    try:
        _, arguments = reduce_tensor(tensor)
    except RuntimeError as e:
        raise Unfit(f"its memory cannot be shared with other processes ({e})") from None
    return pickle.dumps((str(torch.cuda.get_device_properties(tensor.device).uuid), arguments))


def _rebuilt(description: bytes) -> Any:
    """Map the tensor of a description."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid, arguments = pickle.loads(description)
    # The same device may have another number here.
    number = next(
        (i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid), None
    )
    if number is None:
        raise Unfit("the owner's GPU is not visible in this process")
    bound = inspect.signature(rebuild_cuda_tensor).bind(*arguments)
    bound.arguments["storage_device"] = number
    try:
        return rebuild_cuda_tensor(*bound.args)
    except RuntimeError as e:
        raise Unfit(f"the owner's GPU memory cannot be mapped here ({e})") from None
