"""Output of ranks in the controller: decode it, label it with its rank, and forward it to subscribers or the terminal.

Host agents forward the raw bytes of each rank's pipes. The hub decodes them in order and labels them with mesh and
rank. Without a subscriber (in a plain script), whole lines go to this process's stdout and stderr. ``logs`` reads the
output that host agents have stored.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.messages import GetLogs, LogText, Reply
from monarch_kernel.protocol.output_records import OutputDecoder, decode_answer, plain_text
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.mesh.rankset import format_ranks
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.node.future import CoroutineFuture, Future, nothing, resolved
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Timer
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.wire_types import Body


#: Whether ``logging_option(stream_to_client=True)`` puts the rank in front of each line.
PREFIX_WITH_RANK = True
#: How long an answer waits for output (seconds).
OUTPUT_TIMEOUT = 0.5
#: The number of characters of a line that are kept until its end arrives.
LONGEST_LINE = 1_000_000


class RankOutput(msgspec.Struct, frozen=True):
    """One output of one rank; ``kind``, ``cell`` and ``data`` are as in ``protocol.output_records.OutputEvent``."""

    mesh: str
    proc: str
    rank: int
    coords: dict[str, int]
    host: str
    pid: int
    stream: str
    cell: str
    kind: str
    data: Any


class LoggingOption(msgspec.Struct):
    """The ``logging_option`` of one mesh."""

    prefix: bool = False
    window: float | None = None


NO_OPTION = LoggingOption()


class _Line(msgspec.Struct):
    """The beginning of a line whose end has not arrived."""

    parts: list[str] = msgspec.field(default_factory=list)
    size: int = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)


class ScriptTerminal:
    """Shows ranks' output on a script's stdout and stderr in whole lines; lines of megabytes are shown in pieces."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._partial: dict[tuple[str, str], _Line] = {}
        #: By mesh: the held lines of each stream, and the timer that shows them at the end of the window.
        self._held: dict[str, tuple[Timer, dict[str, dict[str, set[int]]]]] = {}
        self._prefixed: dict[str, tuple[int, LoggingOption]] = {}
        #: By stream: the proc whose unfinished line was shown last.
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()

    def show(self, output: RankOutput, option: LoggingOption) -> None:
        """Print the text of one event."""
        if output.kind == "text":
            text: str = output.data
        elif output.kind in ("display", "result"):
            text = (output.data.get("data") or {}).get("text/plain", "")
            text = text + "\n" if text else ""
        else:
            return
        key = (output.proc, output.stream)
        self._prefixed[output.proc] = (output.rank, option)
        lines, newline, rest = text.rpartition("\n")
        if newline:
            begun = self._partial.pop(key, None)
            if begun is not None:
                lines = "".join((*begun.parts, lines))
            self._lines(output, lines.split("\n"), option)
        if rest:
            line = self._partial.setdefault(key, _Line())
            line.add(rest)
            if line.size > LONGEST_LINE:
                del self._partial[key]
                self._lines(output, ["".join(line.parts)], option, end="" if option.window is None else "\n")

    def end(self, proc: str) -> None:
        """Show the last, unfinished lines of a proc that has ended."""
        rank, option = self._prefixed.get(proc, (0, NO_OPTION))
        for stream in ("stdout", "stderr"):
            begun = self._partial.pop((proc, stream), None)
            if begun is not None or self._open.get(stream) == proc:
                line = "".join(begun.parts) if begun is not None else ""
                self._lines(RankOutput("", proc, rank, {}, "", 0, stream, "", "text", ""), [line], option)

    def close(self) -> None:
        """Show all unfinished lines, as the script ends."""
        for proc in {proc for proc, _ in self._partial} | set(self._open.values()):
            self.end(proc)

    def _lines(self, output: RankOutput, lines: Sequence[str], option: LoggingOption, end: str = "\n") -> None:
        stream = output.stream
        if option.window is not None:
            uid = output.proc.rpartition(".")[0]
            with self._lock:
                if uid not in self._held:
                    timer = self._system.node.poller.call_later(option.window, lambda: self.flush(uid))
                    self._held[uid] = (timer, {})
                held = self._held[uid][1].setdefault(stream, {})
                for line in lines:
                    held.setdefault(line, set()).add(output.rank)
            return
        unfinished = self._open.pop(stream, None)
        if option.prefix:
            goes_on = unfinished == output.proc
            lines = [line if goes_on and k == 0 else f"[{output.rank}] {line}" for k, line in enumerate(lines)]
        if unfinished not in (None, output.proc):
            lines = ["", *lines]
        if not end:
            self._open[stream] = output.proc
        self._write(stream, lines, end)

    def flush(self, uid: str | None = None) -> None:
        """Show the lines held for aggregation: of one mesh, or of all."""
        with self._lock:
            wanted = [uid] if uid in self._held else [] if uid is not None else list(self._held)
            held = [self._held.pop(each) for each in wanted]
        for timer, streams in held:
            timer.cancel()
            for stream, lines in streams.items():
                self._write(stream, [f"[{format_ranks(ranks)}] {line}" for line, ranks in lines.items()])

    def _write(self, stream: str, lines: Sequence[str], end: str = "\n") -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write("\n".join(lines) + end)
            target.flush()
        except (OSError, ValueError):  # the script closed its stdout
            pass


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

    def holds(self, proc: str, reply: Reply, body: Body) -> bool:
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
        """Handle bytes from one pipe; None means that both pipes have ended."""
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
    """Return the output hub of this process's system."""
    global _hub
    if _hub is None or _hub._system is not system:
        _hub = OutputHub(system)
    return _hub


def subscribe(callback: Callable[[RankOutput], None]) -> Subscription:
    """Call ``callback(RankOutput)`` for all output of any rank of this controller.

    The polling thread calls it, in order for each rank. It must be fast, must not block, and must not raise. This
    function does not start the runtime.

    Returns:
        The subscription; close (or call) it to unsubscribe.
    """
    return _subscribers.subscribe(callback)


def has_subscribers() -> bool:
    """Return whether any callback takes output. If none does, the terminal shows that of this controller's ranks."""
    return bool(_subscribers)


def flush_default() -> None:
    """Show all output that the terminal still holds."""
    if _hub is not None and not _subscribers:
        _hub.terminal.close()
        _hub.terminal.flush()


def set_option(mesh: Any, stream_to_client: bool, window: float | None, level: int) -> CoroutineFuture[None]:
    """Return the implementation of ``ProcMesh.logging_option``."""
    system = get_system()
    output = hub(system)
    output.options[mesh._mesh_uid] = LoggingOption(stream_to_client and PREFIX_WITH_RANK, window)
    output.terminal.flush(mesh._mesh_uid)  # lines held for the old window are not held for the new one
    asked = mesh._ask_procs(lambda call, rank: _level_message(call, rank, level), "logging_option")
    return CoroutineFuture(asked.then(nothing))


class LoggingMeshClient:
    """The logging of one proc mesh, with the methods of Monarch's class: ``await LoggingMeshClient.spawn(...)``."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    @staticmethod
    def spawn(instance: object, proc_mesh: object) -> Future[LoggingMeshClient]:
        """Return the logging of a proc mesh; ``instance`` is not used."""
        return resolved(get_system().node.poller, "LoggingMeshClient.spawn", LoggingMeshClient(proc_mesh))

    def set_mode(self, instance: object, stream_to_client: bool, aggregate_window_sec: int | None, level: int) -> None:
        """Do the same as ``ProcMesh.logging_option``, without waiting for it; ``instance`` is not used."""
        self._mesh.logging_option(stream_to_client, aggregate_window_sec, level)

    def flush(self, instance: object) -> Future[None]:
        """Show all output that is held here; ``instance`` is not used."""
        flush_default()
        return resolved(get_system().node.poller, "LoggingMeshClient.flush", None)


def _level_message(call: int, rank: int, level: int) -> object:
    from monarch_kernel.protocol.messages import SetLogLevel

    return SetLogLevel(call, rank, level)


def logs(mesh: Any, ranks: Sequence[int] | None = None, tail: int | None = None) -> ValueMesh[str]:
    """Return the output of the ranks of a proc mesh (or slice) that their host agents have stored.

    Args:
        ranks: positions in the mesh; None for all.
        tail: the maximum number of lines from the end of each rank's output.
    """
    target = mesh._target()
    wanted = set(range(len(target.procs))) if ranks is None else set(ranks)
    asked = {ref.id for rank, ref in enumerate(target.procs) if rank in wanted}

    def question(call: int, procs: list[str]) -> GetLogs:
        return GetLogs(call, [proc for proc in procs if proc in asked], tail or 0)

    replies = mesh._ask_agents(question, "logs").get(30)
    texts: dict[str, str] = {}
    for reply in replies:
        for entry in msgspec.msgpack.decode(reply, type=list[LogText]):
            text = plain_text([(1, entry.stdout), (2, entry.stderr)])
            if entry.dropped:
                text = f"[the first {entry.dropped} bytes are gone: the log keeps only the newest output]\n" + text
            if tail:
                text = "".join(text.splitlines(keepends=True)[-tail:])
            texts[entry.proc] = text
    return ValueMesh(
        target.extent,
        [texts.get(ref.id, "") if rank in wanted else "" for rank, ref in enumerate(target.procs)],
    )
