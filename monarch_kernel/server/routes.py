"""The addresses of the extension, below ``<base_url>/monarch-kernel/api``; ``openapi.json`` describes them."""

from __future__ import annotations

from typing import Any

from jupyter_server.utils import url_path_join

from monarch_kernel.server.kept_events import KeptEvents
from monarch_kernel.server.kept_handlers import (
    DescriptionHandler,
    KeptHandler,
    KeptListHandler,
    KeptLogsHandler,
    KeptStopHandler,
)

_NAME = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,31})"


def handlers(base_url: str) -> list[tuple[str, Any]]:
    """The pattern of each address, with its handler."""
    root = url_path_join(base_url, "monarch-kernel", "api")
    return [
        (url_path_join(root, "openapi.json"), DescriptionHandler),
        (url_path_join(root, "kept"), KeptListHandler),
        (url_path_join(root, "kept", "events"), KeptEvents),
        (url_path_join(root, "kept", _NAME), KeptHandler),
        (url_path_join(root, "kept", _NAME, "logs"), KeptLogsHandler),
        (url_path_join(root, "kept", _NAME, "stop"), KeptStopHandler),
    ]
