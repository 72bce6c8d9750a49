"""Bodies of messages: pickle protocol 5, large buffers apart, notebook code by value.

``dumps`` tries the C pickler first. Classes and functions of ``__main__`` (a script or a notebook) do not exist
in the other process, so their first occurrence switches the whole object over to cloudpickle, which sends
them by value. Everything else goes by reference.

A body is the out-of-band buffers, each padded to 64 bytes so that arrays stay aligned, then the pickle.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import cloudpickle

#: Buffers of at least this many bytes are kept out of the pickle and never copied on the way.
OUT_OF_BAND = 16 * 1024
_ALIGN = 64
_PADDING = bytes(_ALIGN)

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

Buffers = list[Any]  # bytes-like pieces, in order


class _ByValue(Exception):
    """Something has to go by value: use cloudpickle."""


def _goes_by_value(obj: Any) -> bool:
    module = getattr(obj, "__module__", None)
    if module == "__main__" or module is None:
        return True
    qualname = getattr(obj, "__qualname__", "")
    if "<locals>" in qualname or "<lambda>" in qualname:
        return True
    if module in _registered() or module.partition(".")[0] in _registered():
        return True
    return module not in sys.modules


def _registered() -> Any:
    return cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]


class _FastPickler(pickle.Pickler):
    """The C pickler, giving up as soon as it meets something that only cloudpickle can send."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            if _goes_by_value(obj):
                raise _ByValue
        elif isinstance(obj, types.ModuleType):
            raise _ByValue
        return NotImplemented


def _is_plain(obj: Any) -> bool:
    """Whether an ``(args, kwargs)`` pair or a result holds nothing but small immutable scalars."""
    kind = type(obj)
    if kind in _PLAIN:
        return True
    if kind is tuple:
        return all(type(x) in _PLAIN or (type(x) in (tuple, dict) and _is_plain(x)) for x in obj)
    if kind is dict:
        return not obj
    return False


def dumps(obj: Any) -> tuple[Any, tuple[int, ...]]:
    """Serialize for a message body.

    Returns:
        ``(body, buffers)``. ``body`` is ``bytes``, or a list of bytes-like pieces when there are
        out-of-band buffers; ``buffers`` are their lengths, for the header.

    Raises:
        Whatever the object's own pickling raises, mostly ``TypeError`` or ``pickle.PicklingError``.
    """
    if _is_plain(obj):
        return pickle.dumps(obj, 5), ()
    kept: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: let pickle copy it
            return True
        if raw.nbytes < OUT_OF_BAND:
            return True
        kept.append(buffer)
        return False

    out = io.BytesIO()
    try:
        _FastPickler(out, 5, buffer_callback=keep).dump(obj)
    except (_ByValue, pickle.PicklingError, AttributeError):
        # AttributeError and PicklingError: an object that cannot be found by name; cloudpickle knows more ways
        kept.clear()
        out = io.BytesIO()
        cloudpickle.Pickler(out, 5, buffer_callback=keep).dump(obj)  # type: ignore[no-untyped-call]
    if not kept:
        return out.getvalue(), ()
    pieces: Buffers = []
    lengths: list[int] = []
    for buffer in kept:
        raw = buffer.raw()
        pieces.append(raw)
        lengths.append(raw.nbytes)
        if rest := -raw.nbytes % _ALIGN:
            pieces.append(_PADDING[:rest])
    pieces.append(out.getvalue())
    return pieces, tuple(lengths)


def dumps_flat(obj: Any) -> bytes:
    """Serialize into one ``bytes``, buffers inside: for what is kept or sent inside another pickle."""
    if _is_plain(obj):
        return pickle.dumps(obj, 5)
    out = io.BytesIO()
    try:
        _FastPickler(out, 5).dump(obj)
    except (_ByValue, pickle.PicklingError, AttributeError):
        return cloudpickle.dumps(obj, 5)  # type: ignore[no-untyped-call]
    return out.getvalue()


def loads(body: Any, buffers: tuple[int, ...] = ()) -> Any:
    """The inverse of ``dumps``. Arrays refer to ``body``'s memory, which they keep alive."""
    if not buffers:
        return pickle.loads(body)
    view = memoryview(body)
    parts: list[memoryview] = []
    at = 0
    for length in buffers:
        parts.append(view[at : at + length])
        at += length + (-length % _ALIGN)
    return pickle.loads(view[at:], buffers=parts)
