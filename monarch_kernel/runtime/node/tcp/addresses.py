"""Addresses of listeners: ``tcp://host:port``."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any

_URL = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:]+):(\d{1,5}|\*)")


def split(url: str) -> tuple[str, int]:
    """The host and port of a URL; port 0 for any.

    Raises:
        ValueError: the URL is invalid.
    """
    match = _URL.fullmatch(url)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ValueError(f"{url!r} is not a worker address: it must look like tcp://host:26600 or tcp://[::1]:26600")
    return match[1].strip("[]"), 0 if match[2] == "*" else int(match[2])


def join(host: str, port: int) -> str:
    """``host:port``, as shown in messages."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int, numeric: bool = False) -> list[tuple[int, Any]]:
    """The addresses of a host, each with its family.

    Raises:
        OSError: the name is unknown.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def origin(address: str) -> str:
    """The unit by which connections are counted: an IPv4 address, or an IPv6 network, as one host can use as many
    addresses of its network as it likes."""
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((number, 64), strict=False))
    return address
