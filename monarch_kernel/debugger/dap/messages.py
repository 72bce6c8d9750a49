"""Build messages of the Debug Adapter Protocol as JSON objects, and the replies that any request can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arguments = Mapping[str, Any]
"""The arguments of a request, as its command defines them; what a front end sends is checked where it is used."""
Body = dict[str, Any]
"""The body of a reply or an event, as its command or name defines it."""
Request = Mapping[str, Any]
"""A request: `command`, `seq` and `arguments`."""
Response = dict[str, Any]
"""A reply: `success`, `body`, and what names the request."""
Event = dict[str, Any]
"""An event: `event` and `body`."""

#: The bodies of replies to failed requests. Front ends read the body without checking whether it exists.
_EMPTY: dict[str, Body] = {
    "threads": {"threads": []},
    "stackTrace": {"stackFrames": [], "totalFrames": 0},
    "scopes": {"scopes": []},
    "variables": {"variables": []},
    "evaluate": {"result": "", "variablesReference": 0},
    "setBreakpoints": {"breakpoints": []},
    "setVariable": {"value": ""},
    "setExpression": {"value": ""},
    "completions": {"targets": []},
    "source": {"content": ""},
    "modules": {"modules": [], "totalModules": 0},
    "inspectVariables": {"variables": []},
    "richInspectVariables": {"data": {}, "metadata": {}},
}


class RequestError(Exception):
    """A request cannot be answered; the message gives the reason."""


def arguments_of(request: Request) -> Arguments:
    """Return the arguments of a request; empty if it has none."""
    return request.get("arguments") or {}


def response(request: Request, body: Mapping[str, Any]) -> Response:
    """Build the reply to a request that has succeeded."""
    return {**_reply(request), "success": True, "body": dict(body)}


def refusal(request: Request, why: str) -> Response:
    """Build the reply to a request that has failed, with a body that every front end can read."""
    body = dict(_EMPTY.get(str(request.get("command")), {}))
    body["error"] = {"id": 1, "format": why.replace("{", "{{").replace("}", "}}"), "showUser": True}
    return {**_reply(request), "success": False, "message": why, "body": body}


def _reply(request: Request) -> Response:
    seq = request.get("seq", 0)
    return {"type": "response", "seq": seq, "request_seq": seq, "command": str(request.get("command", ""))}
