"""Facts from the debugger: where ranks are stopped, and hangs. The source never creates a debugger."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger import existing_debugger, on_made, on_verdict
from monarch_kernel.debugger.events import Event, Key, RankGone, RankResumed, RankStop, RankStopped
from monarch_kernel.debugger.frames import shown_frame
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import get_mesh
from monarch_kernel.subscriptions import Subscription
from monarch_kernel.watch.facts import FailureFact, MeshMark, StopFact
from monarch_kernel.watch.model import StopView
from monarch_kernel.watch.sources import Give

if TYPE_CHECKING:
    from monarch_kernel.debug import MeshDebugger
    from monarch_kernel.debugger.controller.hang.verdict import Verdict


def follow_debugger(give: Give) -> Callable[[], None]:
    """Start the source."""
    follower = _Follower(give)
    made = on_made.subscribe(follower.follow)
    verdicts = on_verdict.subscribe(_Hangs(give).on_verdict)
    debugger = existing_debugger()
    if debugger is not None:
        follower.follow(debugger)

    def end() -> None:
        made.close()
        verdicts.close()
        follower.close()

    return end


class _Follower:
    """Subscribes to the debugger. A rank may have several stopped threads; the first one is reported.

    The frames of an error (post mortem) hold no thread, so the rank is not stopped.
    """

    def __init__(self, give: Give) -> None:
        self._give = give
        self._subscription: Subscription | None = None
        self._stops: dict[Key, RankStop] = {}

    def follow(self, debugger: MeshDebugger) -> None:
        self.close()
        self._stops.clear()
        self._subscription = debugger.subscribe(self._on_event)
        for at in debugger.stops():
            self._on_event(RankStopped(at))

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RankStopped):
            if not event.at.stop.thread:
                return
            self._stops[event.at.key] = event.at
            self._tell(event.at.mesh, event.at.rank)
        elif isinstance(event, RankResumed):
            if self._stops.pop(event.key, None) is not None:
                self._tell(event.key[0], event.key[1])
        elif isinstance(event, RankGone):
            for key in [key for key in self._stops if key[:2] == (event.mesh, event.rank)]:
                del self._stops[key]
            self._tell(event.mesh, event.rank)

    def _tell(self, mesh: str, rank: int) -> None:
        try:
            key = whole_of(get_mesh(mesh)).uid
        except LookupError:
            return  # the mesh was stopped meanwhile
        at = next((at for at in self._stops.values() if (at.mesh, at.rank) == (mesh, rank)), None)
        if at is None:
            self._give(StopFact(key, rank, None))
            return
        stop = at.stop
        frame = shown_frame(stop.frames)
        view = StopView(stop.reason, text=stop.text)
        if frame is not None:
            view = StopView(stop.reason, frame.file, frame.line, frame.name, stop.text)
        self._give(StopFact(key, rank, view, stop.since))


class _Hangs:
    """Converts verdicts to facts.

    A mesh hangs if two verdicts in a row agree, because a single one may be premature.
    """

    def __init__(self, give: Give) -> None:
        self._give = give
        self._before: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def on_verdict(self, mesh: Any, verdict: Verdict) -> None:
        from monarch_kernel.debugger.controller.hang.verdict import NOTHING, PAUSED

        whole = whole_of(mesh)
        if len(whole.ranks) != len(whole.procs):
            return
        sentence = "" if verdict.kind in (NOTHING, PAUSED) else verdict.sentence
        if sentence and self._before.get(whole.uid) == sentence:
            self._give(MeshMark(whole.uid, {"hang": sentence}))
            if self._told.get(whole.uid) != sentence:
                self._give(FailureFact("hang", sentence, mesh=whole.uid))
            self._told[whole.uid] = sentence
        elif not sentence:
            self._told.pop(whole.uid, None)
            self._give(MeshMark(whole.uid, {"hang": ""}))
        self._before[whole.uid] = sentence
