"""The node of each process of the runtime: its address book, links, pending calls and known deaths.

A ``Node`` routes messages and does not depend on actors. Its users register a handler for each message type, and a
*sink* for each call they make. The polling thread calls the handlers, one message of a link at a time. For messages of
the process to itself, the sending thread calls them.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from monarch_kernel import environment, logs
from monarch_kernel._version import __version__
from monarch_kernel.protocol.kept_mesh import EndKept, LookAtKept, ReadKeptLogs
from monarch_kernel.protocol.messages import (
    OLDEST_WIRE,
    WIRE_VERSION,
    AskConsole,
    Death,
    DeathKind,
    Forget,
    Hello,
    Message,
    ProcEnding,
    ProcExited,
    ProcRef,
    ProcResponds,
    ProcStarted,
    ProcUnresponsive,
    Refused,
    Release,
    Reply,
    ReportProcs,
    SegmentRef,
    can_meet,
    decode,
    encode,
    encode_death,
)
from monarch_kernel.protocol.private_files import remove_socket, user_name
from monarch_kernel.protocol.refs import lost_with
from monarch_kernel.protocol.serialize import Apart, Body
from monarch_kernel.protocol.socket_peers import is_ours, peer_of
from monarch_kernel.runtime.node.acceptor import Acceptor
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.interfaces import Gate, Handler, LargeBodies, PeerLink, ReplyGate, Sink
from monarch_kernel.runtime.node.link import Link, LinkError, connect_unix, listen_unix
from monarch_kernel.runtime.node.poller import FORKED, Poller, Timer
from monarch_kernel.runtime.node.routing import Done, Routes, local_site, make_hello
from monarch_kernel.runtime.node.segments import Segments

if TYPE_CHECKING:
    from monarch_kernel.protocol.keys import Keys

log = logs.logger(__name__)

M = TypeVar("M", bound=Message)

#: How long to wait for a report of a proc's end after its connection has ended, if its agent expects no report
#: (seconds).
CAUSE_GRACE = 0.25
#: How long to wait for the agent's answer, and then for an end that the agent expects (seconds).
AGENT_GRACE = 30.0

#: The messages that are accepted on a link before its other end has said Hello.
_STRANGERS = (Hello, Refused, AskConsole, LookAtKept, ReadKeptLogs, EndKept)


class Loopback:
    """A link of a process to itself."""

    peer: str
    pid = os.getpid()
    local = True
    attached = True
    closed = False
    queued = 0
    ended = ""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.peer = node.id

    def send(self, header: bytes, body: Body = b"") -> None:
        """Pass the message to this process's own handler."""
        if type(body) is list:
            body = b"".join(body)
        self._node._dispatch(self, decode(header), body)

    def drain(self) -> None:
        """Do nothing: nothing is queued."""

    def close(self) -> None:
        """Do nothing: this link ends with the process."""

    abandon = close


class _Abandoned(dict[str, PeerLink]):
    """Replaces the links of a process in a forked child. Every use raises."""

    def get(self, key: str, default: object = None) -> NoReturn:
        raise RuntimeError(FORKED)


class Node:
    """This process in the network of processes.

    Args:
        node_id: unique name of this process.
        kind: "controller", "agent" or "rank".
        run_dir: folder of the local sockets.
        host: this host's name, for messages.
        agent: the host agent's reference; None for the agent itself and before there is an agent.
        background: see ``Poller``.
        site: its site; None for the agent's site, or this machine's if there is no agent.
        gateway: the process through which other sites reach it; None for the agent's gateway, or itself.
    """

    def __init__(
        self,
        node_id: str,
        kind: str,
        run_dir: str,
        host: str,
        agent: ProcRef | None = None,
        background: bool = True,
        site: str | None = None,
        gateway: ProcRef | None = None,
    ) -> None:
        self.id = node_id
        self.kind = kind
        self.run_dir = run_dir
        self.poller = Poller(background)
        address = os.path.join(run_dir, node_id + ".sock")
        if agent is not None:
            self.ref = agent.beside(node_id, address)
        else:
            self.ref = ProcRef(
                node_id,
                address,
                host,
                node_id,
                address,
                local_site() if site is None else site,
                gateway.id if gateway is not None else node_id,
                gateway.gateway_address if gateway is not None else "",
            )
        self.refs: dict[str, ProcRef] = {node_id: self.ref}
        for known in (agent, gateway):
            if known is not None:
                self.refs[known.id] = known
        self.links: dict[str, PeerLink] = {}
        self.deaths: dict[str, Death] = {}
        #: Procs declared dead that may be alive: only the connection to them was lost.
        self.out_of_reach: set[str] = set()
        #: Procs of other runtimes and programs, to which all buffers of a message travel inside it.
        self.carried: set[str] = set()
        self.calls: dict[int, Sink] = {}
        self.handlers: dict[type, Handler] = {
            Hello: self._on_hello,
            Refused: self._on_refused,
            Reply: self._on_reply,
            Release: lambda link, message, _body: self.segments.on_release(link.peer, message.number),
            Forget: lambda link, message, _body: self.segments.forget(link.peer, message.number),
            ProcStarted: self._on_proc_started,
            ProcExited: self._on_proc_exited,
            ProcEnding: self._on_proc_ending,
            ProcUnresponsive: self._on_unresponsive,
            ProcResponds: self._on_responds,
        }
        #: Called with (proc id, Death) once per dead peer, after its pending calls have failed.
        self.on_peer_dead: list[Callable[[str, Death], None]] = []
        #: Called with the link when a peer has said hello.
        self.on_hello: list[Callable[[PeerLink], None]] = []
        #: Peers that may return after their end: controllers of a kept mesh.
        self.may_return: set[str] = set()
        #: Called first when the node closes.
        self.on_close: list[Callable[[], None]] = []
        #: The key of this process, and the keys that it trusts, for TCP connections.
        self.keys: Keys | None = None
        #: Records each connection from another site, and each refusal.
        self.audit = Audit(self.poller)
        #: By gateway of another site: the last relayed cast sent there, and the number of single messages.
        self.casts_to: dict[str, int] = {}
        self.directs_to: dict[str, int] = {}
        self.order_lock = threading.RLock()
        self.gate: Gate | None = None
        self.reply_gate: ReplyGate | None = None
        self.pids: dict[str, int] = {}
        self._call_ids = itertools.count(1)
        self._expected: set[str] = set()
        self._refused: set[int] = set()  # other users that have tried to connect
        self._listener: Acceptor | None = None
        #: Procs whose connection has ended, until their agent reports why; each with the timer for no report.
        self.unexplained: dict[str, Timer] = {}
        #: Whether a proc's exit is about to be reported; an agent sets this for its ranks.
        self.is_ending: Callable[[str], bool] = lambda _proc: False
        #: Live procs that do not answer their agent.
        self.unresponsive: dict[str, ProcUnresponsive] = {}
        #: Called with a proc's id and the report when it stops answering, and with None when it answers again.
        self.on_vitals: list[Callable[[str, ProcUnresponsive | None], None]] = []
        #: Procs that died, and the procs that replaced them; holders of references ask ``current``.
        self.successors: dict[str, ProcRef] = {}
        #: Counts the replacements, so that holders of many references know when to update them.
        self.generation = 0
        self._closed = False
        self.routes = Routes(self)
        self.links[node_id] = Loopback(self)
        self.segments = Segments(node_id, self.send, self.poller.say_late)
        self._segment_threshold = environment.SEGMENT_THRESHOLD.get()
        self._direct_threshold = environment.DIRECT_THRESHOLD.get()
        #: Creates the carrier of large bodies to other sites, on first use.
        self.make_bodies: Callable[[], LargeBodies] | None = None
        self._bodies: LargeBodies | None = None
        self.poller.on_late = self.send
        self.on_peer_dead.append(lambda proc, _death: self.segments.on_peer_dead(proc))

    def handle(self, kind: type[M], handler: Callable[[PeerLink, M, Body], None]) -> None:
        """Register ``handler(link, message, body)`` for messages of this type; the polling thread calls it."""
        self.handlers[kind] = handler

    @property
    def is_gateway(self) -> bool:
        """Whether other sites reach this site through this process."""
        return self.ref.gateway == self.id

    # -- listening ----------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept links at ``ref.address``."""
        self._listener = self.accept_unix(listen_unix(self.ref.address))

    def listen_at(self, url: str, advertise: str | None = None) -> str:
        """Accept links at another address, from other sites (``tcp://``) or this machine (``ipc://``).

        Args:
            advertise: the URL that others should use, if it differs.

        Returns:
            The URL that others should use.

        Raises:
            OSError: the address is not available.
            ValueError: the address is invalid, or needs a key that is missing.
        """
        url = self.routes.listen_at(url)
        self.ref = msgspec.structs.replace(self.ref, gateway_address=advertise or url)
        self.refs[self.id] = self.ref
        return self.ref.gateway_address

    def dial(self, url: str, done: Done, timeout: float, keys: Keys | None = None) -> None:
        """Connect to the host agent that listens at a URL.

        Args:
            done: called with its reference, or with an exception that explains why there is no connection.
            timeout: how long to try (seconds).
        """
        self.routes.dial(url, done, timeout, keys)

    def accept_unix(self, sock: socket.socket) -> Acceptor:
        """Accept links of this machine at a listening socket until it is closed."""
        return Acceptor(self.poller, sock, self.id, self._on_socket)

    def _on_socket(self, sock: socket.socket, _address: object) -> None:
        pid, uid = peer_of(sock)
        if not is_ours(uid):
            sock.close()
            if uid not in self._refused:  # logged once: another user must not be able to fill the log
                self._refused.add(uid)
                log.warning("refused a connection of process %d of %s", pid, user_name(uid))
            return
        link = Link(self.poller, "", self._dispatch, self._on_closed)
        link.pid = pid
        link.attach(sock)

    def _on_hello(self, link: PeerLink, hello: Hello, _body: Body) -> None:
        if not can_meet(hello.version, hello.oldest):
            theirs = f"{hello.ref.host} speaks wire version {hello.version} (monarch_kernel {hello.release or '?'})"
            spoken = f"{OLDEST_WIRE} to {WIRE_VERSION}" if OLDEST_WIRE < WIRE_VERSION else WIRE_VERSION
            ours = f"{self.ref.host} speaks {spoken} (monarch_kernel {__version__})"
            self.routes.refuse(link, f"{theirs}, {ours}: install the newer version on all hosts")
            return
        if not self.routes.on_hello(link, hello):
            return
        if hello.node in self.deaths:
            if hello.node not in self.may_return:  # a late Hello, after its reported end
                link.close()
                return
            del self.deaths[hello.node]
        link.peer = hello.node
        link.pid = hello.pid
        self.pids[hello.node] = hello.pid
        self.refs.setdefault(hello.node, hello.ref)
        current = self.links.get(hello.node)
        if current is None or current.closed:
            self.links[hello.node] = link
        elif current is link:
            pass
        elif isinstance(current, Link) and not current.attached and isinstance(link, Link) and link.local:
            self.links[hello.node] = link
            link.take_over(current)
        # Otherwise both sides connected at once, and this link is only read from.
        self._expected.discard(hello.node)
        self.routes.greeted(link, hello)
        for callback in self.on_hello:
            callback(link)

    def _on_refused(self, link: PeerLink, refused: Refused, _body: Body) -> None:
        self.routes.on_refused(link, refused.reason)
        if link.peer:
            cause = f"connection refused: {refused.reason}"
            self.declare_dead(link.peer, Death.of(DeathKind.UNREACHABLE, cause, link.peer))

    # -- sending ------------------------------------------------------------------------------

    def learn(self, ref: ProcRef) -> None:
        """Add a proc to the address book."""
        self.refs.setdefault(ref.id, ref)

    def current(self, ref: ProcRef) -> ProcRef:
        """Return the proc that now has this one's place in its mesh: itself, or its last successor."""
        while (successor := self.successors.get(ref.id)) is not None:
            ref = successor
        return ref

    def replaced(self, proc: str, ref: ProcRef) -> bool:
        """Record the successor of a dead proc. Return False if it was already known."""
        if self.successors.get(proc) == ref:
            return False
        self.successors[proc] = ref
        self.refs[ref.id] = ref
        self.generation += 1
        return True

    def expect(self, ref: ProcRef) -> None:
        """Add a proc that is starting and will connect to this process; messages to it are queued until then."""
        self.refs[ref.id] = ref
        self._expected.add(ref.id)
        if self.routes.far(ref):
            self.routes.link_to(ref)  # messages are queued at its agent
        else:
            self.links[ref.id] = Link(self.poller, ref.id, self._dispatch, self._on_closed)

    def link_to(self, proc: str) -> PeerLink | None:
        """Return the link to a proc, created if there is none; None if the proc is dead."""
        link = self.links.get(proc)
        if link is not None:
            return link
        if proc in self.deaths and not self.routes.forgiven(proc):
            return None
        ref = self.refs.get(proc)
        if ref is None:
            raise LookupError(f"no address known for proc {proc}")
        if self.routes.far(ref):
            far = self.routes.link_to(ref)
            if far is not None and ref.agent != proc:
                self.watch([proc])
            return far
        link = Link(self.poller, proc, self._dispatch, self._on_closed)
        link.send(make_hello(self))
        self.links[proc] = link
        self.poller.start_background()
        try:
            sock = connect_unix(ref.address)
        except OSError as e:
            if ref.agent == proc:
                cause = f"the host agent cannot be reached: {e.strerror or e}"
                self.declare_dead(proc, Death.of(DeathKind.AGENT_UNREACHABLE, cause, proc, ref.host))
                return None
            # It does not listen yet, or no longer; its agent knows which.
            self.watch([proc])
            return self.links.get(proc)
        self.pids.setdefault(proc, peer_of(sock)[0])  # the accepting side says no Hello
        link.attach(sock)
        return link

    def watch(self, procs: Iterable[str]) -> None:
        """Ask the procs' agents to report their starts and exits to this process, including past ones."""
        by_agent: dict[str, list[str]] = {}
        for proc in procs:
            ref = self.refs[proc]
            if ref.agent != proc:
                if ref.agent not in self.refs:
                    self.learn(ref.agent_ref())
                by_agent.setdefault(ref.agent, []).append(proc)
        for agent, names in by_agent.items():
            if not self.send(agent, ReportProcs(names)):
                for name in names:
                    self.declare_dead(name, lost_with(None, name, self.refs[name].host))

    def send(self, proc: str, message: Message, body: Body = b"") -> bool:
        """Send to a proc. Return False, without sending, if it is known to be dead."""
        link = self.links.get(proc) or self.link_to(proc)
        if link is None:
            return False
        link.send(encode(message), body)
        return True

    # -- large buffers ---------------------------------------------------------------------------

    def pack(self, body: Body, buffers: tuple[int, ...], receivers: list[str]) -> tuple[Body, SegmentRef | None]:
        """Move the buffers of a serialized body into shared memory if that saves time for these receivers.

        Returns:
            The body to send, and the reference for the header (None: the body has everything).
        """
        if not receivers or self.id in receivers or not self.carried.isdisjoint(receivers):
            return body, None
        far = sum(self.routes.far(self.refs[proc]) for proc in receivers)
        if far:
            if far < len(receivers) or not self.goes_directly(body, buffers):
                return body, None
            # An interrupt between an offer and sending its reference would lose the offer.
            with self.poller.shielded():
                return self._large_bodies().offer(body, buffers, receivers)
        if not buffers or sum(buffers) < self._segment_threshold:
            return body, None
        # An interrupt between taking a segment and sending its reference would lose the segment.
        with self.poller.shielded():
            ref = self.segments.put(body[:-1], receivers)
        if ref is None:
            return body, None
        for proc in receivers:
            if proc in self.deaths:
                self.segments.on_release(proc, ref.number)
        return body[-1], ref

    def goes_directly(self, body: Body, buffers: tuple[int, ...]) -> bool:
        """Return whether a body is large enough to go to other hosts outside the control plane."""
        return 0 < self._direct_threshold <= (sum(buffers) if buffers else len(body))

    def _large_bodies(self) -> LargeBodies:
        with self.order_lock:
            if self._bodies is None:
                if self.make_bodies is None:
                    raise LinkError("a process without a data plane cannot take bodies that are offered by one")
                self._bodies = self.make_bodies()
            return self._bodies

    def drain(self, timeout: float) -> None:
        """Let other hosts fetch the large messages that this process has sent them, before an orderly end."""
        if self._bodies is not None:
            self._bodies.drain(timeout)

    def apart(self, ref: SegmentRef, body: Body) -> Apart:
        """Return the body of a message whose buffers did not come with it.

        Raises:
            LinkError: this process cannot fetch them.
        """
        if ref.handle:
            return self._large_bodies().receive(ref, bytes(body))
        return Apart(self.segments.received(ref).memory, bytes(body))

    # -- calls --------------------------------------------------------------------------------

    def new_call(self, sink: Sink) -> int:
        """Register ``sink`` for replies until ``end_call``. Return the number of the call."""
        number = next(self._call_ids)
        self.calls[number] = sink
        return number

    def end_call(self, number: int) -> None:
        """Unregister a call; late replies are dropped."""
        self.calls.pop(number, None)

    def _on_reply(self, link: PeerLink, reply: Reply, body: Body) -> None:
        if reply.segment is not None:
            body = self.apart(reply.segment, body)
        if reply.written and self.reply_gate is not None and self.reply_gate.holds(link.peer, reply, body):
            return
        sink = self.calls.get(reply.call)  # as in `settle`
        if sink is not None:
            sink.on_reply(reply.rank, reply.status, body, reply.buffers)

    def settle(self, reply: Reply, body: Body) -> None:
        """Pass a reply to the call that waits for it."""
        sink = self.calls.get(reply.call)
        if sink is not None:
            sink.on_reply(reply.rank, reply.status, body, reply.buffers)

    # -- receiving ----------------------------------------------------------------------------

    def _dispatch(self, link: PeerLink, message: Message, body: Body) -> None:
        handler = self.handlers.get(type(message))
        if handler is None or not link.peer:
            self._dispatch_unusual(link, message, body)
            return
        handler(link, message, body)

    def _dispatch_unusual(self, link: PeerLink, message: Message, body: Body) -> None:
        """Handle the message of a link whose other end has not said Hello, or one without a handler."""
        kind = type(message)
        if not link.peer and kind not in _STRANGERS:
            self._note("a link that did not begin with Hello, and was closed")
            link.close()
            return
        handler = self.handlers.get(kind)
        if handler is None:
            self._note(f"a {kind.__name__}, which it does not handle")
            return
        handler(link, message, body)

    def _note(self, what: str) -> None:
        """Log an unexpected message: one line for the first of a kind, because a peer may send any number."""
        from monarch_kernel.runtime.node.audit import is_first_bad_message

        if is_first_bad_message(self.poller, self.id, what):
            log.error("%s got %s", self.id, what)

    # -- death --------------------------------------------------------------------------------

    def _on_closed(self, link: PeerLink) -> None:
        peer = link.peer
        self.routes.on_closed(link)
        if self._closed or not peer or peer in self.deaths:
            return
        if self.links.get(peer) is not link and not self.routes.is_one_of(peer, link):
            return
        ref = self.refs.get(peer)
        if ref is not None and ref.agent == peer:
            self._agent_dead(peer, ref, link.ended)
            return
        if ref is not None and ref.agent in self.deaths:
            self.declare_dead(peer, lost_with(None, peer, ref.host))
            return
        if why := link.ended:  # the link itself has failed, and the proc may be alive
            self._give_up(peer, f"the connection to it was given up: {why}")
            return
        if ref is None or ref.agent == self.id:
            self.poller.call_later(CAUSE_GRACE, lambda: None if self.is_ending(peer) else self._give_up(peer))
            return
        # The agent knows which procs it was told to stop and which the kernel is tearing down. A guess could turn a
        # requested stop into a failure.
        self.unexplained[peer] = self.poller.call_later(
            AGENT_GRACE, lambda: self._give_up(peer, "its connection was closed, and its host agent says nothing")
        )
        if ref.agent not in self.refs:
            self.learn(ref.agent_ref())
        if not self.send(ref.agent, ReportProcs([peer], closed=True)):
            self.declare_dead(peer, lost_with(None, peer, ref.host))

    def _on_proc_ending(self, _link: PeerLink, message: ProcEnding, _body: Body) -> None:
        proc = message.proc
        waiting = self.unexplained.pop(proc, None)
        if waiting is None or proc in self.deaths:
            return
        waiting.cancel()

        def give_up() -> None:
            if message.asked:
                self._give_up(proc, f"stopped: {message.asked}", DeathKind.STOPPED)
            else:
                self._give_up(proc)

        self.poller.call_later(AGENT_GRACE if message.ending else CAUSE_GRACE, give_up)

    def _give_up(
        self, proc: str, cause: str = "its connection was closed", kind: DeathKind = DeathKind.UNREACHABLE
    ) -> None:
        ref = self.refs.get(proc)
        self.unexplained.pop(proc, None)
        self.declare_dead(proc, Death.of(kind, cause, proc, ref.host if ref else "", self.pids.get(proc, 0)))

    def _agent_dead(self, agent: str, ref: ProcRef, why: str = "") -> None:
        what = "the controller" if ref.is_controller else "the host agent"
        if why:
            kind, cause = DeathKind.AGENT_UNREACHABLE, f"{what} of {ref.host} is out of reach: {why}"
        else:
            kind = DeathKind.CONTROLLER_CLOSED if ref.is_controller else DeathKind.AGENT_CLOSED
            cause = f"{what} ended"
        death = Death.of(kind, cause, agent, ref.host, self.pids.get(agent, 0))
        self.declare_dead(agent, death)
        self.bury(agent, ref.host)
        if self.is_gateway and self.routes.far(ref):
            self.routes.tell_site(agent, death)

    def bury(self, agent: str, host: str) -> None:
        """Declare all procs dead that were reached through a dead host agent (or another site's controller)."""
        self.routes.lost(agent)
        self.out_of_reach.add(agent)
        gone = self.deaths.get(agent)
        for ref in list(self.refs.values()):
            behind = ref.agent == agent or (ref.gateway == agent and self.routes.far(ref))
            if not behind or ref.id in (agent, self.id):
                continue
            if ref.id in self._expected or ref.id in self.links:
                self.out_of_reach.add(ref.id)
                self.declare_dead(ref.id, lost_with(gone, ref.id, host, self.pids.get(ref.id, 0)))

    def revive(self, agent: str) -> None:
        """Allow a lost agent to be reached again, because there is a message for a proc of it that is new here."""
        if not self.is_gateway:
            self.deaths.pop(agent, None)

    def cut_off(self, proc: str, death: Death) -> None:
        """Declare a proc of another site dead for this process only, because casts to it may have been lost."""
        if proc not in self.links and proc not in self.deaths:
            self.out_of_reach.add(proc)
            self.declare_dead(proc, death)

    def death_body(self, receiver: str, death: Death) -> Body:
        """Return the body of a message that reports a death; within this process it is the death itself."""
        return death if receiver == self.id else encode_death(death)

    def _on_proc_started(self, _link: PeerLink, started: ProcStarted, _body: Body) -> None:
        self.pids[started.proc] = started.pid
        link = self.links.get(started.proc)
        ref = self.refs.get(started.proc)
        if not isinstance(link, Link) or link.attached or link.closed or ref is None or started.proc in self._expected:
            return
        try:
            link.attach(connect_unix(ref.address))
        except OSError as e:
            cause = f"it cannot be reached: {e.strerror or e}"
            self.declare_dead(ref.id, Death.of(DeathKind.UNREACHABLE, cause, ref.id, ref.host, started.pid))

    def _on_unresponsive(self, _link: PeerLink, message: ProcUnresponsive, _body: Body) -> None:
        if message.proc in self.deaths:
            return
        self.unresponsive[message.proc] = message
        for callback in list(self.on_vitals):
            callback(message.proc, message)

    def _on_responds(self, _link: PeerLink, message: ProcResponds, _body: Body) -> None:
        if self.unresponsive.pop(message.proc, None) is not None:
            for callback in list(self.on_vitals):
                callback(message.proc, None)

    def _on_proc_exited(self, _link: PeerLink, exited: ProcExited, _body: Body) -> None:
        self.out_of_reach.discard(exited.proc)
        self.declare_dead(exited.proc, exited.death())

    def declare_dead(self, proc: str, death: Death) -> None:
        """Fail everything that waits for ``proc``. Only the first cause counts."""
        if proc in self.deaths or self._closed:
            return
        link = self.links.get(proc)
        if link is not None and link.attached and not link.closed:
            self.deaths[proc] = death  # so that the end of the link is not reported as another death
            link.drain()
            link.close()
        self.deaths[proc] = death
        self.links.pop(proc, None)
        self._expected.discard(proc)
        self.unresponsive.pop(proc, None)
        unexplained = self.unexplained.pop(proc, None)
        if unexplained is not None:
            unexplained.cancel()
        if self.reply_gate is not None:
            self.reply_gate.release(proc)  # these calls were answered
        for sink in list(self.calls.values()):
            sink.on_peer_dead(proc, death)
        for callback in list(self.on_peer_dead):
            callback(proc, death)

    # -- ending -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Leave everything that this process shares alone in a forked child, and reject every further use.

        The fork closes the descriptors, because other processes must detect the parent's death even if the fork
        continues.
        """
        self._closed = True
        for handler in self.poller.abandon():
            link = getattr(handler, "__self__", None)
            if isinstance(link, Link):
                link.abandon()
        for link in self.links.values():
            if isinstance(link, Link):
                link.abandon()
        self.routes.abandon()
        if self._listener is not None:
            self._listener.abandon()
        self.links = _Abandoned()

    def close(self) -> None:
        """Close every link and the listener; remove the socket file. Pending calls fail."""
        if self._closed:
            return
        for callback in list(self.on_close):
            callback()
        self._closed = True
        self.segments.close()
        gone = Death.of(DeathKind.LEFT, "this process has shut its runtime down")
        for sink in list(self.calls.values()):
            for proc in list(self.links):
                sink.on_peer_dead(proc, gone)
        self.routes.close()
        self.audit.close()
        for link in list(self.links.values()):
            if not isinstance(link, Loopback):
                link.close()
        if self._listener is not None:
            self._listener.close()
            remove_socket(self.ref.address)
        self.poller.close()


_source: Callable[[], Node] | None = None


def provide_node(source: Callable[[], Node]) -> None:
    """Set the source of the node for the data plane: ``source()`` returns the node, and creates it if there is none.

    The actor system, which is above the data plane, calls this.
    """
    global _source
    _source = source


def current_node() -> Node:
    """Return this process's node."""
    if _source is None:
        raise RuntimeError("the data plane needs the actor system: import monarch_kernel.rdma")
    return _source()
