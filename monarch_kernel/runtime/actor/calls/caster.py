"""Send casts to many hosts: groups of ranks, the tree of agents that relays casts to them, and open casts.

Ranks of this site receive each message directly. Ranks of other hosts are reached by a ``Caster``, which maintains one
tree of their host agents. This process sends a cast to up to 16 agents, which relay it to the others. The cost of a
cast in this process therefore grows with the fan-out and not with the number of ranks, apart from reading the answers.
``runtime.node.relay`` describes the agents, and why no message is lost, duplicated or reordered.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from monarch_kernel import environment
from monarch_kernel.protocol.casts import (
    Cast,
    CastBranch,
    CastDrop,
    CastGroup,
    CastLost,
    CastReplies,
    CastsOver,
    unpack,
)
from monarch_kernel.protocol.messages import Death, DeathKind, ProcRef, encode
from monarch_kernel.protocol.refs import lost_with
from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink, RankedMessage
from monarch_kernel.runtime.node.poller import Timer

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.node import Node

#: How many groups stay installed for further casts.
MAX_GROUPS = 64
#: Delay before agents are told to drop kept answers, if no further cast carries the request (seconds).
OVER_DELAY = 0.25

Members = list[tuple[int, str]]  # (rank, proc)


class CastSink(Protocol):
    """The destination of the answers to a cast.

    Attributes:
        relayed: procs whose agents answer for them; the sink ignores other reports of their deaths, as these may
            arrive before their last answers.
    """

    relayed: frozenset[str]

    def on_replies(
        self, ranks: Sequence[int], statuses: bytes, bodies: Sequence[Body], buffers: dict[int, Buffers]
    ) -> None:
        """Handle answers of several ranks. Some may be repeated; without ``statuses`` all are OK."""

    def on_gone(self, rank: int, death: Death) -> None:
        """Handle that a rank is gone: if it has not answered yet, it never will."""


class _Host:
    """The position of one agent in the tree."""

    __slots__ = ("children", "id", "lost", "parent", "ref")

    def __init__(self, ref: ProcRef, parent: _Host | None) -> None:
        self.id = ref.id
        self.ref = ref
        self.parent = parent  # None: this process
        self.children: list[_Host] = []
        self.lost: list[str] = []  # children that this process knows as dead: the agent must not wait for them

    @property
    def below(self) -> Iterator[_Host]:
        """This agent and all agents below it."""
        yield self
        for child in self.children:
            yield from child.below

    @property
    def top(self) -> _Host:
        """The agent that this process sends to directly in order to reach this one."""
        return self if self.parent is None else self.parent.top


class RankGroup:
    """Ranks of other hosts that receive the same casts.

    Attributes:
        number: the group's number at the agents; 0 if it is not installed at any of them.
        procs: all members.
        members: the members on living hosts, by agent.
        gone: the members on dead hosts, with the reference of each host.
        installed: the agents to which this process sent the group.
        over: casts that have ended, before the agents were notified.
        used: the number of its last cast.
        version: the version of the tree for which the following attributes are valid.
        path: the agents that have members, and the agents on the way to them.
        tops: the agents of ``path`` that this process sends to.
        deep: the agents with members that get casts from other agents.
    """

    __slots__ = (
        *("agents", "deep", "gone", "installed", "members", "number", "over", "path", "procs", "tops", "used"),
        "version",
    )

    def __init__(self, agents: dict[str, ProcRef], members: dict[str, Members]) -> None:
        self.agents = agents
        self.members = members
        self.procs = frozenset(proc for ranks in members.values() for _, proc in ranks)
        self.gone: list[tuple[ProcRef, Members]] = []
        self.number = 0
        self.installed: set[str] = set()
        self.over: list[int] = []
        self.used = 0
        self.version = -1
        self.path: set[str] = set()
        self.tops: list[_Host] = []
        self.deep: frozenset[str] = frozenset()


class CastPlan:
    """How a message reaches all ranks of a target.

    Attributes:
        near: the ranks that get a message each.
        group: the ranks that a cast reaches.
    """

    __slots__ = ("group", "near")

    def __init__(self, near: list[tuple[int, ProcRef]], group: RankGroup) -> None:
        self.near = near
        self.group = group


class _Record:
    """A cast that is not over.

    Attributes:
        pending: the agents to which this process sent it, and whose branches are not complete.
    """

    __slots__ = ("body", "group", "message", "pending", "sink")

    def __init__(self, group: RankGroup, message: Cast, body: Body, sink: CastSink | None) -> None:
        self.group = group
        self.message = message
        self.body = body
        self.sink = sink
        self.pending: set[str] = set()


class Caster:
    """The casts of a process to other hosts.

    Args:
        node: the node of this process.
        fanout: the maximum number of agents to which this process, and each agent, sends a cast (more only after the
            loss of a relay); the default comes from the environment.
    """

    def __init__(self, node: Node, fanout: int | None = None) -> None:
        self._node = node
        self._fanout = fanout if fanout is not None else environment.CAST_FANOUT.get()
        self._lock = node.order_lock
        self._hosts: dict[str, _Host] = {}
        self._tops: list[_Host] = []
        self._places: deque[_Host] = deque()  # agents that may take more children
        self._version = 0
        self._plans: dict[tuple[str, ...], CastPlan] = {}
        self._groups: dict[int, RankGroup] = {}  # installed groups
        self._group_numbers = itertools.count(1)
        self._numbers = itertools.count(1)
        self._open: dict[int, _Record] = {}  # by number, in increasing order
        self._told: dict[str, int] = {}  # the count of direct messages that each deep agent was last told to wait for
        self._over_timer: Timer | None = None
        self._lost: set[str] = set()  # agents that were lost once, and may be back
        # ranks lost with their hosts; reported after the lock is released
        self._cut_off: deque[tuple[str, ProcRef]] = deque()
        # for sinks; after the lock is released
        self._news: deque[tuple[CastSink, ProcRef, Members, Death | None]] = deque()
        node.handlers[CastReplies] = self._on_replies
        node.handlers[CastLost] = self._on_lost
        node.on_peer_dead.append(self._on_peer_dead)
        node.on_close.append(self._on_close)

    # -- groups -----------------------------------------------------------------------------------

    def plan(self, procs: tuple[ProcRef, ...]) -> CastPlan | None:
        """Plan a cast to these procs; None: each gets it directly. Equal targets share a plan while it is cached."""
        site = self._node.ref.site
        by_agent: dict[str, list[int]] = {}
        for rank, ref in enumerate(procs):
            if ref.site != site and ref.gateway == ref.agent:
                by_agent.setdefault(ref.agent, []).append(rank)
        if len(by_agent) <= self._fanout:  # no relay needed: a host with a single rank gains nothing from a cast
            by_agent = {agent: ranks for agent, ranks in by_agent.items() if len(ranks) > 1}
        if not by_agent:
            return None
        key = tuple(ref.id for ref in procs)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                members = {agent: [(rank, key[rank]) for rank in ranks] for agent, ranks in by_agent.items()}
                agents = {agent: procs[ranks[0]].agent_ref() for agent, ranks in by_agent.items()}
                group = RankGroup(agents, members)
                near = [(rank, ref) for rank, ref in enumerate(procs) if ref.id not in group.procs]
                plan = self._plans[key] = CastPlan(near, group)
            return plan

    def _prepare(self, group: RankGroup) -> None:
        """Assign a number to a group if it has none, and add its agents to the tree."""
        if not group.number:
            group.number = next(self._group_numbers)
            group.version = -1
            group.installed.clear()
            self._groups[group.number] = group
            for agent, ranks in group.members.items():
                if agent not in self._hosts:
                    if any(proc not in self._node.deaths for _, proc in ranks):
                        self._node.revive(agent)
                    self._add_host(group.agents[agent])
            if len(self._groups) > MAX_GROUPS:
                self._evict(group)
        if group.version != self._version:
            self._locate(group)

    def _evict(self, keep: RankGroup) -> None:
        """Drop the least recently used group."""
        busy = {record.group.number for record in self._open.values()} | {keep.number}
        idle = [group for number, group in self._groups.items() if number not in busy]
        if not idle:
            return
        oldest = min(idle, key=lambda group: group.used)
        del self._groups[oldest.number]
        self._plans = {key: plan for key, plan in self._plans.items() if plan.group is not oldest}
        drop = CastDrop(self._node.id, oldest.number)
        oldest.number = 0
        for agent in oldest.installed & self._hosts.keys():
            self._node.send(agent, drop)

    def _add_host(self, ref: ProcRef) -> None:
        parent = None
        # An agent that was lost before becomes a direct child: only then do both sides restart their counts.
        if len(self._tops) >= self._fanout and ref.id not in self._lost:
            while self._hosts.get((parent := self._places[0]).id) is not parent or (
                len(parent.children) >= self._fanout
            ):
                self._places.popleft()
        host = self._hosts[ref.id] = _Host(ref, parent)
        (self._tops if parent is None else parent.children).append(host)
        self._places.append(host)
        self._version += 1
        self._node.learn(ref)

    def _locate(self, group: RankGroup) -> None:
        path: set[str] = set()
        tops: list[_Host] = []
        for agent in group.members:
            host: _Host | None = self._hosts[agent]
            while host is not None and host.id not in path:
                path.add(host.id)
                if host.parent is None:
                    tops.append(host)
                host = host.parent
        group.path = path
        group.tops = tops
        group.deep = frozenset(agent for agent in group.members if self._hosts[agent].parent is not None)
        group.version = self._version

    def _branches(self, group: RankGroup, host: _Host) -> list[CastBranch]:
        """Return the part of the tree below an agent that leads to members, in depth-first order."""
        below: list[CastBranch] = []
        for child in host.children:
            if child.id in group.path:
                below += self._branches(group, child)
        ranks = group.members.get(host.id, [])
        own = CastBranch(host.ref, len(below) + 1, [proc for _, proc in ranks], [rank for rank, _ in ranks])
        return [own, *below]

    # -- casting ----------------------------------------------------------------------------------

    def cast(self, group: RankGroup, message: RankedMessage, body: Body, sink: CastSink | None) -> None:
        """Send a message to all members of a group.

        Args:
            message: its header; each rank gets it with its own ``rank``, and a ``call`` whose answer goes to its agent.
            body: bytes-like, or a list of pieces; the same for all ranks.
            sink: gets the answers; None if no call here waits for them.
        """
        node = self._node
        header = encode(message)
        if sink is not None:
            sink.relayed = group.procs
        # An interrupt halfway would leave a cast that some agents never get.
        with node.poller.shielded(), self._lock:
            for agent, ranks in group.gone if sink is not None else ():
                assert sink is not None
                self._news.append((sink, agent, ranks, None))
            self._prepare(group)
            number = group.used = next(self._numbers)
            after: dict[str, int] = {}
            if group.deep:
                if type(body) is list:  # the record keeps the body, and the caller may change its pieces
                    body = b"".join(body)
                after = self._after(group)
                node.casts_to.update(dict.fromkeys(group.deep, number))
            over, group.over = group.over, []
            oldest = next(iter(self._open), number)
            answered = sink is not None
            cast = Cast(group.number, node.id, number, header, answered, oldest, over, after)
            record = self._open[number] = _Record(group, cast, body, sink)
            tops = list(group.tops)
            record.pending = {top.id for top in tops if answered or self._is_relay(group, top)}
            for top in tops:
                self._send(record, top)
            if not group.deep:
                record.body = b""
            if not record.pending:
                self._open.pop(number, None)
        if self._news:
            self._tell_news()

    def _is_relay(self, group: RankGroup, host: _Host) -> bool:
        return any(child.id in group.path for child in host.children)

    def _after(self, group: RankGroup) -> dict[str, int]:
        """Return the changed counts of direct messages that deep agents must receive before they deliver a cast."""
        told, deep = self._told, group.deep
        news = {
            agent: count for agent, count in self._node.directs_to.items() if agent in deep and told.get(agent) != count
        }
        told.update(news)
        return news

    def _send(self, record: _Record, host: _Host) -> None:
        """Send a cast to an agent, now or again."""
        if host.id not in self._hosts:
            return
        group, node = record.group, self._node
        if host.id not in group.installed:
            group.installed.add(host.id)
            node.send(host.id, CastGroup(group.number, node.ref, self._branches(group, host)))
        if not node.send(host.id, record.message, record.body) and host.id in self._hosts:
            self._remove(host)

    # -- answers ----------------------------------------------------------------------------------

    def _on_replies(self, link: MessageLink, message: CastReplies, body: Body) -> None:
        record = self._open.get(message.number) if message.source == self._node.id else None
        if record is None:
            return
        if record.sink is not None and message.ranks:
            ranks, statuses, bodies = unpack(message, body)
            record.sink.on_replies(ranks, statuses, bodies, message.buffers)
        if message.complete:
            with self._lock:
                record.pending.discard(link.peer)
                if not record.pending:
                    self._finish(record)

    def _finish(self, record: _Record) -> None:
        if self._open.pop(record.message.number, None) is None or not record.group.deep:
            return
        record.group.over.append(record.message.number)
        if self._over_timer is None:
            self._over_timer = self._node.poller.call_later(OVER_DELAY, self._tell_over)

    def _tell_over(self) -> None:
        """Make agents drop the answers of casts that have ended."""
        with self._lock:
            self._over_timer = None
            for group in self._groups.values():
                if not group.over:
                    continue
                over, group.over = group.over, []
                for top in group.tops:
                    if top.id in self._hosts and self._is_relay(group, top):
                        self._node.send(top.id, CastsOver(self._node.id, group.number, over))

    # -- losses -----------------------------------------------------------------------------------

    def _on_lost(self, _link: MessageLink, message: CastLost, _body: Body) -> None:
        """An agent cannot reach another agent: from now on this process sends to that one directly."""
        with self._lock:
            host = self._hosts.get(message.agent)
            if host is None or host.parent is None:
                return
            affected = self._through(host)
            self._detach(host)
            self._adopt([host], affected)
        self._tell_news()

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        with self._lock:
            # Further messages to this proc use a new connection, and both ends restart their counts.
            self._node.casts_to.pop(proc, None)
            self._node.directs_to.pop(proc, None)
            self._told.pop(proc, None)
            host = self._hosts.get(proc)
            if host is None:
                return
            self._lost.add(proc)
            self._remove(host)
        self._tell_news()

    def _remove(self, host: _Host) -> None:
        """Remove a dead agent with its ranks; the agents below it get their casts from this process."""
        affected = self._through(host)
        top = host.top
        del self._hosts[host.id]
        self._detach(host)
        if host.parent is not None:
            host.parent.lost.append(host.id)
            self._node.send(top.id, CastLost(self._node.id, host.id))
        lost: dict[int, Members] = {}
        for number, group in self._groups.items():
            ranks = group.members.pop(host.id, None)
            if ranks is not None and host.id in group.installed:  # casts to them may have been lost
                self._cut_off += [(proc, host.ref) for _, proc in ranks]
            group.installed.discard(host.id)
            if ranks is not None:
                group.gone.append((host.ref, ranks))
                lost[number] = ranks
        for record in affected:
            ranks = lost.get(record.group.number)
            if ranks is not None and record.sink is not None:
                self._news.append((record.sink, host.ref, ranks, None))
        self._adopt(host.children, affected)
        for record in affected:
            record.pending.discard(host.id)
            if not record.pending:
                self._finish(record)

    def _detach(self, host: _Host) -> None:
        if host.parent is None:
            self._tops.remove(host)
        else:
            host.parent.children.remove(host)
            self._places.append(host.parent)

    def _through(self, host: _Host) -> list[_Record]:
        """Return the casts that still lack answers from this agent or those below it."""
        top = host.top.id
        return [record for record in self._open.values() if top in record.pending]

    def _adopt(self, hosts: list[_Host], affected: list[_Record]) -> None:
        """From now on, send casts directly to these agents, beginning with the affected ones."""
        for host in hosts:
            host.parent = None
            self._tops.append(host)
        self._version += 1
        again: list[tuple[_Record, _Host]] = []
        for record in affected:
            group = record.group
            if group.version != self._version:
                self._locate(group)
            for host in hosts:
                if host.id in group.path:
                    again.append((record, host))
                    if record.sink is not None or self._is_relay(group, host):
                        record.pending.add(host.id)
        # Only now, as sending may show that one of them is dead, too.
        for host in hosts:
            for lost in [lost for each in host.below for lost in each.lost]:
                self._node.send(host.id, CastLost(self._node.id, lost))
        for record, host in again:
            self._send(record, host)

    def _tell_news(self) -> None:
        """Report ranks that are gone with their hosts to the sinks; without the lock, as sinks may call anything."""
        while self._news:
            try:
                sink, agent, ranks, death = self._news.popleft()
            except IndexError:
                return
            for rank, proc in ranks:
                sink.on_gone(rank, death or self._death_of(proc, agent))
        while self._cut_off:
            proc, agent = self._cut_off.popleft()
            self._node.cut_off(proc, self._death_of(proc, agent))

    def _death_of(self, proc: str, agent: ProcRef) -> Death:
        deaths = self._node.deaths
        if proc in deaths:
            return deaths[proc]
        return lost_with(deaths.get(agent.id), proc, agent.host)

    def _on_close(self) -> None:
        """Fail all open casts, as this process shuts its runtime down."""
        gone = Death.of(DeathKind.LEFT, "this process has shut its runtime down")
        with self._lock:
            for record in self._open.values():
                if record.sink is not None:
                    for agent, ranks in record.group.members.items():
                        self._news.append((record.sink, record.group.agents[agent], ranks, gone))
            self._open.clear()
        self._tell_news()
