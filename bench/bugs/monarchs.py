"""The six bugs in torchmonarch's debugger: `breakpoint()` in the program, and `monarch debug` in a terminal.

That debugger cannot stop a rank that runs; it needs breakpoints in the program. For a hang, the best that is known to
us is a breakpoint at the top of the step that hangs (the program's log says which), and stepping all ranks from there
with ``cast``, and ``list`` to see where they are.
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from pathlib import Path

from bench.bugs.cases import PROGRAMS, Case, Session
from bench.bugs.processes import free_port, running

#: The program is up by then (seconds).
PATIENCE = 60.0
#: A debugger that has not answered by then is tried again on another connection (seconds).
ANSWER = 10.0
#: What ranks are given to execute a line before one looks where they are (seconds).
STEP = 0.7
#: No bug is so many lines away.
MOST_STEPS = 12
PROMPTS = ("monarch_dbg> ", "(Pdb) ")
#: What is added where no rank fails and none hangs.
COMPARE = (
    "norms = [None] * size",
    "dist.all_gather_object(norms, [p.grad.norm().item() for p in model.parameters()])",
    "if any(each != norms[0] for each in norms):",
)


class Console:
    """What `monarch debug` is: a line-wise connection to the client's port."""

    def __init__(self, port: int) -> None:
        self._port = port
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self._socket = socket.create_connection(("localhost", port), timeout=ANSWER)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def read(self) -> str:
        """What it says until it prompts, or says nothing for long."""
        said = b""
        while not said.decode(errors="replace").endswith(PROMPTS):
            try:
                more = self._socket.recv(1 << 16)
            except (TimeoutError, ConnectionError):
                break
            if not more:
                break
            said += more
        return said.decode(errors="replace")

    def ask(self, line: str) -> str:
        """Type a line; the answer."""
        self._socket.sendall(line.encode() + b"\n")
        return self.read()

    def again(self) -> str:
        """Start `monarch debug` anew; what it says."""
        self.close()
        self.__init__(self._port)
        return self.read()

    def close(self) -> None:
        """Leave."""
        self._socket.close()


def stopped(answer: str) -> dict[int, int]:
    """The ranks in an answer to ``list``, with their lines."""
    rows = [[cell.strip() for cell in row.split("|")] for row in answer.splitlines() if row.startswith("|")]
    return {int(row[2]): int(row[6]) for row in rows if row[2].isdigit() and row[6].isdigit()}


def typed(case: Case, python: Path) -> Session:
    """One session."""
    session = Session("torchmonarch debugger", case)
    shutil.copy(PROGRAMS / "monarch_main.py", case.folder)
    if case.bug == "gradient":
        session.type("(edit) gather the gradients' norms before the optimizer's step; breakpoint() where they differ")
        case.edit("optimizer.step()", *COMPARE, "    breakpoint()")
    else:
        session.type(f"(edit) at the top of the loop: if step == {case.step}: breakpoint()")
        first = "bad =" if case.bug == "crash" else "x, y ="
        case.edit(first, f"if step == {case.step}:", "    breakpoint()")
    port = free_port()
    session.type("python main.py")
    command = [str(python), "monarch_main.py", str(case.ranks)]
    with running(command, case.folder, MONARCH_DEBUG_SERVER_PORT=str(port)):
        session.type("monarch debug")
        console = Console(port)
        try:
            session.shows(console.read())
            end = time.monotonic() + PATIENCE  # a person waits until all have come, too
            while len(stopped(console.ask("list"))) < case.ranks and time.monotonic() < end:
                time.sleep(0.2)
            if case.bug == "gradient":
                compare(session, console)
            else:
                step_along(session, console)
        finally:
            console.close()
    return session


def ask(session: Session, console: Console, line: str) -> str:
    """Type a line into the debugger."""
    session.type(line)
    answer = session.shows(console.ask(line))
    if not answer.endswith(PROMPTS):
        session.type("monarch debug")
        session.shows(console.again())
    return answer


def where(session: Session, console: Console, wanted: int) -> dict[int, int]:
    """List the stopped ranks and their lines; once more, if a rank has not arrived yet."""
    found = stopped(ask(session, console, "list"))
    if len(found) < wanted:  # some have not got there yet, or never will
        time.sleep(STEP)
        found = stopped(ask(session, console, "list"))
    return found


def compare(session: Session, console: Console) -> None:
    """The ranks have stopped where they differ: which one it is stands in the list of norms."""
    case = session.case
    places = where(session, console, case.ranks)
    ask(session, console, "attach program 0")
    answer = ask(session, console, "p norms")
    norms = re.findall(r"\[[^\[\]]*\d\.\d[^\[\]]*\]", answer)
    odd = [rank for rank, each in enumerate(norms) if norms.count(each) == 1]
    if odd == [case.guilty] and set(places.values()) & set(case.lines):
        session.found = "by eye"
    elif odd == [case.guilty]:
        session.note = f"stopped at {sorted(set(places.values()))}"


def step_along(session: Session, console: Console) -> None:
    """Step all ranks together until one of them is elsewhere."""
    case = session.case
    places = where(session, console, case.ranks)
    for _ in range(MOST_STEPS):
        before = places
        ask(session, console, f"cast program ranks(0:{case.ranks}) n")
        time.sleep(STEP)
        places = where(session, console, case.ranks)
        others = {line for rank, line in places.items() if rank != case.guilty}
        mine = places.get(case.guilty)
        if mine is None and others:
            session.note = (
                f"rank {case.guilty} is no longer in the list; it was last seen in line {before[case.guilty]}"
            )
            mine = before[case.guilty]
        elif mine in others or not others:
            continue
        if mine in case.lines:
            session.found = "by eye"
            return
        if case.guilty not in places:
            return
    session.note = session.note or "the list does not tell the rank from the others"
