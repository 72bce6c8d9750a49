"""Monarch's choice of one transport for everything; here each address chooses its own."""

from __future__ import annotations

import enum
import threading

from monarch_kernel.protocol.worker_addresses import dial_address
from monarch_kernel.runtime.actor import system as systems


class ChannelTransport(enum.Enum):
    """Monarch's names for transports, for ``enable_transport``."""

    Local = "local"
    Unix = "ipc"
    TcpWithLocalhost = "tcp-localhost"
    TcpWithHostname = "tcp"
    Tls = "tls"
    MetaTlsWithHostname = "metatls-hostname"
    MetaTlsWithIpV6 = "metatls"


#: What ``monarch.config`` has been told; like ``enable_transport``, it changes nothing.
DEFAULT: ChannelTransport | str = ChannelTransport.Unix
_chosen: ChannelTransport | str | None = None
_lock = threading.Lock()


def enable_transport(transport: ChannelTransport | str) -> None:
    """Accepted as in Monarch, before the first use of the API; it changes nothing.

    Processes of one host use Unix sockets and shared memory; hosts reach each other at the addresses that their
    workers were given, by TCP always with the team's key.

    Raises:
        ValueError: there is no such transport.
        RuntimeError: another one was chosen before, or the API was used already.
    """
    global _chosen
    wanted = checked(transport)
    with _lock:
        if _chosen == wanted:
            return
        if _chosen is not None:
            raise RuntimeError(f"enable_transport({transport!r}): this process has chosen {_shown(_chosen)} already")
        if systems.started():
            raise RuntimeError(
                f"enable_transport({transport!r}) comes too late: call it before anything else of monarch.actor"
            )
        _chosen = wanted


def checked(transport: ChannelTransport | str) -> ChannelTransport | str:
    """What a transport's name means.

    Raises:
        ValueError: there is no such transport.
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
