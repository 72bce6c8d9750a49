"""Monarch's setting of one transport for all connections. Here each address determines its own transport."""

from __future__ import annotations

import enum
import threading

from monarch_kernel.protocol.worker_addresses import dial_address
from monarch_kernel.runtime.actor.process import started


class ChannelTransport(enum.Enum):
    """Monarch's names for transports, for ``enable_transport``."""

    Local = "local"
    Unix = "ipc"
    TcpWithLocalhost = "tcp-localhost"
    TcpWithHostname = "tcp"
    Tls = "tls"
    MetaTlsWithHostname = "metatls-hostname"
    MetaTlsWithIpV6 = "metatls"

    def get(self) -> ChannelTransport:
        """Return the transport itself, as in Monarch."""
        return self


#: The setting ``default_transport`` of ``monarch.config``; like ``enable_transport``, it changes nothing.
DEFAULT: ChannelTransport | str = ChannelTransport.Unix
_chosen: ChannelTransport | str | None = None
_lock = threading.Lock()


def enable_transport(transport: ChannelTransport | str) -> None:
    """Accept a transport for compatibility with Monarch, before the first use of the API. It has no effect.

    Processes of one host use Unix sockets and shared memory. Hosts reach each other at their workers' addresses; TCP
    always needs a key.

    Raises:
        ValueError: the transport does not exist.
        RuntimeError: another transport was chosen before, or the API has already been used.
    """
    global _chosen
    wanted = checked(transport)
    with _lock:
        if _chosen == wanted:
            return
        if _chosen is not None:
            raise RuntimeError(f"enable_transport({transport!r}): this process has already chosen {_shown(_chosen)}")
        if started():
            raise RuntimeError(
                f"enable_transport({transport!r}) comes too late: call it before anything else of monarch.actor"
            )
        _chosen = wanted


def checked(transport: ChannelTransport | str) -> ChannelTransport | str:
    """Return the transport with this name, or the checked address.

    Raises:
        ValueError: the transport does not exist.
    """
    if isinstance(transport, ChannelTransport):
        return transport
    if isinstance(transport, str):
        if "://" in transport:
            return dial_address(transport)
        for known in ChannelTransport:
            if known.value == transport:
                return known
    names = ", ".join(repr(known.value) for known in ChannelTransport)
    raise ValueError(f"there is no transport {transport!r}: use {names}, a URL or a ChannelTransport")


def _shown(chosen: ChannelTransport | str) -> str:
    return repr(chosen if isinstance(chosen, str) else chosen.value)
