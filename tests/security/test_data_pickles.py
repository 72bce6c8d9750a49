"""What a joined rank sends a viewer runs nothing there, unless it is a value that the viewer has asked for."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debugger.model.readings import Stats
from monarch_kernel.debugger.model.stops import Stack, StackFrame, StackSnapshot, Stop, StopFrame
from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.join.controller import JoinController
from monarch_kernel.errors import KeptError, capture
from monarch_kernel.kernel.rank.executor import CellReply
from monarch_kernel.protocol.data_pickles import check_data, without_foreign_exceptions
from monarch_kernel.protocol.faults import Fault, encode_fault
from monarch_kernel.protocol.messages import ERROR, OK
from monarch_kernel.protocol.serialize import dumps_flat
from workspace_sync.model.errors import SyncError
from workspace_sync.model.sync_report import SyncReport

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


@pytest.fixture
def viewer() -> Iterator[JoinController]:
    made = JoinController()
    yield made
    made.close()


@pytest.fixture
def answers(viewer: JoinController) -> list[tuple[int, bytes]]:
    """What calls of the viewer have been answered with."""
    found: list[tuple[int, bytes]] = []
    note: Callable[..., None] = lambda _proc, _call, status, body: found.append((status, body))  # noqa: E731
    viewer.node.on_answer = note  # type: ignore[method-assign]
    return found


def test_nothing_of_a_rank_runs_in_a_viewer(
    viewer: JoinController, answers: list[tuple[int, bytes]], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    evil = pickle.dumps(Evil(os.mkdir, str(taken)))
    number = viewer.node.new_call(None)
    viewer.receive(wire.encode(wire.CallAnswer("m.0", number, OK, dumps_flat((0, [STACK])))))
    viewer.receive(wire.encode(wire.CallAnswer("m.0", number, OK, evil)))
    fault = Fault("builtins", "ValueError", "x", "ValueError: x", [], pickled=evil)
    viewer.receive(wire.encode(wire.CallAnswer("m.0", number, ERROR, encode_fault(fault))))
    assert [status for status, _ in answers] == [OK, ERROR, ERROR]
    assert b"is no data" in answers[1][1] and evil not in answers[2][1]
    for sender in ("m.0", viewer.node.id):  # it may claim to be the viewer itself
        viewer.receive(wire.encode(wire.CallActor(sender, "hub", "stopped", 0, "", evil)))
        viewer.receive(wire.encode(wire.SpawnActor(sender, "m", "new", "new", 0, evil)))
    assert "new" not in viewer.actors and not taken.exists()
    # Values that the viewer has asked for are any objects.
    viewer.node.value_calls.add(number)
    viewer.receive(wire.encode(wire.CallAnswer("m.0", number, OK, evil)))
    assert answers[-1] == (OK, evil)
    viewer.node.calls.clear()
    viewer.receive(wire.encode(wire.CallAnswer("m.0", number, OK, evil)))
    assert answers[-1][0] == ERROR
