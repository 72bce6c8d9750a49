"""Display a value without IPython: as text, or as the JSON-compatible MIME bundle of its own methods."""

from __future__ import annotations

import base64
import json
import pprint
from typing import Any

from monarch_kernel.kernel.rank.sent_values import size_at_least

_LINE = 79
_SMALL = 10_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_RICH = (
    "_ipython_display_", "_repr_mimebundle_", "_repr_html_", "_repr_png_", "_repr_jpeg_", "_repr_svg_",
    "_repr_markdown_", "_repr_latex_", "_repr_json_", "_repr_javascript_", "_repr_pdf_",
)  # fmt: skip


def plain_text(value: Any) -> str | None:
    """Return the text of a value that has no other representation; None if IPython has to decide."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _CONTAINERS:
        if size_at_least(value, _SMALL) > _SMALL:  # its repr takes several lines, and may be huge
            return None
        text = repr(value)
        return text if len(text) <= _LINE and "\n" not in text else None
    if isinstance(value, type) or any(_has(value, name) for name in _RICH):
        return None
    return repr(value)


def fallback_bundle(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle of a value, and its metadata, without IPython."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if _has(value, "_repr_mimebundle_"):
        bundle = value._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data = dict(data or {})
    if _has(value, "_repr_html_") and (html := value._repr_html_()) is not None:
        data.setdefault("text/html", html)
    if "text/plain" not in data:
        container = isinstance(value, _CONTAINERS)
        data["text/plain"] = pprint.pformat(value, sort_dicts=False) if container else repr(value)
    return data, metadata


def _has(value: Any, name: str) -> bool:
    # Looked up on the type, since some objects (mocks, proxies) claim to have every attribute.
    return callable(getattr(type(value), name, None))


def jsonable(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a MIME bundle, or its metadata, to JSON-compatible values; bytes become base64, as in notebooks."""
    return {key: value if isinstance(value, str) else _jsonable(value) for key, value in data.items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return json.loads(json.dumps(value, default=repr))
