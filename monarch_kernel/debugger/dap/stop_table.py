"""Who is stopped, what a front end calls them, and which of them it is shown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from monarch_kernel.debugger.dap.id_table import FrameOf, Ids, RankThread, StopKey, ValueOf
from monarch_kernel.debugger.dap.stop_queue import Event, ShownStop
from monarch_kernel.debugger.dap.translate import RequestError
from monarch_kernel.debugger.events import RankStop
from monarch_kernel.debugger.frames import frames_of_an_ide

#: Meshes of more ranks than this are listed with their stopped ranks only.
MOST_THREADS = 64


class RankTable:
    """The stops of all ranks as a front end knows them. `RankSession` fills it; its lock guards all of it.

    Args:
        publish: takes an event; called on any thread, one at a time, and must not block.
        meshes: the proc meshes there are.
    """

    def __init__(self, publish: Callable[[Event], None], meshes: Callable[[], Iterable[Any]]) -> None:
        self._publish = publish
        self._meshes = meshes
        self._lock = threading.RLock()
        self._ids = Ids()
        self._queue = ShownStop()
        self._at: dict[StopKey, RankStop] = {}
        self._thread_of: dict[StopKey, int] = {}

    def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            self._publish({"type": "event", "seq": 0, **event})

    # -- what a request is about -------------------------------------------------------------------

    def _thread(self, arguments: Mapping[str, Any]) -> StopKey | None:
        """The stop that a request with a `threadId` is about."""
        asked = arguments.get("threadId")
        if isinstance(self._ids.thing(asked), RankThread):
            known = self._queue.lists_threads or int(asked or 0) in self._queue
            thread = asked if known else self._queue.shown
        elif self._queue.lists_threads:
            return None
        else:
            # JupyterLab says 1 where it means what it shows: up to 4.4.4 always, from 4.6.1 on to continue.
            thread = self._queue.shown
        return next((key for key, number in self._thread_of.items() if number == thread), None)

    def _frame(self, arguments: Mapping[str, Any]) -> FrameOf | None:
        number = arguments.get("frameId")
        frame = self._ids.thing(number)
        if isinstance(frame, FrameOf):
            return frame
        if number is None and self._shown_key() is not None:
            return FrameOf(self._shown_key() or ("", 0, 0), 0)
        return None

    def _shown_key(self) -> StopKey | None:
        return next((key for key, number in self._thread_of.items() if number == self._queue.shown), None)

    def _stop(self, key: StopKey | None) -> RankStop:
        with self._lock:
            at = self._at.get(key) if key is not None else None
        if at is None:
            raise RequestError("that rank is not stopped there any more")
        return at

    def _wanted_frame(self, arguments: Mapping[str, Any]) -> FrameOf:
        with self._lock:
            frame = self._frame(arguments)
        if frame is None:
            raise RequestError("that rank is not stopped there any more")
        return frame

    def _wanted_value(self, arguments: Mapping[str, Any]) -> ValueOf:
        with self._lock:
            value = self._ids.thing(arguments.get("variablesReference"))
        if not isinstance(value, ValueOf):
            raise RequestError("that value is no longer there: its rank has gone on")
        return value

    # -- which rank is shown ---------------------------------------------------------------------------

    def focus(self, rank: int, mesh: str | None = None) -> str:
        """Have the front end show a stopped rank; gives its name.

        Args:
            mesh: the name of its mesh; None where one mesh alone has such a rank stopped.

        Raises:
            RequestError: it is not stopped, or there are several.
        """
        with self._lock:
            stopped = [at for at in self._at.values() if mesh in (None, at.mesh)]
            found = [at for at in stopped if at.rank == rank]
            if not found:
                ranks = ", ".join(str(at.rank) for at in sorted(stopped, key=lambda at: at.rank)) or "none"
                raise RequestError(f"rank {rank} is not stopped, so it cannot be shown; stopped are: {ranks}")
            if len({at.mesh for at in found}) > 1:
                meshes = " and ".join(sorted({at.mesh for at in found}))
                raise RequestError(f"rank {rank} is stopped on {meshes}; say which mesh")
            # Of several threads of a rank, the next after the one that is shown.
            threads = [self._thread_of[at.key] for at in found]
            shown = self._queue.shown
            at = threads.index(shown) + 1 if shown is not None and shown in threads else 0
            self._ids.renew_frames(found[at % len(found)].key)
            self._send(self._queue.focus(threads[at % len(found)]))
            return self._rank_name(found[0].mesh, rank)

    # -- all ranks -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All ranks: `meshes`, each with its `name` and `ranks`; a rank's `state` is "stopped", "running" or "dead"."""
        with self._lock:
            shown = self._shown_key()
            by_rank: dict[tuple[str, int], list[RankStop]] = {}
            for at in self._at.values():
                by_rank.setdefault((at.mesh, at.rank), []).append(at)
            meshes: list[dict[str, Any]] = []
            for mesh in self._meshes():
                dead = mesh.dead()
                ranks = [
                    self._rank_state(mesh, rank, by_rank.get((mesh.name, rank), []), shown, dead.get(rank))
                    for rank in range(len(mesh))
                ]
                meshes.append({"name": mesh.name, "ranks": ranks})
            return {"meshes": meshes}

    def _rank_state(
        self, mesh: Any, rank: int, stops: list[RankStop], shown: StopKey | None, cause: str | None
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"rank": rank, "point": dict(mesh.extent.point(rank).items()), "state": "running"}
        if cause is not None:
            return {**told, "state": "dead", "cause": cause}
        if stops:
            told["state"] = "stopped"
            told["stops"] = [
                {
                    "thread": self._thread_of[at.key],
                    "reason": at.stop.reason,
                    "text": at.stop.text,
                    "since": at.stop.since,
                    "shown": at.key == shown,
                    "file": (frame := frames_of_an_ide(at.stop.frames)[0]).file,
                    "line": frame.line,
                    "name": frame.name,
                }
                for at in stops
                if at.stop.frames
            ]
        return told

    def threads(self) -> list[dict[str, Any]]:
        """The ranks as threads: those that are stopped, by where they are, and the others."""
        with self._lock:
            found: dict[int, str] = {}
            for mesh in self._meshes():
                if len(mesh) <= MOST_THREADS:
                    dead = mesh.dead()
                    for rank in range(len(mesh)):
                        if rank not in dead:
                            point = dict(mesh.extent.point(rank).items())
                            found[self._ids.thread(mesh.name, rank)] = self._thread_name(mesh.name, rank, point)
            for at in sorted(self._at.values(), key=lambda at: at.key):
                name = self._thread_name(at.mesh, at.rank, at.point)
                where = frames_of_an_ide(at.stop.frames)[0].name if at.stop.frames else at.stop.reason
                found[self._thread_of[at.key]] = f"{name}: {where}"
            return [{"id": number, "name": name} for number, name in found.items()]

    @property
    def stopped_threads(self) -> list[int]:
        """For `debugInfo`: what a front end that comes now is to show."""
        with self._lock:
            threads = self._queue.threads
            return threads if self._queue.lists_threads else threads[:1]

    def _thread_name(self, mesh: str, rank: int, point: Mapping[str, int]) -> str:
        at = ", ".join(f"{label}={place}" for label, place in point.items())
        return self._rank_name(mesh, rank) + (f" ({at})" if at else "")

    def _rank_name(self, mesh: str, rank: int) -> str:
        several = len({each.name for each in self._meshes()} | {key[0] for key in self._at}) > 1
        return f"{mesh} rank {rank}" if several else f"rank {rank}"
