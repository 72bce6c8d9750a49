"""The agent: the actor on each host that stores trees for one client, and passes blocks on to other hosts."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.rdma import RDMABuffer, configure
from workspace_sync.model.errors import SyncError
from workspace_sync.transfer.host_work import HostWork, SourceError
from workspace_sync.transfer.messages import Failed, StageRequest

log = logging.getLogger(__name__)

#: Threads that fetch blocks and store what is in them.
FETCHERS = 6

_Task = tuple[Any, Callable[..., Any], tuple[Any, ...]]


class SyncAgent(Actor):
    """One a host and client, in a process of its own that ends with the client.

    Each request runs on a thread of its own, so the agent answers while it stages. What goes wrong is an answer, too
    (``Failed``): an exception here is a fault of this package.

    Args:
        host: the name of its host.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, host: str) -> None:
        configure(allow_tcp_fallback=True)  # bulk data between hosts without RDMA cards goes by TCP, without a warning
        self._work = HostWork(host)
        self._queue: queue.SimpleQueue[_Task] = queue.SimpleQueue()  # blocks: by a few threads that keep folders open
        self._threads = 0

    @endpoint(explicit_response_port=True)
    def ping(self, port: Any) -> None:
        """Answer."""
        port.send(None)

    @endpoint(explicit_response_port=True)
    def describe(self, port: Any, workspace: str, kept: bool = False) -> None:
        """``HostWork.describe``."""
        self._run(port, self._work.describe, workspace, kept)

    @endpoint(explicit_response_port=True)
    def facts(self, port: Any, bases: list[str]) -> None:
        """``HostWork.facts``."""
        self._run(port, self._work.facts, bases)

    @endpoint(explicit_response_port=True)
    def fetch(
        self, port: Any, session: str, number: int, size: int, source: RDMABuffer, content: bool, early: bool
    ) -> None:
        """``HostWork.fetch``."""
        self._work.open_job(session)
        self._pass(port, self._work.fetch, session, number, size, source, content, early)

    @endpoint(explicit_response_port=True)
    def offer(self, port: Any, session: str, number: int) -> None:
        """``HostWork.offer``."""
        self._pass(port, self._work.offer, session, number)

    @endpoint(explicit_response_port=True)
    def drop(self, port: Any, session: str, numbers: list[int]) -> None:
        """``HostWork.drop``."""
        self._work.drop(session, numbers)
        port.send(None)

    @endpoint(explicit_response_port=True)
    def begin_early(self, port: Any, session: str, workspace: str, owner: str, wait: float, size: int) -> None:
        """``HostWork.begin_early``."""
        self._work.open_job(session)
        self._run(port, self._work.begin_early, session, workspace, owner, wait, size)

    @endpoint(explicit_response_port=True)
    def stage(self, port: Any, session: str, request: StageRequest) -> None:
        """``HostWork.stage``."""
        self._work.open_job(session)
        self._run(port, self._work.stage, session, request)

    @endpoint(explicit_response_port=True)
    def rollback(self, port: Any, session: str, workspace: str, owner: str, wait: float, steps: int, tree: str) -> None:
        """``HostWork.rollback``."""
        self._work.open_job(session)
        self._run(port, self._work.rollback, session, workspace, owner, wait, steps, tree)

    @endpoint(explicit_response_port=True)
    def condemn(self, port: Any, workspace: str, digest: bytes, why: str, owner: str, wait: float) -> None:
        """``HostWork.condemn``."""
        self._run(port, self._work.condemn, workspace, digest, why, owner, wait)

    @endpoint(explicit_response_port=True)
    def verify(self, port: Any, workspace: str) -> None:
        """``HostWork.verify``."""
        self._run(port, self._work.verify, workspace)

    @endpoint(explicit_response_port=True)
    def collect(self, port: Any, limit: int | None, kept: bool) -> None:
        """``HostWork.collect``."""
        self._run(port, self._work.collect, limit, kept)

    @endpoint(explicit_response_port=True)
    def forget(self, port: Any, workspace: str, owner: str, kept: bool, dry: bool) -> None:
        """``HostWork.forget``."""
        self._run(port, self._work.forget, workspace, owner, kept, dry)

    @endpoint(explicit_response_port=True)
    def finish(self, port: Any, session: str) -> None:
        """``HostWork.finish``."""
        self._run(port, self._work.finish, session)

    @endpoint(explicit_response_port=True)
    def commit(self, port: Any, session: str, workspace: str) -> None:
        """``HostWork.commit``."""
        self._run(port, self._work.commit, session, workspace)

    @endpoint(explicit_response_port=True)
    def abort(self, port: Any, session: str) -> None:
        """``HostWork.abort``."""
        self._work.cancel_job(session)
        self._run(port, self._work.abort, session)

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
