"""Warn before the walltime of a job's hosts ends, while there is time to save work and to get other hosts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monarch_kernel.display.quantities import few
from monarch_kernel.launchers.base import HostStatus
from monarch_kernel.subscriptions import Subscribers

log = logging.getLogger(__name__)

#: Warnings that are due within this time, but at most this share of ``before``, are merged (seconds).
_TOGETHER, _PART = 30.0, 0.1
#: How long a warning waits for others, because hosts of one job come up one after the other (seconds).
_SETTLE = 1.0


@dataclass(frozen=True)
class WalltimeNotice:
    """The walltime of some hosts ends soon.

    Attributes:
        hosts: these hosts.
        ends_at: when the first of them ends (Unix time).
        renewed: whether replacement hosts are already waiting.
        reason: why not, if they were requested.
        job: the id of their job.
        engine: the name of its launcher.
        handled: whether the job has an ``on_walltime``, which is called with this notice.
    """

    hosts: tuple[HostStatus, ...]
    ends_at: float
    renewed: bool = False
    reason: str = ""
    job: str = ""
    engine: str = ""
    handled: bool = False

    def text(self, otherwise: str) -> str:
        """The notice in a sentence.

        Args:
            otherwise: the action to take if no other hosts were requested.
        """
        by_number = sorted(self.hosts, key=lambda each: each.host)
        names = few(list(dict.fromkeys(each.name or f"host {each.host}" for each in by_number)))
        when = time.strftime("%H:%M:%S", time.localtime(self.ends_at))
        left = max(0.0, self.ends_at - time.time())
        return f"the walltime of {names} ends in {left:.0f} s, at {when}: {self.then(otherwise)}"

    def then(self, otherwise: str) -> str:
        """Return the consequence, or the action to take; ``otherwise`` is as for ``text``."""
        if self.renewed:
            return "other hosts are up, and take over what heals"
        return f"there are no other hosts: {self.reason}" if self.reason else otherwise

    def __str__(self) -> str:
        return self.text("save what you need, or ask for other hosts with renew=True")


#: Notified of each notice of this process's jobs, on a separate thread, before the job's own ``on_walltime``.
news: Subscribers[[WalltimeNotice]] = Subscribers("a callback on the end of a walltime")


class WalltimeMonitor:
    """Calls ``warn`` once for each host, on a separate thread, some time before its walltime ends.

    Hosts that end at about the same time, such as those of one allocation, are reported together.

    Args:
        before: the time of the warning before the end (seconds).
        warn: called with the hosts whose walltime ends soon.
    """

    def __init__(self, before: float, warn: Callable[[tuple[HostStatus, ...]], None]) -> None:
        self._before = before
        self._warn = warn
        self._hosts: dict[int, HostStatus] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, hosts: Iterable[HostStatus]) -> None:
        """Add these hosts, except those with unknown walltime."""
        with self._changed:
            self._hosts.update({host.host: host for host in hosts if host.ends_at})
            if self._hosts and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="walltime", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, hosts: Iterable[int]) -> None:
        """Remove these hosts, because they were released."""
        with self._changed:
            for number in hosts:
                self._hosts.pop(number, None)

    def close(self) -> None:
        """Stop warning."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.time()
                first = min((host.ends_at for host in self._hosts.values()), default=now + self._before + 3600.0)
                if not self._closed and first - self._before > now:
                    self._changed.wait(first - self._before - now)
                    continue
                settled = time.monotonic() + _SETTLE
                while not self._closed and (left := settled - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._closed:
                    return
                last = time.time() + min(_TOGETHER, _PART * self._before)
                due = tuple(host for host in self._hosts.values() if host.ends_at - self._before <= last)
                if not due:  # they were released meanwhile
                    continue
                for host in due:
                    del self._hosts[host.host]
            try:
                self._warn(due)
            except Exception:  # an error in a callback of the program
                log.exception("a callback on the end of the walltime failed")
