"""Random joins, stops, steps and deaths of viewers, in a training job whose losses must be an undisturbed run's.

``python -m tests.join.chaos --actions 10000`` runs it by hand.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from monarch_kernel.engines.join.announcements import announcements

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = Path(__file__).with_name("chaos_train.py")
VIEWER = Path(__file__).with_name("chaos_viewer.py")
RANKS = 4
#: A rank goes on so long after the last viewer has died or fallen asleep (seconds), and what a busy machine adds.
LEASH, SLACK = 3.0, 2.0
#: What takes longer than that is told apart (seconds).
SLOW = 5.0
#: The longest hold of a viewer.
HOLD = 1.0


@dataclass
class Found:
    """What has happened.

    Attributes:
        actions: of viewers, by name; those that failed as they may, under "failed ...".
        deaths: of viewers, by their kind.
        steps: of the job.
        longest: how long the job stood still at most after all viewers were gone (seconds).
        different: the first step whose loss is another one than in the undisturbed run, by rank.
        log: what the job has written.
    """

    actions: Counter[str] = field(default_factory=Counter[str])
    deaths: Counter[str] = field(default_factory=Counter[str])
    steps: int = 0
    longest: float = 0.0
    different: dict[int, int] = field(default_factory=dict[int, int])
    log: str = ""

    @property
    def count(self) -> int:
        """All actions and deaths."""
        return self.actions.total() + self.deaths.total()


class Chaos:
    """A job, and viewers that come and go.

    Args:
        folder: for what the job writes.
        seed: decides what happens.
        viewers: how many there are at a time.
        ranks: of the job.
    """

    def __init__(self, folder: Path, seed: int, viewers: int = 2, ranks: int = RANKS) -> None:
        self.found = Found()
        self._ranks = ranks
        self._folder = folder
        self._chance = random.Random(seed)
        self._name = f"chaos-{os.getpid()}"
        self._most = viewers
        self._viewers: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def run(self, actions: int, seconds: float = 3600.0) -> Found:
        """Do so many things to the job, or as many as can be done in that time.

        Raises:
            AssertionError: the job stood still without viewers, or has failed.
        """
        job = self._start("chaos", prepared=True)
        try:
            self._wait(lambda: min(self._steps()) > 0 or job.poll() is not None, 60)
            deadline = time.monotonic() + seconds
            while self.found.count < actions and time.monotonic() < deadline:
                assert job.poll() is None, f"the job has ended: {self._log('chaos')}"
                while len(self._viewers) < self._most:
                    self._start_viewer()
                time.sleep(self._chance.uniform(0.5, 6.0))
                if self._chance.random() < 0.3:
                    self._all_fall_silent()
                else:
                    self._one_dies()
            self._all_fall_silent()
            (self._folder / "gate").touch()
            code = job.wait(60)
            self.found.log = self._log("chaos")
            assert code == 0, self.found.log
        finally:
            for viewer in self._viewers:
                self._end(viewer)
            job.kill()
            job.wait()
            for pid in self._pids():  # of a job that has not ended by itself
                os.kill(pid, signal.SIGKILL)
        self._compare()
        return self.found

    # -- the job -------------------------------------------------------------------------------------

    def _start(self, name: str, prepared: bool, steps: int = 0) -> subprocess.Popen[bytes]:
        (self._folder / name).mkdir()
        how = ["-m", "monarch_kernel.join"] if prepared else []
        most = [str(steps)] if steps else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MONARCH_KERNEL_JOIN": self._name}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*torchrun, *how, str(TRAIN), str(self._folder / "gate"), str(self._folder / name), *most],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _steps(self) -> list[int]:
        found: list[int] = []
        for rank in range(self._ranks):
            try:
                found.append(int.from_bytes((self._folder / "chaos" / f"step.{rank}").read_bytes(), "little"))
            except OSError:
                found.append(0)
        return found

    def _compare(self) -> None:
        self.found.steps = steps = min(self._steps())
        assert steps == max(self._steps())
        job = self._start("quiet", prepared=False, steps=steps)
        assert job.wait(120 + steps / 20) == 0, self._log("quiet")
        for rank in range(self._ranks):
            theirs = (self._folder / "chaos" / f"losses.{rank}").read_text().split()
            quiet = (self._folder / "quiet" / f"losses.{rank}").read_text().split()
            assert len(theirs) == len(quiet) == steps
            for step, (one, other) in enumerate(zip(theirs, quiet, strict=True)):
                if one != other:
                    self.found.different[rank] = step
                    break

    # -- viewers ---------------------------------------------------------------------------------------

    def _start_viewer(self) -> None:
        with (self._folder / "viewers.log").open("ab") as log:
            viewer = subprocess.Popen(
                [sys.executable, "-m", "tests.join.chaos_viewer", self._name, str(self._chance.randrange(1 << 30))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        self._viewers.append(viewer)
        threading.Thread(target=self._read, args=(viewer,), daemon=True).start()

    def _read(self, viewer: subprocess.Popen[str]) -> None:
        assert viewer.stdout is not None
        with viewer.stdout:
            for line in viewer.stdout:
                did, _, took = line.rpartition(" ")
                if float(took) > SLOW:
                    did += " (slow)"
                with self._lock:
                    self.found.actions[re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", did)] += 1

    def _one_dies(self) -> None:
        viewer = self._chance.choice(self._viewers)
        kind = self._chance.choice(["kill", "sleep", "sleep", "end"])
        self.found.deaths[kind] += 1
        if kind == "sleep":
            viewer.send_signal(signal.SIGSTOP)
            time.sleep(self._chance.choice([0.2, 1.0, 3.0]))
            viewer.send_signal(signal.SIGCONT)
            return
        self._viewers.remove(viewer)
        if kind == "kill":
            self._kill(viewer)
        else:
            self._end(viewer)

    def _all_fall_silent(self) -> None:
        """Kill some viewers, and stop the others: the job must go on."""
        self.found.deaths["silence"] += 1
        asleep: list[subprocess.Popen[str]] = []
        for viewer in list(self._viewers):
            if self._chance.random() < 0.5:
                viewer.send_signal(signal.SIGSTOP)
                asleep.append(viewer)
            else:
                self._viewers.remove(viewer)
                self._kill(viewer)
        began = time.monotonic()
        before = min(self._steps())
        # Two more steps of all: one may have been under way.
        went_on = self._wait(lambda: min(self._steps()) > before + 2, LEASH + HOLD + SLACK + 10)
        took = time.monotonic() - began
        self.found.longest = max(self.found.longest, took)
        if not went_on:
            stuck = self._stacks()
        for viewer in asleep:
            viewer.send_signal(signal.SIGCONT)
        assert went_on, (
            f"the job stands still for {took:.1f} s after all viewers were gone, at {self._steps()}:\n{stuck}"
        )

    def _stacks(self) -> str:
        texts = [
            subprocess.run(
                [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            for pid in self._pids()
        ]
        return "\n".join(texts)

    def _pids(self) -> list[int]:
        return [each.pid for each in announcements() if each.name == self._name]

    def _end(self, viewer: subprocess.Popen[str]) -> None:
        assert viewer.stdin is not None
        viewer.send_signal(signal.SIGCONT)
        viewer.stdin.close()
        try:
            viewer.wait(10)
        except subprocess.TimeoutExpired:
            self.found.deaths["had to be killed"] += 1
            self._kill(viewer)

    @staticmethod
    def _kill(viewer: subprocess.Popen[str]) -> None:
        viewer.kill()
        viewer.wait()
        assert viewer.stdin is not None
        viewer.stdin.close()

    @staticmethod
    def _wait(holds: object, timeout: float) -> bool:
        assert callable(holds)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if holds():
                return True
            time.sleep(0.02)
        return False


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--viewers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after that time, whatever was done")
    parser.add_argument("--keep", type=Path, help="keep what was written in this new folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.keep or Path(folder)
        path.mkdir(exist_ok=True)
        began = time.monotonic()
        found = Chaos(path, asked.seed, asked.viewers).run(asked.actions, asked.seconds)
    for name, count in (found.actions + found.deaths).most_common():
        print(f"{count:7d} {name}")
    print(f"{found.count} actions and deaths in {time.monotonic() - began:.0f} s, {found.steps} steps of {RANKS} ranks")
    print(f"without viewers, the job went on after {found.longest:.2f} s at most")
    print(found.log)
    if found.different:
        sys.exit(f"losses differ, by rank from step: {found.different}")
    print("all losses are those of an undisturbed run")


if __name__ == "__main__":
    main()
