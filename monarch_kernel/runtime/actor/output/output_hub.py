"""Output of ranks in the controller: decoded, labelled with its rank, and forwarded to subscribers or the terminal.

Host agents forward the raw bytes of each rank's pipes. The hub decodes them in order and labels them with mesh and
rank. Without a subscriber (in a plain script) whole lines go to this process's stdout and stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel import logs
from monarch_kernel.protocol.messages import Reply
from monarch_kernel.protocol.output_records import OutputDecoder, decode_answer
from monarch_kernel.runtime.actor.output.rank_output import RankOutput
from monarch_kernel.runtime.actor.output.terminal import NO_OPTION, LoggingOption, ScriptTerminal
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.node.future import CoroutineFuture, Future, nothing, resolved
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.subscriptions import Subscribers, Subscription

log = logs.logger(__name__)

#: Whether ``logging_option(stream_to_client=True)`` puts the rank in front of each line.
PREFIX_WITH_RANK = True


#: How long an answer waits for output (seconds).
OUTPUT_TIMEOUT = 0.5


class _Marks:
    """The marks of one proc."""

    __slots__ = ("both", "held", "late", "seen")

    def __init__(self) -> None:
        self.seen = [0, 0]  # the last mark on each pipe
        self.both = 0  # the last mark on stdout's pipe that has a counterpart on stderr's
        self.held: list[tuple[Reply, Any]] = []
        self.late = False  # output timed out, so answers do not wait until some arrives again

    @property
    def arrived(self) -> int:
        """The last mark before which all output has arrived."""
        return self.seen[0] if self.both <= self.seen[1] else self.both - 1


class AnswerGate:
    """Holds the answers of ranks until their earlier output has arrived. The polling thread calls all its methods.

    Output arrives through the host agents, while answers arrive directly and are usually faster. A rank that has
    written output ends it with a numbered mark in its pipe. Every answer names the last mark, and is held until that
    mark arrives, for at most ``OUTPUT_TIMEOUT``. Ranks without output have no mark, and their answers are not held.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._procs: dict[str, _Marks] = {}
        node.reply_gate = self

    def holds(self, proc: str, reply: Reply, body: Any) -> bool:
        """See ``ReplyGate``."""
        state = self._procs.setdefault(proc, _Marks())
        if reply.written <= state.arrived or state.late:
            return False
        number = reply.written
        state.held.append((reply, bytes(body) if isinstance(body, memoryview) else body))
        self._node.poller.call_later(OUTPUT_TIMEOUT, lambda: self._give_up(state, number))
        return True

    def mark(self, proc: str, stream: int, token: str) -> None:
        """Record a mark that has arrived, after the output before it was delivered."""
        number, both = decode_answer(token)
        if not number:
            return
        state = self._procs.setdefault(proc, _Marks())
        state.seen[stream - 1] = max(state.seen[stream - 1], number)
        if both:
            state.both = max(state.both, number)
        state.late = False
        if state.held:
            self._pass(state, state.arrived)

    def release(self, proc: str) -> None:
        """See ``ReplyGate``."""
        state = self._procs.pop(proc, None)
        if state is not None:
            self._pass(state, None)

    def _give_up(self, state: _Marks, number: int) -> None:
        if any(reply.written <= number for reply, _ in state.held):
            state.late = True
            self._pass(state, number)

    def _pass(self, state: _Marks, upto: int | None) -> None:
        held, state.held = state.held, []
        for reply, body in held:
            if upto is None or reply.written <= upto:
                self._node.settle(reply, body)
            else:
                state.held.append((reply, body))


class OutputHub:
    """Decodes the chunks that arrive, and forwards events to subscribers, or to the terminal."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._decoders: dict[tuple[str, int], OutputDecoder] = {}
        self._where: dict[str, tuple[str, str, int, dict[str, int], str]] = {}
        self.terminal = ScriptTerminal(system)
        self.options: dict[str, LoggingOption] = {}
        self._gate = AnswerGate(system.node)
        system.output_sinks.append(self.on_chunk)

    def on_chunk(self, proc: str, stream: int, data: bytes | None) -> None:
        """Take bytes from one pipe; None means that both pipes have ended."""
        if data is None:
            for fd in (1, 2):
                decoder = self._decoders.pop((proc, fd), None)
                if decoder is not None:
                    self._publish(proc, decoder.close())
            if not _subscribers:
                self.terminal.end(proc)
            return
        decoder = self._decoders.get((proc, stream))
        if decoder is None:
            decoder = self._decoders[proc, stream] = OutputDecoder("stdout" if stream == 1 else "stderr")
        events = decoder.feed(data)
        marks = [event for event in events if event.kind == "flush" and decode_answer(event.data)[0]]
        self._publish(proc, [event for event in events if event not in marks] if marks else events)
        for mark in marks:  # not output: a mark determines which answers may be delivered now
            self._gate.mark(proc, stream, mark.data)

    def _place(self, proc: str) -> tuple[str, str, int, dict[str, int], str]:
        place = self._where.get(proc)
        if place is None:
            uid, _, number = proc.rpartition(".")
            mesh = self._system.proc_meshes.get(uid)
            number = number.partition("~")[0]  # a successor has the same rank
            rank = int(number) if number.isdigit() else 0
            ref = self._system.node.refs.get(proc)
            host = ref.host if ref is not None else ""
            if mesh is None:
                return (uid, uid, rank, {}, host)
            place = self._where[proc] = (uid, mesh.name, rank, dict(mesh.extent.point(rank)), host)
        return place

    def _publish(self, proc: str, events: list[Any]) -> None:
        if not events:
            return
        uid, name, rank, coords, host = self._place(proc)
        pid = self._system.node.pids.get(proc, 0)
        for event in events:
            output = RankOutput(name, proc, rank, coords, host, pid, event.stream, event.cell, event.kind, event.data)
            if _subscribers:
                _subscribers.notify(output)
            else:
                self.terminal.show(output, self.options.get(uid, NO_OPTION))


_hub: OutputHub | None = None
#: The subscribers of all hubs that this process creates over time.
_subscribers: Subscribers[[RankOutput]] = Subscribers("an output subscriber")


def hub(system: System) -> OutputHub:
    """The output hub of this process's system."""
    global _hub
    if _hub is None or _hub._system is not system:
        _hub = OutputHub(system)
    return _hub


def subscribe(callback: Callable[[RankOutput], None]) -> Subscription:
    """Call ``callback(RankOutput)`` for all output of any rank of this controller.

    The polling thread calls it, in order for each rank: it must be quick, must not block, and must not raise. Does not
    start the runtime.

    Returns:
        The subscription; close (or call) it to unsubscribe.
    """
    return _subscribers.subscribe(callback)


def flush_default() -> None:
    """Show all output that the terminal still holds."""
    if _hub is not None and not _subscribers:
        _hub.terminal.close()
        _hub.terminal.flush()


def set_option(mesh: Any, stream_to_client: bool, window: float | None, level: int) -> CoroutineFuture[None]:
    """The implementation of ``ProcMesh.logging_option``."""
    system = get_system()
    output = hub(system)
    output.options[mesh._uid] = LoggingOption(stream_to_client and PREFIX_WITH_RANK, window)
    output.terminal.flush(mesh._uid)  # what was held for the old window is not held for the new one
    asked = mesh._ask_procs(lambda call, rank: _level_message(call, rank, level), "logging_option")
    return CoroutineFuture(asked.then(nothing))


class LoggingMeshClient:
    """The logging of one proc mesh, with the methods of Monarch's class: ``await LoggingMeshClient.spawn(...)``."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    @staticmethod
    def spawn(instance: Any, proc_mesh: Any) -> Future[LoggingMeshClient]:
        """The logging of a proc mesh; ``instance`` is not used."""
        return resolved(get_system().node.poller, "LoggingMeshClient.spawn", LoggingMeshClient(proc_mesh))

    def set_mode(self, instance: Any, stream_to_client: bool, aggregate_window_sec: int | None, level: int) -> None:
        """Do what ``ProcMesh.logging_option`` does, without waiting for it; ``instance`` is not used."""
        self._mesh.logging_option(stream_to_client, aggregate_window_sec, level)

    def flush(self, instance: Any) -> Future[None]:
        """Show all output that is held here; ``instance`` is not used."""
        flush_default()
        return resolved(get_system().node.poller, "LoggingMeshClient.flush", None)


def _level_message(call: int, rank: int, level: int) -> Any:
    from monarch_kernel.protocol.messages import SetLogLevel

    return SetLogLevel(call, rank, level)
