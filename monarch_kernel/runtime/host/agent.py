"""The host agent: starts ranks through its fork server, watches them, reads their output, and cleans up.

The agent is one process with one thread, which only polls. It runs no user code and unpickles nothing. It forks its
fork server before it opens anything, so that ranks inherit none of its descriptors.

``Agent`` is the base class of all agents, and ``OwnedAgent`` the agent that belongs to one controller, on its host.
``worker_agent`` has the one that serves any controller. When an agent ends, it leaves no process behind. Procs that a
process has started through the agent end when that process is gone.

This file is long because ``Agent`` has one handler for each message that a host answers.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import pickle
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping

import msgspec

from monarch_kernel import environment, programs
from monarch_kernel.protocol.messages import (
    OK,
    AskStacks,
    Death,
    DeathKind,
    EndProc,
    GetLogs,
    GetStatus,
    KillProcs,
    LogText,
    Message,
    OutputChunk,
    OutputEnd,
    Ping,
    ProcEnding,
    ProcExited,
    ProcRef,
    ProcResponds,
    ProcStarted,
    ProcStatus,
    ProcUnresponsive,
    Reply,
    ReportProcs,
    SetPlacement,
    Shutdown,
    SpawnProcs,
    StackRead,
    StopProcs,
    encode,
)
from monarch_kernel.protocol.observation import GpuFigures
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.protocol.private_files import remove_socket, remove_torch_memory
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.host import cleanup, forkserver, py_spy
from monarch_kernel.runtime.host.devices import device_environment
from monarch_kernel.runtime.host.fork_requests import fork_request, is_placed, load_env, placed
from monarch_kernel.runtime.host.host_observer import HostObserver
from monarch_kernel.runtime.host.procs import ForkClient, OomMonitor, Proc
from monarch_kernel.runtime.host.py_spy import state_of
from monarch_kernel.runtime.host.start_command import AgentConfig, describe_exit
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.relay import Relay

# Read stacks of ranks from outside with py-spy, for ranks that cannot answer, and for native frames.
#
# py-spy runs as a separate process and does not block the agent.

#: The maximum size of a dump (bytes): enough for a thousand threads.
DUMP_MAX = 8_000_000
#: The maximum number of parallel py-spy processes.
AT_ONCE = 4
#: A controller that closes its links without a farewell is dead, or dies within this time (seconds).
_FAREWELL = 5.0
#: How long an agent that fails checks whether its controller dies at the same time (seconds).
_LINGER = 1.0


class PySpy:
    """Runs py-spy processes, a few in parallel."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0

    def dump(self, pid: int, options: tuple[str, ...], timeout: float, done: Callable[[str, str], None]) -> None:
        """Run ``py-spy dump`` on a process; call ``done(output, error)`` once, within ``timeout`` seconds."""
        _Dump(self, self._poller, pid, options, timeout, done)

    def begin(self, start: Callable[[], None]) -> None:
        """Call ``start`` when another py-spy may run."""
        self._waiting.append(start)
        self._next()

    def end(self) -> None:
        """Record that one py-spy has ended, and start the next."""
        self._running -= 1
        self._next()

    def _next(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            self._running += 1
            self._waiting.popleft()()


class _Dump:
    """One run of py-spy: waits for its turn, runs, and is killed at its timeout."""

    def __init__(
        self,
        spy: PySpy,
        poller: Poller,
        pid: int,
        options: tuple[str, ...],
        timeout: float,
        done: Callable[[str, str], None],
    ) -> None:
        self._spy = spy
        self._poller = poller
        self._argv = ("dump", *options, "--pid", str(pid))
        self._done: Callable[[str, str], None] | None = done
        self._output = self._process = self._errors = -1
        self._text = bytearray()
        self._timeout = timeout
        self._timer = poller.call_later(timeout, self._late)
        spy.begin(self._start)

    def _start(self) -> None:
        if self._done is None:  # it timed out while it waited
            self._spy.end()
            return
        program = py_spy.program()
        if program is None:
            self._finish(py_spy.MISSING)
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._errors = os.memfd_create("py-spy", os.MFD_CLOEXEC)
        os.set_blocking(theirs, True)
        try:
            # The agent reaps it, as it does all its children.
            child = programs.spawn([program, *self._argv], os.environ, {1: theirs, 2: self._errors})
            self._process = os.pidfd_open(child)
        except OSError as error:
            os.close(ours)
            self._finish(f"py-spy could not be started there: {error}")
            return
        finally:
            os.close(theirs)
        self._output = ours
        self._poller.register(ours, self._on_output)

    def _on_output(self, _events: int) -> None:
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._finish("")
                return
            self._text += data[: DUMP_MAX - len(self._text)]

    def _late(self) -> None:
        if self._process >= 0:
            try:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            except OSError:
                pass  # it has just ended
            self._finish(f"py-spy did not read its stack within {self._timeout:g} s")
        elif self._done is not None:
            done, self._done = self._done, None
            done("", f"py-spy could not begin to read its stack within {self._timeout:g} s: others came first")

    def _finish(self, error: str) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if self._output >= 0:
            self._poller.unregister(self._output)
        if self._errors >= 0:
            error = error or py_spy.plain_error(os.pread(self._errors, 4096, 0).decode("utf-8", "replace"))
        for fd in (self._output, self._process, self._errors):
            if fd >= 0:
                os.close(fd)
        self._output = self._process = self._errors = -1
        done(self._text.decode("utf-8", "replace"), error)
        self._spy.end()


class StackReader:
    """Answers ``AskStacks``."""

    def __init__(self, spy: PySpy, host: str) -> None:
        self._spy = spy
        self._host = host

    def read(self, message: AskStacks, procs: Mapping[str, Proc], reply: Callable[[bytes], None]) -> None:
        """Read all requested stacks, then reply, within the request's timeout."""
        deadline = time.monotonic() + message.timeout
        found: dict[str, StackRead] = {}

        def note(read: StackRead) -> None:
            found[read.proc] = read
            if len(found) == len(message.procs):
                reply(msgspec.msgpack.encode(list(found.values())))

        if not message.procs:
            reply(msgspec.msgpack.encode([]))
        for name in dict.fromkeys(message.procs):
            proc = procs.get(name)
            if proc is None:
                note(StackRead(name, 0, self._host, "", "", "its host agent does not know it"))
            elif proc.exit is not None:
                note(StackRead(name, proc.pid, self._host, "", "", proc.exit.cause))
            elif not proc.pid:
                note(StackRead(name, 0, self._host, "", "", "it has not started yet"))
            else:
                self._one(proc, message.native, deadline, note)

    def _one(self, proc: Proc, native: bool, deadline: float, note: Callable[[StackRead], None]) -> None:
        why = py_spy.state_of(proc.pid)
        ways = py_spy.ways(native, stopped=bool(why))

        def attempt(rest: list[tuple[str, ...]]) -> None:
            left = max(0.01, deadline - time.monotonic())
            self._spy.dump(proc.pid, (*py_spy.JSON, *rest[0]), left, lambda text, error: ended(rest, text, error))

        def ended(rest: list[tuple[str, ...]], text: str, error: str) -> None:
            good = py_spy.is_whole(text)
            if not good and rest[1:] and time.monotonic() < deadline:
                attempt(rest[1:])
                return
            trouble = "" if good else error or "py-spy has read nothing"
            note(StackRead(proc.id, proc.pid, self._host, why, text if good else "", trouble))

        attempt(ways)


# Detect unresponsive ranks: the host agent pings each rank periodically and reports one that does not answer.
#
# A rank answers as long as any of its threads can take the GIL, so a busy rank still answers. A rank that does not
# answer is stopped (SIGSTOP, a debugger), waits for a disk, or has a thread in native code that holds the GIL. The
# agent reports this to the rank's owner and watchers at once, again with the stack that py-spy has read, and again
# when the rank answers. An unresponsive rank is not declared dead.

#: The time limit for reading a stack (seconds), and the maximum length of the stored stack (characters).
STACK_TIMEOUT = 10.0
STACK_MAX = 16_000

#: Substrings of the lines of runtime frames and of frames of the interpreter's start.
_RUNTIME = ("monarch_kernel/runtime/", "<frozen runpy>", "<module> (<string>:", "(threading.py:")
_WEDGED = "native code holds the interpreter lock, or it gets no processor"


class _RankPings:
    """The ping state of one rank; a sink for its answers."""

    def __init__(self, monitor: ResponsivenessMonitor, proc: Proc) -> None:
        self.monitor = monitor
        self.proc = proc
        self.call = monitor.node.new_call(self)
        self.asked = 0.0  # when the pending ping was sent; 0: none is pending
        self.reported = ""  # why it does not respond, once reported

    def on_reply(self, rank: int, status: int, body: Body, buffers: tuple[int, ...]) -> None:
        self.monitor.answered(self)

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self.proc.id:
            self.monitor.forget(self.proc.id)


class ResponsivenessMonitor:
    """Pings all living ranks of an agent.

    Args:
        tell: ``tell(peer, message)`` sends a report.
        spy: reads stacks.
        look: called with the current time at each round of pings.
    """

    def __init__(
        self,
        node: Node,
        procs: Callable[[], Iterable[Proc]],
        tell: Callable[[str, Message], None],
        spy: PySpy,
        look: Callable[[float], None],
    ) -> None:
        self._look = look
        self.node = node
        self._spy = spy
        self._procs = procs
        self._tell = tell
        self._pings: dict[str, _RankPings] = {}
        self._period = environment.PING_PERIOD.get()
        self._patience = environment.UNRESPONSIVE_AFTER.get()
        if self._period > 0:
            node.poller.call_later(self._period, self._ask)

    def why(self, proc: str) -> str:
        """Return why this rank does not respond; '' if it does."""
        pings = self._pings.get(proc)
        return pings.reported if pings is not None else ""

    def forget(self, proc: str) -> None:
        """Drop the state of a rank that is gone."""
        pings = self._pings.pop(proc, None)
        if pings is not None:
            self.node.end_call(pings.call)

    # -- pings --------------------------------------------------------------------------------------

    def _ask(self) -> None:
        now = time.monotonic()
        self._look(now)
        for proc in self._procs():
            if proc.state != "alive" or proc.exit is not None:
                continue
            pings = self._pings.get(proc.id)
            if pings is None:
                pings = self._pings[proc.id] = _RankPings(self, proc)
            if not pings.asked:
                link = self.node.links.get(proc.id)
                if link is not None:
                    pings.asked = now
                    link.send(encode(Ping(pings.call, 0)))
            elif not pings.reported:
                self._overdue(pings, now)
        self.node.poller.call_later(self._period, self._ask)

    def _overdue(self, pings: _RankPings, now: float) -> None:
        why = state_of(pings.proc.pid)
        if why or now - pings.asked >= self._patience:
            pings.reported = why or _WEDGED
            self._report(pings, "")
            self._read_stack(pings)

    def _report(self, pings: _RankPings, stack: str) -> None:
        proc = pings.proc
        since = time.monotonic() - pings.asked
        message = ProcUnresponsive(proc.id, proc.pid, self.node.ref.host, since, pings.reported, stack)
        for peer in proc.audience():
            self._tell(peer, message)

    def answered(self, pings: _RankPings) -> None:
        """Record a rank's answer; if it was reported unresponsive, report that it responds again."""
        late = time.monotonic() - pings.asked
        pings.asked = 0.0
        if pings.reported:
            pings.reported = ""
            for peer in pings.proc.audience():
                self._tell(peer, ProcResponds(pings.proc.id, late))

    # -- stacks ---------------------------------------------------------------------------------------

    def _read_stack(self, pings: _RankPings) -> None:
        """Make py-spy read the stack of an unresponsive rank, and send it in a second report."""

        def done(text: str, error: str) -> None:
            if pings.reported and (text or error):
                self._report(pings, _tidy((text or error)[:STACK_MAX]))

        self._spy.dump(pings.proc.pid, ("--nonblocking",), STACK_TIMEOUT, done)


def _tidy(text: str) -> str:
    """Return the threads of a dump, without the runtime's threads and frames of the runtime that called user code."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            blocks.append([line])
        elif blocks and line.startswith(" "):
            blocks[-1].append(line)
    if not blocks:
        return text.strip()  # it is an error message
    shown: list[str] = []
    for name, *frames in blocks:
        if '"monarch-' in name:
            continue
        while frames and any(part in frames[-1] for part in _RUNTIME):
            frames.pop()
        shown += [name, *frames] if frames else [f"{name}: in the runtime, waiting for a message"]
    return "\n".join(shown)


log = logging.getLogger(__name__)

#: How long ranks may take to clean up after the process that started them has ended (seconds).
ORPHAN_GRACE = 2.0
#: The maximum number of templates kept; each keeps its modules in memory.
MAX_TEMPLATES = 3
#: The modules that a template has loaded, the variables that they read, and the scope or the import path.
_TemplateKey = tuple[tuple[str, ...], tuple[tuple[str, str | None], ...], Hashable]
#: The maximum number of dead ranks whose output is kept.
MAX_DEAD_LOGS = 256
#: The maximum number of bytes queued for an owner that does not read. Beyond this, ranks block when they print.
MAX_QUEUED = 32 * 1024 * 1024
_CHUNK = 64 * 1024
_CHUNKS_AT_ONCE = 8
#: More than any pipe holds: enough to read all remaining output of a dead rank.
_CHUNKS_LEFT = 17


class _Wait:
    """A pending reply, due when a set of procs is gone (and drained)."""

    def __init__(self, procs: set[str], drained: bool, done: Callable[[], None]) -> None:
        self.procs = procs
        self.drained = drained
        self.done = done


class Agent:
    """The agent's state, and its handlers of messages and events.

    Args:
        node: this process's node, not listening yet.
        server: the agent's end of the fork server's socket.
        server_pid: the fork server's pid.

    Raises:
        InvalidSettingError: an environment variable is invalid.
    """

    def __init__(self, node: Node, server: socket.socket, server_pid: int) -> None:
        environment.check()
        self._node = node
        self._poller = node.poller
        self._logs = os.path.join(node.run_dir, "logs")
        os.makedirs(self._logs, mode=0o700, exist_ok=True)
        self._base = ForkClient(server, self._poller, self._on_fork_event)
        self._base_pid = server_pid
        self._templates: dict[_TemplateKey, tuple[str, ForkClient]] = {}
        self._passing: set[_TemplateKey] = set()  # of templates that have loaded modules of a placement's folders
        self._placements: dict[str, Placement] = {}  # by controller
        self._made = 0
        self._procs: dict[str, Proc] = {}
        self._early_watchers: dict[str, set[str]] = {}
        self._waits: list[_Wait] = []
        self._paused: list[tuple[Proc, int]] = []
        self._dead: list[Proc] = []
        self._oom = OomMonitor()
        spy = PySpy(self._poller)
        self._stack_reader = StackReader(spy, node.ref.host)
        self._responsiveness = ResponsivenessMonitor(self._node, self._procs.values, self._tell, spy, self._oom.look)
        self._over = False
        self._code = 0
        self._reap_wanted = False
        self._node.handle(SpawnProcs, self._on_spawn)
        self._node.handle(SetPlacement, self._on_place)
        self._node.handle(KillProcs, self._on_kill)
        self._node.handle(StopProcs, self._on_stop)
        self._node.handle(ReportProcs, self._on_watch)
        self._node.handle(GetStatus, self._on_status)
        self._node.handle(GetLogs, self._on_logs)
        self._node.handle(AskStacks, self._on_stacks)
        self._node.handle(Shutdown, self._on_shutdown)
        self._relay = Relay(node)
        node.reply_gate = self
        self._node.on_hello.append(self._on_hello)
        self._observer = HostObserver(node, self._procs)
        self._node.is_ending = self._is_ending
        self._node.on_peer_dead.append(self._on_peer_dead)

    # -- life -------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until asked to end, then kill everything it has started. Return the exit code: 0 if asked to end."""
        gc.freeze()
        gc.enable()  # `launch` disables it at the start
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, self._on_sigchld)
        self._node.listen()
        self._begin()
        self._poller.run(self._between_steps)
        self._clean_up()
        return self._code

    def _begin(self) -> None:
        """Connect to the controller, or start to listen for controllers."""
        raise NotImplementedError

    def _between_steps(self) -> bool:
        if self._reap_wanted:
            self._reap_wanted = False
            self._reap()
        return self._over

    def _end(self, why: str) -> None:
        log.info("ending: %s", why)
        self._over = True

    def _on_sigterm(self, signum: int, _frame: object) -> None:
        self._code = 128 + signum
        self._over = True
        self._poller.wake()

    def _on_sigchld(self, _signum: int, _frame: object) -> None:
        self._reap_wanted = True
        self._poller.wake()

    def _on_peer_dead(self, peer: str, _death: Death) -> None:
        for proc in self._procs.values():
            proc.watchers.discard(peer)
        early = {name: watchers - {peer} for name, watchers in self._early_watchers.items()}
        self._early_watchers = {name: watchers for name, watchers in early.items() if watchers}
        # No proc outlives the process that started it; that process may itself be a rank.
        orphans = [proc for proc in self._procs.values() if proc.belongs_to(peer) and proc.exit is None]
        if orphans:
            self._stop(orphans, "its owner's process ended", ORPHAN_GRACE)

    def _clean_up(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The agent is the subreaper of its descendants, so it adopts every orphan, whatever its session.
        cleanup.kill_below(self._base_pid)
        self._node.close()

    # -- starting ranks -----------------------------------------------------------------------

    def _on_spawn(self, _link: PeerLink, message: SpawnProcs, _body: Body) -> None:
        node = self._node
        if self._is_late(message):
            log.info("started nothing for %s, which has gone", message.owner.id)
            return
        node.learn(message.owner)
        node.learn(message.root)
        scope = self._template_scope(message)
        placement = self._placement_of(message)
        if placement is not None:
            message = placed(message, placement)
        cwd, sys_path = self._place(message)
        passing = placement is not None and is_placed(message.preload, sys_path, placement)
        limit = message.start_limit if 0 < message.start_limit < math.inf else environment.START_LIMIT.get()
        for index, spec in enumerate(message.procs):
            proc = Proc(spec, message.mesh, message.owner.id, message.root.id, self._logs)
            proc.start_limit = limit
            proc.tool = message.tool
            proc.watchers |= self._early_watchers.pop(spec.id, set())
            self._procs[spec.id] = proc
            ref = self._ref_of(spec.id, spec.address, message)
            node.expect(ref)
            try:
                kept = self._keeps(message)
                given = self._with_devices(message, index, proc)
                proc.request = fork_request(given, index, ref, node.run_dir, cwd, sys_path, kept, placement)
                if not os.path.isdir(cwd):
                    raise OSError(f"its working directory {cwd} is gone")
                proc.open_pipes()
                for stream in proc.pipes:
                    self._listen(proc, stream)
                preload = [] if proc.request.argv else message.preload
                self._start(proc, self._server_for(preload, proc.request.env, sys_path, scope, passing))
            except Exception as e:  # report any failure, or the owner would wait forever
                reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e) or type(e).__name__
                self._exited(proc, 127, f"could not be started: {reason}", DeathKind.NOT_STARTED)
        if message.owner.agent not in (message.owner.id, node.id):
            node.watch([message.owner.id])  # a rank of another agent, which reports its end

    def _with_devices(self, message: SpawnProcs, index: int, proc: Proc) -> SpawnProcs:
        """Return the request with the variables that restrict one of its procs to its own devices."""
        if not message.devices:
            return message
        environ = {**os.environ, **message.env}
        known = {name: value for name, value in environ.items() if value is not None}
        chosen = device_environment(message.slots[index], message.devices, self._node.ref.host, known)
        proc.devices = next(iter(chosen.values()))
        return msgspec.structs.replace(message, env={**message.env, **chosen})

    def _is_late(self, message: SpawnProcs) -> bool:
        """Return whether the owner or the controller of the requested procs is already gone."""
        return message.owner.id in self._node.deaths or message.root.id in self._node.deaths

    def _on_place(self, link: PeerLink, message: SetPlacement, _body: Body) -> None:
        self._placements[link.peer] = message.placement
        for key in self._passing & self._templates.keys():
            self._retire(key)
        _reply(link, message.call)

    def _placement_of(self, message: SpawnProcs) -> Placement | None:
        """Return how the ranks of this request's controller start here; None: as requested."""
        return None if message.tool else self._placements.get(message.root.id)

    def _keeps(self, message: SpawnProcs) -> bool:
        """Return whether these procs outlive their controller."""
        return False

    def _place(self, message: SpawnProcs) -> tuple[str, list[str]]:
        """Return the working directory and import path of new ranks."""
        return message.cwd, [entry or message.cwd for entry in message.sys_path]

    def _ref_of(self, proc: str, address: str, message: SpawnProcs) -> ProcRef:
        """Return the reference by which other processes reach a new rank."""
        return self._node.ref.beside(proc, address)

    def _start(self, proc: Proc, server: ForkClient) -> None:
        assert proc.request is not None
        proc.server = server
        server.send(proc.request, proc.far_ends)

    def _server_for(
        self, preload: list[str], env: dict[str, str | None], sys_path: list[str], scope: Hashable, passing: bool
    ) -> ForkClient:
        """Return the fork server, or a template that has loaded these modules with the variables that they read.

        Args:
            sys_path: the import path of the template.
            scope: further properties that ranks of one template must share.
            passing: whether some of the modules may change with the next placement.
        """
        if not preload:
            return self._base
        load_time = load_env(env)
        key = (tuple(preload), tuple(sorted(load_time.items())), tuple(sys_path) if passing else scope)
        if key in self._templates:
            return self._templates[key][1]
        source = self._source_of(key)
        self._retire_templates(MAX_TEMPLATES - 1)
        self._made += 1
        name = f"template-{self._made}"
        ours, theirs = forkserver.make_pair()
        request = forkserver.MakeTemplate(name, preload, load_time, sys_path)
        source.send(request, [theirs.detach()], close=True)
        client = ForkClient(ours, self._poller, self._on_fork_event)
        self._templates[key] = (name, client)
        if passing:
            self._passing.add(key)
        return client

    def _source_of(self, wanted: _TemplateKey) -> ForkClient:
        """Return the process from which to fork a template: one that has loaded most of its modules, and no others.

        Only a template that is ready counts: one that fails would take the new template with it.
        """
        below = [
            (len(modules), client)
            for (modules, *others), (_name, client) in self._templates.items()
            if client.ready and others == [*wanted[1:]] and set(modules) < set(wanted[0])
        ]
        return max(below, key=lambda each: each[0], default=(0, self._base))[1]

    def _template_scope(self, message: SpawnProcs) -> Hashable:
        """Return the properties, besides modules, that ranks must share to be forked from one template."""
        return ()

    def _retire_templates(self, keep: int) -> None:
        """Keep at most ``keep`` templates, the most recently used; the others exit after their last ranks."""
        while len(self._templates) > keep:
            self._retire(min(self._templates, key=lambda k: self._templates[k][1].last_used))

    def _retire(self, key: _TemplateKey) -> None:
        """Make a template exit after its last rank."""
        self._passing.discard(key)
        self._templates.pop(key)[1].send(forkserver.Retire(), [])

    # -- events of fork servers ---------------------------------------------------------------

    def _on_fork_event(self, server: ForkClient, event: forkserver.Event | None) -> None:
        if event is None:
            if server is self._base:
                self._on_base_gone()
            else:
                self._on_template_gone(server)
        elif isinstance(event, forkserver.Forked):
            proc = self._procs[event.proc]
            proc.pid = event.pid
            proc.request = None
            proc.close_far_ends()
            if proc.killing:
                cleanup.kill_group(proc.pid)
            elif proc.start_limit > 0:
                self._poller.call_later(proc.start_limit, functools.partial(self._check_started, proc))
        elif isinstance(event, forkserver.ForkFailed):
            cause = f"could not be started: {event.reason}"
            self._exited(self._procs[event.proc], 127, cause, DeathKind.NOT_STARTED)
        elif isinstance(event, forkserver.Exited):
            proc = self._procs.get(event.proc)
            if proc is not None:
                self._died(proc, event.status, event.max_rss_bytes)
        elif isinstance(event, forkserver.TemplateFailed):
            server.failed = event
            log.warning("template failed: %s", event.reason)
        else:
            server.ready = True
            native = event.native_threads
            log.info("%s is ready after %.3f s (%d native threads)", event.template, event.seconds, native)

    def _check_started(self, proc: Proc) -> None:
        """Kill the rank if it has not said hello within its start limit."""
        if proc.state == "starting" and proc.exit is None:
            settings = f"{environment.START_LIMIT.name}, or mesh_proc_spawn_max_idle of monarch.config"
            limit = f"{proc.start_limit:g} s ({settings})"
            self._kill(proc, f"it did not come up within {limit}: is its command a Python that has monarch_kernel?")

    def _on_template_gone(self, server: ForkClient) -> None:
        for key, (_name, client) in list(self._templates.items()):
            if client is server:
                del self._templates[key]
        for proc in self._procs.values():
            if proc.server is not server or proc.pid or proc.exit is not None:
                continue
            failed = server.failed
            if self._must_preload(failed):
                reason = "the template process died while it loaded its modules" if failed is None else failed.reason
                self._exited(proc, 127, f"could not be started: {reason}", DeathKind.PRELOAD_FAILED)
            else:
                self._start(proc, self._base)  # each rank then loads the modules itself

    def _must_preload(self, failed: forkserver.TemplateFailed | None) -> bool:
        """Return whether a template's failure means that its ranks cannot start; None: the template crashed."""
        return failed is None or failed.in_ranks_too

    def _on_base_gone(self) -> None:
        """Report the ranks that died with the fork server, which are all ranks, and end."""
        for pid, raw in cleanup.kill_below(self._base_pid):
            for proc in self._procs.values():
                if proc.pid == pid and proc.exit is None:
                    status = os.waitstatus_to_exitcode(raw)
                    self._exited(proc, status, f"{describe_exit(status)}: its fork server died")
        for proc in self._procs.values():
            if proc.exit is None:
                self._exited(proc, -signal.SIGKILL, "killed by SIGKILL: its fork server died")
        self._code = 1
        self._flush_then_end("the fork server has died")

    def _reap(self) -> None:
        """Reap adopted orphans: user processes, and ranks whose template has died."""
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._base_pid:
                continue  # the end of its socket reports it
            for proc in self._procs.values():
                if proc.pid == pid and proc.exit is None:
                    cleanup.kill_group(pid)
                    self._died(proc, os.waitstatus_to_exitcode(raw), 0)

    # -- ends of ranks ------------------------------------------------------------------------

    def _died(self, proc: Proc, status: int, max_rss: int) -> None:
        kind = DeathKind.HOST_ENDING if proc.withdrawn else DeathKind.EXITED
        if proc.stopping and status == 0:
            cause = f"stopped: {proc.stopping}"
        elif proc.killing:
            cause = f"{describe_exit(status)} on request: {proc.killing}"
        else:
            oom = self._oom.news(time.monotonic()) if status == -signal.SIGKILL else ""
            cause = describe_exit(status, oom, max_rss)
        self._exited(proc, status, cause, kind)

    def _exited(self, proc: Proc, status: int, cause: str, kind: DeathKind = DeathKind.EXITED) -> None:
        """Report a rank's exit to its owner and watchers at once, without waiting for its last output."""
        if proc.exit is not None:
            return
        link = self._node.links.get(proc.id)
        if link is not None:
            link.drain()  # relay its last messages to other sites before the report of its end
        expected = bool(proc.asked)
        proc.state = "stopped" if expected else "dead"
        proc.exit = ProcExited(proc.id, proc.pid, self._node.ref.host, status, cause, expected, kind)
        proc.close_far_ends()
        for peer in proc.audience():
            self._tell(peer, proc.exit)
        self._node.declare_dead(proc.id, proc.exit.death())
        remove_socket(proc.address)
        if proc.pid and status:
            remove_torch_memory(proc.pid)
        self._drain(proc)
        self._dead.append(proc)
        if len(self._dead) > MAX_DEAD_LOGS:
            for output in self._dead.pop(0).logs.values():
                output.remove()
        self._check_waits()

    def _tell(self, peer: str, message: Message, body: Body = b"") -> None:
        try:
            self._node.send(peer, message, body)
        except LookupError:
            pass  # a watcher that has gone

    # -- output -------------------------------------------------------------------------------

    def _listen(self, proc: Proc, stream: int) -> None:
        self._poller.register(proc.pipes[stream], functools.partial(self._on_output, proc, stream))

    def _on_output(self, proc: Proc, stream: int, _events: int) -> None:
        owner = self._node.links.get(proc.owner)
        if owner is not None and owner.queued > MAX_QUEUED:
            self._poller.unregister(proc.pipes[stream])
            if not self._paused:
                self._poller.call_later(0.02, self._resume)
            self._paused.append((proc, stream))
            return
        self._read(proc, stream, _CHUNKS_AT_ONCE)

    def _resume(self) -> None:
        paused, self._paused = self._paused, []
        for proc, stream in paused:
            if stream in proc.pipes:
                self._listen(proc, stream)

    def _read(self, proc: Proc, stream: int, chunks: int) -> None:
        fd = proc.pipes[stream]
        for _ in range(chunks):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._poller.unregister(fd)
                os.close(fd)
                del proc.pipes[stream]
                return
            proc.logs[stream].append(data)
            self._forward(proc, stream, data)
            if len(data) < _CHUNK:
                return

    def holds(self, proc: str, reply: Reply, body: Body) -> bool:
        """See ``ReplyGate``: forward a rank's output before its reply to a relayed cast."""
        known = self._procs.get(proc)
        if known is not None and reply.written > known.marked:
            known.marked = reply.written
            for stream in tuple(known.pipes):
                self._on_output(known, stream, 0)
        return False

    def release(self, proc: str) -> None:
        """See ``ReplyGate``: this gate holds nothing."""

    def _forward(self, proc: Proc, stream: int, data: bytes) -> None:
        if stream == 2 and not (data := proc.crash.feed(data)):
            return
        self._tell(proc.owner, OutputChunk(proc.id, stream), data)

    def _drain(self, proc: Proc) -> None:
        """Read a dead rank's remaining output. Does not wait for other processes that hold the pipes open."""
        for stream in list(proc.pipes):
            fd = proc.pipes[stream]
            # All output of the rank is in the pipe by now; a surviving writer is cut off.
            self._read(proc, stream, _CHUNKS_LEFT)
            if stream in proc.pipes:
                self._poller.unregister(fd)
                os.close(fd)
                del proc.pipes[stream]
        if rest := proc.crash.close():
            self._tell(proc.owner, OutputChunk(proc.id, 2), rest)
        for output in proc.logs.values():
            output.close()
        proc.drained = True
        self._tell(proc.owner, OutputEnd(proc.id))

    # -- requests -----------------------------------------------------------------------------

    def _on_hello(self, link: PeerLink) -> None:
        proc = self._procs.get(link.peer)
        if proc is None or proc.exit is not None:
            return
        proc.state = "alive"
        for peer in proc.audience():
            self._tell(peer, ProcStarted(proc.id, link.pid))
        if proc.stopping:
            self._tell(proc.id, EndProc(proc.stopping))

    def _on_watch(self, link: PeerLink, message: ReportProcs, _body: Body) -> None:
        for name in message.procs:
            proc = self._procs.get(name)
            if proc is None:
                self._early_watchers.setdefault(name, set()).add(link.peer)
                if message.closed:
                    link.send(encode(ProcEnding(name, False)))
            elif proc.exit is not None:
                link.send(encode(proc.exit))
            else:
                proc.watchers.add(link.peer)
                if message.closed:
                    link.send(encode(ProcEnding(name, self._is_ending(name), proc.asked)))
                elif proc.state == "alive":
                    link.send(encode(ProcStarted(proc.id, proc.pid)))

    def _is_ending(self, name: str) -> bool:
        """Return whether this rank is about to exit: it was asked to end, or the kernel is tearing it down."""
        proc = self._procs.get(name)
        return proc is not None and bool(proc.exit or proc.stopping or proc.killing or proc.is_exiting())

    def _on_kill(self, link: PeerLink, message: KillProcs, _body: Body) -> None:
        for proc in self._living(message.procs):
            self._kill(proc, message.reason or "killed by its owner")
        self._answer_when_gone(message.procs, False, functools.partial(_reply, link, message.call))

    def _kill(self, proc: Proc, reason: str) -> None:
        proc.killing = proc.killing or reason
        if proc.pid:
            cleanup.kill_group(proc.pid)

    def _on_stop(self, link: PeerLink, message: StopProcs, _body: Body) -> None:
        names = message.procs
        if names is None:
            names = [proc.id for proc in self._procs.values() if proc.belongs_to(link.peer)]
        self._stop(self._living(names), message.reason or "stopped by its owner", message.grace)
        self._answer_when_gone(names, True, functools.partial(self._stopped, link, message))

    def _stopped(self, link: PeerLink, message: StopProcs) -> None:
        """Reply when all procs that this request stops are gone."""
        _reply(link, message.call)

    def _stop(self, procs: list[Proc], reason: str, grace: float) -> None:
        for proc in procs:
            if not proc.stopping:
                proc.stopping = reason
                if proc.state == "alive":
                    self._tell(proc.id, EndProc(reason))

        def kill_rest() -> None:
            for proc in procs:
                if proc.exit is None:
                    self._kill(proc, f"it did not stop within {grace:g} s")

        self._poller.call_later(grace, kill_rest)

    def _on_shutdown(self, link: PeerLink, message: Shutdown, _body: Body) -> None:
        self._shut_down("the host agent shuts down", message.grace, functools.partial(_reply, link, message.call))

    def _shut_down(self, why: str, grace: float, done: Callable[[], None]) -> None:
        """Stop every proc, call ``done``, then end."""

        def finish() -> None:
            done()
            self._flush_then_end("shut down")

        self._stop(self._living(self._procs), why, grace)
        self._answer_when_gone(list(self._procs), True, finish)

    def _living(self, names: Iterable[str]) -> list[Proc]:
        procs = (self._procs.get(name) for name in names)
        return [proc for proc in procs if proc is not None and proc.exit is None]

    def _answer_when_gone(self, names: list[str], drained: bool, done: Callable[[], None]) -> None:
        known = {name for name in names if name in self._procs}
        self._waits.append(_Wait(known, drained, done))
        self._check_waits()

    def _check_waits(self) -> None:
        for wait in list(self._waits):
            procs = ((name, self._procs.get(name)) for name in wait.procs)  # a worker forgets dead procs
            gone = {name for name, p in procs if p is None or (p.exit and (p.drained or not wait.drained))}
            wait.procs -= gone
            if not wait.procs and wait in self._waits:  # `done` of one wait may remove others
                self._waits.remove(wait)
                wait.done()

    def _flush_then_end(self, why: str) -> None:
        """End as soon as all queued messages have been sent (or their reader is gone)."""
        deadline = time.monotonic() + 2.0

        def check() -> None:
            waiting = any(link.queued for link in self._node.links.values())
            if waiting and time.monotonic() < deadline:
                self._poller.call_later(0.005, check)
            else:
                self._end(why)

        check()

    def _on_status(self, link: PeerLink, message: GetStatus, _body: Body) -> None:
        def answer(gpus: list[GpuFigures], memory: dict[int, dict[int, int]]) -> None:
            use = {gpu.index: gpu.use for gpu in gpus}
            found = [self._status_of(name) for name in message.procs]
            told = [
                msgspec.structs.replace(
                    each, gpus={gpu: (held, use.get(gpu, 0.0)) for gpu, held in memory[each.pid].items()}
                )
                if each.pid in memory
                else each
                for each in found
            ]
            _reply(link, message.call, msgspec.msgpack.encode(told))

        self._observer.gpus.ask(self._poller, answer)

    def _status_of(self, name: str) -> ProcStatus:
        """Return the state of a proc now."""
        proc = self._procs.get(name)
        host = self._node.ref.host
        if proc is None:
            return ProcStatus(name, "dead", 0, host, "unknown to the host agent")
        if proc.exit is not None:
            return ProcStatus(name, proc.state, proc.pid, host, proc.exit.cause)
        rss, cpu = proc.usage()
        uptime = round(time.monotonic() - proc.started, 3)
        why = self._responsiveness.why(name)
        state = "unresponsive" if why else proc.state
        return ProcStatus(name, state, proc.pid, host, why, rss, cpu, uptime, proc.devices)

    def _on_logs(self, link: PeerLink, message: GetLogs, _body: Body) -> None:
        _reply(link, message.call, msgspec.msgpack.encode(self._logs_of(message.procs, message.tail)))

    def _logs_of(self, procs: Iterable[str], tail: int) -> list[LogText]:
        """Return the stored output of procs."""
        known = ((name, self._procs.get(name)) for name in procs)
        return [LogText(name, b"", b"") if proc is None else proc.log_text(tail) for name, proc in known]

    def _on_stacks(self, link: PeerLink, message: AskStacks, _body: Body) -> None:
        self._stack_reader.read(message, self._procs, functools.partial(_reply, link, message.call))


def _reply(link: PeerLink, call: int, value: bytes | None = None) -> None:
    """Reply to a request as an endpoint would: the body is a pickle (of bytes or None)."""
    link.send(encode(Reply(call, 0, OK)), pickle.dumps(value, 5))


class OwnedAgent(Agent):
    """An agent that lives and dies with its controller.

    It ends when its controller dies, closes its link or requests it, on SIGTERM, and when its fork server dies.

    Args:
        config: the controller's settings.
        server: the agent's end of the fork server's socket.
        server_pid: the fork server's pid.
        controller: a pidfd of the controller.
    """

    def __init__(self, config: AgentConfig, server: socket.socket, server_pid: int, controller: int) -> None:
        owner = config.owner
        node = Node(config.id, "agent", config.run_dir, config.host, background=False, site=owner.site, gateway=owner)
        super().__init__(node, server, server_pid)
        self._config = config
        self._owner = owner
        self._controller = controller

    def _begin(self) -> None:
        self._poller.register(0, self._on_lifeline)
        # A fork of the controller may hold its sockets open; the pidfd reports its death even then.
        self._poller.register(self._controller, self._on_controller_dead)
        self._node.learn(self._owner)
        self._node.link_to(self._owner.id)

    def _on_lifeline(self, _events: int) -> None:
        self._poller.unregister(0)
        self._end("the controller closed its end")

    def _on_controller_dead(self, _events: int) -> None:
        self._poller.unregister(self._controller)
        self._end("the controller has died")

    def _on_peer_dead(self, peer: str, death: Death) -> None:
        if peer == self._owner.id:
            self._end("the controller's link was closed")
        else:
            super()._on_peer_dead(peer, death)

    def _clean_up(self) -> None:
        super()._clean_up()
        if self._controller_died(_FAREWELL if self._code == 0 else _LINGER):
            cleanup.remove_inherited_run_dir(self._node.run_dir, self._config.lock_fd)

    def _controller_died(self, timeout: float) -> bool:
        """Return whether the controller ended without a farewell; then only this process can remove the run folder."""
        deadline = time.monotonic() + timeout
        waiting = [0, self._controller]
        while (left := deadline - time.monotonic()) > 0:
            ready = select.select(waiting, [], [], left)[0]
            if self._controller in ready:
                return True
            if 0 in ready:
                if os.read(0, 1):
                    return False
                waiting = [self._controller]  # a dying process closes its descriptors before its pidfd reports the exit
        return False
