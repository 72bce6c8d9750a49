"""Greet in both directions over a channel: whether the key is accepted, and the meaning of silence."""

from __future__ import annotations

import struct

from monarch_kernel.runtime.node.tcp.channel import TlsChannel

#: A mark, a version, flags, and the length of the following text.
_FORM = struct.Struct("<4sBBH")
_MARK, _VERSION = b"mkl\n", 1
_STEADY, _REFUSED = 1, 2
#: The maximum length of an accepted text.
_LONGEST = 1000


class NoGreeting(Exception):
    """The data is not a greeting, or has another version. The message completes 'refused: '."""


class KeyRefused(Exception):
    """The other side does not accept this key. The message has its reason."""


def accept(steady: bool) -> bytes:
    """Encode a greeting. ``steady``: this process runs no user code, so its silence means a failure."""
    return _FORM.pack(_MARK, _VERSION, _STEADY if steady else 0, 0)


def refuse(why: str) -> bytes:
    """Encode a greeting that refuses the key."""
    text = why.encode()[:_LONGEST]
    return _FORM.pack(_MARK, _VERSION, _REFUSED, len(text)) + text


class Reader:
    """Reads the other side's greeting, and no bytes beyond it."""

    def __init__(self) -> None:
        self._got = b""
        #: Whether the other side runs no user code.
        self.steady = False

    def read(self, channel: TlsChannel) -> bool:
        """Read received data. Return whether the greeting is complete.

        Raises:
            NoGreeting: the data is not a greeting.
            KeyRefused: the greeting refuses this key.
            EOFError: the other side has hung up.
            OSError: the connection has failed.
        """
        try:
            while len(self._got) < _FORM.size:
                self._read(channel, _FORM.size - len(self._got))
            mark, version, flags, size = _FORM.unpack_from(self._got)
            if mark != _MARK or version != _VERSION or size > _LONGEST:
                raise NoGreeting("it does not greet as a monarch_kernel of this version does")
            while len(self._got) < _FORM.size + size:
                self._read(channel, _FORM.size + size - len(self._got))
        except BlockingIOError:
            return False
        if flags & _REFUSED:
            text = self._got[_FORM.size :].decode(errors="replace")
            raise KeyRefused("".join(c if c.isprintable() else "?" for c in text))
        self.steady = bool(flags & _STEADY)
        return True

    def _read(self, channel: TlsChannel, size: int) -> None:
        data = channel.recv(size)
        if not data:
            raise EOFError
        self._got += data
