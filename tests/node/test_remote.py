"""Messages between sites: who passes them on, who learns of whom, and who is told that somebody is gone.

Nodes of three sites in one process, with real sockets between them. A worker's gateway is reached at an ``ipc://`` URL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.protocol.messages import (
    AgentLost,
    Death,
    OutputChunk,
    Ping,
    ProcExited,
    ProcRef,
    Reply,
    ReportProcs,
    Routed,
    encode,
)
from monarch_kernel.runtime.node import routing
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.link import Link
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.routing import RemoteLink
from tests.conftest import wait_until
from tests.waiting import patience


class Answer:
    """A sink that keeps what comes."""

    def __init__(self, node: Node, proc: str) -> None:
        self.node = node
        self.proc = proc
        self.number = node.new_call(self)
        self.bodies: list[bytes] = []
        self.future: Future[bytes] = Future(node.poller, "answer")

    def on_reply(self, _rank: int, _status: int, body: Any, _buffers: tuple[int, ...]) -> None:
        self.bodies.append(bytes(body))
        self.future._resolve(bytes(body))

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self.proc:
            self.future._reject(ConnectionError(f"{proc}: {death.cause}"))


class Net:
    """Some nodes of some sites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.got: dict[str, list[tuple[str, int, bytes]]] = {}

    def add(self, name: str, kind: str, host: str, **more: Any) -> Node:
        node = Node(f"{name}-{secrets.token_hex(3)}", kind, str(self.folder), host, **more)
        self.nodes.append(node)
        got = self.got[node.id] = []

        def on_output(link: Any, message: OutputChunk, body: Any) -> None:
            got.append((link.peer, message.stream, bytes(body)))

        def on_ping(link: Any, message: Ping, _body: Any) -> None:
            link.send(encode(Reply(message.call, message.rank, 0)), [node.id.encode(), b"!"])

        node.handlers[OutputChunk] = on_output
        node.handlers[Ping] = on_ping
        node.handlers[ReportProcs] = lambda _link, _message, _body: None
        node.listen()
        node.poller.start_background()
        return node

    def worker(self, host: str) -> Node:
        """The host agent of a site of its own."""
        agent = self.add(f"agent-{host}", "agent", host, site=host)
        url = f"ipc://{self.folder}/{host}"
        assert agent.listen_at(url) == url == agent.ref.gateway_address
        return agent

    def rank(self, name: str, agent: Node) -> Node:
        node = self.add(name, "rank", agent.ref.host, agent=agent.ref)
        node.refs[node.ref.gateway] = next(n.ref for n in self.nodes if n.id == node.ref.gateway)
        agent.learn(node.ref)
        return node

    def ask(self, asker: Node, proc: ProcRef) -> Answer:
        asker.learn(proc)
        answer = Answer(asker, proc.id)
        if not asker.send(proc.id, Ping(answer.number, 0)):
            answer.on_peer_dead(proc.id, asker.deaths[proc.id])
        return answer


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path)
    yield made
    for node in made.nodes:
        node.close()


def dial(node: Node, url: str, timeout: float = 10.0) -> ProcRef:
    future: Future[ProcRef] = Future(node.poller, "dial")

    def done(answer: ProcRef | Exception) -> None:
        if isinstance(answer, Exception):
            future._reject(answer)
        else:
            future._resolve(answer)

    node.dial(url, done, timeout)
    return future.get(timeout + 10)


@pytest.fixture
def sites(net: Net) -> dict[str, Node]:
    """A controller with an agent and a rank, and two workers ``b`` and ``c`` with a rank each; all is connected."""
    controller = net.add("controller", "controller", "a")
    local = net.add("agent-a", "agent", "a", gateway=controller.ref)
    nodes = {"controller": controller, "local": net.rank("local", local), "b": net.worker("b"), "c": net.worker("c")}
    for host in "bc":
        nodes["rank " + host] = net.rank("rank-" + host, nodes[host])
        dial(controller, nodes[host].ref.gateway_address)
    return nodes


PAIRS = [
    ("controller", "rank b"),
    ("rank b", "controller"),
    ("local", "rank c"),
    ("rank c", "local"),
    ("rank b", "rank c"),
    ("controller", "b"),
    ("b", "rank c"),
    ("rank b", "c"),
]


@pytest.mark.parametrize(("asker", "asked"), PAIRS)
def test_everybody_reaches_everybody(net: Net, sites: dict[str, Node], asker: str, asked: str) -> None:
    a, b = sites[asker], sites[asked]
    assert net.ask(a, b.ref).future.get(patience(10)) == f"{b.id}!".encode()
    # and back, by what the other one has learnt
    assert net.ask(b, a.ref).future.get(patience(10)) == f"{a.id}!".encode()


@pytest.mark.parametrize(("asker", "asked"), PAIRS)
def test_messages_keep_their_order_and_their_bytes(net: Net, sites: dict[str, Node], asker: str, asked: str) -> None:
    a, b = sites[asker], sites[asked]
    a.learn(b.ref)
    big = os.urandom(3_000_000)
    bodies = [b"", b"x" * 10, big, b"y", big[:70_000]]
    for k, body in enumerate(bodies):
        a.send(b.id, OutputChunk("p", k), body)
        a.send(b.id, OutputChunk("p", k), [body, b"tail"])
    net.ask(a, b.ref).future.get(patience(20))
    want = [(a.id, k, body + tail) for k, body in enumerate(bodies) for tail in (b"", b"tail")]
    assert net.got[b.id] == want


def test_only_gateways_are_connected(net: Net, sites: dict[str, Node]) -> None:
    a, b = sites["rank b"], sites["rank c"]
    net.ask(a, b.ref).future.get(patience(10))
    assert isinstance(a.links[b.id], RemoteLink)
    assert not isinstance(a.links[sites["b"].id], RemoteLink)
    assert type(sites["b"].links[sites["c"].id]) is Link
    # The controller has nothing to do with it.
    assert a.id not in sites["controller"].links


def test_a_dead_gateway_is_told_to_its_counterparts_sites(net: Net, sites: dict[str, Node]) -> None:
    for asker in ("controller", "local", "rank c"):
        net.ask(sites[asker], sites["rank b"].ref).future.get(patience(10))
    sites["rank b"].handlers[Ping] = lambda *_: None
    pending = {asker: net.ask(sites[asker], sites["rank b"].ref) for asker in ("controller", "local", "rank c")}
    sites["b"].close()
    for asker, answer in pending.items():
        with pytest.raises(ConnectionError, match=r"rank-b.*(died|ended|out of reach)"):
            answer.future.get(patience(10))
        assert sites["b"].id in sites[asker].deaths
        # What is sent afterwards fails at once.
        with pytest.raises(ConnectionError):
            net.ask(sites[asker], sites["rank b"].ref).future.get(1)
    # The others are as they were.
    assert net.ask(sites["local"], sites["rank c"].ref).future.get(patience(10))


def test_a_message_for_a_dead_proc_comes_back(net: Net, sites: dict[str, Node]) -> None:
    sites["b"].declare_dead(sites["rank b"].id, Death("killed by SIGKILL", "proc", sites["rank b"].id, "b", 7))
    for asker in ("controller", "local", "rank c"):
        with pytest.raises(ConnectionError, match="killed by SIGKILL"):
            net.ask(sites[asker], sites["rank b"].ref).future.get(patience(10))


def test_a_watched_proc_that_exits(net: Net, sites: dict[str, Node]) -> None:
    """Whoever makes a link to a proc of another site watches it."""
    watchers: list[tuple[str, list[str]]] = []
    sites["b"].handlers[ReportProcs] = lambda link, message, _body: watchers.append((link.peer, message.procs))
    asker = sites["rank c"]
    sites["rank b"].handlers[Ping] = lambda *_: None
    pending = net.ask(asker, sites["rank b"].ref)
    want = (asker.id, [sites["rank b"].id])
    wait_until(lambda: want in watchers, "the agent was asked to watch", 10)
    sites["b"].send(asker.id, ProcExited(sites["rank b"].id, 7, "b", -9, "killed by SIGKILL"))
    with pytest.raises(ConnectionError, match="killed by SIGKILL"):
        pending.future.get(patience(10))


def test_what_nobody_knows_comes_back(net: Net, sites: dict[str, Node]) -> None:
    where = {"id": "far", "site": "d", "agent": "gw", "gateway": "gw", "gateway_address": ""}
    nowhere = msgspec.structs.replace(sites["b"].ref, **where)
    for asker in ("controller", "rank c", "local"):
        with pytest.raises(ConnectionError, match="far: its host cannot be reached"):
            net.ask(sites[asker], nowhere).future.get(patience(10))


def test_a_gate_holds_messages_back(net: Net, sites: dict[str, Node]) -> None:
    held: list[Callable[[], None]] = []

    def gate(message: Routed, _link: Any, deliver: Callable[[], None]) -> None:
        if message.casts > 0:
            held.append(deliver)
        else:
            deliver()

    sites["b"].gate = gate
    controller, rank = sites["controller"], sites["rank b"]
    net.ask(controller, rank.ref).future.get(patience(10))
    before = controller.directs_to[sites["b"].id]
    controller.casts_to[sites["b"].id] = 1
    answer = net.ask(controller, rank.ref)
    wait_until(lambda: held, "the message is held back", 10)
    assert controller.directs_to[sites["b"].id] == before + 1
    assert not answer.future.done()
    held[0]()
    assert answer.future.get(patience(10))


# -- dialling --------------------------------------------------------------------------------------


def test_dialling_twice_gives_the_same_connection(net: Net, sites: dict[str, Node]) -> None:
    controller, agent = sites["controller"], sites["b"]
    link = controller.links[agent.id]
    assert dial(controller, agent.ref.gateway_address).id == agent.id
    assert controller.links[agent.id] is link


def test_nobody_there(net: Net) -> None:
    controller = net.add("controller", "controller", "a")
    with pytest.raises(ConnectionError, match=r"ipc://.*/nobody: no process listens there"):
        dial(controller, f"ipc://{net.folder}/nobody", 0.3)


def test_a_worker_that_comes_up_later_is_waited_for(net: Net) -> None:
    controller = net.add("controller", "controller", "a")
    future: Future[Any] = Future(controller.poller, "dial")
    controller.dial(f"ipc://{net.folder}/late", future._resolve, 10)
    late = net.worker("late")
    assert future.get(patience(10)).id == late.id


def test_a_refusal_that_comes_at_once_is_told_at_once(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the caller of dial() has its link, even: another thread may poll."""
    from monarch_kernel.runtime.node import tcp

    def dial_slowly(*args: Any) -> Any:
        link = real(*args)
        wait_until(lambda: link.closed, "it is refused")
        return link

    real = tcp.dial
    monkeypatch.setattr(tcp, "dial", dial_slowly)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    controller = net.add("controller", "controller", "a")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as sock, contextlib.suppress(ConnectionResetError):
                sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                sock.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        future: Future[Any] = Future(controller.poller, "dial")
        controller.dial(f"tcp://127.0.0.1:{server.getsockname()[1]}", future._resolve, 600)
        thread.join()
        assert isinstance(future.get(patience(10)), ConnectionError)


def test_no_key_no_tcp(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")  # where this user's own key cannot be made
    controller = net.add("controller", "controller", "a")
    with pytest.raises(ValueError, match=r"tcp://127.0.0.1:1 needs a key"):
        dial(controller, "tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"monarch-kernel keys FILE"):
        controller.listen_at("tcp://127.0.0.1:0")


def test_another_version_is_refused_and_both_are_named(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = net.worker("b")
    controller = net.add("controller", "controller", "a")
    ours = routing.WIRE_VERSION
    monkeypatch.setattr(routing, "WIRE_VERSION", 99)
    monkeypatch.setattr(routing, "OLDEST_WIRE", 99)
    said = rf"a speaks wire version 99 .*, b speaks {ours} .*: install the newer version on all hosts"
    with pytest.raises(ConnectionError, match=said):
        dial(controller, worker.ref.gateway_address)


def test_a_newer_version_that_understands_this_one_is_met(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = net.worker("b")
    controller = net.add("controller", "controller", "a")
    monkeypatch.setattr(routing, "WIRE_VERSION", 99)  # OLDEST_WIRE stays as it is
    assert dial(controller, worker.ref.gateway_address).host == "b"


def test_another_python_is_refused_and_both_are_named(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = net.worker("b")
    controller = net.add("controller", "controller", "a")
    hello = routing.make_hello

    def other(node: Node, answer: bool = False) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(routing, "PYTHON", "3.99")
            return hello(node, answer)

    monkeypatch.setattr(routing, "make_hello", other)
    with pytest.raises(ConnectionError, match=r"runs Python 3\.\d+, a runs Python 3.99: .*same Python"):
        dial(controller, worker.ref.gateway_address)


def test_a_controller_that_connects_anew_is_taken_for_a_new_one(net: Net, sites: dict[str, Node]) -> None:
    """Its old connection may look alive here, but its other end is gone."""
    controller, agent = sites["controller"], sites["b"]
    gone: list[str] = []
    agent.on_peer_dead.append(lambda proc, _death: gone.append(proc))
    controller.links.pop(agent.id)  # as if it had lost the connection, and the worker had not noticed
    assert dial(controller, agent.ref.gateway_address).id == agent.id
    assert gone == [controller.id]
    assert net.ask(controller, sites["b"].ref).future.get(patience(10))
    assert net.ask(sites["b"], controller.ref).future.get(patience(10))


def lose(sites: dict[str, Node]) -> None:
    """The connection between b and c is lost, and both sites know."""
    agent = sites["b"]
    sites["c"].links[agent.id].close()
    wait_until(lambda: agent.id in sites["rank c"].deaths, "the loss was told", 10)
    wait_until(lambda: sites["c"].id in agent.deaths, "the loss was noticed on the other side", 10)


def test_a_lost_gateway_is_tried_again_for_who_is_new(net: Net, sites: dict[str, Node]) -> None:
    asker, agent, old = sites["rank c"], sites["b"], sites["rank b"]
    net.ask(asker, old.ref).future.get(patience(10))
    lose(sites)
    new = net.rank("new", agent)
    assert net.ask(asker, new.ref).future.get(patience(10))
    with pytest.raises(ConnectionError):  # what was lost on the way there nobody knows
        net.ask(asker, old.ref).future.get(patience(10))
    assert net.ask(net.rank("other", sites["c"]), old.ref).future.get(patience(10))  # had never said anything to it


def test_nothing_follows_on_what_was_lost(net: Net, sites: dict[str, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not heard of the loss yet goes on sending, while others make a new connection."""
    slow, agent, old = sites["rank c"], sites["b"], sites["rank b"]
    net.ask(slow, old.ref).future.get(patience(10))
    quick = net.rank("quick", sites["c"])
    monkeypatch.setitem(slow.handlers, AgentLost, lambda *_: None)
    sites["c"].links[agent.id].close()
    wait_until(lambda: sites["c"].id in agent.deaths, "the loss was noticed on the other side", 10)
    new = net.rank("new", agent)
    assert net.ask(quick, new.ref).future.get(patience(10))  # there is a connection again
    with pytest.raises(ConnectionError, match="the connection to it was lost"):
        net.ask(slow, old.ref).future.get(patience(10))
    newer = net.rank("newer", agent)
    with pytest.raises(ConnectionError, match="the connection to it was lost"):
        net.ask(slow, newer.ref).future.get(patience(10))


def test_a_gateway_that_has_not_noticed_the_loss_learns_of_it(net: Net, sites: dict[str, Node]) -> None:
    """Otherwise it would go on sending through a connection at whose other end nobody is."""
    asker, agent, other = sites["rank c"], sites["b"], sites["c"]
    net.ask(asker, sites["rank b"].ref).future.get(patience(10))
    gone: list[str] = []
    agent.on_peer_dead.append(lambda proc, _death: gone.append(proc))
    agent.links[other.id].on_close = lambda _link: None  # b hears nothing of it
    other._agent_dead(agent.id, agent.ref, "silence")
    wait_until(lambda: agent.id in asker.deaths, "the loss was told", 10)
    assert not gone
    new = net.rank("new", agent)
    assert net.ask(asker, new.ref).future.get(patience(10))
    assert gone[0] == other.id
    assert net.ask(new, net.rank("newer", other).ref).future.get(patience(10))


def test_who_was_only_out_of_reach_can_begin_anew(net: Net, sites: dict[str, Node]) -> None:
    """Agents know ranks that talk to nobody else there; after a loss such a rank comes again, for one that is new."""
    asker, agent = sites["rank c"], sites["b"]
    net.ask(asker, agent.ref).future.get(patience(10))
    lose(sites)
    wait_until(lambda: asker.id in agent.deaths, "the asker was lost with its site", 10)
    assert net.ask(asker, net.rank("new", agent).ref).future.get(patience(10))
    assert net.ask(asker, agent.ref).future.get(patience(10))
    assert asker.id not in agent.deaths
