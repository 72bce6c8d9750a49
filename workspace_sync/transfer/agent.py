"""Agents of hosts: actors that store trees for one client and pass blocks on. They are started at first use."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.introspection import ToolHost, spawn_tool
from monarch_kernel.rdma import configure
from workspace_sync.model.errors import SyncError
from workspace_sync.transfer.host_work import HostWork, SourceError
from workspace_sync.transfer.messages import Failed

log = logging.getLogger(__name__)

#: The number of threads that fetch blocks and store their content.
FETCHERS = 6

_Task = tuple[Any, Callable[..., Any], tuple[Any, ...]]


class SyncAgent(Actor):
    """The agent of one client on one host, in a separate process that ends with the client.

    Each request runs in a separate thread, so that the agent answers while it stages. Failures are also answers
    (``Failed``): an exception here is a bug in this package.

    Args:
        host: the name of its host.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, host: str) -> None:
        configure(allow_tcp_fallback=True)  # without RDMA hardware, bulk data between hosts uses TCP, without a warning
        self._work = HostWork(host)
        self._queue: queue.SimpleQueue[_Task] = queue.SimpleQueue()  # blocks: by a few threads that keep folders open
        self._threads = 0

    @endpoint(explicit_response_port=True)
    def work(self, port: Any, name: str, *args: Any) -> None:
        """Answer a request, which is a call of a method of ``HostWork``; "ping" is only answered."""
        if name in ("fetch", "begin_early", "stage", "rollback"):
            self._work.open_job(args[0])
        elif name == "abort":
            self._work.cancel_job(args[0])
        if name == "ping":
            port.send(None)
        elif name == "drop":
            port.send(self._work.drop(*args))
        elif name in ("fetch", "offer"):
            self._pass(port, getattr(self._work, name), *args)
        else:
            self._run(port, getattr(self._work, name), *args)

    def _pass(self, port: Any, work: Callable[..., Any], *args: Any) -> None:
        self._queue.put((port, work, args))
        if self._threads < FETCHERS:
            self._threads += 1
            threading.Thread(target=_serve, args=(self._queue,), name="sync blocks", daemon=True).start()

    def _run(self, port: Any, work: Callable[..., Any], *args: Any) -> None:
        threading.Thread(target=_answer, args=(port, work, args), name=f"sync {work.__name__}", daemon=True).start()


def _serve(tasks: queue.SimpleQueue[_Task]) -> None:
    while True:
        _answer(*tasks.get())


def _answer(port: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = work(*args)
    except SourceError as e:
        answer = Failed(type(e).__name__, str(e), source=True)
    except (SyncError, OSError, RuntimeError, ValueError) as e:
        answer = Failed(type(e).__name__, str(e) or type(e).__name__)
    except BaseException as e:
        text = "".join(traceback.format_exception(e)[-3:])
        answer = Failed(type(e).__name__, f"a fault of workspace sync itself:\n{text}")
    try:
        port.send(answer)
    except Exception as e:  # the client has ended, and this process ends with it
        log.info("an answer had no receiver any more: %r", e)


# -- agents of this client ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentLink:
    """The agent of one host.

    Attributes:
        host: its host.
        procs: its process.
        actor: the actor that receives requests.
    """

    host: ToolHost
    procs: Any
    actor: Any

    @property
    def alive(self) -> bool:
        """Whether its process has not ended, as far as this process knows."""
        return not self.procs._stopped and not self.procs.dead()


_lock = threading.Lock()
_agents: dict[str, AgentLink] = {}


def agents_of(hosts: Sequence[ToolHost]) -> list[AgentLink]:
    """Return the agents of some hosts. Missing agents are being started, and accept requests at once."""
    with _lock:
        for key in [key for key, link in _agents.items() if not link.alive]:
            del _agents[key]
        for host in hosts:
            if host.key not in _agents:
                procs = spawn_tool(host, "workspace_sync")
                _agents[host.key] = AgentLink(host, procs, procs.spawn("workspace_sync", SyncAgent, host.name))
        return [_agents[host.key] for host in hosts]
