"""The kills, and the judge."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.conftest import alive, children, wait_until
from tests.sync.hosts import current_tree, leftovers
from tests.sync.trees import Snapshot, difference, make_tree, mutate, snapshot
from tests.workers import Worker, shared_key
from workspace_sync.model.sync_report import SyncReport

#: How long a sync may take (seconds); never reached when things work.
PATIENCE = 90.0
#: Who is struck, and how often in relation.
VICTIMS = {"client": 3, "agent": 4, "host": 3}


@dataclass
class KillReport:
    """What came of a run."""

    seed: int
    kills: int = 0
    found: Counter[str] = field(default_factory=Counter[str])  # "agent: old" -> hosts
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        said = ", ".join(f"{what} {count}" for what, count in sorted(self.found.items()))
        return "\n".join([f"seed {self.seed}: {self.kills} kills; hosts found: {said}", *self.violations])


class Client:
    """A process that syncs once."""

    def __init__(self, folder: Path, tree: Path, urls: list[str], log: Path) -> None:
        command = [sys.executable, "-m", "tests.sync.chaos.client", shared_key(), str(tree), *urls]
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(folder)},
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self._out = self.process.stdout
        self.family: set[int] = set()
        if self._out.readline() != b"attached\n":
            raise AssertionError(f"the client did not attach:\n{log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """SIGKILL to it alone."""
        self.family = {self.process.pid, *children(self.process.pid)}
        self.process.kill()

    def end(self) -> SyncReport | None:
        """Wait for its end; the receipt, if it has given one."""
        overdue = threading.Timer(PATIENCE, self.process.kill)
        overdue.start()
        try:
            said = self._out.read()
            code = self.process.wait(PATIENCE)
        finally:
            overdue.cancel()
            self._out.close()
        wait_until(lambda: not any(map(alive, self.family)), "the processes of a killed client have ended")
        if code == 0:
            return msgspec.json.decode(said, type=SyncReport)
        return None

    def log(self) -> str:
        """The end of what it has said."""
        return self._log.read_text(errors="replace")[-3000:]


class MortalHost:
    """A host that can be killed: its store outlives its workers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.store = folder / name
        self._folder = folder
        self.start()

    def start(self) -> None:
        """A new worker on the same store."""
        self.worker = Worker(
            "tcp://127.0.0.1:0",
            self.name,
            self._folder,
            "--key-file",
            shared_key(),
            env={"MONARCH_KERNEL_SYNC_FOLDER": str(self.store)},
        )

    def crash(self) -> None:
        """SIGKILL to all that runs here."""
        everything = {self.worker.pid, *children(self.worker.pid)}
        for pid in everything:
            _strike(pid)
        self.worker.process.wait(PATIENCE)
        assert self.worker.process.stdout is not None
        self.worker.process.stdout.close()
        wait_until(lambda: not any(map(alive, everything)), f"all of {self.name} has ended")

    def tree(self) -> Snapshot | None:
        """What ranks would see now, read in full; None: there is no tree."""
        return current_tree(self.store)


def _strike(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class SyncChaos:
    """One run."""

    def __init__(self, seed: int, folder: Path, hosts: int = 2) -> None:
        self.report = KillReport(seed)
        self._draw = random.Random(seed)
        self._folder = folder
        self._tree = make_tree(folder / "source", seed)
        self._hosts = [MortalHost(folder, f"host{n}") for n in range(hosts)]
        self._usual = 1.0  # how long a sync takes (seconds)

    def run(self, kills: int) -> KillReport:
        """So many kills, one after the other."""
        self._repair("the first sync")
        for number in range(kills):
            self._kill(number)
        return self.report

    def close(self) -> None:
        """The end of the hosts."""
        for host in self._hosts:
            host.worker.end()

    def _client(self) -> Client:
        return Client(
            self._folder / "client", self._tree, [host.worker.url for host in self._hosts], self._folder / "client.log"
        )

    def _kill(self, number: int) -> None:
        old = [host.tree() for host in self._hosts]
        mutate(self._tree, self._draw)
        new = snapshot(self._tree)
        victim = self._draw.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        host = self._draw.choice(self._hosts)
        moment = self._draw.random()
        client = self._client()
        time.sleep(moment * self._usual)  # no event marks a random moment
        if victim == "agent":
            agents = sorted(host.worker.ranks())
            victim = "agent" if agents else "client"
            for pid in agents:
                _strike(pid)
        if victim == "client":
            client.kill()
        elif victim == "host":
            host.crash()
        what = f"kill {number}, of {victim} {host.name if victim != 'client' else ''} at {moment:.2f} of a sync"
        client.end()
        self.report.kills += 1
        for each, before in zip(self._hosts, old, strict=True):
            if each.worker.process.returncode is None:
                each.worker.wait_idle()
            self._judge(f"{what}: {each.name}", victim, each.tree(), before, new)
        if victim == "host":
            host.start()
        self._repair(what)

    def _judge(self, what: str, victim: str, found: Snapshot | None, old: Snapshot | None, new: Snapshot) -> None:
        """Old or new."""
        if found == new:
            self.report.found[f"{victim}: new"] += 1
        elif found == old:
            self.report.found[f"{victim}: old"] += 1
        else:
            self.report.found[f"{victim}: a mix"] += 1
            self.report.violations.append(
                f"{what} has neither tree; against the new one:\n{difference(found or {}, new)}\n"
                f"against the old one:\n{difference(found or {}, old or {})}"
            )

    def _repair(self, what: str) -> None:
        """A sync that nothing disturbs."""
        client = self._client()
        began = time.monotonic()
        report = client.end()
        self._usual = max(0.2, time.monotonic() - began)
        wrong = "it failed" if report is None else "; ".join(f"{host.host}: {host.error}" for host in report.failed)
        if wrong:
            self.report.violations.append(f"the sync after {what}: {wrong}\n{client.log()}")
        new = snapshot(self._tree)
        for host in self._hosts:
            host.worker.wait_idle()
            if (found := host.tree()) != new:
                self.report.violations.append(
                    f"{host.name} has another tree after the sync that follows {what}:\n{difference(found or {}, new)}"
                )
            self.report.violations += [f"{left} is left on {host.name} after {what}" for left in leftovers(host.store)]


def chaos(seed: int, kills: int, folder: Path, hosts: int = 2) -> KillReport:
    """A whole run in an empty folder, on so many hosts, of which no process is left; its report."""
    folder.mkdir(parents=True, exist_ok=True)
    run = SyncChaos(seed, folder, hosts)
    try:
        return run.run(kills)
    finally:
        run.close()
