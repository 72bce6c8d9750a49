"""The six bugs in a notebook on the Monarch kernel, driven as by a front end, in a mesh or a joined job."""

from __future__ import annotations

import os
import queue
import re
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from bench.bugs.cases import Case, Session
from bench.bugs.processes import running
from bench.bugs.pytorch import torchrun
from monarch_kernel.kernel.install import KERNEL_NAME, install

ROOT = Path(__file__).resolve().parent.parent.parent
#: The time limit of a cell (seconds).
PATIENCE = 120.0

PREPARED = """\
import os, sys
from monarch_kernel import get_mesh
from monarch_kernel.actor import Actor, endpoint

class Program(Actor):
    @endpoint
    def train(self):
        sys.path.insert(0, os.getcwd())
        import train
        train.train()

program = get_mesh("m").spawn("program", Program)
"""


class Notebook:
    """A kernel, and the output of its cells as plain text."""

    def __init__(self, folder: Path) -> None:
        # Over TCP, another process may take a port before the kernel binds it.
        self.manager = KernelManager(kernel_name=KERNEL_NAME, transport="ipc", ip=f"{folder}/kernel")
        with (folder / "kernel.log").open("wb") as log:
            self.manager.start_kernel(cwd=str(folder), stdout=log, stderr=log)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def send(self, code: str) -> str:
        """Start a cell; return the id of its message."""
        return self.client.execute(code, allow_stdin=False)

    def read(self, message: str, enough: Any = None) -> str:
        """Return the output of a cell until it ends, or until ``enough(text)`` is true.

        Raises:
            TimeoutError: neither happens.
        """
        shown: list[str] = []
        displays: dict[str, int] = {}
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                news = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                break
            if news["parent_header"].get("msg_id") != message:
                continue
            kind, content = news["msg_type"], news["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return "\n".join(shown)
            text = text_of(kind, content)
            if not text:
                continue
            name = str(content.get("transient", {}).get("display_id", ""))
            if name and name in displays:
                shown[displays[name]] = text
            else:
                displays[name] = len(shown)
                shown.append(text)
            if enough is not None and enough("\n".join(shown)):
                return "\n".join(shown)
        raise TimeoutError(f"a cell did not end within {PATIENCE:.0f} s; it shows:\n" + "\n".join(shown))

    def run(self, code: str) -> str:
        """Run a cell; return its output."""
        return self.read(self.send(code))

    def close(self) -> None:
        """Shut the kernel down, with its mesh."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()


def text_of(kind: str, content: dict[str, Any]) -> str:
    """Return the output in a message of the kernel, without colours."""
    text = ""
    if kind == "stream":
        text = content["text"]
    elif kind in ("execute_result", "display_data", "update_display_data"):
        text = content["data"].get("text/plain", "")
    elif kind == "error":
        text = "\n".join(content["traceback"])
    return re.sub(r"\x1b\[[0-9;]*m", "", str(text)).rstrip("\n")


@contextmanager
def notebook(folder: Path) -> Generator[Notebook]:
    """Start a notebook in a folder, on this checkout's kernel."""
    with tempfile.TemporaryDirectory() as prefix:
        install(prefix=prefix)
        before = {name: os.environ.get(name) for name in ("JUPYTER_PATH", "JUPYTER_PREFER_ENV_PATH")}
        os.environ.update(JUPYTER_PATH=f"{prefix}/share/jupyter", JUPYTER_PREFER_ENV_PATH="0")
        try:
            opened = Notebook(folder)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def singled_out(case: Case, text: str) -> bool:
    """Return whether the text distinguishes the guilty rank from the others, and contains one of its lines."""
    # The source of a broadcast, and the number of ended ranks, are not part of the answer.
    text = re.sub(r"\bfor rank \d+|^\d+ of \d+ ranks done", "", text, flags=re.MULTILINE)
    alone = [
        rank
        for rank in range(case.ranks)
        if re.search(rf"(^\s*\[?{rank}\]?\s|\b[Rr]ank {rank}\b(?![-,]))", text, re.MULTILINE)
    ]
    here = any(re.search(rf"\btrain\.py(:|\", line ){line}\b", text) for line in case.lines)
    return here and (alone == [case.guilty] or (case.ranks == 2 and case.guilty in alone))


def judged(session: Session) -> Session:
    """Record what the session has found."""
    session.found = "named" if singled_out(session.case, session.output) else ""
    return session


def started(opened: Notebook, case: Case) -> None:
    """Start a mesh, and the actor whose endpoint runs the program."""
    opened.run(f"%mesh up m gpus={case.ranks} --dist gloo")
    opened.run(PREPARED)


def typed(case: Case) -> Session:
    """Run a session in which the program runs without blocking the cell prompt, and the user asks."""
    session = Session("ours", case)
    with notebook(case.folder) as opened:
        started(opened, case)
        opened.run("running = program.train.call()")
        case.wait()
        ask(session, opened)
    return judged(session)


def ask(session: Session, opened: Notebook) -> None:
    """Type the commands of a user in a notebook whose mesh runs the program."""
    case = session.case
    commands = ["%mesh hang"]
    if case.bug == "crash":
        commands = ["%mesh pm"]
    elif case.bug == "gradient":
        norms = "[p.grad.norm().item() for p in model.parameters()]"
        line = case.line_of("optimizer.step()")
        commands = [f'%mesh break train.py:{line} --when-differs "{norms}"', f"%mesh debug print {norms}"]
    for command in commands:
        session.type(command)
        session.shows(opened.run(command))
        if "break" in command and not all_stop(session, opened):
            # The breakpoint was set while they ran, and some had already passed the line.
            session.type("%mesh debug continue")
            session.shows(opened.run("%mesh debug continue"))
            all_stop(session, opened)


def joined(case: Case) -> Session:
    """Run a session that joins a job started by torchrun; the clock starts after the join."""
    session = Session("ours (joined)", case)
    hold = ["--hold-on-error"] if case.bug == "crash" else []
    command = torchrun(Path(sys.executable), case, "-m", "monarch_kernel.join", *hold, "train.py")
    environment = {"MONARCH_KERNEL_JOIN": "job", "PYTHONPATH": str(ROOT)}
    with notebook(case.folder) as opened, running(command, case.folder, **environment):
        case.wait()
        shown = opened.run("%mesh join job")
        if "joined in" not in shown:
            raise TimeoutError(shown)
        ask(session, opened)
        opened.run("%mesh leave")
    return judged(session)


def all_stop(session: Session, opened: Notebook) -> bool:
    """Wait until ranks have stopped, and briefly for the others; return whether all have."""
    wait = "wait(lambda stops: bool(stops), timeout=20)", "wait(lambda stops: len(stops) == ranks, timeout=1)"
    opened.run(f"from monarch_kernel.debug import get_debugger; ranks = {session.case.ranks}")
    opened.run(f"get_debugger().{wait[0]};")
    return f"stopped {session.case.ranks}" in opened.run(f"print('stopped', len(get_debugger().{wait[1]}))")


def waiting(case: Case) -> Session | None:
    """Run a session in which the user waits for the program in a cell, and types nothing."""
    if case.bug == "gradient":
        return None
    session = Session("ours (nothing typed)", case)
    with notebook(case.folder) as opened:
        started(opened, case)
        # An actor's error ends the cell at once; a %%mesh cell waits for the other ranks and monitors them.
        run_in_cell = "%%mesh\nimport os, sys\nsys.path.insert(0, os.getcwd())\nimport train\ntrain.train()"
        cell = opened.send("program.train.call().get()" if case.bug == "crash" else run_in_cell)
        case.wait(settle=0)
        session.start(case.since())
        session.shows(opened.read(cell, lambda text: singled_out(case, text)))
    return judged(session)
