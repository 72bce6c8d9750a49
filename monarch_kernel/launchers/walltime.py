"""Warns before the walltime of a job's hosts ends, while there is time to save work and to get other hosts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monarch_kernel.launchers.base import HostStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WalltimeNotice:
    """The walltime of some hosts ends soon.

    Attributes:
        hosts: these hosts.
        ends_at: when the first of them ends (Unix time).
        renewed: whether hosts in their places wait already.
        reason: why not, if they were asked for.
    """

    hosts: tuple[HostStatus, ...]
    ends_at: float
    renewed: bool = False
    reason: str = ""

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(host.name or f"host {host.host}" for host in self.hosts))
        when = time.strftime("%H:%M:%S", time.localtime(self.ends_at))
        if self.renewed:
            then = "other hosts are up, and take over what heals"
        elif self.reason:
            then = f"there are no other hosts: {self.reason}"
        else:
            then = "save what you need, or ask for other hosts with renew=True"
        left = max(0.0, self.ends_at - time.time())
        return f"the walltime of {names} ends in {left:.0f} s, at {when}: {then}"


class WalltimeWatch:
    """Calls ``warn`` once for each host, on a thread of its own, some time before its walltime ends.

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
        """Watch these hosts, too. Those whose walltime is not known are left out."""
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
                due = tuple(host for host in self._hosts.values() if host.ends_at - self._before <= now)
                if self._closed:
                    return
                if not due:
                    first = min((host.ends_at for host in self._hosts.values()), default=now + self._before + 3600.0)
                    self._changed.wait(first - self._before - now)
                    continue
                for host in due:
                    del self._hosts[host.host]
            try:
                self._warn(due)
            except Exception:  # a callback of the program's
                log.exception("a callback on the end of the walltime failed")
