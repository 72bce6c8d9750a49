"""Find addresses of hosts, with the names of ``monarch.tools.network``."""

from __future__ import annotations

import enum
import socket

__all__ = ["AddrType", "get_ipaddr", "get_sockaddr"]


class AddrType(enum.Enum):
    """The kind of address that `get_ipaddr` returns; by default IPv6 if there is one, else IPv4."""

    Default = 1
    IPv4 = 2
    IPv6 = 3


_FAMILIES = {
    AddrType.Default: (socket.AF_INET6, socket.AF_INET),
    AddrType.IPv4: (socket.AF_INET,),
    AddrType.IPv6: (socket.AF_INET6,),
}


def get_ipaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Return the address of a host for TCP connections: ``127.0.0.1``, or ``::1``.

    Raises:
        RuntimeError: the name has no such address.
    """
    for family in _FAMILIES[addr_type]:
        try:
            found = socket.getaddrinfo(hostname, port, family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except socket.gaierror:
            continue
        if found:
            return str(found[0][4][0])
    kinds = " or ".join("ipv6" if family == socket.AF_INET6 else "ipv4" for family in _FAMILIES[addr_type])
    raise RuntimeError(
        f"Unable to resolve `{hostname}` to {kinds} address that can bind TCP socket. Check the network configuration "
        "on the host."
    )


def get_sockaddr(hostname: str, port: int) -> str:
    """Return the address and port of a host: ``127.0.0.1:80``, or ``[::1]:80``.

    Raises:
        RuntimeError: the name has no address.
    """
    address = get_ipaddr(hostname, port)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
