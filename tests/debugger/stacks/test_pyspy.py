"""What py-spy has read, as a snapshot: of written dumps, and of a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_kernel
from monarch_kernel.debugger.controller.stacks.pyspy import HOLDS_LOCK, read_snapshot, with_native
from monarch_kernel.debugger.model.stops import CODE, ENDPOINT, NATIVE, THREAD, Stack, StackSnapshot
from monarch_kernel.debugger.rank.stacks import snapshot
from tests.waiting import patience

OURS = str(Path(monarch_kernel.__file__).parent)
THREADING = "/opt/lib/python3.12/threading.py"


def frame(file: str, name: str, line: int = 1, module: str | None = None) -> dict[str, Any]:
    return {"name": name, "filename": file, "module": module, "short_filename": file, "line": line, "locals": None}


def dump(*threads: dict[str, Any]) -> str:
    return json.dumps(threads)


def thread(name: str, *frames: dict[str, Any], gil: bool = False, ident: int = 77) -> dict[str, Any]:
    """A thread of a dump; the outermost frame first."""
    return {"thread_name": name, "thread_id": ident, "owns_gil": gil, "frames": list(reversed(frames))}


STARTS = (frame("<string>", "<module>"), frame(f"{OURS}/runtime/rank/main.py", "Rank.run"))
CALLS = frame(f"{OURS}/runtime/actor/execution/instance.py", "ActorInstance._handle")
CELLS = frame(f"{OURS}/kernel/rank/cell_runner.py", "CellRunner.run")


def test_an_endpoint_a_cell_and_a_thread() -> None:
    found = read_snapshot(
        dump(
            thread("MainThread", *STARTS, CALLS, frame("/w/a.py", "Trainer.step", 3)),
            thread("monarch-actor-driver", CALLS, CELLS, frame("/tmp/ipykernel_1/2.py", "<module>", 2)),
            thread("Thread-3 (load)", frame(THREADING, "Thread.run"), frame("/w/a.py", "load", 9)),
            thread("monarch-poller", frame(f"{OURS}/runtime/node/poller.py", "Poller.wait")),
        ),
        42,
        "",
    )
    assert [(stack.kind, stack.name) for stack in found.stacks] == [
        (ENDPOINT, "Trainer.step"),
        (CODE, ""),
        (THREAD, "load"),
    ]
    assert all(len(stack.frames) == 1 for stack in found.stacks)
    assert (found.pid, found.hidden, found.outside) == (42, 1, True)


def test_a_rank_that_waits_is_idle() -> None:
    found = read_snapshot(dump(thread("MainThread", *STARTS, CALLS)), 42, "it is stopped (SIGSTOP)")
    assert found.stacks == () and found.hidden == 1
    assert len(read_snapshot(dump(thread("MainThread", *STARTS, CALLS)), 42, "", all_threads=True).stacks) == 1


def test_the_thread_that_holds_the_interpreter_lock_is_marked() -> None:
    found = read_snapshot(dump(thread("MainThread", *STARTS, CALLS, frame("/w/a.py", "hold"), gil=True)), 42, "")
    assert found.stacks[0].state == HOLDS_LOCK


def test_a_stop_of_the_debugger_is_a_state_and_no_frames() -> None:
    stopped = frame(f"{OURS}/debugger/stopping/tracer.py", "StopTracer._wait")
    waits = frame(THREADING, "Event.wait")
    found = read_snapshot(dump(thread("MainThread", *STARTS, CALLS, frame("/w/a.py", "f"), stopped, waits)), 42, "")
    assert [each.place.name for each in found.stacks[0].frames] == ["f"]
    assert found.stacks[0].state == "stopped by the debugger"


@pytest.mark.parametrize("text", ["", "Error: no such process", "{}", "[", "3"])
def test_what_is_no_dump(text: str) -> None:
    with pytest.raises(ValueError, match="py-spy's dump cannot be read"):
        read_snapshot(text, 42, "")


def test_native_frames_join_those_of_the_same_thread() -> None:
    mine = read_snapshot(dump(thread("t", frame("/w/a.py", "f", 3), ident=5)), 42, "")
    named = mine._replace(outside=False, stacks=(mine.stacks[0]._replace(kind=ENDPOINT, name="actor.f"),))
    libc = "/usr/lib/libc.so.6"
    read = dump(
        thread(
            "t", frame(libc, "start", 0, libc), CALLS, frame("/w/a.py", "f", 3), frame(libc, "poll", 0, libc), ident=5
        ),
        thread("other", frame("/w/a.py", "g", 3), ident=6),
    )
    (stack,) = with_native(named, read).stacks
    assert (stack.kind, stack.name) == (ENDPOINT, "actor.f")
    assert [each.place.name for each in stack.frames] == ["f", "poll"]
    assert stack.frames[1].place.kind == NATIVE


def test_addresses_are_no_names() -> None:
    libc = "/usr/lib/libc.so.6"
    found = read_snapshot(dump(thread("t", frame("/w/a.py", "f"), frame(libc, "0x7f00", 0, libc))), 42, "")
    assert found.stacks[0].frames[1].place.name == "?"


CODE_OF_A_PROCESS = """
import os, sys, threading
sys.path.insert(0, {root!r})
from monarch_kernel.debugger.rank.stacks import snapshot
import pickle
def outer():
    class A:
        def method(self):
            ready.set()
            threading.Event().wait(60)
    A().method()
ready = threading.Event()
threading.Thread(target=outer, name="mine", daemon=True).start()
ready.wait()
sys.stdout.buffer.write(pickle.dumps(snapshot()))
sys.stdout.flush()
os.close(1)
threading.Event().wait(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], StackSnapshot]]:
    """A process with one thread, and what it says of itself."""
    import pickle

    script = tmp_path / "script.py"
    script.write_text(CODE_OF_A_PROCESS.format(root=str(Path(OURS).parent)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, pickle.loads(process.stdout.read())
    finally:
        process.kill()
        process.wait(patience(20))
        process.stdout.close()


def spy(pid: int, *options: str) -> str:
    program = Path(sys.executable).parent / "py-spy"
    argv = [str(program), "dump", "--json", "--full-filenames", *options, "--pid", str(pid)]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=patience(60)).stdout


def the(found: StackSnapshot) -> Stack:
    (stack,) = [stack for stack in found.stacks if stack.name == "mine"]
    return stack


def test_a_process_and_py_spy_tell_the_same(other: tuple[subprocess.Popen[bytes], StackSnapshot]) -> None:
    process, said = other
    read = read_snapshot(spy(process.pid, "--nonblocking"), process.pid, "")
    inside, outside = the(said), the(read)
    assert [each.place for each in inside.frames[:2]] == [each.place for each in outside.frames[:2]]
    assert [each.source for each in inside.frames[:2]] == [each.source for each in outside.frames[:2]]
    assert inside.thread == outside.thread


def test_native_frames_of_a_process(other: tuple[subprocess.Popen[bytes], StackSnapshot]) -> None:
    process, said = other
    stack = the(with_native(said, spy(process.pid, "--native")))
    python = [each.place.name for each in stack.frames if each.place.kind != NATIVE]
    assert python[:2] == ["outer", "outer.<locals>.A.method"]
    assert stack.frames[-1].place.kind == NATIVE
    assert stack.frames[0].place.name == "outer"


def test_of_this_process() -> None:
    assert snapshot().outside is False
