"""Start each (peer, group) in a fresh process, and collect its output.

The process that calls `measure` must have no other children: after each group, all its descendants are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from bench.environments import ROOT, STATE
from bench.measure import tree
from bench.report import Result

SCRIPTS = {
    "ours": "monarch_actors",
    "torchmonarch": "monarch_actors",
    "ray": "ray_actors",
    "ipyparallel": "ipyparallel_views",
    "dask": "dask_actors",
    "limit": "limits",
}
#: The time limit for the helpers of an ended peer to end, too (seconds).
GRACE_S = 3
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of the processes that a peer leaves behind, so that they can be found and killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_leftovers(grace: float = 0) -> list[str]:
    """Kill every descendant of this process after a grace period; return the names of those that were still running."""
    names: list[str] = []
    until = time.monotonic() + grace
    while any(_running(pid) for pid in tree()[1:]) and time.monotonic() < until:
        time.sleep(0.02)
    while pids := tree()[1:]:
        for pid in pids:
            with contextlib.suppress(OSError):
                if _running(pid):
                    names.append(Path(f"/proc/{pid}/comm").read_text().strip())
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return names


def _running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def measure(peer: str, python: Path, group: str, scale: float, deadline: float) -> list[Result]:
    """Run one group of one peer; return its measurements, and notes on failures."""
    return run_script(peer, [str(python), "-m", f"bench.peers.{SCRIPTS[peer]}", group], group, scale, deadline)


def run_script(peer: str, command: Sequence[str], group: str, scale: float, deadline: float) -> list[Result]:
    """Run a command that prints measurements of one group of a peer; return these, and notes on failures."""
    logs = STATE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{peer}-{group}.log"
    environ = {
        **os.environ,
        "BENCH_PEER": peer,
        "BENCH_SCALE": str(scale),
        "BENCH_DEADLINE": str(deadline),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # installed packages are compiled; modules imported from a checkout are not yet
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # one warning less
    }
    # Files instead of pipes: a helper that outlives the peer may keep these open.
    out = log.with_suffix(".out")
    with log.open("w") as stderr, out.open("w") as stdout:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=ROOT,
            env=environ,
            start_new_session=True,  # an interrupt here must not reach the peers twice
        )
        try:
            process.wait(deadline)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            process.kill()
            process.wait()
    # Peers also print other things.
    lines = out.read_text(errors="replace").splitlines()
    results: list[Result] = [json.loads(line) for line in lines if line.startswith('{"peer"')]
    trouble = {"peer": peer, "metric": f"group:{group}", "value": None}
    if timed_out:
        results.append({**trouble, "note": f"no end within {deadline:g} s; where it was is in {log.relative_to(ROOT)}"})
    elif process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]
        results.append({**trouble, "note": f"exit status {process.returncode}: {last[:200]}"})
    left = end_leftovers(GRACE_S)
    if left and not timed_out and peer == "ours":
        results.append({**trouble, "note": f"left {len(left)} processes behind: {', '.join(sorted(set(left)))}"})
    return [{**r, "group": group} for r in results]
