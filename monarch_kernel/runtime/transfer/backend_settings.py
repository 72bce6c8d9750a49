"""What users set: which backend, and how TCP is used. Handed on to procs through the environment."""

from __future__ import annotations

import os

BACKEND = "MONARCH_KERNEL_RDMA_BACKEND"
TCP = "MONARCH_KERNEL_RDMA_TCP"
FALLBACK = "MONARCH_KERNEL_RDMA_TCP_FALLBACK"

#: Every backend there may be, best first. ``local``: the same process; ``cma``: cross-memory attach within one host;
#: ``segment``: through shared memory, with the owner's help; ``cuda_ipc``: GPU memory within one host; the others
#: between hosts.
NAMES = ("local", "cuda_ipc", "cma", "segment", "ibverbs", "tcp")
ENCRYPTED, TRUSTED = "encrypted", "trusted-network"

_configured: dict[str, str] = {}


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
        ValueError: there is no such backend, or no such way to use TCP.
    """
    for variable, value in (
        (BACKEND, backend),
        (TCP, tcp),
        (FALLBACK, None if allow_tcp_fallback is None else str(int(allow_tcp_fallback))),
    ):
        if value is not None:
            _configured[variable] = _checked(variable, value)
            os.environ[variable] = value


def allow_tcp_fallback(allowed: bool | None) -> None:
    """What ``configure`` sets; None is as it is where nobody has said anything: TCP is used, with a warning."""
    if allowed is None:
        _configured.pop(FALLBACK, None)
        os.environ.pop(FALLBACK, None)
    else:
        configure(allow_tcp_fallback=allowed)


def forced() -> str | None:
    """The backend that must be used; None to choose."""
    name = _get(BACKEND)
    return None if name == "auto" else name


def trusted() -> bool:
    """Whether bytes may go by TCP in the clear."""
    return _get(TCP) == TRUSTED


def tcp_fallback() -> bool | None:
    """Whether TCP may be used between hosts unasked; None: it may, with a warning."""
    return {"1": True, "0": False}.get(_get(FALLBACK))


_CHOICES = {BACKEND: ("auto", *NAMES), TCP: (ENCRYPTED, TRUSTED), FALLBACK: ("", "0", "1")}


def _get(variable: str) -> str:
    found = _configured.get(variable)
    return found if found is not None else _checked(variable, os.environ.get(variable) or _CHOICES[variable][0])


def _checked(variable: str, value: str) -> str:
    if value not in _CHOICES[variable]:
        what = {BACKEND: "is no RDMA backend", TCP: "is no way to use TCP"}.get(variable, "is not known")
        choices = ", ".join(filter(None, _CHOICES[variable]))
        raise ValueError(f"{variable}={value!r} {what}: use one of {choices}")
    return value
