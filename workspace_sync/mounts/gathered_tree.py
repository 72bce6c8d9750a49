"""File system of a gathered mount: the current folders of hosts, side by side.

Each request is forwarded to the host of the file, and answered when that host answers. A slow or dead host thus delays
only its own part. The kernel caches names and sizes for half a second, and drops its pages of a file when the file's
size or time has changed.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Actor, Future, HostMesh, endpoint, this_host
from monarch_kernel.introspection import each_host
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.transfer.errors import RDMAError
from workspace_sync.model.errors import MountError
from workspace_sync.mounts.mounting import PATIENCE, Mount, MountedAt, Processes, why
from workspace_sync.mounts.protocol import (
    GREETING,
    ROOT,
    Attributes,
    Caching,
    Entered,
    FuseSession,
    InodeTable,
    Listed,
    Request,
)
from workspace_sync.mounts.served_folder import START, Seen, ServedFolder

#: The time that the kernel may cache names, sizes and times (seconds).
FRESH = 0.5
#: The readahead for a file that is read in order (bytes).
WINDOW = 4 << 20
#: After this many lookups in a folder within ``FRESH``, the whole folder is listed, unless it is too large.
_ENTRIES = 8
_LARGEST_FOLDER = 100_000
#: The number of cached listings.
_FOLDERS = 64
#: Larger reads use the data plane (bytes).
_LARGE = 64 << 10


@dataclass(slots=True)
class _Node:
    """An inode: a file of a host. If another file takes its name, that file gets another inode."""

    number: int
    host: int
    path: bytes
    identity: tuple[int, int]
    lookups: int = 0
    handles: list[int] = field(default_factory=list[int])


def _key_of(node: _Node) -> tuple[int, bytes, tuple[int, int]]:
    return node.host, node.path, node.identity


class _FolderCache:
    """Recent listings of folders on hosts, for programs that look up one entry after the other.

    After some lookups in a folder, its whole listing is requested. The listing answers further lookups while it is
    fresh.
    """

    def __init__(self, hosts: list[ServedFolder]) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._listed: dict[tuple[int, bytes], tuple[float, dict[bytes, Seen]]] = {}
        self._asked: dict[tuple[int, bytes], tuple[float, int]] = {}

    def enter(self, host: int, folder: bytes, entries: dict[bytes, Seen]) -> None:
        """Add a listing that has arrived."""
        with self._lock:
            self._listed.pop((host, folder), None)
            self._listed[host, folder] = (time.monotonic(), entries)
            while len(self._listed) > _FOLDERS:
                del self._listed[next(iter(self._listed))]

    def find(self, host: int, path: bytes) -> Seen | int | None:
        """Look a path up; None: it does not exist; 0: unknown, ask the host."""
        folder, _, name = path.rpartition(b"/")
        key = (host, folder)
        now = time.monotonic()
        with self._lock:
            listed = self._listed.get(key)
            if listed is not None and now - listed[0] < FRESH / 2:
                return listed[1].get(name)
            since, count = self._asked.get(key, (now, 0))
            if now - since > FRESH:
                since, count = now, 0
            self._asked[key] = (since, count + 1)
            while len(self._asked) > _FOLDERS:
                del self._asked[next(iter(self._asked))]
            worth = count == _ENTRIES and (listed is None or len(listed[1]) <= _LARGEST_FOLDER)
        if worth:

            def done(call: Future[object]) -> None:
                found = _result(call)
                if not isinstance(found, int):
                    self.enter(host, folder, dict(found))

            self._hosts[host].listing.call_one(folder).add_done_callback(done)
        return 0


class GatheredTree:
    """A read-only file system over the folders of hosts.

    Args:
        names: the names of the top-level folders; empty: there is one host, and its folder is the root.
        hosts: the actors of the hosts, in the order of ``names``.
        gateway: the process through which hosts are reached. It must not map files of the mount: waiting for a page
            while it holds the GIL would deadlock.
    """

    def __init__(self, names: list[bytes], hosts: list[ServedFolder], gateway: int) -> None:
        self._gateway = gateway
        self._recent = _FolderCache(hosts)
        self._names = {name: host for host, name in enumerate(names)}
        self._hosts = hosts
        self._lock = threading.Lock()
        root = None if names else _Node(ROOT, 0, b"", (0, 0), 1)
        self._inodes: InodeTable[tuple[int, bytes, tuple[int, int]], _Node] = InodeTable(_key_of, root)
        self._listings: dict[int, tuple[list[Listed], dict[bytes, Seen]]] = {}
        self._files: dict[int, _OpenFile] = {}
        self._handles = itertools.count(1)
        self._began = time.time_ns()

    # -- requests ----------------------------------------------------------------------------------------

    def lookup(self, request: Request, parent: int, name: bytes) -> None:
        if parent == ROOT and self._names:
            host = self._names.get(name)
            if host is None:
                request.found(Entered(0))
                return
            path = b""
        else:
            above = self._inodes.by_number[parent]
            host = above.host
            path = above.path + b"/" + name if above.path else name

        recent = self._recent.find(host, path) if path else 0
        if recent != 0:
            assert not isinstance(recent, int)
            request.found(Entered(0) if recent is None else self._enter(host, path, recent))
            return

        def answer(seen: Seen) -> None:
            request.found(self._enter(host, path, seen))

        def missing(number: int) -> None:
            if number == errno.ENOENT:
                request.found(Entered(0))
            else:
                request.fail(number)

        _when(request, self._hosts[host].stat.call_one(path), answer, missing)

    def getattr(self, request: Request, node: int) -> None:
        if node == ROOT and self._names:
            request.attributes(Attributes(ROOT, stat.S_IFDIR | 0o555, 0, self._began, 2 + len(self._names)))
            return
        here = self._inodes.by_number[node]
        with self._lock:
            handle = here.handles[-1] if here.handles else None
        host = self._hosts[here.host]
        if handle is None and here.path:
            recent = self._recent.find(here.host, here.path)
            if recent and not isinstance(recent, int) and recent.identity == here.identity:
                request.attributes(_attributes(recent))
                return

        def answer(seen: Seen) -> None:
            if here.identity not in (seen.identity, (0, 0)) and here.path:
                request.fail(errno.ESTALE)
            else:
                request.attributes(_attributes(seen))

        asked = host.stat.call_one(here.path) if handle is None else host.stat_open.call_one(handle)
        _when(request, asked, answer)

    def readlink(self, request: Request, node: int) -> None:
        here = self._inodes.by_number[node]
        _when(request, self._hosts[here.host].readlink.call_one(here.path), request.data)

    def open(self, request: Request, node: int) -> None:
        here = self._inodes.by_number[node]
        host = self._hosts[here.host]

        def answer(opened: tuple[int, bytes]) -> None:
            remote, start = opened
            handle = next(self._handles)
            with self._lock:
                self._files[handle] = _OpenFile(host, remote, here, start)
                here.handles.append(remote)
            request.opened(handle, direct=request.process == self._gateway)

        _when(request, host.open.call_one(here.path, here.identity), answer)

    def release(self, handle: int) -> None:
        with self._lock:
            file = self._files.pop(handle)
            file.node.handles.remove(file.remote)
        file.close()

    def read(self, request: Request, node: int, handle: int, offset: int, size: int) -> None:
        self._files[handle].read(request, offset, size)

    def opendir(self, request: Request, node: int) -> None:
        handle = next(self._handles)
        if node == ROOT and self._names:
            request.opened(handle)
            return
        here = self._inodes.by_number[node]

        def answer(found: list[tuple[bytes, Seen]]) -> None:
            entries = [*_dots(), *(Listed(name, seen.inode, stat.S_IFMT(seen.mode)) for name, seen in found)]
            about = dict(found)
            self._recent.enter(here.host, here.path, about)
            with self._lock:
                self._listings[handle] = entries, about
            request.opened(handle)

        _when(request, self._hosts[here.host].listing.call_one(here.path), answer)

    def readdir(self, request: Request, node: int, handle: int, offset: int, size: int, plus: bool) -> None:
        if node == ROOT and self._names:
            # Without attributes, whose lookup would query every host.
            entries = [*_dots(), *(Listed(name, 2 + host, stat.S_IFDIR) for name, host in self._names.items())]
            if plus:
                request.entries_plus(entries, offset, size, lambda _: Entered(0))
            else:
                request.entries(entries, offset, size)
            return
        here = self._inodes.by_number[node]
        entries, about = self._listings[handle]
        if not plus:
            request.entries(entries, offset, size)
            return

        def find(entry: Listed) -> Entered:
            path = here.path + b"/" + entry.name if here.path else entry.name
            return self._enter(here.host, path, about[entry.name])

        request.entries_plus(entries, offset, size, find)

    def releasedir(self, handle: int) -> None:
        with self._lock:
            self._listings.pop(handle, None)

    def statfs(self, request: Request) -> None:
        request.space(0, 0, 0)

    def forget(self, node: int, count: int) -> None:
        with self._lock:
            self._inodes.forget(node, count)

    def _enter(self, host: int, path: bytes, seen: Seen) -> Entered:
        identity = seen.identity
        with self._lock:
            node = self._inodes.enter((host, path, identity), lambda number: _Node(number, host, path, identity))
        return Entered(node.number, _attributes(seen))


class _OpenFile:
    """An open file on its host. Sequential reads fetch windows over the data plane."""

    def __init__(self, host: ServedFolder, remote: int, node: _Node, start: bytes) -> None:
        self.node = node
        self._start = start  # the first bytes, as returned by open
        self._opened = time.monotonic()
        self.remote = remote
        self._host = host
        self._lock = threading.Lock()
        self._next = 0
        self._in_order = 0
        self._memory: bytearray | None = None
        self._buffer: RDMABuffer | None = None
        self._window: tuple[int, int, float] = (0, 0, 0.0)  # offset, bytes, time of the read
        self._coming: tuple[int, int] | None = None  # offset and bytes of the window that is being fetched
        self._waiting: list[tuple[Request, int, int]] = []

    def read(self, request: Request, offset: int, size: int) -> None:
        request.later()
        with self._lock:
            near = abs(offset - self._next) <= WINDOW // 2
            self._in_order = self._in_order + 1 if near and offset else 0
            self._next = offset + size
            small = len(self._start) < START
            if (small or offset + size <= len(self._start)) and time.monotonic() - self._opened < FRESH / 2:
                request.data(self._start[offset : offset + size])
                return
            start, count, when = self._window
            if start <= offset and offset + size <= start + count and time.monotonic() - when < FRESH:
                assert self._memory is not None
                request.data(bytes(self._memory[offset - start : offset - start + size]))
                return
            coming = self._coming
            if coming is not None and coming[0] <= offset and offset + size <= sum(coming):
                self._waiting.append((request, offset, size))
                return
            length = WINDOW if self._in_order >= 2 else size
            if coming is not None or length <= _LARGE:
                asked = None
            else:
                if self._memory is None:
                    self._memory = bytearray(WINDOW)
                    self._buffer = RDMABuffer(self._memory)
                self._window = (0, 0, 0.0)
                self._coming = offset, length
                self._waiting = [(request, offset, size)]
                asked = self._host.read_to.call_one(self.remote, offset, length, self._buffer)
        if asked is None:
            _when(request, self._host.read.call_one(self.remote, offset, size), request.data)
        else:
            asked.add_done_callback(self._arrived)

    def close(self) -> None:
        self._host.close.broadcast(self.remote)
        if self._buffer is not None:
            self._buffer.drop().add_done_callback(lambda _: None)

    def _arrived(self, asked: Future[int]) -> None:
        count = _result(asked)
        with self._lock:
            waiting, self._waiting = self._waiting, []
            coming, self._coming = self._coming, None
            assert coming is not None and self._memory is not None
            start = coming[0]
            if count >= 0:
                self._window = (start, count, time.monotonic())
                for request, offset, size in waiting:
                    request.data(bytes(self._memory[offset - start : min(count, offset - start + size)]))
        if count < 0:
            for request, _, _ in waiting:
                request.fail(-count)


def _dots() -> list[Listed]:
    return [Listed(b".", ROOT, stat.S_IFDIR), Listed(b"..", ROOT, stat.S_IFDIR)]


def _attributes(seen: Seen) -> Attributes:
    return Attributes(seen.inode, seen.mode, seen.size, seen.mtime, seen.links)


def _result(call: Future[object]) -> Any:
    """Return the answer of a host, or a negative ``errno``."""
    try:
        return call.get(0)
    except (SupervisionError, ActorError, RDMAError, TimeoutError, RuntimeError):
        return -errno.EIO


def _when(
    request: Request, call: Future[object], answer: Callable[[Any], None], failed: Callable[[int], None] | None = None
) -> None:
    """Answer a request when a host has answered."""

    def done(call: Future[object]) -> None:
        value = _result(call)
        if isinstance(value, int) and value < 0:
            (failed or request.fail)(-value)
        else:
            answer(value)

    request.later()
    call.add_done_callback(done)


# ``gather_mount``: mount the folders of all hosts of a mesh on this machine, side by side.

#: The placeholder in the path on the hosts that is replaced by the name of the host's folder in the mount.
SUBDIR = "$SUBDIR"


class GatherMount:
    """Folders of hosts, mounted on this machine from creation until ``close``. Also a context manager.

    Created by ``gather_mount``.
    """

    def __init__(self, host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str) -> None:
        self._remote = os.fspath(remote_mount_point)
        self._local = os.path.abspath(os.path.expanduser(os.fspath(local_mount_point)))
        if not self._remote.startswith(("/", "~")):
            raise MountError(
                f"the path {self._remote!r} is relative: name the whole path, as hosts have different folders"
            )
        hosts = each_host(host_mesh)
        names = [_name(point) for point in host_mesh.extent.points()]
        self._processes: Processes | None = Processes()
        try:
            folders = [
                self._processes.spawn(host, "gather", ServedFolder, self._remote.replace(SUBDIR, name))
                for host, name in zip(hosts, names, strict=True)
            ]
            [here] = each_host(this_host())
            self._server = self._processes.spawn(here, "gather-server", GatherServer)
            shown = [name.encode() for name in names if name]
            try:
                mounted = self._server.open.call_one(self._local, shown, folders, os.getpid()).get(PATIENCE)
            except Exception as e:
                raise MountError(why(e)) from None
            self._processes.guard(mounted)
        except BaseException:
            self._processes.end()
            raise

    def close(self, *, deadline: float | None = None) -> None:
        """Unmount, even while programs use the mount. Do nothing if it is closed.

        Args:
            deadline: the time limit, as a time of ``time.monotonic()``.

        Raises:
            MountError: it could not be unmounted.
        """
        processes, self._processes = self._processes, None
        if processes is None:
            return
        patience = PATIENCE if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            self._server.close.call_one().get(patience)
        except Exception as e:
            raise MountError(f"{self._local} could not be unmounted: {why(e)}") from None
        finally:
            processes.end()

    def __enter__(self) -> GatherMount:
        if self._processes is None:
            raise MountError(f"the mount at {self._local} is closed: make another one with gather_mount()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._processes is not None else "closed"
        return f"<GatherMount of {self._remote} at {self._local}, {state}>"


def gather_mount(host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str) -> GatherMount:
    """Mount a folder of each host of a mesh on this machine, read-only, in its current state at any time.

    Each folder is named after its host's coordinates (``hosts_0``, ``racks_1_hosts_3``). For a mesh without dimensions,
    the folder itself is mounted. A folder appears empty until it exists. Sizes are at most half a second old. A read
    from a dead host fails with EIO; other hosts are not affected.

    Args:
        host_mesh: the hosts.
        remote_mount_point: the folder or file on every host; ``$SUBDIR`` in it is replaced by the name above.
        local_mount_point: the mount point on this machine, an empty folder or a path that does not exist.

    Raises:
        MountError: it cannot be mounted; the message names the reason and the remedy.

    Source: the names and semantics are those of ``monarch.gather_mount``.
    """
    return GatherMount(host_mesh, remote_mount_point, local_mount_point)


def _name(point: Any) -> str:
    return "_".join(f"{dimension}_{at}" for dimension, at in point.items())


#: The time after which requests to a silent host fail with EIO (seconds).
_DEADLINE = 30.0


class GatherServer(Actor):
    """Server of the folders of hosts at one mount point of this host."""

    __tool__ = True

    def __init__(self) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._mount: Mount | None = None

    @endpoint
    def open(self, path: str, names: list[bytes], hosts: list[Any], gateway: int) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            names: the names of the hosts' folders in the mount; empty: there is one host, and its folder itself is
                mounted.
            hosts: the actor of each host.
            gateway: the id of the process through which they are reached.

        Raises:
            MountError: it cannot be mounted.
        """
        mount = self._mount = Mount(path, "gather_mount")
        session = FuseSession(
            mount.device, GatheredTree(names, hosts, gateway), Caching(names=FRESH, contents=False), _DEADLINE
        )
        if not session.wait_ready(GREETING):
            mount.close()
            raise MountError(f"the kernel of {socket.gethostname()} did not accept the mount at {mount.path}")
        return MountedAt(os.getpid(), mount.path, mount.source, near=True)

    @endpoint
    def close(self) -> None:
        """Unmount, even while programs use the mount.

        Raises:
            MountError: it could not be unmounted.
        """
        self._unmount()

    def __cleanup__(self, _error: BaseException | None) -> None:
        self._unmount()

    def _unmount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()
