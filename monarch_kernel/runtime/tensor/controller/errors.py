"""Errors of operations on meshes."""

from __future__ import annotations

import threading

from monarch_kernel.runtime.actor.errors import SupervisionError


class RemoteException(Exception):  # Monarch's name
    """An operation failed on a rank, and a fetched value depends on it. The mesh remains usable.

    Attributes:
        rank: the rank of the failure, in the mesh that ran the operation.
        controller_frames: the frames that issued the operation (most recent call last).
        worker_error_string: the traceback on the rank.
    """

    def __init__(self, rank: int, controller_frames: str, worker_error_string: str, mesh: str = "") -> None:
        self.rank = rank
        self.controller_frames = controller_frames
        self.worker_error_string = worker_error_string
        where = f" of mesh {mesh}" if mesh else ""
        super().__init__(
            f"{self._headline(where)}\n"
            f"Issued at (most recent call last):\n{controller_frames}On the rank:\n{worker_error_string}"
        )

    def _headline(self, where: str) -> str:
        return f"an operation failed on rank {self.rank}{where}, and what was asked for depends on it."


class NonFiniteError(RemoteException):
    """A watch found the operation that made the first NaN or Inf; see `watch_nan`. The values remain available."""

    def _headline(self, where: str) -> str:
        return f"an operation made a NaN or Inf on rank {self.rank}{where}, of inputs without."


class TensorUseError(TypeError):
    """An invalid use of tensors.

    Torch's operators convert a TypeError to NotImplemented, and Python then reports "unsupported operand type(s)".
    Handles therefore look here for the last error that was raised on this thread.
    """

    last = threading.local()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.last.raised = type(self), text  # not the error itself, which would keep its frames and their tensors alive


class MixedTensorsError(TensorUseError, ValueError):
    """Tensors that belong to several meshes or streams, or local tensors among tensors of a mesh.

    Monarch raises TypeError for operations and ValueError for arguments of actors. This class is both.
    """


class DeviceMeshError(SupervisionError):
    """A rank of the mesh has died, or a value was lost with a rank. `heal_mesh` replaces the rank."""


class RanksDifferWarning(UserWarning):
    """The value of one rank is used as the value of all, but other ranks hold different values."""


class BorrowError(TensorUseError):
    """A tensor is used while its borrow by another stream excludes the use, or after it was dropped."""
