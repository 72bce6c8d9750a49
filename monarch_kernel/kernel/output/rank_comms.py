"""Connect comms of ranks to the front end: forward messages in both directions.

The front end has one widget manager for the notebook's own widgets and those of all ranks, because a comm's id is
unique among all processes. Messages to the front end are sent on the polling thread, so that a widget arrives before
its view.

A reloaded page asks the kernel for the states of all widgets. The kernel keeps the states of ranks' widgets, because
ranks may be busy.
"""

from __future__ import annotations

import queue
import threading
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.kernel.rank import name_lookup
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import on_change
from monarch_kernel.output import RankOutput

#: The interval between two updates of a widget's state (seconds). Progress bars of many ranks would otherwise exceed
#: the limits of notebook servers.
PERIOD = 0.1
#: The time for a rank to handle a message (seconds).
ANSWER = 5.0

#: The target names of widget comms, and of the comms by which a page requests all widget states.
_WIDGET = "jupyter.widget"
_CONTROL = "jupyter.widget.control"
_MODEL = ("_model_name", "_model_module", "_model_module_version")


@dataclass(eq=False)
class _Proxy:
    """A rank's comm, as registered with ipykernel's comm manager."""

    comm_id: str
    target_name: str
    mesh: str
    rank: int
    parent: object
    received: Callable[[_Proxy, str, dict[str, object]], None]
    primary: bool = True
    state: dict[str, object] = field(default_factory=dict[str, object])
    buffers: dict[tuple[object, ...], bytes] = field(default_factory=dict[tuple[object, ...], bytes])
    _closed: bool = False

    def update(self, data: dict[str, Any], buffers: list[bytes]) -> None:
        """Update the stored widget state from a message."""
        state = data.get("state")
        if not isinstance(state, dict):
            return
        self.buffers = {path: each for path, each in self.buffers.items() if path[0] not in state}
        self.state |= state
        self.buffers |= {tuple(path): each for path, each in zip(data.get("buffer_paths") or (), buffers, strict=False)}

    def handle_msg(self, message: dict[str, object]) -> None:
        """Called by ipykernel for a message of the front end."""
        self.received(self, "comm_msg", message)

    def handle_close(self, message: dict[str, object]) -> None:
        """Called by ipykernel when the front end closes the comm."""
        self.received(self, "comm_close", message)

    def close(self, **_options: object) -> None:
        """Called by ipykernel for all comms as it ends."""


class RankComms:
    """The comms of all ranks.

    Args:
        kernel: the ipykernel.
        session: the meshes.
        parent_of: returns the header of a cell's request, by the cell's key; None if it is not known.
    """

    def __init__(self, kernel: Any, session: MeshSession, parent_of: Callable[[str], object]) -> None:
        self._kernel = kernel
        self._session = session
        self._parent_of = parent_of
        self._proxies: dict[str, _Proxy] = {}
        self._states: dict[str, dict[str, object]] = {}  # pending updates, under the lock
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._answers_pages = False
        self._unsubscribe = on_change(lambda: self._post(self._drop_ended) if self._proxies else None)

    def close(self) -> None:
        """Stop. Widgets stay as they are."""
        self._unsubscribe()
        if self._answers_pages:
            from ipywidgets import Widget

            self._kernel.comm_manager.register_target(_CONTROL, Widget.handle_control_comm_opened)
        for number in list(self._proxies):
            self._forget(number)
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(2)

    # -- from ranks ----------------------------------------------------------------------------

    def on_event(self, event: RankOutput) -> None:
        """Send a rank's message to the front end. Called on the thread that polls."""
        if event.kind != "comm":
            return
        message: dict[str, Any] = event.data
        number, kind = str(message["comm"]), str(message["type"])
        if kind == "comm_open":
            target = str(message.get("target_name") or "")
            proxy = _Proxy(number, target, event.mesh, event.rank, self._parent_of(event.cell), self._received)
            self._proxies[number] = proxy
            proxy.update(message.get("data") or {}, _buffers(message))
            self._kernel.comm_manager.register_comm(proxy)
            opened = {"target_name": target, "target_module": message.get("target_module")}
            self._send(proxy, kind, message, **opened)
            if target == _WIDGET and not self._answers_pages:
                self._answer_pages()
            return
        proxy = self._proxies.get(number)
        if proxy is None:
            return
        proxy.parent = self._parent_of(event.cell) or proxy.parent
        data = message.get("data") or {}
        proxy.update(data, _buffers(message))
        with self._lock:
            if kind == "comm_msg" and data.get("method") == "update" and not message["buffers"]:
                first = not self._states
                self._states.setdefault(number, {}).update(data.get("state") or {})
                if first:
                    self._post(self._send_states)
                return
            self._send_state(number, self._states.pop(number, None))
        self._send(proxy, kind, message)
        if kind == "comm_close":
            self._forget(number)

    def _send(self, proxy: _Proxy, kind: str, message: dict[str, Any], **keys: object) -> None:
        content = {"comm_id": proxy.comm_id, "data": message.get("data") or {}, **keys}
        kernel = self._kernel
        kernel.session.send(
            kernel.iopub_socket,
            kind,
            content,
            metadata=message.get("metadata") or {},
            parent=proxy.parent,
            ident=f"comm-{proxy.comm_id}".encode(),
            buffers=_buffers(message),
        )

    def _send_states(self) -> None:
        time.sleep(PERIOD)
        with self._lock:  # held until all are sent, so that a later state does not overtake one
            states, self._states = self._states, {}
            for number, state in states.items():
                self._send_state(number, state)

    def _send_state(self, number: str, state: dict[str, object] | None) -> None:
        proxy = self._proxies.get(number)
        if state is not None and proxy is not None:
            self._send(proxy, "comm_msg", {"data": {"method": "update", "state": state, "buffer_paths": []}})

    # -- to ranks ------------------------------------------------------------------------------

    def _received(self, proxy: _Proxy, kind: str, message: dict[str, Any]) -> None:
        content = dict(message.get("content") or {})
        buffers = [bytes(each) for each in message.get("buffers") or ()]
        proxy.update(dict(content.get("data") or {}), buffers)
        if kind == "comm_close":
            self._proxies.pop(proxy.comm_id, None)
        self._post(lambda: self._deliver(proxy, kind, content, buffers))

    def _deliver(self, proxy: _Proxy, kind: str, content: dict[str, object], buffers: list[bytes]) -> None:
        mesh = self._session.proc_meshes().get(proxy.mesh)
        if mesh is None:
            self._end(proxy)
            return
        args = (proxy.comm_id, kind, content, buffers)
        answers = ask(mesh, name_lookup.receive_comm, *args, ranks=[proxy.rank], timeout=ANSWER)
        if proxy.rank in answers.dead or answers.values.get(proxy.rank) is False:  # the rank has died, or is a new one
            self._end(proxy)

    # -- to a page that is loaded again --------------------------------------------------------

    def _answer_pages(self) -> None:
        """Answer requests for the states of all widgets. ipywidgets would answer only with the kernel's own widgets."""
        with suppress(ImportError):
            import ipywidgets  # registers its own handler, which is replaced below

            del ipywidgets
            self._kernel.comm_manager.register_target(_CONTROL, self._page_asks)
            self._answers_pages = True

    def _page_asks(self, comm: Any, _message: dict[str, object]) -> None:
        def answer(_request: dict[str, object]) -> None:
            data, buffers = self._all_states()
            comm.send(data, buffers=buffers)

        comm.on_msg(answer)

    def _all_states(self) -> tuple[dict[str, object], list[bytes]]:
        from ipywidgets import Widget

        states: dict[str, object] = {}
        buffers: dict[tuple[object, ...], bytes] = {}
        own: Any = Widget.get_manager_state()
        for model, each in own["state"].items():
            for buffer in each.pop("buffers", ()):
                buffers[model, "state", *buffer["path"]] = b64decode(buffer["data"])
            states[model] = each
        for model, proxy in list(self._proxies.items()):
            if proxy.target_name == _WIDGET:
                state = dict(proxy.state)
                states[model] = {name.removeprefix("_"): state.get(name, "") for name in _MODEL} | {"state": state}
                buffers |= {(model, "state", *path): each for path, each in proxy.buffers.items()}
        paths = [list(path) for path in buffers]
        return {"method": "update_states", "states": states, "buffer_paths": paths}, list(buffers.values())

    # -- the end -------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        meshes = self._session.proc_meshes()
        for proxy in list(self._proxies.values()):
            if proxy.mesh not in meshes:
                self._end(proxy)

    def _end(self, proxy: _Proxy) -> None:
        """Notify the front end that the comm is closed."""
        if self._forget(proxy.comm_id):
            self._send(proxy, "comm_close", {})

    def _forget(self, number: str) -> bool:
        self._kernel.comm_manager.comms.pop(number, None)
        with self._lock:
            self._states.pop(number, None)
        return self._proxies.pop(number, None) is not None

    # -- the thread ----------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-rank-comms", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # a mesh that has just ended, or a closed front end
                import logging

                logging.getLogger(__name__).debug("a message of a widget could not be passed on", exc_info=True)


def _buffers(message: dict[str, Any]) -> list[bytes]:
    return [b64decode(each) for each in message.get("buffers") or ()]
