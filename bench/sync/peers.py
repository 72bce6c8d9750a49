"""Tools that send trees to hosts: this project, rsync, and torchmonarch's own ``sync_workspace``."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.bugs.processes import free_port
from bench.environments import python_for
from bench.sync.hosts import Place, Program, family, running, workers
from bench.sync.rows import MONARCH, OURS, RSYNC
from bench.sync.service import Client, PeerFailedError
from bench.sync.trees import MODULE, BenchTree

#: A peer without CPU use for this long is at rest; the longest wait for that (seconds).
REST, REST_AT_MOST = 0.4, 120.0


class SyncPeer(ABC):
    """A tool that makes the copies on hosts equal to a tree."""

    name: str

    def __init__(self, client: Client, tree: BenchTree, programs: Sequence[Program]) -> None:
        self.client = client
        self.tree = tree
        #: The programs on hosts.
        self.programs = list(programs)

    @abstractmethod
    def sync(self) -> dict[str, Any]:
        """Sync; return ``seconds``, and further data of the peer."""

    @abstractmethod
    def copies(self) -> list[Path]:
        """Return the path of the tree on each host."""

    def edited(self, value: int) -> float:
        """Sync after an edit of the module; return the time until the hosts have it (seconds)."""
        seconds = self.sync()["seconds"]
        for copy in self.copies():
            if str(value) not in (copy / f"{MODULE}.py").read_text():
                raise PeerFailedError(f"{copy} still has the old {MODULE}.py")
        return seconds

    def prove(self, names: Sequence[str]) -> None:
        """Compare files on the hosts with the client's.

        Raises:
            PeerFailedError: a file differs.
        """
        for copy in self.copies():
            for name in names:
                if not filecmp.cmp(self.tree.path / name, copy / name, shallow=False):
                    raise PeerFailedError(f"{copy / name} is not what the client has")

    def rest(self) -> None:
        """Wait until its processes are idle, and written data is on disk."""
        end = time.monotonic() + REST_AT_MOST
        before = self._ticks()
        while time.monotonic() < end:
            time.sleep(REST)
            now = self._ticks()
            if now - before <= 1 + len(self.programs) // 4:  # each worker sends occasional signs of life
                break
            before = now
        os.sync()

    def _ticks(self) -> int:
        """Return the CPU time of all its processes (in ticks)."""
        total = 0
        for pid in family(self.client.program.pid, *(program.pid for program in self.programs)):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += int(fields[11]) + int(fields[12])
        return total


class Rsync(SyncPeer):
    """A daemon on each host, and one rsync for each at the client, all in parallel."""

    name = RSYNC

    def __init__(
        self, client: Client, tree: BenchTree, daemons: Sequence[Program], urls: list[str], folders: list[Path]
    ) -> None:
        super().__init__(client, tree, daemons)
        self._urls, self._folders = urls, folders

    def sync(self, *options: str) -> dict[str, Any]:
        return self.client.ask("sync", source=str(self.tree.path), targets=self._urls, options=list(options))

    def copies(self) -> list[Path]:
        return self._folders


class Monarch(SyncPeer):
    """``HostMesh.sync_workspace``, which starts an rsync daemon at the client that each host pulls from."""

    name = MONARCH

    def __init__(self, client: Client, tree: BenchTree, programs: Sequence[Program], folders: list[Path]) -> None:
        super().__init__(client, tree, programs)
        self._folders = folders

    def sync(self) -> dict[str, Any]:
        return self.client.ask("sync", source=str(self.tree.path))

    def copies(self) -> list[Path]:
        return [folder / self.tree.path.name for folder in self._folders]


class Ours(SyncPeer):
    """``workspace_sync``, with a worker on each host."""

    name = OURS

    def __init__(self, client: Client, tree: BenchTree, programs: Sequence[Program], stores: list[Path]) -> None:
        super().__init__(client, tree, programs)
        self._stores = stores
        self._spawned = False

    def sync(self) -> dict[str, Any]:
        return self.client.ask("sync", source=str(self.tree.path))

    def spawn(self) -> None:
        """Spawn a rank on each host, in the synced tree; ``edited`` then queries their imports."""
        self.client.ask("spawn", source=str(self.tree.path))
        self._spawned = True

    def edited(self, value: int) -> float:
        if not self._spawned:
            return super().edited(value)
        return self.client.ask("imported", source=str(self.tree.path), module=MODULE, value=value)["seconds"]

    def environment(self, prefix: Path, count: int) -> dict[str, Any]:
        """Sync an environment to the first hosts."""
        return self.client.ask("sync", source="", env=str(prefix), count=count)

    def copies(self) -> list[Path]:
        return [next(store.glob("w/*")) / "current" / "tree" / self.tree.path.name for store in self._stores]


@contextmanager
def rsync_peer(where: Place, tree: BenchTree) -> Generator[Rsync]:
    """Start rsync with empty hosts.

    Raises:
        PeerFailedError: it is not installed.
    """
    if shutil.which("rsync") is None:
        raise PeerFailedError("rsync is not installed: tests/prepare.sh does it where it may")
    with ExitStack() as programs:
        daemons: list[Program] = []
        urls: list[str] = []
        folders: list[Path] = []
        for host in range(where.count):
            folder = where.disk(host) / "rsync"
            folder.mkdir()
            port = free_port()
            config = where.disk(host) / "rsyncd.conf"
            config.write_text(
                f"port = {port}\naddress = {where.address(host)}\nuse chroot = no\nuid = {os.getuid()}\n"
                f"gid = {os.getgid()}\n[tree]\npath = {folder}\nread only = no\n"
            )
            command = ["rsync", "--daemon", "--no-detach", f"--config={config}"]
            daemons.append(programs.enter_context(running(where, host, command)))
            urls.append(f"rsync://{where.address(host)}:{port}/tree/")
            folders.append(folder)
        client = programs.enter_context(running(where, None, [sys.executable, "-m", "bench.sync.rsync_client"]))
        peer = Rsync(Client(client), tree, daemons, urls, folders)
        _until_listening(peer, urls)
        yield peer


def _until_listening(peer: Rsync, urls: list[str]) -> None:
    """Wait until each daemon answers: sync an empty folder to it."""
    empty = peer.copies()[0]
    end = time.monotonic() + 20
    while True:
        try:
            peer.client.ask("sync", source=str(empty), targets=urls, options=["--dry-run"])
            return
        except PeerFailedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


#: Why it fails on many machines, as measured with 0.7.0 and rsync 3.5.0.
HOSTS_ALLOW = (
    "its rsync daemon allows localhost and ip6-localhost only, and where /etc/hosts does not have the second, rsync "
    "says \"Unknown module 'workspace'\"; its client runs in a mount namespace with both names here"
)


@contextmanager
def monarch_peer(count: int, folder: Path, tree: BenchTree, named: bool = True) -> Generator[Monarch]:
    """Start torchmonarch with empty hosts, which are always workers of this machine.

    Args:
        count: of the hosts.
        folder: for their files.
        tree: to sync.
        named: whether its client runs where ``ip6-localhost`` has an address.

    Raises:
        EnvironmentFailed: it cannot be installed.
        PeerFailedError: it cannot run.
    """
    python = str(python_for(MONARCH))
    folder.mkdir()
    where = Place(count, folder)
    try:
        with ExitStack() as programs:
            started: list[Program] = []
            urls: list[str] = []
            for host in range(count):
                urls.append(f"tcp://127.0.0.1:{free_port()}")
                command = [python, "-m", "bench.peers.monarch_sync", "worker", urls[-1]]
                env = {"WORKSPACE_DIR": str(where.disk(host))}
                started.append(programs.enter_context(running(where, host, command, env)))
            command = [python, "-m", "bench.peers.monarch_sync"]
            if named:
                names = folder / "hosts"
                names.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")
                mount = f'mount --bind {names} /etc/hosts && exec "$0" "$@"'
                command = ["unshare", "--mount", "--propagation=private", "sh", "-c", mount, *command]
            client = Client(programs.enter_context(running(where, None, command)))
            try:
                client.ask("attach", workers=urls)
            except PeerFailedError as error:
                raise PeerFailedError(f"{error}; it had said: {where.log()[-300:]}") from None
            yield Monarch(client, tree, started, [where.disk(host) for host in range(count)])
    finally:
        where.close()


def needs_names(folder: Path, tree: BenchTree) -> bool:
    """Return whether torchmonarch's client can sync only where ``ip6-localhost`` has an address.

    Raises:
        EnvironmentFailed, PeerFailedError: it cannot be installed, or cannot run at all.
    """
    with monarch_peer(1, folder, tree, named=False) as peer:
        try:
            peer.sync()
            return False
        except PeerFailedError as error:
            if "Unknown module" not in str(error):
                raise
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        raise PeerFailedError(f"{HOSTS_ALLOW.partition(';')[0]}; only root can make a mount namespace with both names")
    return True


@contextmanager
def our_peer(where: Place, tree: BenchTree, stores: Sequence[Path], key: Path) -> Generator[Ours]:
    """Start this project with a worker for each store; the workers are on the hosts in turn."""
    with ExitStack() as programs:
        urls, started = programs.enter_context(workers(where, stores, key))
        env = {"MONARCH_KERNEL_SYNC_FOLDER": str(where.folder / "client")}
        program = programs.enter_context(running(where, None, [sys.executable, "-m", "bench.sync.our_client"], env))
        client = Client(program)
        client.ask("attach", workers=urls, key=str(key))
        yield Ours(client, tree, started, list(stores))
