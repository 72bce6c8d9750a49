"""Between the words of the Debug Adapter Protocol and those of the mesh debugger. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.debugger.events import MeshBreakpoint, RankStop
from monarch_kernel.debugger.model.stops import Evaluation, Frame, Variable
from monarch_kernel.debugger.source_locations import LIBRARY, kind_of

#: `Stop.reason` as the `stopped` event has it.
REASONS = {"breakpoint()": "breakpoint", "post mortem": "exception"}
#: The requests by which a stopped thread goes on, as `MeshDebugger.resume` has them.
MOVES = {"continue": "continue", "next": "next", "stepIn": "step", "stepOut": "out"}

# Names that every module has, and what a debugger or a shell leaves there.
_HIDDEN = re.compile(r"__\w+__|_+|_i+|_i?\d+|_[oid]h")
_HITS = re.compile(r"\s*(?P<op>==?|>=?)?\s*(?P<count>\d+)\s*")

#: What a front end is given where a request fails: it reads the body without looking whether there is one.
EMPTY: dict[str, dict[str, Any]] = {
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
    """A request cannot be answered; the sentence says why."""


def breakpoint_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One of `setBreakpoints`' as `MeshDebugger.replace` takes it; `hitCondition` is a number, `>= N` or `> N`.

    Raises:
        RequestError: the hit condition is something else.
    """
    wanted: dict[str, Any] = {"line": int(asked["line"])}
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


def breakpoint_reply(
    kernel: Mapping[str, Any] | None, ranks: MeshBreakpoint | str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What became of a breakpoint, in the kernel and on ranks.

    Args:
        kernel: what the kernel's own debugger said of it.
        ranks: what the mesh debugger made of it, or why it did not.
        asked: what was asked for.
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


def _joined(reply: Mapping[str, Any], said: Sequence[str]) -> str:
    return "; ".join([each for each in (str(reply.get("message") or ""), *said) if each])


def stopped_body(at: RankStop) -> dict[str, Any]:
    """The body of the `stopped` event; the thread is for whoever sends it to add."""
    body: dict[str, Any] = {"reason": REASONS.get(at.stop.reason, at.stop.reason)}
    if at.stop.text:
        body["description"] = body["text"] = at.stop.text
    return body


def frame_reply(frame: Frame, number: int, prefix: str) -> dict[str, Any]:
    """One of `stackTrace`'s frames."""
    reply: dict[str, Any] = {
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
    """Whether a variable of a scope is worth a line."""
    return _HIDDEN.fullmatch(variable) is None


def value_reply(value: Variable, number: int, variable: bool = False) -> dict[str, Any]:
    """One of `variables`' variables; `variable` says that its name is an expression of the frame."""
    reply: dict[str, Any] = {
        "name": value.name,
        "value": value.value,
        "type": value.type,
        "variablesReference": number,
    }
    if variable:
        reply["evaluateName"] = value.name
    return _counted(reply, value.named, value.indexed)


def evaluation_reply(found: Evaluation, number: int) -> dict[str, Any]:
    """The body of the reply to `evaluate`."""
    reply: dict[str, Any] = {"result": found.text, "type": found.type, "variablesReference": number}
    return _counted(reply, found.named, found.indexed)


def _counted(reply: dict[str, Any], named: int, indexed: int) -> dict[str, Any]:
    if indexed:
        reply["indexedVariables"] = indexed
        reply["namedVariables"] = named
    return reply


def response(request: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that says that it worked."""
    return {**_reply(request), "success": True, "body": dict(body)}


def refusal(request: Mapping[str, Any], why: str) -> dict[str, Any]:
    """A reply that says that it did not, with a body that every front end can read."""
    body = dict(EMPTY.get(str(request.get("command")), {}))
    body["error"] = {"id": 1, "format": why.replace("{", "{{").replace("}", "}}"), "showUser": True}
    return {**_reply(request), "success": False, "message": why, "body": body}


def _reply(request: Mapping[str, Any]) -> dict[str, Any]:
    seq = request.get("seq", 0)
    return {"type": "response", "seq": seq, "request_seq": seq, "command": str(request.get("command", ""))}
