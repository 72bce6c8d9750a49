"""The fork server: a small single-threaded process from which ranks are forked in a millisecond.

It communicates with the host agent over a Unix SOCK_SEQPACKET pair. Each packet holds one of the requests or
events below and its file descriptors. The server imports what every rank needs once, freezes the garbage
collector so that those pages stay shared, and waits. It can fork *templates*: copies of itself that have
more modules (torch) loaded. Each template has its own socket to the agent, and can fork templates itself: one of
more modules is forked from one that has loaded some of them, and ends with it.

What can be preloaded: a fork copies only the calling thread, so a preloaded module must not hold locks in other
threads. A template with a second Python thread, or with CUDA initialised, is rejected. ``import torch`` leaves
native threads of OpenBLAS (from numpy). Those are harmless: OpenBLAS stops its threads in a ``pthread_atfork``
handler and restarts them in the child on demand. OpenMP pools (torch's own intra-op threads) are created by
the first parallel region, and no import runs one. Tests cover training, gloo groups and DataLoader workers in
forked ranks.

Deaths: ranks set ``PR_SET_PDEATHSIG``, so they die with the process that forked them. When the agent dies,
its socket closes; the fork server then kills the remaining processes of the run, removes its folder and exits.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # no stub; that of ``signal`` makes enums of all
import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from monarch_kernel import programs
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.start_command import memfd
from monarch_kernel.runtime.node import descriptors

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl

#: The delay after the first rank until an idle fork server loads modules for later ranks (seconds).
LATER = 0.3
#: A packet larger than this goes through a memfd (the socket's buffer bounds a packet).
_MAX_PACKET = 48 * 1024
_SPILLED = b"\xc1"  # no MessagePack value begins with it
_MAX_FDS = 8
_FD_SIZE = array.array("i").itemsize


T = TypeVar("T")


class Fork(msgspec.Struct, array_like=True, tag=1):
    """Start a rank. Descriptors: the write ends of the stdout and stderr pipes.

    ``env`` updates the server's environment (None removes a variable), or replaces it with ``clean_env``. With
    ``argv``, the rank executes that command; its argument "{fd}" becomes the number of the descriptor that holds
    ``config``. With ``asyncio``, the server loads what runs async actors before it forks, once for all later ranks.
    """

    proc: str
    config: bytes
    env: dict[str, str | None]
    cwd: str
    sys_path: list[str]
    argv: list[str] | None = None
    clean_env: bool = False
    asyncio: bool = False


class MakeTemplate(msgspec.Struct, array_like=True, tag=2):
    """Fork a template that loads ``modules``. Descriptor: the template's end of a new socket pair."""

    template: str
    modules: list[str]
    env: dict[str, str | None]
    sys_path: list[str]


class Retire(msgspec.Struct, array_like=True, tag=3):
    """Ask a template to exit as soon as its last rank has exited."""


class Forked(msgspec.Struct, array_like=True, tag=11):
    """The rank is running."""

    proc: str
    pid: int


class ForkFailed(msgspec.Struct, array_like=True, tag=12):
    """The rank could not be started."""

    proc: str
    reason: str


class Exited(msgspec.Struct, array_like=True, tag=13):
    """The rank (or template) and its whole process group are gone."""

    proc: str
    pid: int
    status: int  # exit code, or minus the signal
    max_rss_bytes: int


class TemplateReady(msgspec.Struct, array_like=True, tag=14):
    """The template has loaded its modules."""

    template: str
    pid: int
    native_threads: int
    seconds: float


class TemplateFailed(msgspec.Struct, array_like=True, tag=15):
    """The template could not load its modules, or they do not survive a fork. The template has exited."""

    template: str
    reason: str
    in_ranks_too: bool = False  # a rank that loads them itself also fails


Request = Fork | MakeTemplate | Retire
Event = Forked | ForkFailed | Exited | TemplateReady | TemplateFailed
_encode = msgspec.msgpack.Encoder().encode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode


# -- packets ----------------------------------------------------------------------------------


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Create a packet socket pair; return the agent's end and the server's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(sock: socket.socket, message: Request | Event, fds: list[int] | None = None) -> None:
    """Send one request or event.

    Raises:
        BlockingIOError: the socket is non-blocking and its buffer is full; nothing was sent.
    """
    data = _encode(message)
    fds = list(fds or ())
    spill = -1
    if len(data) > _MAX_PACKET:
        spill = memfd("packet", data)
        data, fds = _SPILLED, [*fds, spill]
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    finally:
        if spill >= 0:
            os.close(spill)


def receive_packet(sock: socket.socket, decode: Callable[[bytes], T]) -> tuple[T | None, list[int]]:
    """Return the next packet and its descriptors; ``(None, [])`` at the end of the socket."""
    room = (_MAX_PACKET + 64, socket.CMSG_SPACE(_MAX_FDS * _FD_SIZE), socket.MSG_CMSG_CLOEXEC)
    try:
        data, ancillary, _flags, _addr = sock.recvmsg(*room)
    except ConnectionResetError:
        # Raised once if the peer closed without reading everything; packets that it sent can still be read.
        data, ancillary, _flags, _addr = sock.recvmsg(*room)
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(rights[: len(rights) - len(rights) % _FD_SIZE])
            fds.extend(got)
    if not data:
        return None, fds
    if data == _SPILLED:
        spill = fds.pop()
        data = os.pread(spill, os.fstat(spill).st_size, 0)
        os.close(spill)
    return decode(data), fds


# -- the server -------------------------------------------------------------------------------


class ForkedRank:
    """The work of a forked child. In the child, the server's loop ends and returns this."""

    def __init__(self, request: Fork) -> None:
        self.request = request


class ForkServer:
    """The loop of the fork server and of each template.

    Args:
        sock: this side of the packet socket.
        entry: "module:function" that a forked rank calls with its config.
        async_actors: the module that loads what runs async actors.
        later: a module that most ranks import, to be loaded once the first ranks are started; "": none.
        orphaned: called when the agent's end of the socket closes; None in templates.
    """

    def __init__(
        self, sock: socket.socket, entry: str, async_actors: str, later: str, orphaned: Callable[[], None] | None
    ) -> None:
        self._sock = sock
        self._entry = entry
        self._async_actors = async_actors
        self._later = later
        self._load_at = 0.0  # the time to load it, set when the first rank has started
        self._orphaned = orphaned
        self._epoll = select.epoll()
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._children: dict[int, tuple[str, int]] = {}  # pidfd -> (proc, pid)
        self._retiring = False
        descriptors.raise_limit()  # each rank needs one

    def serve(self) -> ForkedRank | None:
        """Serve until the agent closes the socket, then return None. In a forked child, return the child's work."""
        while not (self._retiring and not self._children):
            wait = max(0.0, self._load_at - time.monotonic()) if self._later and self._children else None
            ready = self._epoll.poll(wait)
            if not ready:
                self._load_later()
            for fd, _events in ready:
                if fd in self._children:
                    self._reap(fd)
                    continue
                if fd != self._sock.fileno():
                    continue
                request, fds = receive_packet(self._sock, decode_request)
                if request is None:
                    if self._orphaned is not None:
                        self._orphaned()
                    return None
                job = self._handle(request, fds)
                if job is not None:
                    return job
        return None

    def _load_later(self) -> None:
        """Load modules for later ranks. The first ranks start without waiting for this."""
        later, self._later = self._later, ""
        with contextlib.suppress(Exception):  # a rank that needs it reports why it cannot be loaded
            importlib.import_module(later)
        freeze()

    def _handle(self, request: Request, fds: list[int]) -> ForkedRank | None:
        try:
            if isinstance(request, Fork):
                return self._fork(request, fds)
            if isinstance(request, MakeTemplate):
                return self._make_template(request, fds)
            self._retiring = True
            return None
        finally:
            for fd in fds:
                os.close(fd)

    def _report(self, event: Event) -> None:
        try:
            send_packet(self._sock, event)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the agent is gone; the loop sees the end of the socket

    def _watch(self, proc: str, pid: int) -> None:
        self._load_at = self._load_at or time.monotonic() + LATER
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (proc, pid)
        self._epoll.register(pidfd, select.EPOLLIN)

    def _reap(self, pidfd: int) -> None:
        proc, pid = self._children.pop(pidfd)
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        # While it is a zombie, its pid cannot be reused, so this signals only its own process group.
        cleanup.kill_group(pid)
        _pid, status, usage = os.wait4(pid, 0)
        self._report(Exited(proc, pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))

    # -- forking ----------------------------------------------------------------------------

    def _fork(self, request: Fork, fds: list[int]) -> ForkedRank | None:
        if len(fds) != 2:
            self._report(ForkFailed(request.proc, f"the agent passed {len(fds)} descriptors instead of 2"))
            return None
        if request.asyncio and not request.argv and self._async_actors not in sys.modules:
            with contextlib.suppress(Exception):  # the rank that needs it reports why it cannot be loaded
                importlib.import_module(self._async_actors)
            freeze()
        # If the command cannot be executed, the child writes the reason to this pipe; a successful exec closes it.
        read, write = os.pipe2(os.O_CLOEXEC) if request.argv else (-1, -1)
        server = os.getpid()
        try:
            pid = _fork()
        except OSError as e:
            if request.argv:
                os.close(read)
                os.close(write)
            self._report(ForkFailed(request.proc, f"fork failed: {e.strerror}"))
            return None
        if pid == 0:
            try:
                self._become_rank(request, fds, write, server)
            except BaseException as e:
                _give_up(write, f"{type(e).__name__}: {e}")
            fds.clear()  # closed already
            return ForkedRank(request)
        if request.argv:
            os.close(write)
            reason = os.read(read, 4096).decode("utf-8", "replace")
            os.close(read)
            if reason:
                os.waitpid(pid, 0)
                self._report(ForkFailed(request.proc, reason))
                return None
        self._watch(request.proc, pid)
        self._report(Forked(request.proc, pid))
        return None

    def _become_rank(self, request: Fork, fds: list[int], failure: int, server: int) -> None:
        os.setsid()
        die_with(server)
        set_name("monarch-rank")  # the cleanup recognises the fork server by its name
        self._sock.close()
        self._epoll.close()
        self._children.clear()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        reset_signals()
        env = os.environ
        if request.clean_env:
            markers = {name: env[name] for name in (cleanup.MARKER, cleanup.AGENT_MARKER) if name in env}
            env.clear()
            env.update(markers)
        set_environment(request.env)
        time.tzset()
        os.chdir(request.cwd)
        if request.argv is not None:
            # First move both away from 3 and 4.
            failure = fcntl.fcntl(failure, fcntl.F_DUPFD_CLOEXEC, 10)
            config = fcntl.fcntl(memfd("config", request.config), fcntl.F_DUPFD_CLOEXEC, 10)
            os.dup2(config, 3)
            os.dup2(failure, 4, inheritable=False)
            _close_from(5)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            argv = [argument.replace("{fd}", "3") for argument in request.argv]
            try:
                programs.become(argv, env)
            except OSError as e:
                _give_up(4, f"cannot execute {argv[0]}: {e.strerror}")
        _close_from(3)
        sys.path[:] = request.sys_path
        _forget_missing_folders()
        _forget_exit_handlers()

    def _make_template(self, request: MakeTemplate, fds: list[int]) -> ForkedRank | None:
        server = os.getpid()
        try:
            pid = _fork()
        except OSError as e:
            self._report(TemplateFailed(request.template, f"fork failed: {e.strerror}"))
            return None
        if pid:
            self._watch(request.template, pid)
            return None
        die_with(server)
        keep = os.dup(fds[0])
        self._sock.close()
        self._epoll.close()
        for pidfd in self._children:
            os.close(pidfd)
        for fd in fds:
            os.close(fd)
        fds.clear()
        set_environment(request.env)
        sys.path[:] = request.sys_path
        set_name("monarch-template")
        sock = socket.socket(fileno=keep)
        start = time.monotonic()
        failed = preload(request.template, request.modules)
        try:
            if failed is not None:
                send_packet(sock, failed)
                os._exit(0)
            ready = TemplateReady(request.template, os.getpid(), native_threads(), round(time.monotonic() - start, 3))
            send_packet(sock, ready)
        except OSError:
            os._exit(0)  # the agent is gone
        job = ForkServer(sock, self._entry, self._async_actors, self._later, None).serve()
        if job is None:
            os._exit(0)
        return job


def run_rank(job: ForkedRank, entry: str) -> NoReturn:
    """Run a forked rank: call its entry point, then exit as a fresh interpreter would."""
    module, _, function = entry.partition(":")
    # Hide the agent's __main__ from the rank: pickled references and multiprocessing must not find it.
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [""]
    gc.enable()
    code = 1
    try:
        result = getattr(importlib.import_module(module), function)(job.request.config)
        code = result if isinstance(result, int) else 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        # Not an ordinary exit: this process must not run the exit handlers of the processes it was forked from.
        os._exit(code & 0xFF)


# -- helpers of forked children ---------------------------------------------------------------


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies; exit now if the parent is already dead."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show for this process's main thread."""
    _prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_environment(env: dict[str, str | None]) -> None:
    """Update the environment; None removes a variable."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def reset_signals() -> None:
    """Restore the signal handlers and the mask of a fresh interpreter."""
    _signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):  # the agent sets these
        _signal.signal(number, _signal.SIG_DFL)
    _signal.signal(signal.SIGINT, signal.default_int_handler)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])


def _fork() -> int:
    # Python warns about native threads since 3.12; those that templates can have are safe (see the module docstring).
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _give_up(pipe: int, reason: str) -> NoReturn:
    try:
        if pipe >= 0:
            os.write(pipe, reason.encode()[:4096])
        os.write(2, f"the rank could not start: {reason}\n".encode())
    except OSError:
        pass
    os._exit(127)


def _forget_missing_folders() -> None:
    # A folder on the path that did not exist at the last lookup may exist now. Finders of existing folders check the
    # modification time themselves; invalidating all of them would take a tenth of a rank's start time.
    for folder, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[folder]


def _close_from(first: int) -> None:
    # The current limit does not bound the open descriptors: they may have been opened under a higher limit.
    os.closerange(first, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _forget_exit_handlers() -> None:
    # A stopped rank runs its exit handlers. Those that a template's modules have registered are for the template's
    # exit and may remove what its ranks share. These two belong to the interpreter, and every process needs them.
    atexit._clear()
    atexit.register(logging.shutdown)
    processes = sys.modules.get("multiprocessing.util")
    if processes is not None:
        atexit.register(processes._exit_function)
    for known in weakref.finalize._registry.values():  # pyright: ignore[reportAttributeAccessIssue]  # there is no API
        known.atexit = False
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]  # the next sets it


# -- preloading -------------------------------------------------------------------------------


def preload(template: str, modules: list[str]) -> TemplateFailed | None:
    """Import modules that forks of this template inherit. Return the failure, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as e:
            return TemplateFailed(template, f"cannot preload {name}: {type(e).__name__}: {e}", True)
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if threads:
        reason = f"preloading {', '.join(modules)} started threads that a fork would lose: {', '.join(threads)}"
        return TemplateFailed(template, reason)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        reason = f"preloading {', '.join(modules)} initialised CUDA, which does not survive a fork"
        return TemplateFailed(template, reason)
    freeze()
    return None


def freeze() -> None:
    """Exclude loaded objects from garbage collection, so that forked ranks keep sharing their pages."""
    gc.disable()
    gc.freeze()


def native_threads() -> int:
    """Return the number of threads of this process, not counting the main one."""
    return len(os.listdir("/proc/self/task")) - 1
