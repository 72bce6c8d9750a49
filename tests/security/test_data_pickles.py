"""What a joined rank sends a viewer runs nothing there, unless it is a value that the viewer has asked for."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from monarch_kernel.actor import Extent, shutdown_context
from monarch_kernel.debugger.controller.hub_actor import DebugHub
from monarch_kernel.debugger.model.readings import Stats
from monarch_kernel.debugger.model.stops import Stack, StackFrame, StackSnapshot, Stop, StopFrame
from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.join.controller import JoinController, JoinedJob, LinkCarrier
from monarch_kernel.errors import KeptError, capture
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank.executor import CellExecutor, CellReply
from monarch_kernel.output import subscribe
from monarch_kernel.protocol.data_pickles import check_data, without_foreign_exceptions
from monarch_kernel.protocol.faults import Fault, encode_fault
from monarch_kernel.protocol.messages import ERROR, OK, Call, Create, OutputChunk, Reply
from monarch_kernel.protocol.serialize import dumps_flat
from monarch_kernel.runtime.actor.calls.pending import OneCall
from tests.waiting import wait_until
from workspace_sync.model.errors import SyncError
from workspace_sync.model.sync_report import SyncReport

T = TypeVar("T")
STACK = Stack("thread", "MainThread", (StackFrame(SourceLocation("/train.py", 7, "train", "user"), "step()"),))
DATA = [
    *(None, 1, 2.5, "text", b"bytes", True, (1, [2, {3: {4}}]), frozenset({1}), bytearray(b"x"), 1j, range(3)),
    *(collections.OrderedDict(a=1), collections.deque([1]), datetime.datetime(2026, 1, 1), datetime.timedelta(1)),
    (3, CellReply(0, b"any", True, "", "", capture(ValueError("x")), 0.1)),
    (0, {"stacks": [STACK]}),
]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.how = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


def sends(taken: str) -> dict[str, bytes]:
    """Pickles that make a file, or would be half of the way, by what they name."""
    name = taken.encode()
    return {
        "a function": pickle.dumps(Evil(os.mkdir, taken)),
        "a method": pickle.dumps(Evil(Path.touch, Path(taken))),
        "eval": pickle.dumps(Evil(eval, f"__import__('os').mkdir({taken!r})")),
        "within data": pickle.dumps([1, (2, {"x": Evil(os.mkdir, taken)})]),
        "a module of a module of ours": b"\x80\x04\x8c\x17monarch_kernel.programs\x8c\x08os.mkdir\x93\x8c"
        + bytes([len(name)])
        + name
        + b"\x85R.",
        "a function of ours": b"cmonarch_kernel.programs\nrun\n(]V" + b"touch\naV" + name + b"\natR.",
        "a module of old protocols": b"cos\nmkdir\n(V" + name + b"\ntR.",
        "INST": b"(V" + name + b"\nios\nmkdir\n.",
        "getattr": pickle.dumps(Evil(getattr, Path, "touch")),
        "a class of the standard library": pickle.dumps(Evil(Path, taken)),
        "a class that is no data": pickle.dumps(JoinController),
        "a persistent name": b"Pos.mkdir\n.",
    }


@pytest.mark.parametrize("data", DATA, ids=lambda data: type(data).__name__)
def test_data_is_taken(data: Any) -> None:
    check_data(dumps_flat(data))


@pytest.mark.parametrize("kind", [Stop, StopFrame, StackSnapshot, Stats, CellReply, SyncReport])
def test_classes_of_answers_hold_data(kind: type) -> None:
    check_data(pickle.dumps(kind))


@pytest.mark.parametrize("what", sends("x"))
def test_what_runs_something_is_refused(tmp_path: Path, what: str) -> None:
    taken = tmp_path / "taken"
    for exceptions in (False, True):
        with pytest.raises(pickle.UnpicklingError):
            check_data(sends(str(taken))[what], exceptions=exceptions)
    assert not taken.exists()


def test_exceptions_are_rebuilt_if_they_are_pythons_or_ours(tmp_path: Path) -> None:
    class Foreign(Exception):
        pass

    for error in (ValueError("x"), OSError(2, "no", "f"), KeptError("x"), SyncError("x")):
        assert type(without_foreign_exceptions(capture(error)).rebuild()) is type(error)
    assert without_foreign_exceptions(capture(Foreign("x"))).rebuild() is None
    taken = tmp_path / "taken"
    for pickled in sends(str(taken)).values():
        inner = Fault("builtins", "ValueError", "x", "ValueError: x", [], pickled=pickled)
        outer = Fault("builtins", "ValueError", "x", "ValueError: x", [], cause=inner, context=inner, members=[inner])
        found = without_foreign_exceptions(outer)
        for each in (found.cause, found.context, *found.members, without_foreign_exceptions(inner)):
            assert each is not None and each.pickled is None and each.summary == "ValueError: x"
    assert not taken.exists()


class Rank:
    """The connection to a rank that is attacked with: what the viewer sends, and what it makes of an answer."""

    def __init__(self) -> None:
        self.heard: list[tuple[wire.ToolMessage, bytes]] = []

    def send(self, *parts: bytes) -> None:
        message, body = wire.unpack(b"".join(parts))
        self.heard.append((message, bytes(body)))

    def close(self) -> None:
        pass

    def last(self, kind: type[T]) -> tuple[T, bytes]:
        """The last message of a kind."""
        return next((message, body) for message, body in reversed(self.heard) if isinstance(message, kind))


class Viewer:
    """A viewer that has joined a job of two ranks, which send what the test says."""

    def __init__(self) -> None:
        self.jobs = JoinController()
        self.ranks = [Rank(), Rank()]
        extent = Extent(("ranks",), (2,))
        self.procs = self.jobs.enter("m", extent, self._make, owned=False, timeout=60)
        self.cells: Any = self.procs.spawn("c", CellExecutor)

    def _make(self, first: wire.EnterRank) -> LinkCarrier:
        job = self.jobs._jobs[first.uid] = JoinedJob(self.jobs, "m")
        job.uid = first.uid
        job.carrier = LinkCarrier(dict(enumerate(self.ranks)))
        self.mesh = self.jobs._meshes[first.uid]
        for rank in range(2):
            self.jobs.on_entered(self.mesh, rank, "elsewhere", 1)
        return job.carrier

    def ask(self, endpoint: str, *args: Any) -> tuple[OneCall, int]:
        """Call the tool of rank 0; returns the call, and its number."""
        call = getattr(self.cells.slice(ranks=0), endpoint).call_one(*args)
        return call, self.ranks[0].last(Call)[0].call

    def get(self, rank: int, message: wire.ToolMessage, body: bytes) -> None:
        """Handle a message of a rank."""
        self.jobs.handle(self.mesh, rank, message, memoryview(body))


@pytest.fixture
def viewer() -> Iterator[Viewer]:
    made = Viewer()
    yield made
    made.jobs.close()
    shutdown_context().get(60)


CELL = Cell("1", "1", "<1>", "1")


def answered(call: OneCall) -> tuple[int, bytes]:
    """What a call was answered with."""
    return call._status, bytes(call._body)  # type: ignore[arg-type]


def test_nothing_of_a_rank_runs_in_a_viewer(viewer: Viewer, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    evil = pickle.dumps(Evil(os.mkdir, str(taken)))
    call, number = viewer.ask("run", CELL)
    viewer.get(0, Reply(number, 0, OK), dumps_flat((0, [STACK])))
    assert call.get(60) == (0, [STACK])
    call, number = viewer.ask("run", CELL)
    viewer.get(0, Reply(number, 0, OK), evil)
    assert answered(call)[0] == ERROR and b"is no data" in answered(call)[1]
    call, number = viewer.ask("run", CELL)
    fault = Fault("builtins", "ValueError", "x", "ValueError: x", [], pickled=evil)
    viewer.get(0, Reply(number, 0, ERROR), encode_fault(fault))
    assert answered(call)[0] == ERROR and evil not in answered(call)[1]
    # Values that the viewer has asked for are any objects, and only those.
    call, number = viewer.ask("pull", ["x"])
    viewer.get(0, Reply(number, 0, OK), evil)
    assert answered(call) == (OK, evil) and not taken.exists()


def test_a_rank_answers_its_own_calls_only(viewer: Viewer) -> None:
    call, number = viewer.ask("run", CELL)
    for rank, place in ((1, 0), (1, 1), (0, 1), (0, -1)):
        viewer.get(rank, Reply(number, place, OK), dumps_flat(None))
        assert not call.done()
    viewer.get(0, Reply(number, 0, OK, buffers=(1 << 40,)), dumps_flat(7))  # as if the body had none
    assert call.get(60) == 7
    viewer.get(0, Reply(number, 0, OK), dumps_flat(8))  # an answer to nothing


@pytest.mark.parametrize("number", [0, 7])
def test_a_rank_calls_what_it_may_call_with_data(viewer: Viewer, tmp_path: Path, number: int) -> None:
    taken = tmp_path / "taken"
    evil, fine = pickle.dumps(Evil(os.mkdir, str(taken))), dumps_flat(((), {}))
    viewer.jobs.controller_actor("hub", DebugHub, 60)
    actors = set(viewer.jobs.system.actors)
    call = Call("hub", "stopped", number, 0, (), (), "")
    refused = [
        (call, evil),
        (Call("controllers", "get", number, 0, (), (), ""), fine),
        (Call("hub", "changed", number, 0, (), (), "", reply_to=viewer.jobs.system.node.ref), fine),
        (Create("new", "new", number, 0, (), (), "", viewer.jobs.system.node.ref), evil),
    ]
    for message, body in refused:
        viewer.ranks[0].heard.clear()
        viewer.get(0, message, body)
        if isinstance(message, Call):
            assert viewer.ranks[0].last(Reply)[0].status == ERROR
    assert set(viewer.jobs.system.actors) == actors and not taken.exists()


@pytest.mark.parametrize("endpoint", ["stopped", "vote", "hold", "stopped!port", "__init__", "_answer"])
def test_a_rank_ends_no_actor_with_a_wrong_call(viewer: Viewer, endpoint: str) -> None:
    viewer.jobs.controller_actor("hub", DebugHub, 60)
    for number in (0, 7):
        viewer.get(0, Call("hub", endpoint, number, 0, (), (), ""), dumps_flat((("wrong", [], {}), {})))
    viewer.get(0, Call("hub", "changed", 8, 0, (), (), ""), dumps_flat(((), {})))
    wait_until(lambda: any(type(each) is Reply and each.call == 8 for each, _ in viewer.ranks[0].heard), "it answers")
    statuses = {each.call: each.status for each, _ in viewer.ranks[0].heard if type(each) is Reply}
    assert (statuses[7], statuses[8]) == (ERROR, OK)


def test_output_of_a_rank_is_kept_and_goes_to_subscribers_only(
    viewer: Viewer, capsys: pytest.CaptureFixture[str]
) -> None:
    viewer.get(0, OutputChunk("", 1), b"kept\n")
    seen: list[tuple[str, int, str]] = []
    with subscribe(lambda out: seen.append((out.mesh, out.rank, out.data))):
        viewer.get(1, OutputChunk("", 1), b"seen\n")
    assert seen == [("m", 1, "seen\n")]
    assert capsys.readouterr().out == ""
    assert list(viewer.jobs.logs(viewer.procs).values()) == ["kept\n", "seen\n"]
