"""Output of ranks, in the controller: who wrote what, given to whoever subscribed, or to the terminal.

Host agents forward the raw bytes of each rank's pipes; here they are decoded, in order, and labelled with the mesh
and rank. Without a subscriber (a plain script) whole lines go to this process's stdout and stderr.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from monarch_kernel.protocol.messages import GetLogs, LogText
from monarch_kernel.protocol.output_records import OutputDecoder, decode_answer, plain_text
from monarch_kernel.runtime.actor.output.answer_gate import AnswerGate
from monarch_kernel.runtime.actor.system import System, get_system
from monarch_kernel.runtime.mesh.rankset import format_ranks
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.node.future import Future

log = logging.getLogger(__name__)

#: Characters of a line that are kept until its end comes.
LONGEST_LINE = 1_000_000
#: Whether ``logging_option(stream_to_client=True)`` puts the rank in front of each line.
PREFIX_WITH_RANK = True


@dataclass(frozen=True, slots=True)
class RankOutput:
    """One output of one rank; ``kind``, ``cell`` and ``data`` as in ``protocol.output_records.OutputEvent``."""

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


Subscriber = Callable[[RankOutput], None]


@dataclass
class _Option:
    """What ``logging_option`` asked for one mesh."""

    prefix: bool = False
    window: float | None = None


class OutputHub:
    """Decodes the chunks that arrive and hands events to subscribers, or to the default sink."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._decoders: dict[tuple[str, int], OutputDecoder] = {}
        self._where: dict[str, tuple[str, str, int, dict[str, int], str]] = {}
        self.subscribers: list[Subscriber] = []
        self.terminal = Terminal(system)
        self.options: dict[str, _Option] = {}
        self._gate = AnswerGate(system.node)
        system.output_sinks.append(self.on_chunk)

    def on_chunk(self, proc: str, stream: int, data: bytes | None) -> None:
        """Bytes of one pipe; ``data`` None: both pipes have ended."""
        if data is None:
            for fd in (1, 2):
                decoder = self._decoders.pop((proc, fd), None)
                if decoder is not None:
                    self._publish(proc, decoder.close())
            if not self.subscribers:
                self.terminal.end(proc)
            return
        decoder = self._decoders.get((proc, stream))
        if decoder is None:
            decoder = self._decoders[proc, stream] = OutputDecoder("stdout" if stream == 1 else "stderr")
        events = decoder.feed(data)
        marks = [event for event in events if event.kind == "flush" and decode_answer(event.data)[0]]
        self._publish(proc, [event for event in events if event not in marks] if marks else events)
        for mark in marks:  # these are no output, but say which answers may now be handed on
            self._gate.mark(proc, stream, mark.data)

    def _place(self, proc: str) -> tuple[str, str, int, dict[str, int], str]:
        place = self._where.get(proc)
        if place is None:
            uid, _, number = proc.rpartition(".")
            mesh = self._system.proc_meshes.get(uid)
            number = number.partition("~")[0]  # a successor has its place
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
            if self.subscribers:
                for subscriber in tuple(self.subscribers):
                    try:
                        subscriber(output)
                    except Exception:
                        log.exception("an output subscriber failed")
            else:
                self.terminal.show(output, self.options.get(uid, _PLAIN))


_PLAIN = _Option()


@dataclass
class _Line:
    """The beginning of a line whose end has not come."""

    parts: list[str] = field(default_factory=list[str])
    size: int = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)


class Terminal:
    """Shows ranks' output in a script's own stdout and stderr, by whole lines; one of megabytes comes in pieces."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._partial: dict[tuple[str, str], _Line] = {}
        self._held: dict[tuple[str, str], dict[str, set[int]]] = {}
        self._prefixed: dict[str, tuple[int, _Option]] = {}
        #: By stream: whose line stands there without its end.
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()

    def show(self, output: RankOutput, option: _Option) -> None:
        """Print what is printable of one event."""
        if output.kind == "text":
            text: str = output.data
        elif output.kind in ("display", "result"):
            text = (output.data.get("data") or {}).get("text/plain", "")
            text = text + "\n" if text else ""
        elif output.kind == "error":
            text = "\n".join(output.data.get("traceback") or ()) + "\n"
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
        """The proc writes no more: show its last, unfinished lines."""
        rank, option = self._prefixed.get(proc, (0, _PLAIN))
        for stream in ("stdout", "stderr"):
            begun = self._partial.pop((proc, stream), None)
            if begun is not None or self._open.get(stream) == proc:
                line = "".join(begun.parts) if begun is not None else ""
                self._lines(RankOutput("", proc, rank, {}, "", 0, stream, "", "text", ""), [line], option)

    def close(self) -> None:
        """The script ends."""
        for proc in {proc for proc, _ in self._partial} | set(self._open.values()):
            self.end(proc)

    def _lines(self, output: RankOutput, lines: Sequence[str], option: _Option, end: str = "\n") -> None:
        stream = output.stream
        if option.window is not None:
            with self._lock:
                first = not self._held
                held = self._held.setdefault((output.mesh, stream), {})
                for line in lines:
                    held.setdefault(line, set()).add(output.rank)
            if first:
                self._system.node.poller.call_later(option.window, self.flush)
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

    def flush(self) -> None:
        """Show what is held for aggregation."""
        with self._lock:
            held, self._held = self._held, {}
        for (_, stream), lines in held.items():
            self._write(stream, [f"[{format_ranks(ranks)}] {line}" for line, ranks in lines.items()])

    def _write(self, stream: str, lines: Sequence[str], end: str = "\n") -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write("\n".join(lines) + end)
            target.flush()
        except (OSError, ValueError):  # the script closed its stdout
            pass


_hub: OutputHub | None = None
_waiting: list[Subscriber] = []


def hub(system: System) -> OutputHub:
    """The output hub of this process's system."""
    global _hub
    if _hub is None or _hub._system is not system:
        _hub = OutputHub(system)
        _hub.subscribers.extend(_waiting)
    return _hub


def subscribe(callback: Subscriber) -> Callable[[], None]:
    """Have ``callback(RankOutput)`` called for everything that any rank of this controller puts out.

    It is called in order for each rank, by whichever thread polls: it must be quick, must not block, and must not
    raise. Does not start the runtime.

    Returns:
        A function that ends the subscription.
    """
    _waiting.append(callback)
    if _hub is not None:
        _hub.subscribers.append(callback)

    def unsubscribe() -> None:
        for subscribers in (_waiting, _hub.subscribers if _hub is not None else []):
            if callback in subscribers:
                subscribers.remove(callback)

    return unsubscribe


def flush_default() -> None:
    """Show on the terminal whatever is still held back."""
    if _hub is not None and not _hub.subscribers:
        _hub.terminal.close()
        _hub.terminal.flush()


def set_option(mesh: Any, stream_to_client: bool, window: float | None, level: int) -> Future[None]:
    """What ``ProcMesh.logging_option`` does."""
    system = get_system()
    hub(system).options[mesh._uid] = _Option(stream_to_client and PREFIX_WITH_RANK, window)
    return mesh._ask_procs(lambda call, rank: _level_message(call, rank, level), "logging_option").then(lambda _v: None)


def _level_message(call: int, rank: int, level: int) -> Any:
    from monarch_kernel.protocol.messages import SetLogLevel

    return SetLogLevel(call, rank, level)


def logs(mesh: Any, ranks: Any = None, tail: int | None = None) -> ValueMesh[str]:
    """What the ranks of a proc mesh (or slice) have put out, as their host agents kept it.

    Args:
        ranks: positions in the mesh; None for all.
        tail: only so many lines from the end of each.
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
                text = f"[the first {entry.dropped} bytes are gone: the log keeps the newest only]\n" + text
            if tail:
                text = "".join(text.splitlines(keepends=True)[-tail:])
            texts[entry.proc] = text
    return ValueMesh(
        target.extent,
        [texts.get(ref.id, "") if rank in wanted else "" for rank, ref in enumerate(target.procs)],
    )
