"""Find the address at which other hosts reach this host, and its network interface."""

from __future__ import annotations

import ipaddress
import os
import socket

from monarch_kernel.runtime.actor.process import get_system

LOOPBACK = "127.0.0.1"
#: The environment variable that names gloo's network interface.
GLOO = "GLOO_SOCKET_IFNAME"

_chosen = ""


def own_address() -> str:
    """Return the address at which other hosts reach this host.

    On the host of a worker that listens on TCP, it is the address in the worker's URL; otherwise the address of this
    host's name; otherwise the address of the interface of the default route. The result is a name if only other hosts
    can resolve it.
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
            probe.connect(("192.0.2.1", 9))  # sends nothing; only selects a route
            return str(probe.getsockname()[0])
        except OSError:
            return address or LOOPBACK


def choose_interface(address: str) -> None:
    """Make gloo use the interface that has this address, unless the user has chosen an interface.

    By default gloo resolves the host's name, and silently uses the loopback interface if that fails.

    Args:
        address: the result of ``own_address``, or the loopback address.
    """
    global _chosen
    if os.environ.get(GLOO, _chosen) != _chosen:
        return
    _chosen = _interface_of(_resolved(address))
    if _chosen:
        os.environ[GLOO] = _chosen
    else:  # no interface has it, for example behind NAT
        os.environ.pop(GLOO, None)


def _advertised() -> str:
    """Return the host in the URL at which other hosts reach this site's worker; "" on a site without a worker."""
    scheme, _, place = get_system().node.ref.gateway_address.partition("://")
    return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


def _resolved(name: str) -> str:
    """Return the address of a name; "" if it cannot be resolved here."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    """Return the interface that has this address; "" if there is none."""
    import psutil

    found = (name for name, entries in psutil.net_if_addrs().items() if address in (e.address for e in entries))
    return next(found, "")
