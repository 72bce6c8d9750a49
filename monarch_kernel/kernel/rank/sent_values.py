"""Pickle the value of a cell for the notebook. Of a large value, only a short text is sent."""

from __future__ import annotations

import base64
import io
import json
import pprint
import reprlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

from monarch_kernel.introspection import by_value_pickler

# Compute lower bounds for the size of a value without copying it, to decide whether a cell sends and shows it.
#
# Pure.

_FLAT = (str, bytes, bytearray, memoryview)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_SCALARS = (int, float, complex, bool, type(None), type)
#: The maximum number of objects visited; the rest are not counted.
_MOST = 20_000


def size_at_least(value: object, limit: int) -> int:
    """Return a lower bound for the number of bytes in `value`. Stop counting beyond `limit`.

    Counts strings, bytes and objects with `nbytes` (arrays, tensors), including those inside containers and attributes
    of objects (modules and their parameters).
    """
    return _total((size for _one, size in _parts(value, attributes=True)), limit)


def text_at_least(value: object, limit: int) -> int:
    """Return a lower bound for the length of the strings in `repr(value)`. Stop counting beyond `limit`."""
    return _total((size for one, size in _parts(value, attributes=False) if isinstance(one, _FLAT)), limit)


def shortened(value: object, limit: int) -> str:
    """Return `repr(value)` in at most about `limit` characters, without building a long one in full."""
    if isinstance(value, _FLAT):
        if len(value) <= limit:
            return repr(value)
        unit = "characters" if isinstance(value, str) else "bytes"
        head = bytes(value[:limit]) if isinstance(value, memoryview) else value[:limit]
        return f"{head!r}… ({len(value):,} {unit})"
    try:
        text = _brief(limit).repr(value) if isinstance(value, (*_CONTAINERS, dict)) else repr(value)
    except Exception as error:  # user code
        return f"<{type(value).__qualname__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _brief(limit: int) -> reprlib.Repr:
    brief = reprlib.Repr()
    brief.maxlist = brief.maxtuple = brief.maxdict = brief.maxset = brief.maxfrozenset = brief.maxdeque = 20
    brief.maxstring = brief.maxother = max(60, limit // 20)
    return brief


def _total(sizes: Iterable[int], limit: int) -> int:
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            break
    return total


def _parts(value: object, *, attributes: bool) -> Iterator[tuple[object, int]]:
    """Yield the objects in `value`, beginning with `value` itself, and the bytes that each holds itself."""
    seen: set[int] = set()
    todo: deque[object] = deque([value])
    while todo and len(seen) < _MOST:
        one = todo.popleft()
        if isinstance(one, _SCALARS) or id(one) in seen:
            continue
        seen.add(id(one))
        held = len(one) if isinstance(one, _FLAT) else _bytes_of(one)
        if held is not None:
            yield one, held
        elif isinstance(one, dict):
            yield one, sys.getsizeof(one)
            todo.extend(islice(one.keys(), _MOST))
            todo.extend(islice(one.values(), _MOST))
        elif isinstance(one, _CONTAINERS):
            yield one, sys.getsizeof(one)
            todo.extend(islice(cast("Iterable[object]", one), _MOST))
        elif attributes:
            todo.append(getattr(one, "__dict__", None))


def _bytes_of(one: object) -> int | None:
    try:
        size = getattr(one, "nbytes", None)
    except Exception:  # a property in user code
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


#: The maximum size of a value's pickle (bytes).
VALUE_LIMIT = 16_000_000


def pickled(value: object) -> tuple[bytes | None, str]:
    """Return the pickle of a value, or None and the reason why it is not sent."""
    size = size_at_least(value, VALUE_LIMIT)
    if size > VALUE_LIMIT:
        return None, _too_large(size)
    written = _Limited()
    try:
        _ValuePickler(written, protocol=5).dump(value)
    except _Full:
        return None, _too_large(VALUE_LIMIT)
    except _Stays as error:
        return None, str(error)
    except Exception as error:  # pickling runs user code
        return None, f"it cannot be pickled ({type(error).__name__}: {error})"
    return written.getvalue(), ""


def check_not_bound(value: object) -> None:
    """Raise TypeError if a value depends on the process groups of its rank: a DTensor, or a device mesh."""
    kind = type(value)
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch."):
        raise _Stays("a DTensor stays on its rank; %mesh pull NAME --as-handle makes a handle of it")
    if kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch."):
        raise _Stays("a DeviceMesh is of its rank")


class _Stays(TypeError):
    """Raised for a value that cannot leave its rank."""


class _ValuePickler(by_value_pickler()):  # type: ignore[misc]  # a class that cloudpickle's import makes
    with_names = False  # the notebook already has them

    def reducer_override(self, obj: Any) -> object:
        check_not_bound(obj)
        kind = type(obj)
        if kind.__name__ == "Tensor" and kind.__module__ == "torch" and obj.is_cuda:
            # The notebook may have no GPU. If it has one, a displayed value must not create a CUDA context there.
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        return super().reducer_override(obj)


class _Full(Exception):
    """Raised when a pickle is too large to send."""


class _Limited(io.BytesIO):
    """A file that accepts a pickle up to the limit, so that the rest is never produced."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > VALUE_LIMIT:
            raise _Full
        return super().write(data)


def _too_large(size: int) -> str:
    return f"it is larger than a cell sends by itself (at least {size / 1e6:.0f} MB); use %mesh pull"


#: The pickle of None, the value of a cell that ends in a call for its effect.
NONE = pickled(None)[0]


def short(value: object) -> str:
    """Return a short text for a value that the notebook may show without unpickling it."""
    return shortened(value, 200)


# Display a value without IPython: as text, or as the JSON-compatible MIME bundle of its own methods.

_LINE = 79
_SMALL = 10_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_SHOWN_CONTAINERS = (list, tuple, dict, set, frozenset)
_RICH = (
    "_ipython_display_", "_repr_mimebundle_", "_repr_html_", "_repr_png_", "_repr_jpeg_", "_repr_svg_",
    "_repr_markdown_", "_repr_latex_", "_repr_json_", "_repr_javascript_", "_repr_pdf_",
)  # fmt: skip


def plain_text(value: object) -> str | None:
    """Return the text of a value that has no other representation; None if IPython has to decide."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _SHOWN_CONTAINERS:
        if size_at_least(value, _SMALL) > _SMALL:  # its repr takes several lines, and may be huge
            return None
        text = repr(value)
        return text if len(text) <= _LINE and "\n" not in text else None
    if isinstance(value, type) or any(_has(value, name) for name in _RICH):
        return None
    return repr(value)


def fallback_bundle(value: Any) -> tuple[dict[str, object], dict[str, object]]:
    """Return the MIME bundle of a value, and its metadata, without IPython."""
    data: dict[str, object] = {}
    metadata: dict[str, object] = {}
    if _has(value, "_repr_mimebundle_"):
        bundle = value._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data = dict(data or {})
    if _has(value, "_repr_html_") and (html := value._repr_html_()) is not None:
        data.setdefault("text/html", html)
    if "text/plain" not in data:
        container = isinstance(value, _SHOWN_CONTAINERS)
        data["text/plain"] = pprint.pformat(value, sort_dicts=False) if container else repr(value)
    return data, metadata


def _has(value: object, name: str) -> bool:
    # Looked up on the type, since some objects (mocks, proxies) claim to have every attribute.
    return callable(getattr(type(value), name, None))


def jsonable(data: dict[str, object]) -> dict[str, Any]:
    """Convert a MIME bundle, or its metadata, to JSON-compatible values; bytes become base64, as in notebooks."""
    return {key: value if isinstance(value, str) else _jsonable(value) for key, value in data.items()}


def _jsonable(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return json.loads(json.dumps(value, default=repr))
