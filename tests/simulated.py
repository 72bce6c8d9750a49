"""A source that casts, host agents and ranks without sockets: links are queues, and a random order decides.

What happens at all is up to the test: it takes steps (``Net.step`` delivers one message or fires one timer), kills
agents and ranks, and cuts links, at any moment. ``Net.check`` then says whether every rank got what it should.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from monarch_kernel.protocol.casts import GONE
from monarch_kernel.protocol.messages import Call, Death, ProcRef, Reply, Routed, decode, encode
from monarch_kernel.runtime.actor.calls.caster import Caster
from monarch_kernel.runtime.node.relay import Relay

CLOSED = object()


class Timer:
    """As of a poller."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class SimLink:
    """One direction of a connection."""

    def __init__(self, net: Net, source: str, peer: str) -> None:
        self._net = net
        self._source = source
        self.peer = peer

    def send(self, header: bytes, body: Any = b"") -> None:
        body = b"".join(body) if type(body) is list else bytes(body)
        self._net.put(self._source, self.peer, (decode(header), body))


class SimNode:
    """What ``Relay`` and ``Caster`` use of a node."""

    def __init__(self, net: Net, ref: ProcRef) -> None:
        self.net = net
        self.id = ref.id
        self.ref = ref
        self.refs: dict[str, ProcRef] = {ref.id: ref}
        self.links: dict[str, Any] = {}
        self.deaths: dict[str, Death] = {}
        self.calls: dict[int, Any] = {}
        self.handlers: dict[type, Any] = {Reply: self._on_reply}
        self.on_peer_dead: list[Callable[[str, Death], None]] = []
        self.on_hello: list[Callable[[Any], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.gate: Any = None
        self.order_lock = threading.RLock()
        self.casts_to: dict[str, int] = {}
        self.directs_to: dict[str, int] = {}
        self.poller = self
        self._numbers = itertools.count(1)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.net.now + delay, callback)
        self.net.timers.append((self.id, timer))
        return timer

    def shielded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def learn(self, ref: ProcRef) -> None:
        self.refs.setdefault(ref.id, ref)

    def watch(self, procs: Any) -> None:
        """Nobody's death is told."""

    def link_to(self, proc: str) -> Any:
        if proc in self.deaths:
            return None
        if proc not in self.refs:
            raise LookupError(proc)
        link = self.links.get(proc)
        if link is None:
            link = self.links[proc] = SimLink(self.net, self.id, proc)
            if proc not in self.net.nodes and proc not in self.net.ranks:
                self.net.queue(proc, self.id).append(CLOSED)
        return link

    def send(self, proc: str, message: Any, body: Any = b"") -> bool:
        link = self.links.get(proc) or self.link_to(proc)
        if link is None:
            return False
        link.send(encode(message), body)
        return True

    def pack(self, body: Any, _buffers: Any, _receivers: Any) -> tuple[Any, None]:
        return body, None

    def new_call(self, sink: Any) -> int:
        number = next(self._numbers)
        self.calls[number] = sink
        return number

    def end_call(self, number: int) -> None:
        self.calls.pop(number, None)

    def _on_reply(self, _link: Any, reply: Reply, body: Any) -> None:
        sink = self.calls.get(reply.call)
        if sink is not None:
            sink.on_reply(reply.rank, reply.status, body, reply.buffers)

    def revive(self, agent: str) -> None:
        """Whoever was lost here stays lost."""

    def cut_off(self, proc: str, death: Death) -> None:
        """Only agents are told of here."""

    def declare_dead(self, proc: str, death: Death) -> None:
        if proc in self.deaths:
            return
        self.deaths[proc] = death
        self.links.pop(proc, None)
        for sink in list(self.calls.values()):
            sink.on_peer_dead(proc, death)
        for callback in self.on_peer_dead:
            callback(proc, death)

    def receive(self, peer: str, message: Any, body: bytes) -> None:
        link = self.links.get(peer)
        if link is None and peer not in self.deaths:  # they have connected to us
            link = self.links[peer] = SimLink(self.net, self.id, peer)
        if link is None:
            return
        if type(message) is Routed:
            self.gate(message, link, lambda: self.net.put(self.id, message.to, (message, body)))
        else:
            self.handlers[type(message)](link, message, body)


class Gathered:
    """A sink: the value of each rank, or the cause of its end."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.got: dict[int, Any] = {}
        self.relayed: frozenset[str] = frozenset()

    def on_replies(self, ranks: Any, statuses: bytes, bodies: Any, buffers: Any) -> None:
        assert not buffers
        for rank, status, body in zip(ranks, statuses or bytes(len(ranks)), bodies, strict=True):
            self.got.setdefault(rank, None if status == GONE else bytes(body))

    def on_gone(self, rank: int, death: Death) -> None:
        assert death.cause
        self.got.setdefault(rank, None)


class Net:
    """A source, agents with their ranks, and all that is on the way between them."""

    def __init__(self, hosts: int, ranks: int, fanout: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.timers: list[tuple[str, Timer]] = []
        self.channels: dict[tuple[str, str], deque[Any]] = {}
        self._busy: list[tuple[str, str]] = []  # channels that may hold something
        self.nodes: dict[str, SimNode] = {}
        self.ranks: dict[str, list[int]] = {}  # proc -> what it got
        self.relays: dict[str, Relay] = {}
        self.source = self._add("source")
        self.caster = Caster(self.source, fanout)
        self.procs: list[ProcRef] = []
        self.sent: dict[str, list[int]] = {}  # proc -> what was sent to it
        self.lost: set[str] = set()  # agents that the source takes for dead
        for host in range(hosts):
            agent = self._add(f"a{host}")
            self.relays[agent.id] = Relay(agent, lambda: self.now)
            for rank in range(ranks):
                self._add_rank(agent, f"a{host}r{rank}")
        self._numbers = itertools.count(1)
        self.sinks: list[tuple[tuple[ProcRef, ...], int, Gathered]] = []

    def _add(self, name: str) -> SimNode:
        node = self.nodes[name] = SimNode(self, ProcRef(name, "", name, name, "", name, name, f"ipc://{name}"))
        return node

    def _add_rank(self, agent: SimNode, name: str) -> None:
        ref = agent.ref.beside(name, "")
        agent.refs[name] = ref
        self.procs.append(ref)
        self.ranks[name] = []
        self.sent[name] = []

    # -- traffic ----------------------------------------------------------------------------------

    def queue(self, sender: str, receiver: str) -> deque[Any]:
        key = (sender, receiver)
        queue = self.channels.get(key)
        if queue is None:
            queue = self.channels[key] = deque()
        if not queue:
            self._busy.append(key)  # the caller is about to put something in
        return queue

    def _pick(self) -> tuple[str, str] | None:
        """A channel that holds something."""
        busy = self._busy
        while busy:
            at = self.random.randrange(len(busy))
            if self.channels[busy[at]]:
                return busy[at]
            busy[at] = busy[-1]
            busy.pop()
        return None

    def put(self, sender: str, receiver: str, item: Any) -> None:
        """Something is sent; to the dead it goes nowhere, and a connection that has ended takes nothing."""
        queue = self.queue(sender, receiver)
        alive = receiver in self.nodes or receiver in self.ranks
        if alive and not (queue and queue[-1] is CLOSED):
            queue.append(item)

    def step(self) -> bool:
        """One message or timer; False if there is none."""
        key = self._pick()
        if key is not None and (not self.timers or self.random.random() < 0.95):
            self._receive(*key, self.channels[key].popleft())
            return True
        self.timers = [(who, timer) for who, timer in self.timers if timer.callback and who in self.nodes]
        if not self.timers:
            if key is not None:
                return self.step()
            return False
        _, timer = min(self.timers, key=lambda item: item[1].due)
        self.now = timer.due
        callback, timer.callback = timer.callback, None
        assert callback is not None
        callback()
        return True

    def _receive(self, sender: str, receiver: str, item: Any) -> None:
        node = self.nodes.get(receiver)
        if item is CLOSED:
            if node is not None:
                if receiver == "source":
                    self.lost.add(sender)
                node.declare_dead(sender, Death("out of reach", "agent", sender))
        elif node is not None:
            node.receive(sender, *item)
        elif receiver in self.ranks:
            self._work(receiver, *item)

    def _work(self, proc: str, message: Any, body: bytes) -> None:
        """A rank gets a message."""
        self.ranks[proc].append(int(body))
        if type(message) is Call and message.call:
            answer = Reply(message.call, message.rank, 0)
            self.put(proc, next(ref.agent for ref in self.procs if ref.id == proc), (answer, body))

    def run(self) -> None:
        """Until nothing happens any more."""
        for _ in range(1_000_000):
            if not self.step():
                return
        raise AssertionError("it goes on for ever")

    # -- what the source does ---------------------------------------------------------------------

    def direct(self, ref: ProcRef) -> None:
        """One message for one rank, as a RemoteLink sends it."""
        source = self.source
        number = next(self._numbers)
        self.sent[ref.id].append(number)
        source.learn(ref.agent_ref())
        link = source.link_to(ref.agent)
        if link is None:
            return
        casts = source.casts_to.get(ref.agent, 0)
        source.directs_to[ref.agent] = source.directs_to.get(ref.agent, 0) + 1
        link.send(encode(Routed(ref.id, source.id, ref.agent, casts)), str(number).encode())

    def cast(self, procs: tuple[ProcRef, ...], answered: bool = True) -> Gathered | None:
        """One message for many."""
        plan = self.caster.plan(procs)
        if plan is not None:
            number = next(self._numbers)
            for agent in plan.group.members.values():
                for _, proc in agent:
                    self.sent[proc].append(number)
            sink = Gathered(len(plan.group.procs)) if answered else None
            call = Call("actor", "work", 7 if answered else 0, 0, (), (), "")
            self.caster.cast(plan.group, call, str(number).encode(), sink)
            if sink is not None:
                self.sinks.append((procs, number, sink))
        for _, ref in enumerate(procs) if plan is None else plan.near:
            self.direct(ref)
        return self.sinks[-1][2] if plan is not None and answered else None

    # -- what may happen --------------------------------------------------------------------------

    def kill_agent(self, name: str) -> None:
        """An agent ends, with its ranks. What it sent last may still arrive, in part."""
        node = self.nodes.pop(name)
        ranks = [ref.id for ref in self.procs if ref.agent == name]
        for rank in ranks:
            self.ranks.pop(rank, None)
        for (sender, receiver), queue in self.channels.items():
            if receiver == name or sender in ranks:
                queue.clear()
            elif sender == name:
                self._cut(queue)
        for other in [*node.links, *(peer for peer, n in self.nodes.items() if name in n.links), "source"]:
            queue = self.queue(name, other)
            if not (queue and queue[-1] is CLOSED):
                queue.append(CLOSED)

    def cut(self, a: str, b: str) -> None:
        """The connection between two agents is lost; both live on."""
        for sender, receiver in ((a, b), (b, a)):
            queue = self.queue(sender, receiver)
            self._cut(queue)
            queue.append(CLOSED)

    def _cut(self, queue: deque[Any]) -> None:
        for _ in range(self.random.randint(0, len(queue))):
            queue.pop()

    def kill_rank(self, proc: str) -> None:
        """A rank ends; its agent is told after its last answers."""
        if self.ranks.pop(proc, None) is None:
            return
        agent = next(ref.agent for ref in self.procs if ref.id == proc)
        self._cut(self.queue(proc, agent))
        self.queue(proc, agent).append(CLOSED)

    # -- what must be -----------------------------------------------------------------------------

    def check(self) -> None:
        """Every rank that lives got everything in order, once, and every cast was answered for all its ranks."""
        for ref in self.procs:
            got = self.ranks.get(ref.id)
            if got is None:
                continue
            if ref.agent in self.lost:  # alive, but the source could not know that
                assert got == sorted(set(got)), f"{ref.id} got {got}"
            else:
                assert got == self.sent[ref.id], f"{ref.id} got {got} instead of {self.sent[ref.id]}"
        for procs, number, sink in self.sinks:
            assert len(sink.got) == sink.ranks, f"cast {number} has {len(sink.got)} of {sink.ranks} answers"
            for rank, value in sink.got.items():
                ref = procs[rank]
                if value is None:
                    assert ref.id not in self.ranks or ref.agent in self.lost, f"{ref.id} lives"
                else:
                    assert value == str(number).encode()

    def check_forgotten(self) -> None:
        """Nobody keeps anything of casts that are over."""
        assert not self.caster._open
        for name, relay in self.relays.items():
            source = relay._sources.get("source")
            if name in self.nodes and source is not None and name not in self.lost:
                assert not source.casts, f"{name} keeps {list(source.casts)}"
            if name in self.nodes and name not in self.lost:
                assert not relay.node.calls
