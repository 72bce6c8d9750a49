"""A page that shows a kernel's meshes: what JupyterLab's panel does, without a browser."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from monarch_kernel.kernel.views import TARGET
from tests.kernel.harness import PATIENCE, Kernel

Message = dict[str, Any]


class Page:
    """A client of its own, whose comm has a subshell of its own, as in JupyterLab, or none, as in VS Code.

    Attributes:
        messages: all that the kernel has sent over the comm.
        statuses: the kernel's states (busy, idle) as all clients see them.
        busy_with: the requests with which the kernel has begun.
    """

    def __init__(self, kernel: Kernel, period: float = 0.2, subshell: bool = True) -> None:
        # Not the manager's client, which would share the identity of the test's own.
        self._client = BlockingKernelClient(connection_file=kernel.manager.connection_file)
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)
        self._subshell = kernel.control("create_subshell_request")["subshell_id"] if subshell else None
        self._comm = uuid.uuid4().hex
        self._is_widget = False
        self._count = 0
        self._period = period
        self._leased = 0.0
        self.messages: list[Message] = []
        self.statuses: list[str] = []
        self.busy_with: set[str] = set()
        self._send("comm_open", {"comm_id": self._comm, "target_name": TARGET, "data": {}})

    def _send(self, kind: str, content: Message) -> None:
        message = self._client.session.msg(kind, content)
        message["header"]["subshell_id"] = self._subshell
        self._client.shell_channel.send(message)

    def send(self, message: Message) -> None:
        """Send a message of the feed."""
        data = {"method": "custom", "content": message} if self._is_widget else message
        self._send("comm_msg", {"comm_id": self._comm, "data": data})

    def use_widget(self, model: str) -> None:
        """Speak over the comm of a widget from now on."""
        self._comm, self._is_widget = model, True

    def lease(self) -> None:
        """Renew the lease."""
        self._leased = time.monotonic()
        self.send({"kind": "lease", "period": self._period})

    def beside(self) -> None:
        """Send a message that concerns no view, on the same subshell."""
        self._send("comm_info_request", {})

    def close(self) -> None:
        """What a page that is closed may still send."""
        self._send("comm_close", {"comm_id": self._comm, "data": {}})
        self._client.stop_channels()

    def vanish(self) -> None:
        """End as a page whose computer sleeps: nothing is sent."""
        self._client.stop_channels()

    # -- what comes -------------------------------------------------------------------------------

    def read(self, timeout: float = PATIENCE) -> bool:
        """Take one message of the kernel; False if none comes."""
        if time.monotonic() - self._leased > 3:
            self.lease()
        try:
            message = self._client.get_iopub_msg(timeout=timeout)
        except queue.Empty:
            return False
        content = message["content"]
        if message["msg_type"] == "status":
            self.statuses.append(content["execution_state"])
            if content["execution_state"] == "busy":
                self.busy_with.add(message["parent_header"]["msg_id"])
        elif message["msg_type"] == "comm_msg" and content["comm_id"] == self._comm:
            assert not message["parent_header"], "views belong to no cell"
            data = content["data"]
            if not self._is_widget:
                self.messages.append(data)
            elif data.get("method") == "custom":
                self.messages.append(data["content"])
        return True

    def until(self, condition: Callable[[], Any]) -> Any:
        """Read until ``condition`` gives something; returns that."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {PATIENCE} s; so far: {self.messages[-5:]}"
            self.read(1.0)
        return found

    def of_kind(self, kind: str, begin: int = 0) -> list[Message]:
        """The messages of one kind."""
        return [message for message in self.messages[begin:] if message["kind"] == kind]

    def request(self, kind: str, what: str, mesh: str = "", ranks: tuple[int, ...] = (), **more: Any) -> Message:
        """Ask or do something; returns the answer."""
        self._count += 1
        number = str(self._count)
        self.send({"kind": kind, "id": number, "what": what, "mesh": mesh, "ranks": list(ranks), **more})
        return self.until(lambda: next((each for each in self.of_kind("answer") if each["id"] == number), None))

    def ask(self, what: str, mesh: str = "", ranks: tuple[int, ...] = (), **more: Any) -> Any:
        """The value of the answer."""
        answer = self.request("ask", what, mesh, ranks, **more)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def do(self, what: str, mesh: str = "", ranks: tuple[int, ...] = (), **more: Any) -> str:
        """What was done, in a sentence."""
        answer = self.request("do", what, mesh, ranks, **more)
        assert "error" not in answer, answer["error"]
        return str(answer["value"]["text"])

    # -- what a page would show ---------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Message], dict[str, dict[int, Message]]]:
        """Meshes by key, and ranks by key and rank, after all that has come."""
        meshes: dict[str, Message] = {}
        ranks: dict[str, dict[int, Message]] = {}
        version = 0
        for message in self.messages:
            if message["kind"] == "snapshot":
                meshes = {each["key"]: each for each in message["meshes"]}
                ranks = {key: {each["rank"]: dict(each) for each in all_} for key, all_ in message["ranks"].items()}
                version = message["version"]
            elif message["kind"] == "changes":
                assert message["base"] == version, "a gap"
                version = message["version"]
                meshes |= {each["key"]: each for each in message["meshes"]}
                for key, changed in message["ranks"].items():
                    for rank, fields in changed.items():
                        ranks.setdefault(key, {}).setdefault(int(rank), {}).update(fields)
                for key in message["gone"]["meshes"]:
                    meshes.pop(key, None)
                    ranks.pop(key, None)
        return meshes, ranks

    def key(self, name: str) -> str:
        """The key of the mesh of that name, once it is shown."""
        return str(
            self.until(lambda: next((key for key, mesh in self.state()[0].items() if mesh["name"] == name), None))
        )

    def rank(self, name: str, rank: int, **wanted: Any) -> Message:
        """A rank, once its fields are these."""
        key = self.key(name)

        def found() -> Message | None:
            one = self.state()[1].get(key, {}).get(rank, {})
            return one if all(one.get(field) == value for field, value in wanted.items()) else None

        return dict(self.until(found))
