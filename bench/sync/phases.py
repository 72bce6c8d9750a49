"""The measurements: peers take turns in every round, and each proves that the hosts have the client's content."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environments import EnvironmentFailed
from bench.report import Result
from bench.sync.hosts import PeakMemory, Place, place
from bench.sync.peers import HOSTS_ALLOW, Ours, SyncPeer, monarch_peer, needs_names, our_peer, rsync_peer
from bench.sync.rows import MONARCH, OURS
from bench.sync.service import PeerFailedError
from bench.sync.trees import BenchTree, TreeSpec
from workspace_sync.scanning.hashing import CHUNK

#: A file system may search long before it reuses the inodes of files removed in the last minute (ext4 does). Copies
#: are therefore removed only when space is needed, and nothing is measured for this long afterwards (seconds).
RECENT = 65
#: The space on the disk that stays free (bytes).
ROOM = 5_000_000_000
#: The bandwidth of hosts' cables in rows that mention it (bits/s).
CABLE = 1e9


@dataclass
class Bench:
    """One run.

    Attributes:
        folder: on the disk that is measured.
        rounds: the number of rounds of each measurement.
        quick: whether to use smaller trees and fewer hosts.
        peers: the peers to measure.
        results: the measurements.
    """

    folder: Path
    rounds: int
    quick: bool
    peers: list[str]
    results: list[Result] = field(default_factory=list[Result])

    def __post_init__(self) -> None:
        scale = 50 if self.quick else 1
        trees = self.folder / "trees"
        trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        size = 5_000_000_000
        self.large = BenchTree(TreeSpec(f"large{100_000 // scale}", 100_000 // scale, size // scale), trees)
        self.some = BenchTree(TreeSpec(f"some{20_000 // scale}", 20_000 // scale, size // 5 // scale), trees)
        self.few = BenchTree(TreeSpec(f"few{2_000 // scale}", 2_000 // scale, size // 250 // scale), trees)
        self.big = BenchTree(TreeSpec(f"big{1_000 // scale}", 1, (1 << 30) // scale), trees)
        self.several, self.many = (2, 4) if self.quick else (8, 64)
        self.key = self.folder / "key"
        if not self.key.exists():
            command = [sys.executable, "-m", "monarch_kernel", "keys", str(self.key)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        #: MB by peer and metric.
        self.peaks: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._names: bool | None = None
        self._turn = 0

    def record(self, peer: str, metric: str, value: float | None, **extra: object) -> None:
        """Record one figure, or none with the reason."""
        self.results.append({"peer": peer, "metric": metric, "value": value, **extra})

    @contextmanager
    def scratch(self, name: str) -> Generator[Path]:
        """Create a folder whose content is not needed afterwards."""
        path = self.folder / "scratch" / name
        path.parent.mkdir(exist_ok=True, mode=0o700)
        self._put_away(path)
        try:
            yield path
        finally:
            self._put_away(path)

    def _put_away(self, path: Path) -> None:
        if path.exists():
            path.rename(self.folder / "scratch" / f"old-{os.getpid()}-{time.monotonic_ns()}")

    def clear(self) -> None:
        """Remove folders that are no longer needed."""
        for path in (self.folder / "scratch").glob("old-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, tree: BenchTree, count: int) -> None:
        """Ensure that all peers have space for their copies, without removals shortly before they run."""
        copies = count * (len(self.peers) + (OURS in self.peers))  # a host of ours also has the previous tree
        if shutil.disk_usage(self.folder).free < 1.2 * copies * tree.size + ROOM and any(
            (self.folder / "scratch").glob("old-*")
        ):
            say(f"removing old copies, and waiting {RECENT} s")
            self.clear()
            os.sync()
            time.sleep(RECENT)

    # -- peers and rounds -------------------------------------------------------------------------

    @contextmanager
    def against(self, tree: BenchTree, count: int, rate: float | None = None) -> Generator[list[SyncPeer]]:
        """Start all peers with this many empty hosts each; a peer that cannot run becomes a note.

        Args:
            rate: of their cables (bits/s).
        """
        self._make_room(tree, count)
        with ExitStack() as opened:
            found: list[SyncPeer] = []
            for peer in self.peers:
                folder = opened.enter_context(self.scratch(peer))
                try:
                    if peer == MONARCH:
                        if rate is not None:
                            continue  # its hosts are workers of this machine
                        found.append(opened.enter_context(self._monarch(tree, count, folder)))
                    else:
                        where = opened.enter_context(place(count, folder, rate=rate))
                        made = self.ours(where, tree) if peer == OURS else rsync_peer(where, tree)
                        found.append(opened.enter_context(made))
                except (EnvironmentFailed, PeerFailedError) as error:
                    self.record(peer, "group:start", None, note=str(error)[-300:])
            yield found

    @contextmanager
    def _monarch(self, tree: BenchTree, count: int, folder: Path) -> Generator[SyncPeer]:
        if self._names is None:
            with self.scratch("names") as tried:
                self._names = needs_names(tried, BenchTree(TreeSpec("tiny", 20, 20_000), self.large.path.parent).make())
                if self._names:
                    self.record(MONARCH, "group:sync_workspace", None, note=HOSTS_ALLOW)
        with monarch_peer(count, folder, tree, self._names) as peer:
            yield peer

    def ours(self, where: Place, tree: BenchTree) -> AbstractContextManager[Ours]:
        """Start this project with a store on each host."""
        return our_peer(where, tree, [where.disk(host) / "store" for host in range(where.count)], self.key)

    def each(self, peers: list[SyncPeer], metric: str, work: Callable[[SyncPeer], float]) -> None:
        """Measure every peer in turn. A peer that fails is noted and omitted from then on."""
        self._turn += 1
        for n in range(len(peers)):
            peer = peers[(n + self._turn) % len(peers)]
            peer.rest()
            load = os.getloadavg()[0]
            try:
                value = work(peer)
            except PeerFailedError as error:
                self.record(peer.name, metric, None, note=str(error)[-300:])
                say(f"{metric} of {peer.name}: {error}")
                peer.client.program.signal(signal.SIGKILL)
                continue
            self.record(peer.name, metric, value, load=round(load, 2))
            say(f"{metric} of {peer.name}: {value:.3f}")
        failed = {r["peer"] for r in self.results if r["metric"] == metric and r["value"] is None}
        peers[:] = [peer for peer in peers if peer.name not in failed]

    # -- measurements -----------------------------------------------------------------------------

    def whole(self, tree: BenchTree, prefix: str) -> None:
        """Sync a tree to two hosts: first completely, then unchanged, with one changed file, with a thousand."""
        tree.make().warm()
        with self.against(tree, 2) as peers:
            self.each(peers, f"{prefix}whole2_s", lambda peer: self._with_memory(peer, prefix))
            for peer in peers:
                peer.prove(tree.sample())
                if isinstance(peer, Ours):
                    peer.spawn()
            for _ in range(self.rounds):
                self.each(peers, f"{prefix}none_s", lambda peer: peer.sync()["seconds"])
                value = tree.edit()
                self.each(peers, f"{prefix}edit2_s", lambda peer, value=value: peer.edited(value))
                names = tree.change_small(1000)
                self.each(peers, f"{prefix}small2_s", lambda peer, names=names: proven(peer, names)["seconds"])
            for peer in peers:
                self._with_memory(peer, prefix)
        for (name, metric), most in self.peaks.items():
            self.record(name, metric, most)
        self.peaks.clear()

    def _with_memory(self, peer: SyncPeer, prefix: str) -> float:
        """Sync while monitoring memory, which may slow the sync a little."""
        hosts = [program.pid for program in peer.programs]
        with PeakMemory(*hosts) as far, PeakMemory(peer.client.program.pid) as near:
            seconds = peer.sync()["seconds"]
        self.peaks[peer.name, f"{prefix}client_mb"] = max(near.most, self.peaks[peer.name, f"{prefix}client_mb"])
        self.peaks[peer.name, f"{prefix}host_mb"] = max(far.most, self.peaks[peer.name, f"{prefix}host_mb"])
        return seconds

    def inside(self) -> None:
        """Change 4 KB somewhere in one large file, on one host."""
        tree = self.big.make()
        tree.warm()
        with self.against(tree, 1) as peers:
            for peer in peers:
                peer.sync()
            for _ in range(self.rounds):
                names = [tree.change_inside(4096)]
                self.each(peers, "inside_s", lambda peer, names=names: self._inside(peer, names))

    def _inside(self, peer: SyncPeer, names: list[str]) -> float:
        result = proven(peer, names)
        if "sent" in result:
            self.record(peer.name, "inside_bytes", result["sent"])
            if peer.name == OURS:
                self.record(peer.name, "inside_chunks", result["sent"] // CHUNK)
        return result["seconds"]

    def first(self, count: int, rate: float | None = None) -> None:
        """Sync a tree to hosts that have none of it, from a client that has never read it."""
        tree = self.some.make()
        tree.warm()
        for _ in range(self.rounds):
            with self.against(tree, count, rate) as peers:
                self.each(peers, f"first{count}_s" if rate is None else f"cable{count}_s", self._first)

    def _first(self, peer: SyncPeer) -> float:
        result = proven(peer, peer.tree.sample())
        if "sent" in result and len(peer.copies()) > 1:
            self.record(peer.name, f"first{len(peer.copies())}_egress", result["sent"] / peer.tree.size)
        return result["seconds"]

    def more(self) -> None:
        """Make ranks of more hosts import an edited module: namespaces, then workers here, each with its store."""
        some, few = self.some.make(), self.few.make()
        with self.scratch("several") as folder, place(self.several, folder) as where, self.ours(where, some) as peer:
            self._edits(peer, "edit8_s")
        with (
            self.scratch("many") as folder,
            place(self.many, folder, namespaces=False) as where,
            self.ours(where, few) as peer,
        ):
            self._edits(peer, "edit64_s")

    def _edits(self, peer: Ours, metric: str) -> None:
        peer.sync()
        peer.spawn()
        peer.sync()  # new ranks must first note their imports, for which each imports a few modules
        for _ in range(self.rounds):
            value = peer.tree.edit()
            self.each([peer], metric, lambda each, value=value: each.edited(value))

    def environment(self) -> None:
        """Sync an environment: the first host has it, then the second gets it."""
        prefix = Path(sys.prefix)
        sizes = [file.lstat().st_size for file in prefix.rglob("*") if file.is_file() and not file.is_symlink()]
        say(f"the environment has {len(sizes):,} files, {sum(sizes) / 1e9:.1f} GB")
        for _ in range(self.rounds):
            with self.scratch("environment") as folder, place(2, folder) as where:
                began = time.perf_counter()
                subprocess.run(["cp", "-a", str(prefix), str(where.disk(0) / "copy")], check=True)
                copy = time.perf_counter() - began
                disk = sum(sizes) / written_per_second(where.disk(0) / "row", min(sum(sizes), 2 << 30))
                shutil.rmtree(where.disk(0) / "copy")
                with self.ours(where, self.some.make()) as peer:
                    peer.environment(prefix, 1)
                    peer.rest()
                    result = peer.environment(prefix, 2)
                if result["received"][1] < sum(sizes) / 2:
                    raise PeerFailedError(f"the second host has received only {result['received'][1]:,} bytes")
                self.record(OURS, "env_s", result["seconds"])
                self.record(OURS, "env_of_copy", copy / result["seconds"])
                self.record(OURS, "env_of_disk", disk / result["seconds"])

    def kills(self) -> None:
        """Kill with ``kill -9`` at random: see ``tests/sync/chaos``."""
        from tests.sync.chaos.engine import chaos

        with self.scratch("kills") as folder:
            report = chaos(seed=int(time.time()), kills=5 if self.quick else 50, folder=folder)
        say(str(report))
        mixed = sum(count for what, count in report.found.items() if what.endswith("a mix"))
        self.record(OURS, "kills_mixed", mixed, kills=report.kills)
        self.record(OURS, "kills_other", len(report.violations) - mixed)


def proven(peer: SyncPeer, names: Sequence[str]) -> dict[str, Any]:
    """Sync, prove that the hosts have the client's content of these files, and return the peer's data."""
    result = peer.sync()
    peer.prove(names)
    return result


def written_per_second(file: Path, size: int) -> float:
    """Measure the bytes per second of sequential writes to the disk."""
    piece = os.urandom(16 << 20)
    began = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(0, size, len(piece)):
            out.write(piece)
        os.fsync(out)
    seconds = time.perf_counter() - began
    file.unlink()
    return size / seconds


def say(text: str) -> None:
    """Print a line about the progress."""
    print(text, file=sys.stderr, flush=True)
