"""Select the stopped thread that a front end shows. The others wait in a queue.

JupyterLab shows one thread, the one in the last `stopped` event. It has no list of threads, and treats a `continued`
event of any thread as the end of the stop that it shows. It is therefore notified of one stop at a time, and the others
wait here. A front end with a list of threads (VS Code) is notified of every stop immediately, and keeps its focus
unless an event changes it.

The kernel's own threads and those of ranks share one queue. Pure: events in, events out.
"""

from __future__ import annotations

from collections.abc import Iterable

from monarch_kernel.debugger.dap.messages import Body, Event


class StopQueue:
    """The stopped threads by their ids: the one that is shown, and those that wait.

    Args:
        lists_threads: whether the front end has a list of threads.
    """

    def __init__(self, lists_threads: bool = False) -> None:
        self.lists_threads = lists_threads
        self.shown: int | None = None
        """The thread shown, which is stopped."""
        self.moving: int | None = None
        """The thread that was shown and is now stepping; it will be shown again."""
        self._stopped: dict[int, Body] = {}

    def __contains__(self, thread: int) -> bool:
        return thread in self._stopped

    @property
    def threads(self) -> list[int]:
        """Return the stopped threads: the shown one first, then the waiting ones in the order of their stops."""
        return sorted(self._stopped, key=lambda thread: thread != self.shown)

    def stopped(self, thread: int, body: Body) -> list[Event]:
        """Handle that a thread has stopped; `body` is the body of its `stopped` event."""
        self._stopped[thread] = {**body, "threadId": thread, "allThreadsStopped": False}
        returns = self.moving == thread
        if returns or (self.shown in (None, thread) and self.moving is None):
            self.moving = None
            return self._show(thread)
        if self.lists_threads:
            return [{"event": "stopped", "body": {**self._stopped[thread], "preserveFocusHint": True}}]
        return []

    def resumed(self, thread: int) -> list[Event]:
        """Handle that a thread runs again."""
        if self._stopped.pop(thread, None) is None:
            return []
        if self.shown != thread:
            return [_continued(thread)] if self.lists_threads else []
        self.shown = None
        if self.moving == thread:
            # What it showed stays on display until it stops again, so that stepping does not flicker.
            return [_continued(thread)] if self.lists_threads else []
        return [_continued(thread), *self._next()]

    def withdraw(self, threads: Iterable[int]) -> None:
        """Remove threads that are about to run together with the shown one, so that none of them is shown."""
        for thread in threads:
            if thread != self.shown:
                self._stopped.pop(thread, None)

    def gone(self, thread: int) -> list[Event]:
        """Handle that a thread has ended, stopped or not."""
        events = self.resumed(thread)
        if self.moving == thread:
            events += self.overdue()
        if self.lists_threads:
            events.append({"event": "thread", "body": {"reason": "exited", "threadId": thread}})
        return events

    def step(self, thread: int) -> None:
        """Record that the thread is about to step; it keeps the focus if it has it."""
        if self.shown == thread:
            self.moving = thread

    def hold(self) -> None:
        """Record that the step was rejected."""
        self.moving = None

    def overdue(self) -> list[Event]:
        """Show another thread, because the step takes long (for example in a collective that waits for other ranks)."""
        thread, self.moving = self.moving, None
        if thread is None or thread in self._stopped:
            return []
        return [*([] if self.lists_threads else [_continued(thread)]), *self._next()]

    def focus(self, thread: int) -> list[Event]:
        """Show this thread, which must be stopped."""
        self.moving = None
        return self._show(thread)

    def show_again(self) -> list[Event]:
        """Report all stops to a front end that has just connected."""
        events: list[Event] = []
        if self.shown is not None:
            events += self._show(self.shown)
        if self.lists_threads:
            others = [thread for thread in self._stopped if thread != self.shown]
            events += [
                {"event": "stopped", "body": {**self._stopped[each], "preserveFocusHint": True}} for each in others
            ]
        return events

    def _show(self, thread: int) -> list[Event]:
        self.shown = thread
        return [{"event": "stopped", "body": dict(self._stopped[thread])}]

    def _next(self) -> list[Event]:
        waiting = next(iter(self._stopped), None)
        if waiting is None:
            return []
        if self.lists_threads:  # the front end chooses
            self.shown = waiting
            return []
        return self._show(waiting)


def _continued(thread: int) -> Event:
    return {"event": "continued", "body": {"threadId": thread, "allThreadsContinued": False}}
