"""Errors over a mesh: how exceptions cross a process boundary, how they read, what they can be caught as."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import linecache
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.errors import ActorError, MeshFailure, RankFailure, SupervisionError
from monarch_kernel.protocol.faults import Fault, capture, decode_fault, encode_fault
from monarch_kernel.protocol.messages import Death
from monarch_kernel.runtime.actor.errors import build_actor_error, build_supervision_error
from monarch_kernel.runtime.mesh import Extent

GPUS = Extent(["gpus"], [4])


def raised(function: Callable[..., Any], *args: Any, skip: tuple[str, ...] = ()) -> Fault:
    """The fault of what `function` raises, as it arrives in another process."""
    try:
        function(*args)
    except BaseException as e:
        return decode_fault(encode_fault(capture(e, skip)))
    raise AssertionError("nothing was raised")


def of(exception: BaseException) -> Fault:
    def throw() -> None:
        raise exception

    return raised(throw)


def failure(rank: int, fault: Fault | None = None, *, host: str = "vm", death: Death | None = None) -> RankFailure:
    return RankFailure(rank, {"gpus": rank}, host, 100 + rank, f"p{rank}", fault, death)


def error_of(*faults: Fault, extent: Extent = GPUS, values: dict[int, Any] | None = None) -> ActorError:
    failures = [failure(rank, fault) for rank, fault in enumerate(faults)]
    return build_actor_error("w.step", extent, failures, values or {}, [])


def inner(message: str) -> None:
    raise ValueError(message)


def outer(message: str) -> None:
    inner(message)


# -- faults -------------------------------------------------------------------------------------------


def test_a_fault_reads_like_pythons_traceback() -> None:
    try:
        outer("boom")
    except ValueError as e:
        fault = capture(e)
        expected = traceback.format_exc().removeprefix("Traceback (most recent call last):\n").rstrip()
    assert fault.text == expected
    assert (fault.module, fault.qualname, fault.message) == ("builtins", "ValueError", "boom")
    assert fault.type_name == "ValueError"
    assert [frame.function for frame in fault.frames][-2:] == ["outer", "inner"]
    assert fault.frames[-1].source == "raise ValueError(message)"


def test_chained_exceptions() -> None:
    def fail() -> None:
        try:
            {}["a b"]
        except KeyError:
            try:
                outer("second")
            except ValueError as e:
                raise RuntimeError("third") from e

    fault = raised(fail)
    assert fault.cause is not None
    assert fault.cause.context is not None
    assert (fault.message, fault.cause.message, fault.cause.context.message) == ("third", "second", "'a b'")
    text = fault.text
    assert text.index("KeyError: 'a b'") < text.index("During handling") < text.index("ValueError: second")
    assert text.index("ValueError: second") < text.index("direct cause") < text.index("RuntimeError: third")


def test_suppressed_context_and_cycles() -> None:
    def fail() -> None:
        try:
            outer("hidden")
        except ValueError:
            raise KeyError("shown") from None

    assert raised(fail).context is None
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    fault = of(first)
    assert fault.cause is not None
    assert fault.cause.cause is None


def test_groups_and_notes() -> None:
    note = KeyError("x")
    note.add_note("look here")
    fault = of(ExceptionGroup("several", [ValueError("one"), note]))
    assert [member.message for member in fault.members] == ["one", "'x'"]
    assert "look here" in fault.text
    assert "  | ValueError: one" in fault.text


def test_source_of_notebook_cells_comes_from_linecache() -> None:
    source = "def step(x):\n    return 1 / x\n"
    name = "/tmp/ipykernel_1/2768543.py"
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    without = raised(namespace["step"], 0)  # the rank knows no source
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        with_source = raised(namespace["step"], 0)
        # The controller knows the source of its own cells, whatever the rank knew.
        for fault in (with_source, without):
            assert f'  File "{name}", line 2, in step\n    return 1 / x' in fault.text
        assert with_source.frames[-1].source.splitlines()[0] == "return 1 / x"
        assert without.frames[-1].source == ""
    finally:
        del linecache.cache[name]


def test_runtime_frames_are_hidden() -> None:
    skip = (__file__,)
    namespace: dict[str, Any] = {"outer": outer}
    exec(compile("def user(message):\n    outer(message)\n", "/tmp/user.py", "exec"), namespace)
    fault = raised(namespace["user"], "boom", skip=skip)
    assert [(frame.function, frame.is_runtime) for frame in fault.frames] == [
        ("user", False),  # this file's frames above it are dropped
        ("outer", True),
        ("inner", True),
    ]
    assert "/tmp/user.py" in fault.text
    assert __file__ not in fault.text
    ours = raised(outer, "boom", skip=skip)  # nothing but runtime: its innermost frame shows where
    assert [frame.function for frame in ours.shown_frames] == ["inner"]
    assert "in inner\n    raise ValueError(message)\nValueError: boom" in ours.text


def test_recursion_is_collapsed() -> None:
    def down(n: int) -> int:
        return down(n + 1)

    fault = raised(down, 0)
    assert fault.qualname == "RecursionError"
    assert "more times]" in fault.text
    assert fault.text.count("\n") < 15

    def ping(n: int) -> int:
        return pong(n + 1)

    def pong(n: int) -> int:
        return ping(n + 1)

    fault = raised(ping, 0)
    assert fault.omitted > 100
    assert len(fault.frames) == 64
    assert f"[{fault.omitted} frames left out]" in fault.text


class Odd(Exception):
    """Its __init__ takes something else than `args`."""

    def __init__(self, code: int, *, path: str) -> None:
        super().__init__(f"{path} failed with {code}")
        self.code, self.path = code, path


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Slotted(Exception):
    __slots__ = ("code",)


class Loud(Exception):
    """Everything that can be overridden is."""

    def __new__(cls, *args: Any) -> Loud:
        if not args:
            raise AssertionError("foreign __new__ ran")
        return super().__new__(cls, *args)

    def __init__(self, message: str) -> None:
        self.code = 7

    def __init_subclass__(cls) -> None:
        raise AssertionError("foreign __init_subclass__ ran")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "code":
            raise AssertionError("foreign __setattr__ ran")
        super().__setattr__(name, value)

    @property
    def message(self) -> str:
        raise AssertionError("foreign property read")

    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("boom"),
        KeyError("a b"),
        Odd(3, path="/x"),
        Frozen(5),
        FileNotFoundError(errno.ENOENT, "missing", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        ImportError("no", name="m"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_the_original_is_rebuilt_equal(exception: BaseException) -> None:
    again = of(exception).rebuild()
    assert type(again) is type(exception)
    assert again.args == exception.args
    assert vars(again) == vars(exception)
    assert str(again) == str(exception)
    if isinstance(exception, OSError):
        assert isinstance(again, OSError)
        assert (again.errno, again.filename) == (errno.ENOENT, "/x")
    if isinstance(exception, SystemExit):
        assert isinstance(again, SystemExit)
        assert again.code == 3


def test_what_cannot_be_pickled_is_replaced_by_its_repr() -> None:
    exception = RuntimeError("held", threading.Lock())
    exception.lock = threading.Lock()  # type: ignore[attr-defined]
    exception.step = 3  # type: ignore[attr-defined]
    again = of(exception).rebuild()
    assert isinstance(again, RuntimeError)
    assert again.args[0] == "held"
    assert again.args[1].startswith("<unlocked _thread.lock")
    assert vars(again) == {"step": 3}


def test_exceptions_that_cannot_be_rebuilt_still_tell_their_story() -> None:
    class Refusing(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never")

    class Breaking(Exception):
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    assert isinstance(error_of(of(Refusing("story"))), Refusing)  # put together without its help
    error = error_of(of(Breaking("story")))
    assert error.exception is None
    assert type(error) is ActorError
    assert "Breaking: story" in str(error)


def test_the_object_that_lacks_an_attribute_is_not_sent() -> None:
    class Model:
        weights = bytes(1 << 20)

        def __reduce__(self) -> Any:
            raise AssertionError("sent")

    model = Model()
    fault = raised(lambda: model.nothing)  # type: ignore[attr-defined]
    assert fault.pickled is not None
    assert isinstance(fault.rebuild(), AttributeError)


def test_lone_surrogates_and_huge_messages_can_be_sent() -> None:
    assert of(ValueError("\udcff")).message == "\\udcff"
    fault = of(ValueError("x" * 10_000_000))
    assert len(encode_fault(fault)) < 200_000
    assert "more characters" in fault.message


# -- ActorError ---------------------------------------------------------------------------------------


def test_one_rank_of_several() -> None:
    error = build_actor_error("w.step", GPUS, [failure(2, raised(outer, "boom"))], {0: "a", 1: "b"}, [3])
    assert error.message == "Actor call w.step failed on rank 2 of 4 (gpus=2)."
    lines = str(error).split("\n")
    assert lines[0] == error.message
    assert lines[1] == " Traceback of where the remote call failed (most recent call last):"
    assert lines[2] == "  rank 2 (gpus=2), host vm, pid 102:"
    assert lines[-5].startswith("    raise ValueError")
    assert lines[-4:] == [
        "ValueError: boom",
        "",
        "Ranks 0-1 answered: their results are in `.values` of this error.",
        "Rank 3 had not answered when this was raised.",
    ]
    assert error.values == {0: "a", 1: "b"}
    assert error.unanswered == [3]
    assert error.failures[0].message == "ValueError: boom"
    assert isinstance(error.exception, ValueError)


def test_a_single_actor_reads_as_in_monarch() -> None:
    error = build_actor_error("w.step", Extent([], []), [failure(0, raised(outer, "boom"))], {}, [])
    assert error.message == "Actor call w.step failed."
    assert str(error).startswith(
        "Actor call w.step failed.\n Traceback of where the remote call failed (most recent call last):\n"
        "  host vm, pid 100:\n  File "
    )
    assert str(error).endswith("\nValueError: boom")
    assert repr(error) == "ActorError[ValueError](ValueError('boom'), 'Actor call w.step failed.')"


def test_identical_tracebacks_are_shown_once() -> None:
    same, other = raised(outer, "boom"), of(KeyError("x"))
    error = build_actor_error("w.step", GPUS, [failure(r, same) for r in (0, 1, 3)] + [failure(2, other)], {}, [])
    text = str(error)
    assert text.count("ValueError: boom") == 1
    assert error.message == "Actor call w.step failed on all 4 ranks."
    assert "  ranks 0-1,3 (gpus=0-1,3), host vm, pids 100,101,103:" in text
    assert "  rank 2 (gpus=2), host vm, pid 102:" in text
    assert type(error) is ActorError  # two types: neither would tell the truth
    assert isinstance(error.exception, ValueError)


def test_a_thousand_ranks_that_fail_alike_with_different_messages() -> None:
    extent = Extent(["hosts", "gpus"], [125, 8])
    failures = [failure(r, raised(outer, f"bad rank {r}"), host=f"h{r // 8}") for r in range(1000)]
    text = str(build_actor_error("w.step", extent, failures, {}, []))
    assert text.count("\n") < 25
    assert len(text) < 2500
    assert "failed on all 1000 ranks" in text
    assert "host h2, pids 116,117,118,119,120,121,… (2 more); and 122 more hosts:" in text
    assert "ValueError: bad rank 0\n  (this is the message of rank 0; the others' differ:)" in text
    assert "    rank 4: bad rank 4\n    … and 995 more on ranks 5-999" in text


def test_a_thousand_ranks_that_all_fail_differently() -> None:
    extent = Extent(["gpus"], [1000])
    namespace: dict[str, Any] = {}
    source = "\n".join(f"def f{r}(): raise ValueError({r})" for r in range(1000))
    exec(compile(source, "/tmp/many.py", "exec"), namespace)
    failures = [failure(r, raised(namespace[f"f{r}"])) for r in range(0, 1000, 2)]
    text = str(build_actor_error("w.step", extent, failures, {}, []))
    assert len(text) < 5000
    assert "w.step failed on ranks 0:999:2 of 1000 (gpus=0:999:2)." in text
    assert "and 494 more different tracebacks, on ranks 12:999:2 (all are in `.failures`)" in text


def test_except_with_the_original_type() -> None:
    with pytest.raises(ValueError, match=r"Actor call w.step failed on ranks 0-1 of 4 \(gpus=0-1\)") as caught:
        raise error_of(raised(outer, "boom"), raised(outer, "other"))
    assert isinstance(caught.value, ActorError)
    assert caught.value.args == ("boom",)
    assert not isinstance(caught.value, KeyError)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert shown.startswith("monarch_kernel.errors.ActorError[ValueError]: Actor call w.step failed")


def test_key_error_does_not_garble_the_text() -> None:
    error = error_of(of(KeyError("a b")))
    assert isinstance(error, KeyError)
    assert str(error).startswith("Actor call w.step failed on rank 0 of 4 (gpus=0).\n Traceback")
    assert str(error).endswith("KeyError: 'a b'")


def test_the_originals_attributes_are_there() -> None:
    error = error_of(of(FileNotFoundError(errno.ENOENT, "missing", "/x")))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.strerror, error.filename) == (errno.ENOENT, "missing", "/x")
    error = error_of(of(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")))
    assert isinstance(error, UnicodeDecodeError)
    assert (error.start, error.reason) == (0, "bad byte")
    slotted = Slotted("boom")
    slotted.code = 9
    for original, code in ((Odd(3, path="/x"), 3), (Frozen(5), 5), (slotted, 9)):
        error = error_of(of(original))
        assert isinstance(error, type(original))
        assert error.code == code  # type: ignore[attr-defined]
        assert str(error).startswith("Actor call w.step failed")


def test_no_foreign_code_runs_while_the_error_is_built_raised_and_shown() -> None:
    fault = of(Loud("boom"))
    assert fault.message == "<exception str() failed>"
    error = error_of(fault)
    assert isinstance(error, Loud)
    assert error.message == "Actor call w.step failed on rank 0 of 4 (gpus=0)."
    assert error.code == 7
    assert {error: 1}[error] == 1
    assert repr(error).startswith("ActorError[Loud](<")
    with pytest.raises(Loud) as caught:
        raise error from None
    assert "Actor call" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "exception",
    [
        SystemExit(1),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        StopIteration(1),
        StopAsyncIteration(),
        SyntaxError("bad", ("f.py", 1, 2, "x y")),
        ExceptionGroup("g", [ValueError()]),
        TimeoutError("slow"),
        Exception("plain"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_types_that_would_mislead_their_handlers_stay_apart(exception: BaseException) -> None:
    error = error_of(of(exception))
    assert type(error) is ActorError
    assert type(error.exception) is type(exception)
    assert str(error).startswith("Actor call w.step failed")


def test_pickling_keeps_everything() -> None:
    error = build_actor_error("w.step", GPUS, [failure(1, raised(outer, "boom"))], {0: [1]}, [2])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.values, again.unanswered, again.extent) == ({0: [1]}, [2], GPUS)
    assert again.failures[0].coords == {"gpus": 1}
    simple = pickle.loads(pickle.dumps(ActorError(ValueError("x"), "said")))
    assert (str(simple), repr(simple.exception)) == ("said", "ValueError('x')")


def test_an_actor_error_that_crosses_another_process_keeps_its_type() -> None:
    def relay() -> None:
        raise error_of(raised(outer, "deep"))

    error = error_of(raised(relay))
    assert isinstance(error, ValueError)
    assert isinstance(error.exception, ActorError)
    assert "ValueError: deep" in str(error)


def test_a_class_made_in_a_notebook_is_the_same_class_when_its_instance_comes_back() -> None:
    # By value, as cells' classes go: made in __main__, sent to a process, raised there.
    program = (
        "import sys, cloudpickle\n"
        "from monarch_kernel.protocol.faults import capture, encode_fault\n"
        "cls = cloudpickle.loads(sys.stdin.buffer.read())\n"
        "try:\n    raise cls('boom', step=3)\n"
        "except Exception as e:\n    sys.stdout.buffer.write(encode_fault(capture(e)))\n"
    )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "class CellError(ValueError):\n"
        "    def __init__(self, text, *, step):\n"
        "        super().__init__(text)\n"
        "        self.step = step\n",
        namespace,
    )
    cls = namespace["CellError"]
    done = subprocess.run(
        [sys.executable, "-c", program], input=cloudpickle.dumps(cls), stdout=subprocess.PIPE, check=True
    )
    error = error_of(decode_fault(done.stdout))
    assert isinstance(error, cls)
    assert error.step == 3
    assert error.failures[0].fault is not None
    assert error.failures[0].fault.type_name == "CellError"


def test_an_error_that_holds_large_results_is_sent_without_them() -> None:
    large = error_of(raised(outer, "deep"), values={1: bytes(4 << 20)})
    dead = build_supervision_error("w.step", "w", GPUS, died([1]), {0: bytes(4 << 20)}, [])
    for error in (large, dead):
        fault = of(error)
        assert len(encode_fault(fault)) < 100_000
        again = fault.rebuild()
        assert isinstance(again, type(error))
        assert (again.values, [f.rank for f in again.failures]) == ({}, [f.rank for f in error.failures])
        assert len(error.values) == 1


# -- deaths -------------------------------------------------------------------------------------------


def died(ranks: Sequence[int], cause: str = "killed by SIGKILL", detail: str = "") -> list[RankFailure]:
    return [failure(r, death=Death(cause, "proc", f"p{r}", "vm", 100 + r, detail)) for r in ranks]


def test_supervision_error_names_rank_host_cause_and_what_to_do() -> None:
    error = build_supervision_error("w.step", "w", GPUS, died([1]), {0: "a", 2: "c"}, [3])
    assert str(error) == (
        "Endpoint call w.step() failed: rank 1 of 4 of mesh 'w' (gpus=1), host vm, pid 101, "
        "cannot answer: killed by SIGKILL.\n"
        "  Other ranks still work: slice the mesh to them, or replace the dead ranks with heal() of the proc mesh.\n"
        "\n"
        "Ranks 0,2 answered: their results are in `.values` of this error.\n"
        "Rank 3 had not answered when this was raised."
    )
    assert (error.endpoint, error.mesh_name, error.ranks) == ("w.step", "w", (1,))
    assert error.cause == "killed by SIGKILL"
    assert error.values == {0: "a", 2: "c"}


def test_supervision_error_with_several_causes_and_faults_beside() -> None:
    failures = [*died([1]), *died([2], "exited with code 3", "last words"), failure(3, raised(outer, "boom"))]
    error = build_supervision_error("w.step", "w", GPUS, failures, {}, [])
    text = str(error)
    assert text.startswith("Endpoint call w.step() failed: ranks 1-2 of 4 of mesh 'w' cannot answer.\n  rank 1 of 4")
    assert "exited with code 3.\n    last words\n" in text
    assert "The endpoint also failed on rank 3 of 4 (gpus=3).\n Traceback" in text
    assert "ValueError: boom" in text
    assert error.ranks == (1, 2)
    assert len(error.failures) == 3


def test_a_thousand_deaths_are_one_line() -> None:
    extent = Extent(["gpus"], [1000])
    text = str(build_supervision_error("w.step", "w", extent, died(range(1000)), {}, []))
    assert "ranks 0-999 of 1000 of mesh 'w' (gpus=0-999)" in text
    assert len(text) < 500


def test_supervision_error_and_mesh_failure_survive_pickling() -> None:
    error = build_supervision_error("w.step", "w", GPUS, died([1]), {0: 1}, [2])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.ranks, again.values, again.failures) == (error.ranks, error.values, error.failures)
    death = Death("killed by SIGKILL", "proc", "p1", "vm", 101, "line 1\nline 2\n")
    mesh = MeshFailure.of("w", "w-1", GPUS, [1], death)
    mesh.key = ("k", 1)
    copy = pickle.loads(pickle.dumps(mesh))
    assert (copy.report(), copy.key, copy.ranks) == (mesh.report(), ("k", 1), (1,))


def test_mesh_failure_report() -> None:
    death = Death("killed by SIGKILL", "proc", "p1", "vm", 101, "line 1\nline 2\n")
    mesh = MeshFailure.of("w", "w-1", GPUS, [1], death)
    assert (mesh.mesh, mesh.mesh_name, mesh.ranks, mesh.reason) == ("w", "w-1", (1,), "killed by SIGKILL")
    head = "Mesh 'w' lost rank 1 of 4 (gpus=1) on host vm, pid 101: killed by SIGKILL"
    assert str(mesh) == f"MeshFailure: {head}"
    assert mesh.report() == f"{head}\n  line 1\n  line 2"
    assert str(MeshFailure("m", "gone")) == "MeshFailure: Mesh 'm' failed: gone"
    assert isinstance(SupervisionError("x"), Exception)
