"""Run programs written for torchrun, with Monarch's actor of this purpose.

torchrun's processes end with the program. Ranks here continue, so that they can run it again, for example after a heal.
Each run therefore restores its changes to the process and leaves its process group, however it ends.
"""

from __future__ import annotations

import io
import os
import pickle
import runpy
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.spmd import member
from monarch_kernel.runtime.spmd.member import LOOPBACK, Meeting, choose_interface, own_address
from monarch_kernel.runtime.spmd.rendezvous import counting_apart, tidy_up

# Copy the state of a training run from the most advanced rank to all others.

#: Smaller tensors are sent in the pickle, each larger one in a separate broadcast (bytes).
SMALL = 4096


class Stateful(Protocol):
    """An object with a state, such as a module, optimizer, scheduler or sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> Any: ...


def share_state(progress: int, *parts: Stateful) -> int:
    """Copy the state of the most advanced rank to every rank of the default process group.

    This is a collective: all ranks call it, with the same number and kinds of parts. The source is never a healed rank,
    which has made no progress yet, nor a rank that failed in a step that others completed.

    Args:
        progress: the progress of this rank, such as its number of completed steps; the lowest rank wins a tie.
        parts: modules, optimizers, and other objects with ``state_dict`` and ``load_state_dict``.

    Returns:
        The progress of the source, which all ranks now have.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    progresses: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(progresses, progress)
    source = progresses.index(max(progresses))
    leads = distributed.get_rank() == source
    tensors: list[Any] = []
    box: list[Any] = [None]
    if leads:
        box[0] = _pickled([part.state_dict() for part in parts], tensors)
    distributed.broadcast_object_list(box, src=source)
    outline, shapes = box[0]
    if not leads:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
    for tensor in tensors:
        distributed.broadcast(tensor, src=source)
    if not leads:
        states = _Unpickler(io.BytesIO(outline), tensors).load()
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    return progresses[source]


def _pickled(states: list[dict[str, object]], tensors: list[Any]) -> tuple[bytes, list[tuple[Any, Any, str]]]:
    """Pickle states without the large tensors, which are appended to ``tensors``.

    Also return their shapes, types and devices.
    """
    stream = io.BytesIO()
    _Pickler(stream, tensors).dump(states)
    return stream.getvalue(), [(t.shape, t.dtype, t.device.type) for t in tensors]


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: list[object]) -> None:
        super().__init__(stream, protocol=5)
        self._tensors = tensors

    def persistent_id(self, obj: object) -> int | None:
        import torch

        if not isinstance(obj, torch.Tensor) or obj.numel() * obj.element_size() < SMALL or obj.is_sparse:
            return None
        self._tensors.append(obj.detach().contiguous())
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[object]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> object:
        return self._tensors[pid]


class SPMDActor(Actor):
    """Runs scripts and modules on every rank of a mesh, with the environment variables of torchrun.

    ```python
    spmd = procs.spawn("spmd", SPMDActor)
    address, port = await spmd.flatten("ranks").slice(ranks=0).get_host_port.call_one()
    await spmd.main.call(address, port, ["-m", "train", "--lr", "0.001"])
    ```

    The last dimension of the mesh counts the ranks of a host (LOCAL_RANK). When a rank dies in ``main``, the call
    raises ``MeshFailure`` and the others are released from their collectives: after ``procs.heal()``, call both
    endpoints again.
    """

    def __init__(self) -> None:
        point = current_rank()
        self._rank = point.rank
        self._world_size = point.extent.nelements
        self._local_size = point.extent.shape[-1] if point.extent.shape else 1

    @endpoint
    def get_host_port(self, use_ipaddr: object = None) -> tuple[str, int]:
        """Return, on rank 0, an address at which the other ranks reach this host, and a port that is free there.

        Args:
            use_ipaddr: accepted for compatibility with Monarch; the address is an IP address if one is known.
        """
        meeting = member.reserve(self._world_size, self._local_size, local=False, serve=False)
        return meeting.address, meeting.port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set the variables that torchrun sets."""
        self._set_environment(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Set the variables that torchrun sets, and run a program to its end.

        Args:
            master_addr: the address of rank 0.
            master_port: a port there, on which the program's process group may listen.
            script_args: ``["-m", module, ...]`` or ``[path, ...]``, with the arguments of the program.

        Returns:
            True.

        Raises:
            ValueError: no script or module is named.
            RuntimeError: the program exited with a code other than 0.
        """
        args = [str(arg) for arg in script_args]
        module = args[:1] == ["-m"]
        if len(args) < 1 + module:
            raise ValueError("No script or module specified: main() takes ['-m', module, ...] or [path, ...]")
        member.leave()  # a group left by other code of this process
        argv = args[module:]
        folder = os.getcwd() if module else os.path.dirname(os.path.abspath(argv[0]))
        apart = counting_apart(self._meeting(master_addr, master_port))
        with _as_program(argv, folder), apart, collectives.keeping_groups():
            self._set_environment(master_addr, master_port)
            try:
                if module:
                    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(argv[0], run_name="__main__")
            except SystemExit as exit_:
                if exit_.code not in (None, 0):
                    raise RuntimeError(f"{argv[0]} exited with {exit_.code!r} on rank {self._rank}") from exit_
            finally:
                member.leave()
                tidy_up()
        return True

    def _meeting(self, address: str, port: int) -> Meeting:
        return Meeting(address, port, self._world_size, self._local_size)

    def _set_environment(self, address: str, port: int) -> None:
        choose_interface(LOOPBACK if address == LOOPBACK else own_address())
        member.set_environment(self._meeting(address, port), self._rank)


@contextmanager
def _as_program(argv: list[str], folder: str) -> Generator[None]:
    """Set the arguments and the import path of a program, which imports modules of a folder first.

    Afterwards, arguments and environment variables are restored.
    """
    arguments, environment = sys.argv, dict(os.environ)
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = arguments
        for name in os.environ.keys() - environment.keys():
            os.environ.pop(name, None)
        os.environ.update(environment)
        if folder in sys.path:  # the program may have changed it
            sys.path.remove(folder)
