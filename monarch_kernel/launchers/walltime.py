"""Warns before the walltime of a job's hosts ends, while there is time to save work and to get other hosts."""

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

#: Hosts that are to be warned of within this time, and this part of the time before, are told of together (seconds).
_TOGETHER, _PART = 30.0, 0.1
#: How long a warning waits for others, as hosts of one job come up one after the other (seconds).
_SETTLE = 1.0


@dataclass(frozen=True)
class WalltimeNotice:
    """The walltime of some hosts ends soon.

    Attributes:
        hosts: these hosts.
        ends_at: when the first of them ends (Unix time).
        renewed: whether hosts in their places wait already.
        reason: why not, if they were asked for.
        job: the id of their job.
        engine: the name of its launcher.
        handled: whether the job has an ``on_walltime``, which is called with it.
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
            otherwise: what to do if nobody has asked for other hosts.
        """
        by_number = sorted(self.hosts, key=lambda each: each.host)
        names = few(list(dict.fromkeys(each.name or f"host {each.host}" for each in by_number)))
        when = time.strftime("%H:%M:%S", time.localtime(self.ends_at))
        left = max(0.0, self.ends_at - time.time())
        return f"the walltime of {names} ends in {left:.0f} s, at {when}: {self.then(otherwise)}"

    def then(self, otherwise: str) -> str:
        """The consequence, or the action to take; ``otherwise`` as for ``text``."""
        if self.renewed:
            return "other hosts are up, and take over what heals"
        return f"there are no other hosts: {self.reason}" if self.reason else otherwise

    def __str__(self) -> str:
        return self.text("save what you need, or ask for other hosts with renew=True")


#: Notified of each notice of this process's jobs, on a thread of its own, before the job's own ``on_walltime``.
news: Subscribers[[WalltimeNotice]] = Subscribers("a callback on the end of a walltime")


class WalltimeMonitor:
    """Calls ``warn`` once for each host, on a separate thread, some time before its walltime ends.

    Hosts that end at about the same time are told of together: those of one allocation, say.

    Args:
        before: how long before (seconds).
        warn: gets the hosts whose time has come.
    """

    def __init__(self, before: float, warn: Callable[[tuple[HostStatus, ...]], None]) -> None:
        self._before = before
        self._warn = warn
        self._hosts: dict[int, HostStatus] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, hosts: Iterable[HostStatus]) -> None:
        """Watch these hosts, too, except those with unknown walltime."""
        with self._changed:
            self._hosts.update({host.host: host for host in hosts if host.ends_at})
            if self._hosts and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="walltime", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, hosts: Iterable[int]) -> None:
        """Watch these hosts no more, as they were given back."""
        with self._changed:
            for number in hosts:
                self._hosts.pop(number, None)

    def close(self) -> None:
        """Warn no more."""
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
                if not due:  # they were given back meanwhile
                    continue
                for host in due:
                    del self._hosts[host.host]
            try:
                self._warn(due)
            except Exception:  # a callback of the program's
                log.exception("a callback on the end of the walltime failed")
