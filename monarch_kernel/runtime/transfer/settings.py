"""Which backend to use: chosen per pair of processes, unless it is forced."""

from __future__ import annotations

import os

VARIABLE = "MONARCH_KERNEL_RDMA_BACKEND"
#: Every backend there may be, best first. ``local``: the same process; ``cma``: cross-memory attach within one host;
#: ``segment``: through shared memory, with the owner's help; the others between hosts.
NAMES = ("local", "cma", "segment", "ibverbs", "tcp")

_forced: str | None = None


def configure(*, backend: str | None = None) -> None:
    """Force a backend for all transfers that this process begins, and those of procs that it spawns later.

    Args:
        backend: one of "local", "cma", "segment", "ibverbs", "tcp"; "auto" chooses the best for each pair of
            processes; None leaves it as it is.

    Raises:
        ValueError: there is no such backend.
    """
    global _forced
    if backend is not None:
        _forced = _checked(backend, "backend")
        os.environ[VARIABLE] = backend


def forced() -> str | None:
    """The backend that must be used; None to choose."""
    if _forced is not None:
        return None if _forced == "auto" else _forced
    name = os.environ.get(VARIABLE) or "auto"
    return None if _checked(name, VARIABLE) == "auto" else name


def _checked(name: str, what: str) -> str:
    if name not in (*NAMES, "auto"):
        raise ValueError(f"{what}={name!r} is no RDMA backend: use one of auto, {', '.join(NAMES)}")
    return name
