"""Handle `%mesh focus` where no cell can run it: while a cell is stopped, and in a debugger's console."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from monarch_kernel.kernel.debug.rank_focus import FocusAnswer, focus
from monarch_kernel.kernel.magics.arguments import Arguments, peek
from monarch_kernel.kernel.magics.dap_magics import DapMagics

if TYPE_CHECKING:
    from monarch_kernel.debugger.dap import RankSession

_LINE = re.compile(r"\s*%mesh\s+focus\b(.*)\s*")


def answer_typed(ranks: RankSession, text: str) -> FocusAnswer | None:
    """Answer a line typed into a debugger's console; None if it is not `%mesh focus`."""
    line = _LINE.fullmatch(text)
    if line is None:
        return None
    found = peek(DapMagics.focus, line[1])
    if found is None:
        return FocusAnswer(f"%mesh focus takes a rank, not {line[1].strip()!r}", refused=True)
    return focus(ranks, found.rank, found.on)


def answer_beside(
    kernel: Any, idents: Any, request: dict[str, Any], running: dict[str, Any], ranks: RankSession
) -> bool:
    """Answer an execute request immediately if its cell is `%mesh focus`. Called on the thread that receives requests.

    Args:
        kernel: the kernel.
        idents: the sender of the request.
        request: the request, with its content.
        running: the request whose cell is running.
        ranks: the session of the front end's debugger.

    Returns:
        Whether the request was answered; if not, it waits in the queue as usual.
    """
    found = _read(str(request["content"].get("code", "")))
    if found is None:
        return False
    answer = focus(ranks, found.rank, found.on)
    session, count = kernel.session, kernel.shell.execution_count

    def publish(kind: str, content: dict[str, Any], parent: dict[str, Any] = request) -> None:
        session.send(kernel.iopub_socket, kind, content, parent, ident=kernel._topic(kind))

    publish("status", {"execution_state": "busy"})
    publish("execute_input", {"code": request["content"]["code"], "execution_count": count})
    reply: dict[str, Any] = {"status": "ok", "execution_count": count, "user_expressions": {}, "payload": []}
    if answer.refused:
        text = f"%mesh focus: {answer.text}"
        error = {"ename": "UsageError", "evalue": text, "traceback": [f"UsageError: {text}"]}
        publish("error", error)
        reply = {"status": "error", "execution_count": count, **error}
    else:
        publish("stream", {"name": "stdout", "text": f"{answer.text}\n"})
    session.send(kernel.shell_stream, "execute_reply", reply, request, idents)
    publish("status", {"execution_state": "idle"})
    publish("status", {"execution_state": "busy"}, running)  # front ends show the last status as the kernel's
    return True


def _read(code: str) -> Arguments | None:
    line = _LINE.fullmatch(code)
    return peek(DapMagics.focus, line[1]) if line is not None else None
