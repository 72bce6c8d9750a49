"""What users set: which backend, and how TCP is used. Handed on to procs through the environment."""

from __future__ import annotations

from typing import Any, TypeVar

from monarch_kernel.environment import RDMA_BACKEND, RDMA_TCP, RDMA_TCP_FALLBACK, TRUSTED_NETWORK, Variable

T = TypeVar("T")

#: What ``configure`` has set in this process, by variable: later changes of the environment do not count.
_configured: dict[Variable[Any], Any] = {}


class RDMATcpFallbackWarning(UserWarning):
    """Buffers are moved between hosts by TCP, as there is nothing faster."""


def configure(*, backend: str | None = None, tcp: str | None = None, allow_tcp_fallback: bool | None = None) -> None:
    """Set how transfers are done that this process begins, and those of procs that it spawns later.

    Args:
        backend: force one of "local", "cuda_ipc", "cma", "segment", "ibverbs", "tcp"; "auto" chooses the best for
            each pair of processes.
        tcp: "encrypted" (the default), or "trusted-network": bytes then go as they are, which anybody on the way can
            read and change. Only between two processes that both have it set.
        allow_tcp_fallback: whether TCP is used between hosts where nothing better exists. It is by default, with a
            ``RDMATcpFallbackWarning``, which True silences; False: such transfers fail with ``RDMAError``.

    What is None stays as it is.

    Raises:
        InvalidSettingError: there is no such backend, or no such way to use TCP.
    """
    fallback = None if allow_tcp_fallback is None else str(int(allow_tcp_fallback))
    for variable, text in ((RDMA_BACKEND, backend), (RDMA_TCP, tcp), (RDMA_TCP_FALLBACK, fallback)):
        if text is not None:
            _configured[variable] = variable.parse(text)
            variable.set(text)


def allow_tcp_fallback(allowed: bool | None) -> None:
    """What ``configure`` sets; None unsets it: TCP is used, with a warning."""
    if allowed is None:
        _configured.pop(RDMA_TCP_FALLBACK, None)
        RDMA_TCP_FALLBACK.set(None)
    else:
        configure(allow_tcp_fallback=allowed)


def forced() -> str | None:
    """The backend that must be used; None to choose."""
    name = _get(RDMA_BACKEND)
    return None if name == "auto" else name


def trusted() -> bool:
    """Whether bytes may go by TCP in the clear."""
    return _get(RDMA_TCP) == TRUSTED_NETWORK


def tcp_fallback() -> bool | None:
    """Whether TCP may be used between hosts unasked; None: it may, with a warning."""
    return _get(RDMA_TCP_FALLBACK)


def _get(variable: Variable[T]) -> T:
    return _configured[variable] if variable in _configured else variable.get()
