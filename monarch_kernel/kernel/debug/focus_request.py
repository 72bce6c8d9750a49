"""Cells that are answered beside the one that runs: `%mesh focus`, which is of use only while that one is stopped."""

from __future__ import annotations

import re
from typing import Any

from monarch_kernel.kernel.magics.arguments import peek
from monarch_kernel.kernel.magics.dap_magics import DapMagics

_LINE = re.compile(r"\s*%mesh\s+focus\b(.*)\s*")


def answer_aside(kernel: Any, idents: Any, request: dict[str, Any], running: dict[str, Any], ranks: Any) -> bool:
    """Answer a request to run a cell at once, if it is one of these. Called on the thread that receives requests.

    Args:
        kernel: the kernel.
        idents: who has sent the request.
        request: the request, with its content.
        running: the request whose cell runs.
        ranks: the session of the front end's debugger.

    Returns:
        Whether it is answered; else it has to wait for its turn.
    """
    line = _LINE.fullmatch(str(request["content"].get("code", "")))
    found = peek(DapMagics.focus, line[1]) if line is not None else None
    if found is None:
        return False
    outcome, text = _focus(ranks, found.rank, found.on)
    session, count = kernel.session, kernel.shell.execution_count

    def publish(kind: str, content: dict[str, Any], parent: dict[str, Any] = request) -> None:
        session.send(kernel.iopub_socket, kind, content, parent, ident=kernel._topic(kind))

    publish("status", {"execution_state": "busy"})
    publish("execute_input", {"code": request["content"]["code"], "execution_count": count})
    reply: dict[str, Any] = {"status": "ok", "execution_count": count, "user_expressions": {}, "payload": []}
    if outcome:
        publish("stream", {"name": "stdout", "text": f"{text}\n"})
    else:
        error = {"ename": "UsageError", "evalue": text, "traceback": [f"UsageError: {text}"]}
        publish("error", error)
        reply = {"status": "error", "execution_count": count, **error}
    session.send(kernel.shell_stream, "execute_reply", reply, request, idents)
    publish("status", {"execution_state": "idle"})
    publish("status", {"execution_state": "busy"}, running)  # which front ends show for the kernel
    return True


def _focus(ranks: Any, rank: int | None, mesh: str | None) -> tuple[bool, str]:
    from monarch_kernel.debugger.dap import RequestError
    from monarch_kernel.kernel.debug.mux import stopped_text

    if rank is None:
        return True, stopped_text(ranks.state())
    try:
        return True, f"{ranks.focus(rank, mesh)} is shown"
    except RequestError as error:
        return False, f"%mesh focus: {error}"
