"""Relay casts through host agents to their ranks and to other agents, and combine the replies.

A process that casts (the *source*) keeps one tree of all the agents it casts to. The agents in the tree forward a cast
to their children, deliver it to the addressed ranks of their own host, and send the replies up, several in one message.
An agent unpickles nothing.

For a live actor, no cast is lost, duplicated or reordered, because:

* An agent has one position in a source's tree, whatever group a cast belongs to. All casts of the source therefore
  reach it over one chain of links, and each link keeps their order. The agent's position changes only when its parent
  is lost; from then on its parent is the source itself.
* A source numbers its casts. It keeps each relayed cast until the whole branch has replied (or acknowledged, if no
  replies are wanted). When an agent loses its parent, the source first resends to it, in order, every such pending
  cast. Hence casts arrive in order on each link to an agent, and the casts that a new link skips at its start have been
  delivered. An agent therefore accepts a cast if its number is higher than that of all earlier ones and drops it as a
  duplicate otherwise; the sender does not matter.
* Replies are not lost with a relay: an agent below a relay keeps the replies that it has sent up until the source
  confirms that it has all of them. When it gets a duplicate cast from the source itself, it sends the kept replies and
  all later ones to the source. The source may receive a reply twice, and takes the first.
* An agent that cannot reach a child reports it to the source (``CastLost``) before it reports its branch complete. The
  source then sends to that child directly or, if it cannot reach it either, to that child's children.
* Single messages (``Routed``) take another path to the agent than relayed casts. Both are numbered: a message names the
  cast that must precede it, a cast the number of messages. ``Merge`` restores the order in which they were sent.
  Neither can wait for the other forever: each waits only for what was sent before it, which is on a live link or is
  resent. When the link between two sites is lost, both sides restart their counts.
* Casts wait for ranks that their source has just started, because the request to start them may arrive later.

After a source has ended, its earlier casts are still delivered for a while; then the relay drops its state.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.casts import (
    GONE,
    Cast,
    CastAnswers,
    CastBranch,
    CastDrop,
    CastGroup,
    CastLost,
    CastReplies,
    CastsOver,
)
from monarch_kernel.protocol.messages import (
    Call,
    Death,
    DeathKind,
    Message,
    ProcRef,
    Routed,
    decode,
    encode,
    encode_death,
)
from monarch_kernel.protocol.serialize import Apart, Body, padded
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.poller import Timer

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.node import Node

log = logging.getLogger(__name__)

#: How long replies wait to be merged with others: an eighth of their own latency, within these bounds (seconds).
FLUSH = 0.002
LONGEST_FLUSH = 0.05
#: Larger replies are sent immediately (bytes).
LARGE = 256 * 1024
#: How long casts of a process that has ended may still arrive (seconds).
FAREWELL = 10.0
#: How long a cast waits for ranks that are not known yet, and how often it checks (seconds).
UNKNOWN_TIMEOUT = 30.0
UNKNOWN_RETRY = 0.002


class Merge:
    """Delivers one source's casts and other messages to one site in the order in which they were sent.

    Attributes:
        cast: the number of the last delivered cast.
        directs: the number of other messages delivered.
    """

    __slots__ = ("_casts", "_directs", "_running", "cast", "directs")

    def __init__(self) -> None:
        self.cast = 0
        self.directs = 0
        self._casts: deque[tuple[int, int, Callable[[], bool], Callable[[], None]]] = deque()
        self._directs: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._running = False

    def add_direct(self, cast: int, deliver: Callable[[], None] | None) -> None:
        """Add a message that was sent after the cast of this number; None: it is only counted, and does not wait."""
        self._directs.append((cast, deliver))
        self.run()

    def add_cast(self, number: int, directs: int, ready: Callable[[], bool], deliver: Callable[[], None]) -> None:
        """Add a cast that was sent after ``directs`` messages; it also waits until it is ``ready``."""
        self._casts.append((number, directs, ready, deliver))
        self.run()

    def run(self) -> None:
        """Deliver everything that can be delivered now."""
        if self._running:
            return
        self._running = True
        try:
            while self._next_direct() or self._next_cast():
                pass
        finally:
            self._running = False

    def _next_direct(self) -> bool:
        if not self._directs:
            return False
        cast, deliver = self._directs[0]
        if deliver is not None and cast > self.cast:
            return False
        self._directs.popleft()
        self.directs += 1
        if deliver is not None:
            deliver()
        return True

    def _next_cast(self) -> bool:
        if not self._casts:
            return False
        number, directs, ready, deliver = self._casts[0]
        if directs > self.directs or not ready():
            return False
        self._casts.popleft()
        self.cast = number
        deliver()
        return True


class _Group:
    """A group at one agent: its local members, and the child agents to relay to."""

    __slots__ = ("children", "known", "looking", "procs", "ranks", "relays")

    def __init__(self, own: CastBranch, children: list[str], relays: bool) -> None:
        self.procs = own.procs
        self.ranks = own.ranks
        self.children = children
        self.relays = relays  # whether the source gave it children, which may have been lost since
        self.known = False  # whether all members are known
        self.looking = False  # whether a timer checks for unknown members


class _Source:
    """An agent's state of one process that casts to its site or through it."""

    __slots__ = ("accepted", "casts", "children", "groups", "id", "lost", "merge", "oldest", "parent", "told", "via")

    def __init__(self, source: str, via: str) -> None:
        self.id = source
        self.via = via  # the gateway of its site
        self.merge = Merge()
        self.groups: dict[int, _Group] = {}
        self.children: set[str] = set()
        self.accepted = 0
        self.oldest = 0  # all casts before this one are over
        self.casts: dict[int, _Share] = {}  # pending casts
        self.parent = source
        self.lost: set[str] = set()  # descendants that this agent, or one below it, cannot reach
        self.told: set[tuple[str, str]] = set()  # (parent, lost agent)

    def forget(self, number: int) -> None:
        """Drop a cast once the source has all replies. An incomplete one drops itself when it completes."""
        share = self.casts.get(number)
        if share is not None and share.complete:
            del self.casts[number]


class _Share:
    """One cast at one agent: the pending replies, and those not sent up yet. A sink for its ranks' replies."""

    __slots__ = (
        "_complete",
        "_kept",
        "_number",
        "_relay",
        "_started",
        "_timer",
        "_unsent",
        "cast",
        "children",
        "group",
        "open",
        "parent",
        "source",
        "waiting",
    )

    def __init__(self, relay: Relay, source: _Source, group: _Group, cast: Cast, parent: str) -> None:
        self._relay = relay
        self.source = source
        self.group = group
        self.cast = cast
        self.parent = parent
        self.open = True  # not delivered yet
        self.waiting: dict[int, str] = {}  # rank -> proc
        self.children: set[str] = set()
        self._unsent = CastAnswers()
        self._kept: list[tuple[CastReplies, Body]] = []
        self._complete = False
        self._timer: Timer | None = None
        self._number = 0
        self._started = relay.clock()

    # -- delivery ---------------------------------------------------------------------------------

    def deliver(self, body: Body) -> None:
        """Send the message to the addressed ranks of this host."""
        node = self._relay.node
        message: Any = decode(self.cast.header)  # any type that is addressed to a rank
        if self.cast.answered:
            self.waiting = dict(zip(self.group.ranks, self.group.procs, strict=True))
            self._number = message.call = node.new_call(self)
        if type(message) is Call and message.buffers:
            view = memoryview(body)
            at = padded(message.buffers)
            alive = [proc for proc in self.group.procs if proc not in node.deaths and proc in node.refs]
            body, message.segment = node.pack([view[:at], view[at:]], message.buffers, alive)
        for rank, proc in zip(self.group.ranks, self.group.procs, strict=True):
            link = node.links.get(proc) or self._relay.link_to(proc)
            if link is None:
                self._gone(rank, proc)
                continue
            message.rank = rank
            link.send(encode(message), body)
        self.open = False
        self.progress()

    def _gone(self, rank: int, proc: str) -> None:
        if self.waiting.pop(rank, None) is not None:
            unknown = Death.of(DeathKind.UNREACHABLE, "it is not known on its host", proc)
            death = self._relay.node.deaths.get(proc, unknown)
            self._unsent.add(rank, GONE, encode_death(death))

    # -- replies ----------------------------------------------------------------------------------

    def on_reply(self, rank: int, status: int, body: Body, buffers: tuple[int, ...]) -> None:
        """Handle the reply of a rank of this host."""
        if rank not in self.waiting:
            return
        if not buffers:
            self._unsent.add(rank, status, bytes(body))
        elif type(body) is Apart:
            try:
                pieces = [body.memory()[: padded(buffers)], body.pickled]
            except ConnectionError:  # the rank died after its reply, and its buffers with it
                self._gone(rank, self.waiting[rank])
                self.progress()
                return
            self._unsent.add_large(rank, status, pieces, buffers)
        else:
            self._unsent.add_large(rank, status, [body], buffers)
        del self.waiting[rank]
        self.progress()

    def on_peer_dead(self, proc: str, death: Death) -> None:
        """Add failures for the ranks of a dead process that have not replied."""
        ranks = [rank for rank, waiting in self.waiting.items() if waiting == proc]
        if not ranks:
            return
        told = encode_death(death)
        for rank in ranks:
            del self.waiting[rank]
            self._unsent.add(rank, GONE, told)
        self.progress()

    def on_branch(self, child: str, message: CastReplies, body: Body) -> None:
        """Handle replies from a child agent."""
        if child not in self.children:
            return
        self._unsent.extend(message, body)
        if message.complete:
            self.children.discard(child)
        self.progress()

    def progress(self) -> None:
        """Send the collected replies up, now or soon."""
        if self._complete:
            return
        if not (self.open or self.waiting or self.children):
            self._finish()
        elif self._unsent.nbytes > LARGE:
            self._send(False)
        elif len(self._unsent) and self._timer is None:
            age = self._relay.clock() - self._started
            self._timer = self._relay.node.poller.call_later(min(max(FLUSH, age / 8), LONGEST_FLUSH), self._flush)

    def _flush(self) -> None:
        self._timer = None
        if not self._complete and len(self._unsent):
            self._send(False)

    def _finish(self) -> None:
        self.end()
        if self.cast.answered or self.group.relays or self.parent != self.source.id:
            self._send(True)
        if self.parent == self.source.id or self.cast.number < self.source.oldest:
            self.source.casts.pop(self.cast.number, None)

    def _send(self, complete: bool) -> None:
        answers, self._unsent = self._unsent, CastAnswers()
        message = answers.message(self.source.id, self.cast.number, complete)
        body: Body = answers.bodies
        if self.parent != self.source.id:
            body = b"".join(body)
            self._kept.append((message, body))
        self._relay.send(self.parent, message, body)

    def move(self) -> None:
        """Make the source the parent after the loss of the old parent, and resend all replies that may be lost."""
        self.parent = self.source.id
        kept, self._kept = self._kept, []
        for message, body in kept:
            self._relay.send(self.parent, message, body)
        if self._complete:
            self.source.casts.pop(self.cast.number, None)

    def end(self) -> None:
        """Stop taking replies."""
        self._complete = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._number:
            self._relay.node.end_call(self._number)

    @property
    def complete(self) -> bool:
        """Whether all replies of this branch have been sent up."""
        return self._complete


class Relay:
    """Relays casts at one host agent.

    Args:
        node: the agent's node.
        clock: the time in seconds.
    """

    def __init__(self, node: Node, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = node
        self.clock = clock
        self._sources: dict[str, _Source] = {}
        node.handlers.update(
            {
                CastGroup: self._on_group,
                Cast: self._on_cast,
                CastReplies: self._on_replies,
                CastLost: self._on_lost,
                CastsOver: self._on_over,
                CastDrop: self._on_drop,
            }
        )
        node.gate = self._gate
        node.on_hello.append(self._on_hello)
        node.on_peer_dead.append(self._on_peer_dead)

    # -- sending ----------------------------------------------------------------------------------

    def send(self, peer: str, message: Message, body: Body = b"") -> bool:
        """Send to another process. Return False if it is dead or unknown."""
        try:
            return self.node.send(peer, message, body)
        except LookupError:
            return False

    def link_to(self, proc: str) -> PeerLink | None:
        """Return the link to a rank; None if it is dead or unknown."""
        try:
            return self.node.link_to(proc)
        except LookupError:
            return None

    # -- from above -------------------------------------------------------------------------------

    def _source(self, source: str, via: str) -> _Source:
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Source(source, via)
        return known

    def _gate(self, message: Routed, link: PeerLink, deliver: Callable[[], None]) -> None:
        """Deliver a single message to this site, in order with the source's casts."""
        if message.casts < 0:  # from a gateway, not from the source
            deliver()
            return
        merge = self._source(message.source, link.peer).merge
        if message.to == self.node.id:  # messages that set up casts must not wait for casts
            merge.add_direct(0, None)
            deliver()
        else:
            merge.add_direct(message.casts, deliver)

    def _on_group(self, link: PeerLink, message: CastGroup, _body: Body) -> None:
        ref: ProcRef = message.source
        if ref.gateway in self.node.deaths:
            return  # it has declared this agent dead; messages that still arrive through others have gaps
        source = self._source(ref.id, ref.gateway)
        source.parent = link.peer
        if message.group in source.groups:
            return
        node = self.node
        node.learn(ref)
        if not source.groups and ref.agent != ref.id:
            node.watch([ref.id])
        branches = message.branches
        if source.lost:  # the source routes to these through this agent, so it does not know that they are lost
            wanted = source.lost.intersection(branch.agent.id for branch in branches)
            source.told = {(parent, agent) for parent, agent in source.told if agent not in wanted}
        children: list[str] = []
        at = 1
        while at < len(branches):
            branch = branches[at : at + branches[at].size]
            at += len(branch)
            child = branch[0].agent
            if child.id not in source.lost:
                node.learn(child)
                children.append(child.id)
                for agent in source.lost.intersection(part.agent.id for part in branch):
                    self.send(child.id, CastLost(ref.id, agent))
                self.send(child.id, CastGroup(message.group, ref, branch))
        source.children.update(children)
        source.groups[message.group] = _Group(branches[0], children, len(branches) > 1)

    def _on_cast(self, link: PeerLink, message: Cast, body: Body) -> None:
        source = self._sources.get(message.source)
        group = source.groups.get(message.group) if source is not None else None
        if source is None or group is None:
            # The source was lost meanwhile and detects that itself; no agent on the path may wait for this one.
            link.send(encode(CastLost(message.source, self.node.id)))
            link.send(encode(CastReplies(message.source, message.number, True)))
            return
        parent = source.parent = link.peer
        self._forget(source, message)
        if message.number > source.accepted:
            source.accepted = message.number
            self._accept(source, group, message, body, parent)
            return
        share = source.casts.get(message.number)
        self._tell(source, parent)
        if share is not None and parent == source.id and share.parent != parent:
            share.move()

    def _accept(self, source: _Source, group: _Group, message: Cast, body: Body, parent: str) -> None:
        share = _Share(self, source, group, message, parent)
        source.casts[message.number] = share
        share.children.update(group.children)
        for child in list(group.children):
            if not self.send(child, message, body):
                self._lose(source, child)
        if source.lost:
            self._tell(source, parent)
        if not group.procs:
            share.open = False
            share.progress()
            return
        after = message.after.get(self.node.id, 0)
        source.merge.add_cast(message.number, after, lambda: self._ready(source, group), lambda: share.deliver(body))

    def _ready(self, source: _Source, group: _Group) -> bool:
        """Return whether all members are known; if not, the merge runs again once they are."""
        if group.known or group.looking:
            return group.known
        node = self.node
        deadline = self.clock() + UNKNOWN_TIMEOUT

        def known() -> bool:
            return all(proc in node.refs or proc in node.deaths for proc in group.procs)

        def look() -> None:
            if known() or self.clock() > deadline:
                group.known = True
                source.merge.run()
            elif self._sources.get(source.id) is source:
                node.poller.call_later(UNKNOWN_RETRY, look)

        group.known = known()
        if not group.known:
            group.looking = True
            node.poller.call_later(UNKNOWN_RETRY, look)
        return group.known

    def _forget(self, source: _Source, message: Cast) -> None:
        """Drop the replies that have reached the source."""
        source.oldest = max(source.oldest, message.oldest)
        for number in message.over:
            source.forget(number)
        if source.casts and next(iter(source.casts)) < source.oldest:
            for number in [number for number in source.casts if number < source.oldest]:
                source.forget(number)

    def _on_over(self, _link: PeerLink, message: CastsOver, _body: Body) -> None:
        source = self._sources.get(message.source)
        group = source.groups.get(message.group) if source is not None else None
        if source is None or group is None:
            return
        for number in message.numbers:
            source.forget(number)
        for child in group.children:
            self.send(child, message)

    def _on_drop(self, _link: PeerLink, message: CastDrop, _body: Body) -> None:
        source = self._sources.get(message.source)
        group = source.groups.pop(message.group, None) if source is not None else None
        if source is None or group is None:
            return
        for child in group.children:
            self.send(child, message)

    # -- from below -------------------------------------------------------------------------------

    def _on_replies(self, link: PeerLink, message: CastReplies, body: Body) -> None:
        source = self._sources.get(message.source)
        share = source.casts.get(message.number) if source is not None else None
        if share is not None:
            share.on_branch(link.peer, message, body)

    def _on_lost(self, link: PeerLink, message: CastLost, _body: Body) -> None:
        source = self._sources.get(message.source)
        if source is not None and link.peer in source.children:
            self._lose(source, message.agent)
            return
        # From the parent: the source has declared it dead.
        if source is None:
            ref = self.node.refs.get(message.source)
            source = self._source(message.source, ref.gateway if ref is not None else link.peer)
        self._lose(source, message.agent)
        for child in source.children - source.lost:
            self.send(child, message)

    def _tell(self, source: _Source, parent: str) -> None:
        """Report the descendants that this agent cannot reach."""
        for agent in sorted(source.lost):
            if (parent, agent) not in source.told:
                source.told.add((parent, agent))
                self.send(parent, CastLost(source.id, agent))

    def _tell_all(self, source: _Source) -> None:
        for parent in {source.parent, *(share.parent for share in source.casts.values())}:
            self._tell(source, parent)

    # -- deaths -----------------------------------------------------------------------------------

    def _on_hello(self, link: PeerLink) -> None:
        """Drop the sources behind a gateway that has connected anew: it restarts its counts."""
        for source in [source for source in self._sources.values() if source.via == link.peer]:
            self._drop(source)

    def _on_peer_dead(self, peer: str, _death: Death) -> None:
        for source in list(self._sources.values()):
            if peer == source.via:
                self._drop(source)
                if source.parent != source.id:  # no ancestor in the tree may wait for this agent
                    self.send(source.parent, CastLost(source.id, self.node.id))
            elif peer == source.id:
                self.node.poller.call_later(FAREWELL, lambda source=source: self._drop(source))
            elif peer in source.children:
                self._lose(source, peer)

    def _lose(self, source: _Source, agent: str) -> None:
        source.lost.add(agent)
        for group in source.groups.values():
            if agent in group.children:
                group.children.remove(agent)
        self._tell_all(source)
        for share in list(source.casts.values()):
            share.children.discard(agent)
            share.progress()

    def _drop(self, source: _Source) -> None:
        """Drop a source. Its descendants do so themselves, as the source may still reach them."""
        if self._sources.get(source.id) is not source:
            return
        del self._sources[source.id]
        for share in source.casts.values():
            share.end()
