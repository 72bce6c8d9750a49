"""Build messages of the Debug Adapter Protocol as JSON objects, and the replies that any request can have."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from monarch_kernel.debugger.events import MeshBreakpoint, RankStop
from monarch_kernel.debugger.model.stops import Evaluation, StopFrame, Variable
from monarch_kernel.debugger.source_locations import LIBRARY, kind_of

# Frame Debug Adapter Protocol messages in a stream of bytes: a header with the length, then JSON.

_END = b"\r\n\r\n"


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    body = json.dumps(message).encode()
    return b"Content-Length: %d%s%s" % (len(body), _END, body)


class Frames:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def rest(self) -> bytes:
        """The beginning of an incomplete message."""
        return self._held

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are now complete, each with its header.

        Raises:
            ValueError: the data does not follow this protocol.
        """
        self._held += data
        found: list[bytes] = []
        while (end := self._held.find(_END)) >= 0:
            length = _length(self._held[:end])
            size = end + len(_END) + length
            if len(self._held) < size:
                break
            found.append(self._held[:size])
            self._held = self._held[size:]
        return found


def content(message: bytes) -> dict[str, Any]:
    """Parse the JSON of a framed message."""
    return dict(json.loads(message.partition(_END)[2]))


def _length(header: bytes) -> int:
    for line in header.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    raise ValueError(f"no Content-Length in {header[:80]!r}: that is not the Debug Adapter Protocol")


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


def response(request: Request, body: Mapping[str, object]) -> Response:
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


# Translate between the Debug Adapter Protocol and the mesh debugger. Pure functions.

#: The reason in the `stopped` event for a `Stop.reason`.
REASONS = {"breakpoint()": "breakpoint", "post mortem": "exception"}
#: The requests that resume a stopped thread, and the `how` of `MeshDebugger.resume` for each.
MOVES = {"continue": "continue", "next": "next", "stepIn": "step", "stepOut": "out"}

# Names that every module has, and names that a debugger or a shell adds to it.
_HIDDEN = re.compile(r"__\w+__|_+|_i+|_i?\d+|_[oid]h")
_HITS = re.compile(r"\s*(?P<op>==?|>=?)?\s*(?P<count>\d+)\s*")
# Documents that exist in the editor only. VS Code replaces the names of cells of the notebook that it debugs by files.
_IN_EDITOR = re.compile(r"(vscode-[\w-]+|untitled):")


def is_in_editor(path: str) -> bool:
    """Return whether a source is a document that only VS Code knows, such as a cell of another notebook."""
    return _IN_EDITOR.match(path) is not None


class BreakpointLine(TypedDict):
    """A breakpoint in the form that `MeshDebugger.replace` accepts."""

    line: int
    condition: NotRequired[str]
    log: NotRequired[str]
    hits: NotRequired[int]


def breakpoint_of(asked: Arguments) -> BreakpointLine:
    """Convert a breakpoint of `setBreakpoints` for `MeshDebugger.replace`; `hitCondition` is `N`, `>= N` or `> N`.

    Raises:
        RequestError: the hit condition is something else.
    """
    wanted: BreakpointLine = {"line": int(asked["line"])}
    if asked.get("condition"):
        wanted["condition"] = str(asked["condition"])
    if asked.get("logMessage"):
        wanted["log"] = str(asked["logMessage"])
    if asked.get("hitCondition"):
        found = _HITS.fullmatch(str(asked["hitCondition"]))
        if found is None:
            raise RequestError(f"ranks count hits by N, >= N or > N, not by {asked['hitCondition']!r}")
        wanted["hits"] = int(found["count"]) + (found["op"] == ">")
    return wanted


def breakpoint_reply(kernel: Mapping[str, object] | None, ranks: MeshBreakpoint | str, asked: Arguments) -> Body:
    """Build the reply about a breakpoint's state in the kernel and on ranks.

    Args:
        kernel: the reply of the kernel's own debugger.
        ranks: the breakpoint of the mesh debugger, or why there is none.
        asked: the requested breakpoint.
    """
    reply = dict(kernel) if kernel is not None else {"verified": False, "line": asked["line"]}
    if isinstance(ranks, str):
        reply["message"] = _joined(reply, [ranks])
        return reply
    bound = sorted(ranks.bound.items())
    verified = [each for _at, each in bound if each.verified]
    if verified and not reply.get("verified"):
        reply.update(verified=True, line=verified[0].line)
        reply.pop("message", None)
    said = list(dict.fromkeys(each.message for each in verified if each.message))
    if said:
        reply["message"] = _joined(reply, said)
    reply.setdefault("line", asked["line"])
    return reply


def _joined(reply: Body, said: Sequence[str]) -> str:
    return "; ".join([each for each in (str(reply.get("message") or ""), *said) if each])


def stopped_body(at: RankStop) -> Body:
    """Build the body of the `stopped` event. `StopQueue` adds the thread."""
    body: Body = {"reason": REASONS.get(at.stop.reason, at.stop.reason)}
    if at.stop.text:
        body["description"] = body["text"] = at.stop.text
    return body


def frame_reply(frame: StopFrame, number: int, prefix: str) -> Body:
    """Build one of the frames of `stackTrace`."""
    reply: Body = {
        "id": number,
        "name": f"{prefix}{frame.name}",
        "line": frame.line,
        "column": 1,
        "source": {"name": os.path.basename(frame.file), "path": frame.file, "sourceReference": 0},
    }
    if kind_of(frame.file) == LIBRARY:
        reply["presentationHint"] = "subtle"
        reply["source"]["presentationHint"] = "deemphasize"
    return reply


def is_shown(variable: str) -> bool:
    """Return whether a variable of a scope is shown: not names like `__name__`, nor those of a shell's history."""
    return _HIDDEN.fullmatch(variable) is None


def value_reply(value: Variable, number: int, variable: bool = False) -> Body:
    """Build one of the variables of `variables`; with `variable`, its name is an expression of the frame."""
    reply: Body = {
        "name": value.name,
        "value": value.value,
        "type": value.type,
        "variablesReference": number,
    }
    if variable:
        reply["evaluateName"] = value.name
    return _counted(reply, value.named, value.indexed)


def evaluation_reply(found: Evaluation, number: int) -> Body:
    """Build the body of the reply to `evaluate`."""
    reply: Body = {"result": found.text, "type": found.type, "variablesReference": number}
    return _counted(reply, found.named, found.indexed)


def _counted(reply: Body, named: int, indexed: int) -> Body:
    if indexed:
        reply["indexedVariables"] = indexed
        reply["namedVariables"] = named
    return reply
