"""Encrypt a conversation through a meeting point end to end: both ends prove their own keys to each other.

A meeting point checks the keys that it trusts itself. A viewer or a machine may trust other keys. The frames of a
conversation therefore travel in a separate TLS 1.3 connection, in which both ends present a key on the other's
allow-list, as over TCP (``protocol.keys``). The meeting point forwards data that it can neither read nor forge.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable

from monarch_kernel.engines.join.frame_loop import FrameReader, FrameTooLongError, framed
from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node.tcp.channel import HandshakeFailure, handshake_failure

#: The size of the pieces in which frames are encrypted and sent, so that other conversations get their turn (bytes).
_PIECE = 1 << 20
#: The size of the pieces in which data is decrypted: a TLS record (bytes).
_RECORD = 1 << 14


class SealBrokenError(Exception):
    """One end does not trust the other, or data was changed in transit. The message gives the reason."""


class Seal:
    """One end of an encrypted conversation. Frames sent before the other end has proved its key are queued.

    Args:
        keys: the keys of this process.
        viewer: whether this end is the viewer, which starts the handshake.
        other: the other end's host, for messages.
        send: sends bytes to the other end, in order and without waiting.
    """

    def __init__(self, keys: Keys, viewer: bool, other: str, send: Callable[[bytes], None]) -> None:
        self._keys = keys
        self._other = other
        self._send = send
        self._came, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = keys.client_context() if viewer else keys.server_context()
        self._tls = context.wrap_bio(self._came, self._out, server_side=not viewer)
        self._lock = threading.Lock()
        self._frames = FrameReader()
        self._early: list[tuple[bytes, ...]] = []
        self._generation = -1
        #: Whether the other end has proved its key.
        self.proved = False

    def begin(self) -> None:
        """Start the handshake, as the viewer."""
        with self._lock:
            self._shake_hands()

    def send(self, *parts: bytes) -> None:
        """Send a frame with these parts. It is dropped if the other end's key is no longer trusted."""
        with self._lock:
            if not self.proved:
                self._early.append(parts)
            elif self._is_trusted():
                self._write(parts)

    def receive(self, data: bytes) -> list[bytes]:
        """Handle received data. Return the complete frames.

        Raises:
            SealBrokenError: the conversation is over.
        """
        with self._lock:
            self._came.write(data)
            if not self.proved and not self._shake_hands():
                return []
            if not self._is_trusted():
                raise SealBrokenError(f"the key of {self._other} is not allowed any more")
            try:
                frames = self._read()
            except ssl.SSLError as error:
                raise SealBrokenError(self._why(error)) from None
            except FrameTooLongError as error:
                raise SealBrokenError(f"{self._other} sent what cannot be taken: {error}") from None
            finally:
                self._flush()
            return frames

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise SealBrokenError(self._why(error)) from None
        finally:
            self._flush()
        if self._keys.admitted(self._certificate) is None:
            raise SealBrokenError(f"the key of {self._other} is not allowed any more")
        self.proved = True
        for parts in self._early:
            self._write(parts)
        self._early.clear()
        return True

    @property
    def _certificate(self) -> bytes:
        return self._tls.getpeercert(binary_form=True) or b""

    def is_revoked(self) -> bool:
        """Return whether the other end has proved a key that was revoked since."""
        with self._lock:
            return self.proved and not self._is_trusted()

    def _is_trusted(self) -> bool:
        """Return whether the other end's key is still on the list. The link to the meeting point updates the list."""
        if self._generation != self._keys.generation:
            generation = self._keys.generation
            if self._keys.name_of(self._certificate) is None:
                return False
            self._generation = generation
        return True

    def _write(self, parts: tuple[bytes, ...]) -> None:
        for part in framed(parts):
            for at in range(0, len(part), _PIECE):
                self._tls.write(part[at : at + _PIECE])
                self._flush()

    def _read(self) -> list[bytes]:
        frames: list[bytes] = []
        try:
            while data := self._tls.read(_RECORD):
                frames += self._frames.feed(data)
        except ssl.SSLWantReadError:
            pass
        return frames

    def _flush(self) -> None:
        if self._out.pending:
            self._send(self._out.read())

    def _why(self, error: ssl.SSLError) -> str:
        match handshake_failure(error):
            case HandshakeFailure.THEIR_KEY:
                why = f"the key of {self._other} is not one that this process trusts"
            case HandshakeFailure.OUR_KEY | HandshakeFailure.NO_KEY:
                why = f"{self._other} does not trust the key of this process"
            case _:
                return f"data from {self._other} was changed on the way ({error.reason or error})"
        return f"{why}: {self._keys.trust_hint}"  # no hint to copy keys to a host whose name is unverified
