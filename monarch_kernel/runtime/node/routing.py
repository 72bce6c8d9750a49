"""Route messages between processes of different sites through the gateways of their sites.

A process that is not a gateway sends a message for another site to its own gateway, over their Unix link, wrapped in
``Routed``. The gateway forwards it to the receiver's gateway, over the one connection between the two, which forwards
it to the receiver. Gateways do not decode the wrapped messages. A ``RemoteLink`` wraps them, and is used like any other
link.

Addresses of other sites: a gateway learns the route to a proc from ``Introduce``, which precedes the first message to
it. The receiver learns the sender's identity from its ``Hello``, the first message on every link, including these.

Deaths: an agent reports a proc's end to all its watchers, and a process with a link to a proc of another site watches
it. When a connection between gateways ends, all procs reached through it are lost (``AgentLost``), because messages may
have been lost in transit. A process that has a message for a proc that is new to it causes a new connection. It carries
messages only to procs introduced since the loss, and only from senders that knew of the loss by then: messages of other
senders may follow on lost ones. A message to a dead proc is returned as ``Unreachable``.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel import logs
from monarch_kernel._version import __version__
from monarch_kernel.protocol.messages import (
    OLDEST_WIRE,
    WIRE_VERSION,
    AgentLost,
    Death,
    DeathKind,
    Hello,
    Introduce,
    ProcRef,
    Refused,
    Routed,
    Unreachable,
    decode,
    decode_death,
    encode,
    encode_death,
)
from monarch_kernel.protocol.private_files import NotPrivateError
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.acceptor import UnixListener
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.link import Link, add_message_name, connect_unix, describe, is_peers_fault, listen_unix

if TYPE_CHECKING:
    from monarch_kernel.protocol.keys import Keys
    from monarch_kernel.runtime.node.node import Node
    from monarch_kernel.runtime.node.tcp import Listener

log = logs.logger(__name__)

#: How often a dial checks whether a process listens at an ``ipc://`` address (seconds).
RETRY = 0.05
#: How long after its loss a gateway may be dialled again for known procs (seconds).
FORGIVE = 3.0
#: The time limit for a dial caused by a message, not by ``dial`` (seconds).
LAZY_TIMEOUT = 10.0
#: The number of lost connections with a gateway that a new dial reports to it.
REMEMBERED = 4

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

Done = Callable[[ProcRef | Exception], None]


def local_site() -> str:
    """Return the name of the site that all processes of this user on this machine share (except those of a worker).

    It combines what decides whether processes can share Unix sockets and memory: the running kernel, the mount
    namespace and the user.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}.{os.stat('/proc/self/ns/mnt').st_ino}.{os.getuid()}"


def make_hello(node: Node, answer: bool = False, connection: str = "", lost: tuple[str, ...] = ()) -> bytes:
    """Encode the first message on a link."""
    me = (node.id, os.getpid(), node.kind, node.ref, __version__, PYTHON)
    return encode(Hello(WIRE_VERSION, *me, answer, connection, lost, OLDEST_WIRE))


class Routes:
    """A node's routes to other sites: its gateway links, the messages it forwards, and the connections it makes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._dials: dict[PeerLink, _Dial] = {}
        self._dialled: dict[str, str] = {}  # gateways by their dialled URL
        self._ways: dict[str, tuple[str, Keys | None]] = {}  # by gateway: the URL and the keys that reached it
        self._keys: list[Keys] = []  # all keys used so far
        self._lost_at: dict[str, float] = {}
        #: At a gateway: by other gateway, this site's procs that send there, and the procs each was introduced to.
        self._introduced: dict[str, dict[str, set[str]]] = {}
        #: How often a gateway was lost: as reported to this process, or (at a gateway) as reported to each local proc.
        self._heard: Counter[str] = Counter()
        self._told: Counter[tuple[str, str]] = Counter()
        self._listeners: list[UnixListener | Listener] = []
        #: The connections with each gateway, by name: usually one, or two if both sides have dialled at once.
        self._connections: dict[str, dict[str, PeerLink]] = {}
        self._lost_connections: dict[str, tuple[str, ...]] = {}
        node.handle(Routed, self._on_routed)
        node.handle(Introduce, self._on_introduce)
        node.handle(Unreachable, self._on_unreachable)
        node.handle(AgentLost, self._on_agent_lost)
        node.on_peer_dead.append(self._on_peer_dead)

    # -- links ----------------------------------------------------------------------------------

    def far(self, ref: ProcRef) -> bool:
        """Return whether a proc belongs to another site."""
        return ref.site != self._node.ref.site

    def link_to(self, ref: ProcRef) -> PeerLink | None:
        """Return a link to a proc of another site; None if the proc is out of reach."""
        node = self._node
        if node.is_gateway and ref.id == ref.gateway:
            return self._connect(ref)
        if node.is_gateway:
            via = node.links.get(ref.gateway) or self._gateway_link(ref)
        else:
            via = node.links.get(node.ref.gateway) or node.link_to(node.ref.gateway)
        if via is None:
            gone = node.deaths.get(ref.gateway if node.is_gateway else node.ref.gateway)
            cause = f"its host cannot be reached: {gone.cause}" if gone is not None else "its host cannot be reached"
            node.declare_dead(ref.id, Death.of(DeathKind.HOST_LOST, cause, ref.id, ref.host))
            return None
        with node.order_lock:  # another thread's message must not precede the Hello
            link = node.links.get(ref.id)
            if link is None:
                link = RemoteLink(node, ref, via)
                if not node.is_gateway:
                    via.send(encode(Introduce(ref, self._heard[ref.gateway])))
                    self._revive(ref)
                link.send(make_hello(node))
                node.links[ref.id] = link
        return link

    def _gateway_link(self, ref: ProcRef) -> PeerLink | None:
        """Return the link to the gateway of this proc's site."""
        node = self._node
        if ref.gateway not in node.refs:
            node.learn(gateway_of(ref))
        return node.link_to(ref.gateway)

    def _connect(self, ref: ProcRef) -> PeerLink | None:
        node = self._node
        url, keys = self._ways.get(ref.id, (ref.gateway_address, None))  # a tunnel may be the only way
        why = "there is no connection to it" if not url else self._why_not(url)
        if why:
            node.declare_dead(ref.id, Death.of(DeathKind.AGENT_UNREACHABLE, why, ref.id, ref.host))
            return None
        try:
            return _Dial(node, self, url, None, LAZY_TIMEOUT, ref, keys).link
        except ValueError as e:  # its address, which it has reported itself, may be invalid
            node.declare_dead(ref.id, Death.of(DeathKind.AGENT_UNREACHABLE, str(e), ref.id, ref.host))
            return None

    def _why_not(self, url: str) -> str:
        """Return why this process cannot use this URL; "" if it can. Reads the key on first use."""
        if url.startswith("ipc://") or self._node.keys is not None:
            return ""
        from monarch_kernel.protocol.keys import KeyFileError, load_keys

        try:
            self._node.keys = load_keys()
        except KeyFileError as e:
            return f"{url} needs a key: {e}"
        return ""

    def lost(self, gateway: str) -> None:
        """Record the loss of a gateway, and close its connections."""
        self._lost_at[gateway] = time.monotonic()
        self._introduced.pop(gateway, None)
        connections = self._connections.pop(gateway, {})
        self._lost_connections[gateway] = (*self._lost_connections.get(gateway, ()), *connections)[-REMEMBERED:]
        for link in connections.values():
            link.close()

    def _revive(self, ref: ProcRef) -> None:
        """Allow the gateway and agent of a newly introduced proc to be reached again, if they were lost."""
        for name in (ref.gateway, ref.agent):
            self._node.deaths.pop(name, None)

    def forgiven(self, proc: str) -> bool:
        """Return whether a proc declared dead is a gateway that may be dialled again.

        If so, it no longer counts as dead.
        """
        node = self._node
        ref = node.refs.get(proc)
        if ref is None or proc != ref.gateway or not self.far(ref) or not ref.gateway_address:
            return False
        if time.monotonic() - self._lost_at.get(proc, 0.0) < FORGIVE:
            return False
        node.deaths.pop(proc, None)
        return True

    # -- connecting and listening ---------------------------------------------------------------

    def known_keys(self, keys: Keys) -> Keys:
        """Return these keys, or the same ones that this process uses already, so that each list is watched once."""
        known = next((each for each in self._keys if each.same_as(keys)), None)
        if known is None:
            self._keys.append(known := keys)
        return known

    def dial(self, url: str, done: Done, timeout: float, keys: Keys | None = None) -> None:
        """Connect to a worker by its URL; ``done`` gets its reference, or the reason why there is no connection.

        Args:
            keys: for TCP; None: the process's own.
        """
        node = self._node
        known = self._dialled.get(url, "")
        link = node.links.get(known)
        why = self._why_not(url)
        if link is not None and not link.closed and known not in node.deaths:
            done(node.refs[known])
        elif why:
            done(ValueError(why))
        else:
            try:
                _Dial(node, self, url, done, timeout, None, keys)
            except ValueError as e:  # the URL, or a setting, is invalid
                done(e)

    def listen_at(self, url: str) -> str:
        """Accept links of other sites (``tcp://``), or at another Unix socket (``ipc://``). Return the actual URL."""
        node = self._node
        if url.startswith("ipc://"):
            path = url.removeprefix("ipc://")
            sock = listen_unix(path)
            self._listeners.append(UnixListener(node.accept_unix(sock), path))
            return url
        if why := self._why_not(url):
            raise ValueError(why)
        assert node.keys is not None
        from monarch_kernel.runtime.node.tcp import Listener

        steady = node.kind == "agent"
        told = node._dispatch, node._on_closed, lambda _link: None
        listener = Listener(node.poller, url, node.keys, *told, node.audit, steady)
        self._listeners.append(listener)
        return listener.url

    def on_hello(self, link: PeerLink, hello: Hello) -> bool:
        """Check the Hello of a connection between sites or of a dialled one. Return False if it is rejected."""
        node = self._node
        dialled = hello.answer or link in self._dials
        if not dialled and not self.far(hello.ref):
            return True
        if hello.python != PYTHON:
            where = f"{node.ref.host} runs Python {PYTHON}, {hello.ref.host} runs Python {hello.python}"
            self.refuse(link, f"{where}: functions travel as bytecode, so all hosts need the same Python")
            return False
        if dialled:
            current = node.links.get(hello.node)
            if current is not None and current is not link and current.attached and not current.closed:
                # A peer that dials has lost its connection, even if this process has not detected that yet.
                node._agent_dead(hello.node, hello.ref, "it has connected anew")
            node.refs[hello.node] = hello.ref
        if not self._connections.get(hello.node, {}).keys().isdisjoint(hello.lost):
            node._agent_dead(hello.node, hello.ref, "the other side had lost the connection, and has connected anew")
        if hello.connection:
            self._connections.setdefault(hello.node, {})[hello.connection] = link
        node.deaths.pop(hello.node, None)
        return True

    def is_one_of(self, peer: str, link: PeerLink) -> bool:
        """Return whether this is a connection with a gateway, even if messages are sent through another one."""
        return link in self._connections.get(peer, {}).values()

    def greeted(self, link: PeerLink, hello: Hello) -> None:
        """Answer the Hello of a registered link if it asks for that, and complete its dial."""
        if hello.answer:
            link.send(make_hello(self._node))
        dial = self._dials.pop(link, None)
        if dial is not None:
            self._dialled[dial.url] = hello.node
            self._ways[hello.node] = dial.url, dial.keys
            dial.answered(hello.ref)

    def refuse(self, link: PeerLink, reason: str) -> None:
        """Reject a connection: tell the other side why, and end the link."""
        log.warning("refused a connection: %s", reason)
        dial = self._dials.pop(link, None)
        if dial is not None:
            dial.failed(reason)
        link.send(encode(Refused(reason)))
        link.close()

    def on_refused(self, link: PeerLink, reason: str) -> None:
        """Fail the dial of a connection that the other side rejects."""
        dial = self._dials.pop(link, None)
        if dial is not None:
            dial.failed(reason)

    def on_closed(self, link: PeerLink) -> None:
        """Fail the dial of a link that has ended before its Hello."""
        dial = self._dials.pop(link, None)
        if dial is not None:
            dial.failed(link.ended or "the connection was closed")

    # -- forwarding -------------------------------------------------------------------------------

    def _on_routed(self, link: PeerLink, message: Routed, body: Body) -> None:
        node = self._node
        if message.gateway != node.id or not node.is_gateway:
            if message.to == node.id:
                self._arrived(message, body)
            else:
                self._pass_on(link, message, body)
        elif node.gate is not None:
            node.gate(message, link, lambda: self._deliver(link, message, body))
        else:
            self._deliver(link, message, body)

    def _deliver(self, link: PeerLink, message: Routed, body: Body) -> None:
        """Deliver to a process of this site."""
        node = self._node
        if message.to == node.id:
            self._arrived(message, body)
            return
        target = node.links.get(message.to)
        if target is None and message.to in node.refs:
            target = node.link_to(message.to)
        if target is None:
            unknown = Death.of(DeathKind.UNREACHABLE, "it is not known on its host", message.to)
            self._return(link, message, node.deaths.get(message.to, unknown))
            return
        target.send(encode(message), body)

    def _pass_on(self, link: PeerLink, message: Routed, body: Body) -> None:
        """Forward to the gateway of another site."""
        node = self._node
        via = node.links.get(message.gateway)
        ref = node.refs.get(message.to)
        introduced = self._introduced.get(message.gateway)
        if introduced is None or message.to not in introduced.get(message.source, ()):
            via = None
        if via is None:
            gone = node.deaths.get(message.gateway)
            cause = gone.cause if gone is not None else "the connection to it was lost"
            host = ref.host if ref is not None else ""
            cause = f"its host cannot be reached: {cause}"
            self._return(link, message, Death.of(DeathKind.HOST_LOST, cause, message.to, host))
            return
        via.send(encode(message), body)

    def _return(self, link: PeerLink, message: Routed, death: Death) -> None:
        """Notify the sender that the receiver is gone."""
        back = encode(Unreachable(message.to))
        if link.peer == message.source:
            link.send(back, encode_death(death))
            return
        prefix = len(back).to_bytes(4, "little") + back
        link.send(encode(Routed(message.source, self._node.id, link.peer, -1)), prefix + encode_death(death))

    def _arrived(self, message: Routed, body: Body) -> None:
        """Handle a message to this process. On failure, the link to its sender ends, not the link to the gateway."""
        try:
            self._take(message, body)
        except Exception as e:
            node = self._node
            why = describe(e)
            log.error("the link to %s ends: %s", message.source, why, exc_info=None if is_peers_fault(e) else e)
            cause = f"the connection to it was given up: {why}"
            via = node.links.get(message.source)
            if via is not None:
                here = Death.of(DeathKind.UNREACHABLE, cause, node.id, node.ref.host)
                via.send(encode(Unreachable(node.id)), encode_death(here))
            node.declare_dead(message.source, Death.of(DeathKind.UNREACHABLE, cause, message.source))

    def _take(self, message: Routed, body: Body) -> None:
        node = self._node
        view = memoryview(body)
        at = 4 + int.from_bytes(view[:4], "little")
        inner = decode(view[4:at])
        if isinstance(inner, Unreachable):
            self._on_unreachable(None, inner, view[at:])
            return
        link = node.links.get(message.source)
        if isinstance(inner, Hello):
            self._on_far_hello(link, inner)
            return
        if link is None:
            if message.source in node.deaths or message.source not in node.refs:
                return  # a late message of a dead sender
            link = node.link_to(message.source)
            if link is None:
                return
        node._dispatch(link, inner, view[at:])

    def _on_far_hello(self, link: PeerLink | None, hello: Hello) -> None:
        """Handle the first message from a proc of another site."""
        node = self._node
        # It starts again over a new connection. (A controller keeps it dead: procs end when they lose their
        # controller.)
        if hello.node in node.out_of_reach and node.kind != "controller":
            node.out_of_reach.discard(hello.node)
            node.deaths.pop(hello.node, None)
        if hello.node in node.deaths:
            return
        node.refs[hello.node] = hello.ref
        node.pids[hello.node] = hello.pid
        if link is None:
            link = self.link_to(hello.ref)
            if link is None:
                return
            node.watch([hello.node])
        link.pid = hello.pid
        node._expected.discard(hello.node)
        for callback in node.on_hello:
            callback(link)

    # -- introductions and losses -------------------------------------------------------------------

    def _on_introduce(self, link: PeerLink, message: Introduce, _body: Body) -> None:
        node = self._node
        ref = message.ref
        node.learn(ref)
        if ref.gateway == node.id or ref.gateway == link.peer:
            return
        if message.losses != self._told[link.peer, ref.gateway]:
            return  # earlier messages of this sender were lost; the report of that is on its way to it
        self._revive(ref)
        via = node.links.get(ref.gateway) or self._gateway_link(ref)
        if via is not None:
            self._introduced.setdefault(ref.gateway, {}).setdefault(link.peer, set()).add(ref.id)
            via.send(encode(Introduce(ref)))

    def _on_unreachable(self, _link: PeerLink | None, message: Unreachable, body: Body) -> None:
        death = decode_death(body)
        self._node.declare_dead(message.proc, msgspec.structs.replace(death, cause=add_message_name(death.cause)))

    def _on_agent_lost(self, _link: PeerLink, message: AgentLost, body: Body) -> None:
        node = self._node
        death = decode_death(body)
        self._heard[message.agent] += 1
        node.declare_dead(message.agent, death)
        node.bury(message.agent, death.host)

    def tell_site(self, gateway: str, death: Death) -> None:
        """Report to all processes of this site that a gateway, and every proc reached through it, is gone."""
        node = self._node
        header, body = encode(AgentLost(gateway)), encode_death(death)
        for peer, link in list(node.links.items()):
            ref = node.refs.get(peer)
            if isinstance(link, Link) and link.local and ref is not None and not self.far(ref):
                self._told[peer, gateway] += 1
                link.send(header, body)

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        """Drop the introductions of a dead proc of this site, and the counts of losses reported to it."""
        for senders in self._introduced.values():
            senders.pop(proc, None)
        for key in [key for key in self._told if key[0] == proc]:
            del self._told[key]

    # -- ending ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept no more connections, and end pending dials."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for link in list(self._dials):
            link.close()

    def abandon(self) -> None:
        """Leave all connections to the parent, in a forked child."""
        for listener in self._listeners:
            listener.abandon()
        for link in self._dials:
            link.abandon()


class RemoteLink:
    """A link to a proc of another site, through the gateways of both sites."""

    __slots__ = ("_node", "_ref", "_routed", "_stamp", "_via", "closed", "peer", "pid")

    local = False
    attached = True
    ended = ""

    def __init__(self, node: Node, ref: ProcRef, via: PeerLink) -> None:
        self._node = node
        self._ref = ref
        self._via = via
        self._stamp = -1
        self._routed = b""
        self.peer = ref.id
        self.pid = 0
        self.closed = False

    @property
    def queued(self) -> int:
        """Bytes to the gateway that the kernel has not accepted yet."""
        return self._via.queued

    def send(self, header: bytes, body: Body = b"") -> None:
        """See ``Link.send``."""
        if self.closed:
            return
        node = self._node
        gateway = self._ref.gateway
        prefix = len(header).to_bytes(4, "little") + header
        pieces = [prefix, *body] if type(body) is list else prefix if not len(body) else [prefix, body]
        with node.order_lock:  # messages are sent in the order in which they are counted
            casts = node.casts_to.get(gateway, 0)
            if casts != self._stamp:
                self._routed = encode(Routed(self.peer, node.id, gateway, casts))
                self._stamp = casts
            node.directs_to[gateway] = node.directs_to.get(gateway, 0) + 1
            self._via.send(self._routed, pieces)

    def drain(self) -> None:
        """Do nothing: no data of a remote proc is queued here."""

    def close(self) -> None:
        """Drop all later messages."""
        self.closed = True

    abandon = close

    def __repr__(self) -> str:
        return f"<RemoteLink to {self.peer} through {self._via!r}>"


class _Dial:
    """One attempt to reach a gateway by its URL.

    Args:
        done: called with the outcome, or None.
        known: the gateway expected at the URL; None: only the URL is known.
        keys: for TCP; None: the process's own.
    """

    def __init__(
        self,
        node: Node,
        routes: Routes,
        url: str,
        done: Done | None,
        timeout: float,
        known: ProcRef | None,
        keys: Keys | None = None,
    ) -> None:
        self._node = node
        self._routes = routes
        self.url = url
        self.keys = keys
        self._done = done
        self._deadline = time.monotonic() + timeout
        self._why = "it does not answer"
        # The transport's own timeout expires first, as it has a more precise reason.
        self._timer = node.poller.call_later(timeout + 1.0, self._too_late) if known is None else None
        poller = node.poller
        if url.startswith("ipc://"):
            self.link: Link = Link(poller, known.id if known else "", node._dispatch, node._on_closed)
        else:
            from monarch_kernel.runtime.node.tcp import dial

            keys = keys or node.keys
            assert keys is not None
            steady = node.kind == "agent"
            self.link = dial(poller, url, keys, node._dispatch, node._on_closed, timeout, steady)
            self.link.peer = known.id if known else ""
        if known is not None:
            node.links[known.id] = self.link
            name = os.urandom(8).hex()
            routes._connections.setdefault(known.id, {})[name] = self.link
            hello = make_hello(node, False, name, routes._lost_connections.get(known.id, ()))
        else:
            routes._dials[self.link] = self
            hello = make_hello(node, answer=True)
        if self.link.closed:  # the polling thread rejected it before it was registered here
            node._on_closed(self.link)
            return
        self.link.send(hello)
        if url.startswith("ipc://"):
            self._try_unix()
        poller.start_background()

    def _try_unix(self) -> None:
        if self.link.closed or self._node._closed:
            return
        try:
            self.link.attach(connect_unix(self.url.removeprefix("ipc://")))
        except NotPrivateError as e:
            self._routes._dials.pop(self.link, None)
            self.failed(str(e))
        except OSError as e:
            self._why = f"no process listens there ({e.strerror})"
            if time.monotonic() < self._deadline:
                self._node.poller.call_later(RETRY, self._try_unix)
            else:
                self._routes._dials.pop(self.link, None)
                self.failed(self._why)

    def answered(self, ref: ProcRef) -> None:
        """Report the reference of the gateway that has answered."""
        if self._timer is not None:
            self._timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(ref)

    def failed(self, reason: str) -> None:
        """Report that the dial has failed, and close its link."""
        if self._timer is not None:
            self._timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(ConnectionError(f"{self.url}: {reason}"))
        self.link.close()

    def _too_late(self) -> None:
        if self._routes._dials.pop(self.link, None) is not None:
            self.failed(self.link.ended or self._why)


def gateway_of(ref: ProcRef) -> ProcRef:
    """Return a reference to the gateway of a proc's site."""
    if ref.gateway == ref.agent:
        return ref.agent_ref()
    # A controller: its address is unknown, as it cannot be dialled.
    return ProcRef(ref.gateway, "", ref.host, ref.gateway, "", ref.site, ref.gateway, ref.gateway_address)
