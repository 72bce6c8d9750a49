"""Messages of ranks' widgets on their way to the front end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from monarch_kernel.kernel.output import rank_comms
from monarch_kernel.kernel.output.rank_comms import RankComms
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.output import RankOutput
from tests.waiting import patience

MODELS = tuple(f"model {number}" for number in range(30))


def event(model: str, kind: str, **content: Any) -> RankOutput:
    """A widget's message, as it comes from rank 0."""
    message = {"type": kind, "comm": model, "buffers": [], **content}
    return RankOutput("m", "m-0", 0, {"procs": 0}, "host", 7, "", "cell-1", "comm", message)


@dataclass
class FrontEnd:
    """A kernel whose front end keeps the value of each model, and says when all have the last one."""

    last: int
    iopub_socket: None = None
    values: dict[str, int] = field(default_factory=dict)
    comms: dict[str, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)

    @property
    def session(self) -> FrontEnd:
        return self

    @property
    def comm_manager(self) -> FrontEnd:
        return self

    def register_comm(self, comm: Any) -> None:
        self.comms[comm.comm_id] = comm

    def send(self, _socket: None, kind: str, content: dict[str, Any], **_keys: Any) -> None:
        if kind == "comm_msg":
            before, now = self.values.get(content["comm_id"], -1), content["data"]["state"]["value"]
            assert before < now, "an earlier state has overtaken a later one"
            self.values[content["comm_id"]] = now
            time.sleep(1e-5)  # lets the other thread run, as a send through a socket does
            if [*self.values.values()] == [self.last] * len(MODELS):
                self.complete.set()


def test_the_last_state_of_each_widget_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates come while others are sent: each model has its last value in the end, however they interleave."""
    monkeypatch.setattr(rank_comms, "PERIOD", 0)
    for _ in range(3):
        page = FrontEnd(last=19)
        kernel: Any = page
        comms = RankComms(kernel, MeshSession(), lambda _cell: None)
        for model in MODELS:
            comms.on_event(event(model, "comm_open", target_name="test"))
        for value in range(page.last + 1):
            for model in MODELS:
                comms.on_event(event(model, "comm_msg", data={"method": "update", "state": {"value": value}}))
                time.sleep(1e-5)
        assert page.complete.wait(patience(5)), page.values
        comms.close()
