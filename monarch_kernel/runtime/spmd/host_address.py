"""By which address this host is reached from others, and which network interface has it."""

from __future__ import annotations

import ipaddress
import os
import socket

from monarch_kernel.runtime.actor.process import get_system

LOOPBACK = "127.0.0.1"
#: The interface that gloo shall use.
GLOO = "GLOO_SOCKET_IFNAME"

_chosen = ""


def own_address() -> str:
    """The address that other hosts reach this one at.

    On the host of a worker that listens at TCP, the one in that worker's URL; else that of this host's name; else that
    of the interface which leads out of here. It is a name where only others can resolve it.
    """
    advertised = _advertised()
    if advertised:
        address = _resolved(advertised)
        return advertised if address.startswith("127.") else address or advertised
    address = _resolved(socket.gethostname())
    if address and not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: this only chooses the route
            return str(probe.getsockname()[0])
        except OSError:
            return address or LOOPBACK


def choose_interface(address: str) -> None:
    """Have gloo use the interface with this address of ours, unless the user has chosen one.

    Left alone it goes by the host's name, and where that does not resolve it takes the loopback, silently.

    Args:
        address: as ``own_address`` gives it, or the loopback's.
    """
    global _chosen
    if os.environ.get(GLOO, _chosen) != _chosen:
        return
    _chosen = _interface_of(_resolved(address))
    if _chosen:
        os.environ[GLOO] = _chosen
    else:  # behind NAT, say
        os.environ.pop(GLOO, None)


def _advertised() -> str:
    """The host in the URL by which others reach this site's worker; "" on a site that has none."""
    scheme, _, place = get_system().node.ref.gateway_address.partition("://")
    return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


def _resolved(name: str) -> str:
    """An address of a name; "" if it cannot be resolved here."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    """The interface that has this address; "" if none has."""
    import psutil

    found = (name for name, entries in psutil.net_if_addrs().items() if address in (e.address for e in entries))
    return next(found, "")
