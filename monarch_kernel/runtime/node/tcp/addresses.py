"""Parse and resolve addresses of listeners: ``tcp://host:port``."""

from __future__ import annotations

import socket
from typing import Any

# This avoids regular expressions: compiling one takes longer than all address handling of a starting worker.


def split(url: str) -> tuple[str, int]:
    """Split a URL into host and port. Port 0 means any.

    Raises:
        ValueError: the URL is invalid.
    """
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    sound = url.startswith("tcp://") and name and not any(c in name for c in ("[]" if bracketed else "[]:"))
    if not sound or not (port == "*" or (port.isdecimal() and len(port) <= 5 and int(port) <= 65535)):
        raise ValueError(f"{url!r} is not a worker address: it must look like tcp://host:26600 or tcp://[::1]:26600")
    return name, 0 if port == "*" else int(port)


def host_and_port(host: str, port: int) -> str:
    """Format ``host:port`` for messages."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int, numeric: bool = False) -> list[tuple[int, Any]]:
    """Resolve a host to its addresses, each with its family.

    Raises:
        OSError: the name is unknown.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    # A codec for text takes a millisecond to load.
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def origin(address: str) -> str:
    """Return the unit by which connections are counted: an IPv4 address or an IPv6 network.

    A host can use any number of addresses of its IPv6 network.
    """
    if ":" not in address:
        return address
    import ipaddress  # takes half of this module's load time

    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((number, 64), strict=False))
    return address
