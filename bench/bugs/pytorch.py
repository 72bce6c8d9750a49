"""The six bugs in py-spy and in PyTorch's own tools: debug server, Flight Recorder, DETAIL checks, breakpoint()."""

from __future__ import annotations

import html
import re
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.bugs.cases import HANGS, PROGRAMS, Case, Session
from bench.bugs.monarchs import COMPARE
from bench.bugs.processes import free_port, running, shell

#: The time for which a program is observed if it may report something by itself (seconds).
PATIENCE = 60.0
#: The shortened timeout of the process group, if its error is wanted (seconds).
SHORT = 10

LAST_ENTRIES = (
    'python -c "import pickle, glob\n'
    "for file in sorted(glob.glob('fr/*')):\n"
    "    last = pickle.load(open(file, 'rb'))['entries'][-1]\n"
    "    frames = [(f['filename'].split('/')[-1], f['line']) for f in last['frames']]\n"
    "    print(file, last['profiling_name'], last['collective_seq_id'], last['state'], frames)\""
)


def torchrun(python: Path, case: Case, *program: str) -> list[str]:
    """Return the command that runs a program of the case's folder on all ranks."""
    port = str(free_port())
    return [
        str(python.with_name("torchrun")),
        *("--nproc-per-node", str(case.ranks), "--master-addr", "127.0.0.1", "--master-port", port),
        *program,
    ]


def lines_in(case: Case, text: str) -> bool:
    """Return whether the text contains one of the guilty rank's lines."""
    return any(re.search(rf"\btrain\.py('?,|:|\",) ?(line )?{line}\b", text) for line in case.lines)


def section(text: str, heading: str, rank: int) -> str:
    """Return a rank's part of a text in which each part begins with a heading, such as 'Rank %d:'."""
    parts = re.split("(?m)^(?=" + re.escape(heading).replace("%d", r"\d+") + ")", text)
    return "".join(part for part in parts if part.startswith(heading.replace("%d", str(rank))))


def spy(case: Case, python: Path) -> Session:
    """Run py-spy in a loop over the ranks' processes; each is printed with its rank, which py-spy does not know."""
    session = Session("py-spy", case)
    with running(torchrun(python, case, "train.py"), case.folder) as program:
        case.wait()
        if case.bug == "crash":
            program.process.wait()
        options = " --locals" if case.bug == "gradient" else ""
        each = f"grep -z ^RANK= /proc/$p/environ; py-spy dump --pid $p{options}"
        command = f"for p in $(pgrep -P {program.process.pid}); do {each}; done"
        session.type(command.replace(str(program.process.pid), "$(pgrep torchrun)"))
        text = session.shows(shell(command, case.folder, python))
        if case.bug == "gradient":
            session.note = "all ranks look alike; of tensors, --locals shows the address"
        elif lines_in(case, section(text, "RANK=%d", case.guilty)):
            session.found = "by eye"
        elif case.bug == "crash":
            session.note = "nothing is left to look at when the program has ended; its log has the traceback"
    return session


def page(port: int, name: str) -> str:
    """Return a page of the debug server, as rendered by a browser."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/{name}", timeout=90) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
    text = re.sub(r"(?s)<style.*?</style>|<nav.*?</nav>", "", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return "\n".join(line.strip() if line.strip().startswith("Rank ") else line for line in text.splitlines())


def debug_page(case: Case, python: Path) -> Session:
    """Read the page of all stacks, or py-spy's page if the rank is not in it."""
    session = Session("torch.distributed.debug", case)
    port = free_port()
    shutil.copy(PROGRAMS / "served.py", case.folder)
    with running(torchrun(python, case, "served.py"), case.folder, DEBUG_PORT=str(port)) as program:
        case.wait()
        if case.bug == "crash":
            program.process.wait()
        for name in ("stacks", "pyspy_dump"):
            session.type(f"open http://localhost:25999/{name}")
            try:
                text = session.shows(page(port, name))
            except OSError as error:
                session.shows(f"{error}")
                session.note = "there is no page when the program has ended; its log has the traceback"
                return session
            if case.bug != "gradient" and lines_in(case, section(text, "Rank %d:", case.guilty)):
                session.found = "by eye"
                return session
        session.note = "all ranks look alike" if case.bug == "gradient" else "the rank is in neither page"
    return session


def flight_recorder(case: Case, python: Path) -> Session | None:
    """Run PyTorch's analyzer of the recorded collectives; show the last entries if that finds nothing."""
    if case.bug not in HANGS:
        return None
    session = Session("Flight Recorder", case)
    shutil.copy(PROGRAMS / "served.py", case.folder)
    (case.folder / "fr").mkdir()
    with running(torchrun(python, case, "served.py"), case.folder, TORCH_FR_BUFFER_SIZE="2000"):
        case.wait()
        session.type("(tell the ranks to write their files)")
        (case.folder / "dump").touch()
        end = time.monotonic() + 5
        while len(list((case.folder / "fr").iterdir())) < case.ranks and time.monotonic() < end:
            time.sleep(0.02)
        session.shows(shell("ls fr", case.folder, python))
        command = "torchfrtrace -p rank_ fr --allow-incomplete-ranks"
        session.type(command)
        text = session.shows(shell(command, case.folder, python))
        if f"Rank {case.guilty}" in text and lines_in(case, text):
            session.found = "named"
            return session
        failed = text.strip().splitlines()[-1][:60] if "Traceback" in text else ""
        session.type(LAST_ENTRIES)
        text = session.shows(shell(LAST_ENTRIES, case.folder, python))
        if lines_in(case, section(text, "fr/rank_%d", case.guilty)):
            session.found = "by eye"
        else:
            session.note = "its last collective is an earlier one; where it is now is not recorded"
            if not section(text, "fr/rank_%d", case.guilty):
                session.note = "the rank writes no file"
        if failed:
            session.note = "; ".join(part for part in (f"torchfrtrace ends with {failed}", session.note) if part)
    return session


def detail(case: Case, python: Path) -> Session | None:
    """Run the program again with PyTorch's checks of every collective, and a short timeout of the process group."""
    if case.bug == "gradient":
        return None
    session = Session("TORCH_DISTRIBUTED_DEBUG=DETAIL", case)
    if case.bug != "crash":
        session.type(f'(edit) init_process_group("gloo", timeout=timedelta(seconds={SHORT}))')
        parts = case.folder / "parts.py"
        text = parts.read_text().replace('"gloo")', f'"gloo", timeout=timedelta(seconds={SHORT}))')
        parts.write_text(text.replace("import torch\n", "from datetime import timedelta\n\nimport torch\n", 1))
        session.type("TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun train.py")
    environ = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if case.bug != "crash" else {}
    if case.bug == "crash":
        session.tool = "torchrun"
    with running(torchrun(python, case, "train.py"), case.folder, **environ) as program:
        if case.bug == "crash":
            case.wait(settle=0)
            session.start(case.since())
        heading = rf"(?m)^\[rank{case.guilty}\]: .*"

        def told(text: str) -> bool:
            return lines_in(case, "\n".join(re.findall(heading, text)))

        text = session.shows(program.until(told, PATIENCE))
        if told(text):
            blamed = set(re.findall(r"but Rank (\d+) is running", text)) if case.bug != "crash" else {str(case.guilty)}
            session.found = "named" if str(case.guilty) in blamed else "by eye"
        elif named := re.search(rf"Ranks {case.guilty} failed to pass monitoredBarrier.*", text):
            session.note = f"the rank, not where it is: {named.group()[:80]!r}"
    return session


def pdb(case: Case, python: Path) -> Session | None:
    """Set torch.distributed.breakpoint() where the ranks differ, and print the values of all ranks."""
    if case.bug != "gradient":
        return None
    session = Session("torch.distributed.breakpoint", case)
    session.type("(edit) gather the gradients' norms before the optimizer's step; dist.breakpoint() where they differ")
    case.edit("optimizer.step()", *COMPARE, "    dist.breakpoint()")
    session.type("torchrun train.py")
    with running(torchrun(python, case, "train.py"), case.folder) as program:
        text, seen = "", 0
        for n, line in enumerate(("", "up", "p norms"), 1):
            if line:
                session.type(line)
                program.write(line)
            text = program.until(lambda text, n=n: text.count("(Pdb) ") >= n, PATIENCE)
            session.shows(text[seen:])
            seen = len(text)
        norms = re.findall(r"\[[^\[\]]*\d\.\d[^\[\]]*\]", session.spoken[-1][1])
        odd = [rank for rank, each in enumerate(norms) if norms.count(each) == 1]
        if odd == [case.guilty] and lines_in(case, shown_place(text)):
            session.found = "by eye"
    return session


def shown_place(text: str) -> str:
    """Rewrite locations of pdb, FILE(LINE), in the form of other tools."""
    return re.sub(r"train\.py\((\d+)\)", r"train.py:\1 ", text)
