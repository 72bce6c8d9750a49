"""Parse the URLs of workers, and explain what is wrong with invalid ones.

``tcp://host:port``; ``ipc:///path``, or ``ipc://path`` below the working folder; ``ADVERTISED@LISTEN``, two such URLs,
if other processes reach the worker at a different address from the one that it listens at; and ``NAME@URL``, which also
names the host.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

#: The maximum length of the path of a Unix socket (bytes).
_LONGEST_PATH = 107
_TCP = r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/@\s]+):(\d+)"
_EVERYWHERE = {"*", "0.0.0.0", "[::]", "[::0]"}


class AddressError(ValueError):
    """A URL cannot be used. The message has the reason and a remedy, in one sentence."""


class WorkerAddress(NamedTuple):
    """The parts of a worker's URL.

    ``advertised`` is the URL that others connect to; None if it is the URL it listens at.
    """

    name: str
    listen: str
    advertised: str | None


def worker_address(text: str) -> WorkerAddress:
    """Parse the address at which a worker is to listen.

    Raises:
        AddressError: the worker cannot listen there, or no host can reach it.
    """
    name, advertised, listen = _parts(text)
    _check(listen, text)
    if advertised:
        _check(advertised, text)
        if advertised.startswith("ipc://") or listen.startswith("ipc://"):
            raise AddressError(f"{text}: an ipc:// address cannot be advertised by another name: write it alone")
    else:
        advertised = listen
    host, port = _host_and_port(advertised)
    if host in _EVERYWHERE:
        where = f"tcp://NAME:{port}@tcp://{host}:{port}"
        raise AddressError(
            f"other hosts cannot connect to {advertised}: write {where}, where NAME is the name or the "
            "address by which they reach this host"
        )
    if advertised != listen and port == 0:
        raise AddressError(f"{text}: port 0 cannot be advertised: name the port that other hosts connect to")
    return WorkerAddress(
        name, listen.replace("tcp://*:", "tcp://0.0.0.0:"), None if advertised == listen else advertised
    )


def dial_address(text: str) -> str:
    """Find the address to connect to, in a worker's URL of any form.

    Raises:
        AddressError: no worker can be reached at the URL.
    """
    _name, advertised, listen = _parts(text)
    url = advertised or listen
    _check(url, text)
    host, port = _host_and_port(url)
    if host in _EVERYWHERE:
        raise AddressError(f"cannot connect to {url}: name the host, as in tcp://node1:{port}")
    if url.startswith("tcp://") and port == 0:
        raise AddressError(f"cannot connect to {url}: name the port that the worker printed when it started")
    return url


def _parts(text: str) -> tuple[str, str, str]:
    """Split a URL into the name, the advertised URL and the URL to listen at; "" for missing parts."""
    if not isinstance(text, str) or "://" not in text:
        raise AddressError(f"{text!r} is not a worker address: write tcp://HOST:PORT or ipc:///PATH")
    name = ""
    if "@" in text and "://" not in text.partition("@")[0]:
        name, _, text = text.partition("@")
        if not name:
            raise AddressError(f"@{text}: there is no name before the @")
    first, at, second = text.partition("@")
    return (name, _absolute(first), _absolute(second)) if at and "://" in second else (name, "", _absolute(text))


def _absolute(url: str) -> str:
    path = url.removeprefix("ipc://")
    return url if path == url or path[:1] in ("", "/", "@") else f"ipc://{os.path.abspath(path)}"


def _check(url: str, whole: str) -> None:
    if url.startswith("ipc://"):
        path = url.removeprefix("ipc://")
        if not path.startswith("/"):
            raise AddressError(f"{whole}: write the path of a socket's file, as in ipc:///run/user/1000/worker")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise AddressError(f"{whole}: the path of a socket has at most {_LONGEST_PATH} bytes")
        return
    match = re.fullmatch(_TCP, url)
    if match is None or int(match[2]) > 65535:
        raise AddressError(f"{whole} is not a worker address: write tcp://HOST:PORT or ipc:///PATH")


def _host_and_port(url: str) -> tuple[str, int]:
    match = re.fullmatch(_TCP, url)
    return (match[1], int(match[2])) if match else ("", 0)
