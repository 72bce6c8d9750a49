"""``python -m tests.gpu [--seconds 400] [--only NAME] [--jobs N]``: run the checks, one line a result as it comes.

Without a GPU it says so, runs the checks that have a form for the CPU, and ends with 0 if those pass.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

import monarch_kernel.actor as runtime
from tests.gpu import Check, Skipped, all_checks, has_gpu
from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent.parent
#: Of a result that is printed.
WIDTH = 400


def main() -> int:
    """Run the checks; 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=400, help="the time for all of them (400)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check; may be repeated")
    parser.add_argument("--jobs", type=int, metavar="N", help="how many at a time (one for four cores, at least 2)")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--child", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    checks = all_checks()
    if options.child:
        return child([checks[name] for name in options.child])
    unknown = [name for name in options.only or () if name not in checks]
    if unknown:
        parser.error(f"there is no check {', '.join(unknown)}; there are {', '.join(checks)}")
    chosen = [each for each in checks.values() if not options.only or each.name in options.only]
    if options.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if not has_gpu():
        print("There is no NVIDIA GPU here: the checks run that have a form for the CPU.", flush=True)
    runner = Runs(time.monotonic() + options.seconds)
    jobs = options.jobs or max(2, (os.cpu_count() or 2) // 4)
    with ThreadPoolExecutor(jobs) as pool:
        running: list[Future[None]] = []
        # Without a card there is no state of it to keep apart: one process loads torch once, and runs them in turn.
        for each in ([one] for one in chosen) if has_gpu() else [chosen]:
            if has_gpu() and each[0].alone:
                wait(running)
                runner.run(each)
            else:
                running.append(pool.submit(runner.run, each))
        wait(running)
    counts = runner.counts
    print(f"{counts['ok']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return 1 if counts["FAILED"] else 0


def wait(running: list[Future[None]]) -> None:
    """Wait for all of them; raises what one raised."""
    while running:
        running.pop().result()


class Runs:
    """Runs checks in processes of their own until a time is over, and prints what came out."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def run(self, checks: list[Check]) -> None:
        """Run checks in one process."""
        began = time.monotonic()
        able = [each for each in checks if has_gpu() or each.cpu]
        for check in checks:
            if check not in able:
                self._say("skipped", check, "it needs a GPU", began)
        while able:
            began = time.monotonic()
            if self._end - began < 1:
                self._say("skipped", able.pop(0), "no time is left", began)
                continue
            process = _Process(able)
            while able and process.alive:
                began = time.monotonic()
                # Other programs use these cores, too, where CI runs it.
                deadline = able[0].deadline if has_gpu() else patience(3 * able[0].deadline)
                self._say(*process.result(able.pop(0), min(self._end - began, deadline)), began)

    def _say(self, kind: str, check: Check, text: str, began: float) -> None:
        with self._lock:
            self.counts[kind] += 1
            took = time.monotonic() - began
            print(f"{kind:7} {check.name:24} {took:5.1f} s  {text}".rstrip(), flush=True)


class _Process:
    """A process that runs checks in turn."""

    def __init__(self, checks: list[Check]) -> None:
        self.alive = True
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--child", *(check.name for check in checks)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"},
        )
        os.close(writer)
        self._said = os.fdopen(reader, errors="replace")
        self._last = checks[-1]

    def result(self, check: Check, deadline: float) -> tuple[str, Check, str]:
        """Wait for its next check, at most ``deadline`` seconds: what came out, and a text."""
        hangs = threading.Event()
        killer = threading.Timer(deadline, _end_all, [self._process, hangs])
        killer.start()
        output = result = ""
        for line in self._said:
            if line.startswith("result: "):
                result = line.removeprefix("result: ").strip()
                break
            output += line
        code = 0
        if not result or check is self._last:
            self.alive = False
            self._said.close()
            code = self._process.wait()
        killer.cancel()
        if code or not result:
            why = f"it did not end within {deadline:.0f} s" if hangs.is_set() else f"its process ended with {code}"
            return "FAILED", check, f"{why}\n{_indented(output)}"
        kind, _, text = result.partition(" ")
        return kind, check, f"{text}\n{_indented(output)}" if kind == "FAILED" else text


def _indented(text: str, lines: int = 40) -> str:
    return "\n".join(f"        {line[:WIDTH]}" for line in text.rstrip().split("\n")[-lines:])


def _end_all(process: subprocess.Popen[bytes], hangs: threading.Event) -> None:
    """End a check that hangs, with the stacks of its threads in its output, and all that it has started."""
    hangs.set()
    try:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGABRT)  # faulthandler prints them
        process.wait(5)
    except (psutil.Error, subprocess.TimeoutExpired):
        below = []
    for each in below:
        try:
            each.kill()
        except psutil.Error:
            pass
    process.kill()


def child(checks: list[Check]) -> int:
    """Run checks in this process, and print how each ended."""
    runtime.unhandled_fault_hook = lambda _failure: None  # the death of a rank would end this process, as any script
    for check in checks:
        kind = "ok"
        try:
            text = check.run() or ""
        except Skipped as e:
            kind, text = "skipped", str(e)
        except BaseException as e:
            traceback.print_exc()
            kind, text = "FAILED", f"{type(e).__name__}: {e}"
        sys.stderr.flush()
        print("result:", kind, " ".join(text.split())[:WIDTH], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
