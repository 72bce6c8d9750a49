"""Closes a link gracefully: sends the queued messages first, then TLS's goodbye."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import Any

from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller
from monarch_kernel.runtime.node.tcp.channel import TlsChannel

#: How long the other side may take to read the sent data and to hang up in turn (seconds).
LINGER = 1.0


#: Closes in progress, by the poller that runs them.
_leaving: dict[Poller, set[GracefulClose]] = {}
os.register_at_fork(after_in_child=_leaving.clear)


class GracefulClose:
    """Sends the rest and the goodbye, and closes the channel once the other side has also hung up.

    It must not close earlier: a kernel that closes a connection with unread data discards sent data that is not
    delivered yet.

    Args:
        channel: the channel, which this takes over.
        rest: the data to send first.
    """

    def __init__(self, poller: Poller, channel: TlsChannel, rest: deque[Any]) -> None:
        self._poller = poller
        self.channel = channel
        self._rest = rest
        self.said = False
        self.done = False
        self._lock = threading.Lock()  # any thread may start a close
        with self._lock:
            if poller not in _leaving:
                _leaving[poller] = set()
                poller.at_close.append(lambda: finish(poller))
            _leaving[poller].add(self)
            self._timer = poller.call_later(LINGER, self.end)
            poller.register(channel.fileno(), self.go_on, EPOLLIN | EPOLLOUT)
        self.go_on(EPOLLOUT)

    def go_on(self, events: int) -> None:
        """Send and read as much as is possible now."""
        with self._lock:
            if self.done:
                return
            try:
                if not self.said:
                    self._send()
                over = bool(events & ~EPOLLOUT) and not self.channel.discard()
            except BlockingIOError:
                return
            except OSError:
                over = True
        if over:
            self.end()

    def _send(self) -> None:
        rest = self._rest
        while rest:
            try:
                sent = self.channel.sendmsg([rest[i] for i in range(min(len(rest), 64))])
            except BlockingIOError:
                return
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]
        if self.channel.say_goodbye():
            self.said = True
            self._poller.modify(self.channel.fileno(), EPOLLIN)

    def end(self) -> None:
        """Close the channel, even if not everything was sent."""
        with self._lock:
            if self.done:
                return
            self.done = True
            self._timer.cancel()
            _leaving.get(self._poller, set()).discard(self)
            self._poller.unregister(self.channel.fileno())
            self.channel.close()


def finish(poller: Poller) -> None:
    """Finish the closes of a poller that has ended, within ``LINGER``."""
    deadline = time.monotonic() + LINGER
    leaving = _leaving.pop(poller, set())
    while (waiting := {each.channel.fileno(): each for each in leaving if not each.done}) and (
        left := deadline - time.monotonic()
    ) > 0:
        polled = select.poll()
        for fd, each in waiting.items():
            polled.register(fd, select.POLLIN if each.said else select.POLLIN | select.POLLOUT)
        for fd, events in polled.poll(left * 1000):
            waiting[fd].go_on(events)
    for each in leaving:
        each.end()
