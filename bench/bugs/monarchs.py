"""The six bugs in torchmonarch's debugger: `breakpoint()` in the program, and `monarch debug` in a terminal.

That debugger cannot stop a running rank; it needs breakpoints in the program. For a hang, the best way that we know is
a breakpoint at the start of the step that hangs (which is in the program's log). From there, ``cast`` steps all ranks,
and ``list`` shows where they are.
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from pathlib import Path

from bench.bugs.cases import PROGRAMS, Case, Session
from bench.bugs.processes import free_port, running

#: The time limit for the start of the program (seconds).
PATIENCE = 60.0
#: If the debugger does not answer for this long, another connection is tried (seconds).
ANSWER = 10.0
#: The time for ranks to execute a line before they are listed (seconds).
STEP = 0.7
#: The maximum number of steps to a bug.
MOST_STEPS = 12
PROMPTS = ("monarch_dbg> ", "(Pdb) ")
#: The breakpoint that is added if no rank fails and none hangs.
COMPARE = (
    "norms = [None] * size",
    "dist.all_gather_object(norms, [p.grad.norm().item() for p in model.parameters()])",
    "if any(each != norms[0] for each in norms):",
)


class Console:
    """The equivalent of `monarch debug`: a line-based connection to the client's port."""

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
        """Read the output until the prompt, or until there has been none for long."""
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
        """Type a line; return the answer."""
        self._socket.sendall(line.encode() + b"\n")
        return self.read()

    def again(self) -> str:
        """Start `monarch debug` again; return its output."""
        self.close()
        self.__init__(self._port)
        return self.read()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def stopped(answer: str) -> dict[int, int]:
    """Parse an answer to ``list``: the stopped ranks, with their lines."""
    rows = [[cell.strip() for cell in row.split("|")] for row in answer.splitlines() if row.startswith("|")]
    return {int(row[2]): int(row[6]) for row in rows if row[2].isdigit() and row[6].isdigit()}


def typed(case: Case, python: Path) -> Session:
    """Run one session."""
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
            end = time.monotonic() + PATIENCE  # a user also waits until all ranks have stopped
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
    """List the stopped ranks and their lines; repeat if a rank has not arrived yet."""
    found = stopped(ask(session, console, "list"))
    if len(found) < wanted:  # some have not arrived yet, or never will
        time.sleep(STEP)
        found = stopped(ask(session, console, "list"))
    return found


def compare(session: Session, console: Console) -> None:
    """Compare the ranks, which have stopped where they differ: the list of norms shows the guilty one."""
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
