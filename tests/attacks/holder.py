"""A holder of a key that sends what no process of ours does."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import typing
from typing import Any, Self

import msgspec

from monarch_kernel.protocol import messages
from monarch_kernel.protocol.keys import Keys
from monarch_kernel.protocol.messages import PREFIX, Hello, ProcRef, encode
from monarch_kernel.runtime.node.tcp import channel


class Holder:
    """A bare connection with a key, on which anything can be sent."""

    def __init__(self, port: int, keys: Keys, timeout: float = 20.0) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout)
        self.sock: ssl.SSLSocket = keys.client_context().wrap_socket(sock)
        try:
            self.sock.sendall(channel.accept(steady=False))
            self._exactly(8)
        except BaseException:
            self.sock.close()
            raise

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def said(self) -> str:
        """The cause that the other side gives for the end of the link, which comes; "" if it gives none."""
        cause = ""
        try:
            while True:
                header, body = PREFIX.unpack(self._exactly(PREFIX.size))
                data = self._exactly(header + body)
                if not header and data[:1] == b"\x01":
                    cause = data[1:].decode()
        except (OSError, EOFError):
            return cause

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def framed(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(len(header), len(body)) + header + body


def hello(name: str) -> bytes:
    """A right first message, as of a controller of another site."""
    from monarch_kernel._version import __version__
    from monarch_kernel.runtime.node.routing import PYTHON

    ref = ProcRef(name, "", "attacker", name, "", f"site-{name}", name)
    return framed(encode(Hello(messages.WIRE_VERSION, name, 1, "controller", ref, __version__, PYTHON)))


#: Messages that a holder may send, and that do what they say: end the worker, or start what is not waited for.
_DOES_HARM = ("Shutdown", "StopProcs", "SpawnProcs")


# -- what they send -----------------------------------------------------------------------------------


def random_header(chance: random.Random) -> bytes:
    """Lengths of noise, small or giant."""
    kind = chance.randrange(3)
    if kind == 0:
        return chance.randbytes(PREFIX.size) + chance.randbytes(64)
    if kind == 1:
        return struct.pack("<IQ", chance.randrange(1 << 32), chance.choice([0, 1 << 20, 1 << 40, (1 << 64) - 1]))
    return struct.pack("<IQ", chance.randrange(64), chance.randrange(1 << 62)) + chance.randbytes(200)


def junk(chance: random.Random) -> bytes:
    """A frame that is one, with a header of noise."""
    return framed(chance.randbytes(chance.randrange(200)), chance.randbytes(chance.randrange(500)))


def typed(chance: random.Random) -> bytes:
    """A message of a type that exists, with fields of its types and of any value."""
    kinds = messages.Message.__subclasses__()
    kind = chance.choice([k for k in kinds if k.__name__ not in _DOES_HARM])
    values = [_value(field.type, chance, 0) for field in msgspec.structs.fields(kind)]
    tag = kind.__struct_config__.tag
    return framed(msgspec.msgpack.encode([tag, *values]), chance.randbytes(chance.choice([0, 3, 4, 50])))


def _value(kind: Any, chance: random.Random, depth: int) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _value(args[0], chance, depth)
    if origin in (typing.Union, __import__("types").UnionType):
        return _value(chance.choice(args), chance, depth)
    if kind is int:
        return chance.choice([0, 1, -1, 7, 2**31, 2**62, -(2**62)])
    if kind is float:
        return chance.choice([0.0, 1.0, -1.0, 1e300, float("nan"), float("inf")])
    if kind is bool:
        return chance.random() < 0.5
    if kind is str:
        return chance.choice(["", "x", "agent", "../../etc", "\x00", "é" * 50, "a" * 1000])
    if kind is bytes:
        return chance.randbytes(chance.randrange(50))
    if kind is type(None):
        return None
    if origin in (list, tuple, set, frozenset) or kind in (list, tuple):
        inner = args[0] if args else int
        fixed = origin is tuple and args and args[-1] is not Ellipsis
        if fixed:
            return [_value(each, chance, depth + 1) for each in args]
        return [_value(inner, chance, depth + 1) for _ in range(chance.choice([0, 1, 3]) if depth < 3 else 0)]
    if origin is dict or kind is dict:
        key, value = args if args else (str, int)
        return {
            _value(key, chance, depth + 1): _value(value, chance, depth + 1) for _ in range(chance.choice([0, 1, 2]))
        }
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        values = [_value(field.type, chance, depth + 1) for field in msgspec.structs.fields(kind)]
        config: Any = kind.__struct_config__
        if not config.array_like:
            return dict(zip((field.name for field in msgspec.structs.fields(kind)), values, strict=True))
        return [config.tag, *values] if config.tag is not None else values
    return None
