"""User settings: the backend, and the use of TCP. Procs inherit them through the environment."""

from __future__ import annotations

from typing import Any, TypeVar

from monarch_kernel.environment import RDMA_BACKEND, RDMA_TCP, RDMA_TCP_FALLBACK, TRUSTED_NETWORK, EnvironmentVariable

T = TypeVar("T")

#: The settings made by ``configure`` in this process, by variable. Later changes of the environment do not affect them.
_configured: dict[EnvironmentVariable[Any], Any] = {}


class RDMATcpFallbackWarning(UserWarning):
    """Buffers move between hosts over TCP, because nothing faster is available."""


class RDMAReadTransferWarning(Warning):
    """Monarch's category of warnings about slow reads, for warning filters of programs. It is never issued here."""


class RDMAWriteTransferWarning(Warning):
    """Monarch's category of warnings about slow writes, for warning filters of programs. It is never issued here."""


def configure(*, backend: str | None = None, tcp: str | None = None, allow_tcp_fallback: bool | None = None) -> None:
    """Configure the transfers that this process starts, and those of procs that it spawns later.

    Args:
        backend: force one of "local", "cuda_ipc", "cma", "segment", "ibverbs", "tcp"; "auto" chooses the best for
            each pair of processes.
        tcp: "encrypted" (the default), or "trusted-network": bytes are then sent in plain text, and anyone on the path
            can read and change them. Takes effect only between two processes that both have it set.
        allow_tcp_fallback: whether to use TCP between hosts without a faster backend. By default TCP is used, with a
            ``RDMATcpFallbackWarning``. True silences the warning. With False, such transfers raise ``RDMAError``.

    An argument that is None changes nothing.

    Raises:
        InvalidSettingError: a name is unknown.
    """
    fallback = None if allow_tcp_fallback is None else str(int(allow_tcp_fallback))
    for variable, text in ((RDMA_BACKEND, backend), (RDMA_TCP, tcp), (RDMA_TCP_FALLBACK, fallback)):
        if text is not None:
            _configured[variable] = variable.parse(text)
            variable.set(text)


def allow_tcp_fallback(allowed: bool | None) -> None:
    """Set ``allow_tcp_fallback`` as ``configure`` does. None unsets it: TCP is used, with a warning."""
    if allowed is None:
        _configured.pop(RDMA_TCP_FALLBACK, None)
        RDMA_TCP_FALLBACK.set(None)
    else:
        configure(allow_tcp_fallback=allowed)


def forced() -> str | None:
    """Return the forced backend; None if the engine chooses."""
    name = _get(RDMA_BACKEND)
    return None if name == "auto" else name


def trusted() -> bool:
    """Return whether bytes may be sent over TCP in plain text."""
    return _get(RDMA_TCP) == TRUSTED_NETWORK


def tcp_fallback() -> bool | None:
    """Return whether TCP may be used between hosts without being forced; None: yes, with a warning."""
    return _get(RDMA_TCP_FALLBACK)


def _get(variable: EnvironmentVariable[T]) -> T:
    return _configured[variable] if variable in _configured else variable.get()
