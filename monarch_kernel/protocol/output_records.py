"""The format of a rank's output pipes: records and plain bytes, with an encoder and a decoder.

A rank's file descriptors 1 and 2 are pipes. C code, subprocesses and ``os.write`` write plain bytes to
them. Python code (``print``, ``sys.stderr.write``, displays) writes *records*, each in one ``write`` of at
most ``MAX_RECORD`` bytes. The kernel never mixes such a write with that of another process or thread, so a
reader can separate both, whatever the interleaving, and no record is lost when the writer is killed.

A record is::

    marker 4 | type 1 | stream 1 | cell length 1 | payload length 2 | check 2 | cell | payload

The marker contains 0xC0, a byte that no UTF-8 text has; ``check`` covers the nine bytes before it, so that
binary garbage is not mistaken for a record. Every record names the *cell* that caused it. Plain bytes
belong to the cell that was last begun on that pipe and has not ended.

Python's stdout *and* stderr records are written to the pipe of fd 1 (``stream`` tells them apart), because
two pipes have no common order, and users expect ``print`` and a warning in the order in which they
happened. ``begin``, ``end`` and ``flush`` records are written to both pipes.
"""

from __future__ import annotations

import os
import zlib
from codecs import utf_8_decode
from collections.abc import Iterable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Any, Literal

import msgspec

Stream = Literal["stdout", "stderr"]
Kind = Literal["text", "display", "result", "clear", "comm", "begin", "end", "flush"]

MAX_RECORD = 4096
"""PIPE_BUF on Linux: the largest write to a pipe that is atomic."""

MARKER = b"\x00\xc0MK"
_HEADER = Struct("<4sBBBHH")
_CHECKED = Struct("<4sBBBH")
_PART = Struct("<QIB")

_TEXT, _BEGIN, _END, _PARTIAL, _FLUSH = 1, 2, 3, 4, 5
_TYPES = frozenset((_TEXT, _BEGIN, _END, _PARTIAL, _FLUSH))
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_NUMBERS: dict[str, int] = {"stdout": 1, "stderr": 2}

_MAX_OPEN_MESSAGES = 64
#: The most headers that a decoder caches: enough for lines of every length in a few cells.
_MOST_HEADERS = 16_384
_MESSAGE_KINDS: frozenset[str] = frozenset(("display", "result", "clear", "comm"))


class OutputEvent(msgspec.Struct, frozen=True):
    """One item of a rank's output.

    ``cell`` is the id of the cell that caused it, or "". ``data`` depends on ``kind``: ``text`` the str; ``display``
    and ``result`` a dict with ``data`` (MIME bundle), ``metadata`` and, if given, ``display_id`` and ``update``;
    ``clear`` a dict with ``wait``; ``comm`` a dict with the ``type``, ``comm`` (its id), ``data``, ``metadata`` and
    ``buffers`` (base64) of a widget's message; ``flush`` the token (str); else None.
    """

    cell: str
    kind: Kind
    data: Any = None
    stream: Stream = "stdout"


def _encode(kind: int, stream: int, cell: bytes, payload: bytes) -> bytes:
    checked = _CHECKED.pack(MARKER, kind, stream, len(cell), len(payload))
    return b"".join((checked, (zlib.crc32(checked) & 0xFFFF).to_bytes(2, "little"), cell, payload))


def _cell_bytes(cell: str) -> bytes:
    data = cell.encode("utf-8", "backslashreplace")
    if len(data) > 255:
        raise ValueError(f"a cell id has at most 255 bytes, this one has {len(data)}: {cell[:40]!r}…")
    return data


def _room(cell: bytes) -> int:
    return MAX_RECORD - _HEADER.size - len(cell)


def _cuts(data: bytes, room: int) -> Iterator[bytes]:
    """Split ``data`` into pieces of at most ``room`` bytes; UTF-8 is split between characters."""
    start = 0
    while len(data) - start > room:
        end = start + room
        for back in range(4):
            if data[end - back] & 0xC0 != 0x80:
                end -= back
                break
        yield data[start:end]
        start = end
    yield data[start:]


class TextEncoder:
    """Encodes text of one cell and stream as records. Lines of the same length share a header."""

    def __init__(self, stream: Stream, cell: str) -> None:
        self._number = _NUMBERS[stream]
        self._cell = _cell_bytes(cell)
        #: The maximum size of the text in one record (bytes).
        self.room = _room(self._cell)
        #: The bytes before the payload, by the payload's length, which alone determines them.
        self.heads: dict[int, bytes] = {}

    def record(self, data: bytes) -> bytes:
        """Encode at most ``room`` bytes of UTF-8 as a record."""
        head = self.heads.get(len(data))
        if head is None:
            head = self.heads[len(data)] = _encode(_TEXT, self._number, self._cell, data)[: -len(data)]
        return head + data

    def records(self, data: bytes) -> Iterator[bytes]:
        """Encode any number of bytes as records."""
        return map(self.record, _cuts(data, self.room)) if data else iter(())


@lru_cache(maxsize=16)
def text_encoder(stream: Stream, cell: str) -> TextEncoder:
    """Return the encoder for this stream and cell. It is created on first use."""
    return TextEncoder(stream, cell)


def encode_text(stream: Stream, cell: str, data: bytes) -> list[bytes]:
    """Encode text (UTF-8 bytes) of a cell as records."""
    return list(text_encoder(stream, cell).records(data))


def encode_begin(cell: str, stream: Stream) -> bytes:
    """Encode the record after which plain bytes on ``stream``'s pipe belong to ``cell``."""
    return _encode(_BEGIN, _NUMBERS[stream], _cell_bytes(cell), b"")


def encode_end(cell: str, stream: Stream) -> bytes:
    """Encode the record that ends ``cell`` on ``stream``'s pipe: all its output so far precedes it."""
    return _encode(_END, _NUMBERS[stream], _cell_bytes(cell), b"")


def encode_flush(token: str, stream: Stream) -> bytes:
    """Encode a mark in the pipe. A reader that receives ``token`` has read everything written before it."""
    return _encode(_FLUSH, _NUMBERS[stream], b"", token.encode()[: MAX_RECORD - _HEADER.size])


def encode_answer(number: int, both: bool) -> bytes:
    """Encode the mark on stdout's pipe before a reply. ``both``: the mark on stderr's pipe must also be read."""
    return encode_flush(f"{number}+" if both else str(number), "stdout")


def decode_answer(token: str) -> tuple[int, bool]:
    """Decode the number of such a mark, and whether stderr's pipe also has one; 0 for a mark of another kind."""
    number = token.removesuffix("+")
    return (int(number), token != number) if number.isdigit() else (0, False)


def encode_message(kind: Kind, cell: str, number: int, data: dict[str, object]) -> list[bytes]:
    """Encode a display, a result, an error or a request to clear the output as records.

    ``number`` must be unique among the messages of all processes that write to the pipe, so that the
    parts of two messages may be interleaved.
    """
    if kind not in _MESSAGE_KINDS:
        raise ValueError(f"an output message is one of {', '.join(sorted(_MESSAGE_KINDS))}, not {kind!r}")
    cell_data = _cell_bytes(cell)
    body = msgspec.json.encode({"kind": kind, **data})
    room = _room(cell_data) - _PART.size
    pieces = [body[i : i + room] for i in range(0, len(body), room)]
    last = len(pieces) - 1
    return [
        _encode(_PARTIAL, 1, cell_data, _PART.pack(number, index, index == last) + piece)
        for index, piece in enumerate(pieces)
    ]


class OutputDecoder:
    """Decodes the bytes of one pipe, split anywhere, into events. Not thread-safe: one reader each.

    Never raises on bad input: bytes that are not a valid record are text, as they would be on a terminal.
    """

    def __init__(self, stream: Stream = "stdout") -> None:
        self._stream: Stream = stream
        self._pending = b""
        self._cells: list[str] = []
        self._incomplete: dict[tuple[str, str, str], bytes] = {}
        self._messages: dict[tuple[str, int], list[bytes]] = {}
        self._events: list[OutputEvent] = []
        # Payloads of adjacent text records of one cell and stream, which are joined and decoded together.
        self._run: list[bytes] = []
        self._run_of: tuple[bytes, Stream] = (b"", stream)
        # Adjacent text of one cell and stream, which becomes one event.
        self._texts: list[str] = []
        self._texts_of: tuple[str, Stream] = ("", stream)
        # Headers found to be valid: kind, stream, size of the cell's id, total size.
        self._headers: dict[bytes, tuple[int, Stream, int, int]] = {}

    def feed(self, data: bytes) -> list[OutputEvent]:
        """Decode received bytes; an unfinished record or character waits for the next call."""
        buffer = self._pending + data if self._pending else data
        self._pending = b""
        position, size = 0, len(buffer)
        known, run, head = self._headers, self._run, _HEADER.size
        while position < size:
            header = known.get(buffer[position : position + head])
            if header is None:
                start = buffer.find(MARKER, position)
                if start < 0:
                    keep = _marker_prefix(buffer, position)
                    self._raw(buffer[position : size - keep])
                    self._pending = buffer[size - keep :]
                    break
                if start > position:
                    self._raw(buffer[position:start])
                    position = start
                if size - start < head:
                    self._pending = buffer[start:]
                    break
                header = self._header(buffer[start : start + head])
                if header is None:
                    self._raw(buffer[start : start + 1])
                    position = start + 1
                    continue
            kind, stream, cell_size, total = header
            if size - position < total:
                self._pending = buffer[position:]
                break
            body = position + head + cell_size
            cell = buffer[position + head : body]
            position += total
            if kind != _TEXT:
                self._end_run()
                self._record(kind, stream, cell.decode("utf-8", "replace"), buffer[body:position])
                continue
            if run and (cell, stream) != self._run_of:
                self._end_run()
            if not run:
                self._run_of = (cell, stream)
            run.append(buffer[body:position])
        self._end_run()
        return self._take()

    def close(self) -> list[OutputEvent]:
        """Decode unfinished records and characters at the end of the pipe."""
        rest, self._pending = self._pending, b""
        self._raw(rest)
        for cell in {key[1] for key in self._incomplete}:
            self._finish_text(cell)
        return self._take()

    def _header(self, data: bytes) -> tuple[int, Stream, int, int] | None:
        """Decode a header; None if it is invalid."""
        _, kind, stream, cell_size, payload_size, check = _HEADER.unpack(data)
        total = _HEADER.size + cell_size + payload_size
        if (
            kind not in _TYPES
            or stream not in _STREAMS
            or total > MAX_RECORD
            or zlib.crc32(data[: _CHECKED.size]) & 0xFFFF != check
        ):
            return None
        if len(self._headers) >= _MOST_HEADERS:
            self._headers.clear()
        header = self._headers[data] = (kind, _STREAMS[stream], cell_size, total)
        return header

    def _take(self) -> list[OutputEvent]:
        self._end_texts()
        events, self._events = self._events, []
        return events

    def _raw(self, data: bytes) -> None:
        if data:
            self._end_run()
            self._text("plain", self._cells[-1] if self._cells else "", self._stream, data)

    def _end_run(self) -> None:
        if self._run:
            data = b"".join(self._run)
            self._run.clear()
            cell, stream = self._run_of
            self._text("record", cell.decode("utf-8", "replace"), stream, data)

    def _text(self, source: str, cell: str, stream: Stream, data: bytes) -> None:
        key = (source, cell, stream)
        before = self._incomplete.pop(key, b"")
        if before:
            data = before + data
        text, used = utf_8_decode(data, "replace", False)
        if used < len(data):
            self._incomplete[key] = data[used:]
        self._emit_text(cell, stream, text)

    def _emit_text(self, cell: str, stream: Stream, text: str) -> None:
        if text:
            if self._texts_of != (cell, stream):
                self._end_texts()
                self._texts_of = (cell, stream)
            self._texts.append(text)

    def _end_texts(self) -> None:
        if self._texts:
            cell, stream = self._texts_of
            self._events.append(OutputEvent(cell, "text", "".join(self._texts), stream))
            self._texts.clear()

    def _emit(self, event: OutputEvent) -> None:
        self._end_texts()
        self._events.append(event)

    def _finish_text(self, cell: str) -> None:
        for key in [key for key in self._incomplete if key[1] == cell]:
            data = self._incomplete.pop(key)
            self._emit_text(cell, _STREAMS[_NUMBERS[key[2]]], data.decode("utf-8", "replace"))

    def _record(self, kind: int, stream: Stream, cell: str, payload: bytes) -> None:
        if kind == _PARTIAL:
            self._part(cell, stream, payload)
        elif kind == _BEGIN:
            self._cells.append(cell)
            self._emit(OutputEvent(cell, "begin", None, stream))
        elif kind == _END:
            self._finish_text(cell)
            if cell in self._cells:
                self._cells.remove(cell)
            self._emit(OutputEvent(cell, "end", None, stream))
        else:
            token = payload.decode("utf-8", "replace")
            self._emit(OutputEvent(cell, "flush", token, stream))

    def _part(self, cell: str, stream: Stream, payload: bytes) -> None:
        if len(payload) < _PART.size:
            return
        number, index, last = _PART.unpack_from(payload)
        key = (cell, number)
        pieces = self._messages.setdefault(key, [])
        if index != len(pieces):
            # Its first part is missing (in a log that starts in the middle), so it can never be completed.
            del self._messages[key]
            return
        pieces.append(payload[_PART.size :])
        if not last:
            if len(self._messages) > _MAX_OPEN_MESSAGES:
                del self._messages[next(iter(self._messages))]
            return
        del self._messages[key]
        try:
            message = msgspec.json.decode(b"".join(pieces))
            kind = message.pop("kind")
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError):
            return
        if kind in _MESSAGE_KINDS:
            self._emit(OutputEvent(cell, kind, message, stream))


def _marker_prefix(buffer: bytes, position: int) -> int:
    """Count the bytes at the end of ``buffer`` that may be the start of a marker."""
    for size in range(min(len(MARKER) - 1, len(buffer) - position), 0, -1):
        if buffer.endswith(MARKER[:size]):
            return size
    return 0


def beginning(data: bytes) -> int:
    """Find where decoding can start in a section of a pipe's bytes: at a record, or, in plain bytes, at a line."""
    record = data.find(MARKER, 0, MAX_RECORD + len(MARKER))
    return record if record >= 0 else data.find(b"\n") + 1


def plain_text(chunks: Iterable[tuple[int, bytes]]) -> str:
    """Convert ``(fd, bytes)`` chunks of one rank, in order, to the text that a user would have seen.

    Displays and results appear as their plain text.
    """
    decoders = {1: OutputDecoder("stdout"), 2: OutputDecoder("stderr")}
    parts: list[str] = []
    for number, data in chunks:
        parts.extend(map(_plain, decoders[number].feed(data)))
    for decoder in decoders.values():
        parts.extend(map(_plain, decoder.close()))
    return "".join(parts)


def _plain(event: OutputEvent) -> str:
    if event.kind == "text":
        return event.data
    if event.kind in ("display", "result"):
        bundle = event.data.get("data") or {}
        text = bundle.get("text/plain", "")
        return f"{text}\n" if text else ""
    return ""


def unique_number(counter: int) -> int:
    """Create a message number that no other process of this machine uses at the same time."""
    return (os.getpid() << 32) | (counter & 0xFFFFFFFF)
