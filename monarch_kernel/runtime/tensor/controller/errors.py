"""Errors of operations on meshes."""

from __future__ import annotations

import threading

from monarch_kernel.runtime.actor.errors import SupervisionError


class RemoteException(Exception):  # Monarch's name
    """An operation failed on a rank, and a value that was asked for depends on it. The mesh lives.

    Attributes:
        rank: where it failed, in the mesh that ran it.
        controller_frames: where it was issued (most recent call last).
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
    """A watch found the operation that made the first NaN or Inf: see `watch_nan`. The values are there to examine."""

    def _headline(self, where: str) -> str:
        return f"an operation made a NaN or Inf on rank {self.rank}{where}, of inputs without."


class TensorUseError(TypeError):
    """Tensors cannot be used so.

    Torch's operators make NotImplemented of a TypeError, from which Python makes "unsupported operand type(s)": handles
    look here for the last one that was raised on this thread.
    """

    last = threading.local()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.last.raised = type(self), text  # not the error, which would keep its frames and their tensors


class MixedTensorsError(TensorUseError, ValueError):
    """Tensors that are not in one place: of several meshes, of several streams, or local ones among those of a mesh.

    It is a TypeError, as Monarch's for operations, and a ValueError, as its for arguments of actors.
    """


class DeviceMeshError(SupervisionError):
    """A rank of the mesh has died, or a value was lost with one: `heal_mesh` replaces the rank."""


class RanksDifferWarning(UserWarning):
    """A program takes the value of one rank for that of all, and other ranks hold other values."""


class BorrowError(TensorUseError):
    """A tensor is used in a way that its borrow by another stream excludes, or after it was dropped."""
