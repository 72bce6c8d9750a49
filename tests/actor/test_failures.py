"""Endpoints that raise: what the caller gets to see and to catch."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, Channel, SupervisionError, current_rank, endpoint
from tests.actor.actors import PATIENCE, Basic
from tests.actor.conftest import Procs
from tests.deaths import Mortal


class CustomError(Exception):
    """Its constructor takes something else than a message."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint

    def __reduce__(self) -> Any:
        return (_custom, (self.code, self.hint))


def _custom(code: int, hint: str) -> CustomError:
    return CustomError(code, hint=hint)


class UnpicklableError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Fails(Actor):
    @endpoint
    def custom(self) -> None:
        raise CustomError(7, hint="look there")

    @endpoint
    def unpicklable(self) -> None:
        raise UnpicklableError("cannot travel")

    @endpoint
    def chained(self) -> None:
        try:
            {}["missing"]  # pyright: ignore[reportArgumentType]
        except KeyError as e:
            raise ValueError("because of that") from e

    @endpoint
    def deep(self, n: int) -> None:
        if n:
            return self.deep(n - 1)
        raise ValueError("at the bottom")

    @endpoint
    def by_rank(self) -> int:
        rank = current_rank().rank
        if rank == 1:
            raise ValueError("one")
        if rank == 2:
            raise KeyError("two")
        return rank

    @endpoint
    def missing_file(self) -> None:
        open("/no/such/file")  # noqa: SIM115

    @endpoint
    def noted(self) -> None:
        error = ValueError("with a note")
        error.add_note("the note")
        raise error

    @endpoint
    def group(self) -> None:
        raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])

    @endpoint
    def nested(self, other: Any) -> None:
        other.boom.call("from below").get()


@pytest.fixture
def fails(procs: Procs) -> Any:
    return procs(3).spawn("fails", Fails)


def test_one_error_tells_of_every_failing_rank(four: Any) -> None:
    with pytest.raises(ActorError) as caught:
        four.boom_at.call([1, 3]).get()
    error = caught.value
    text = str(error)
    assert text.startswith("Actor call basic.boom_at failed on ranks 1,3 of 4 (gpus=1,3).\n")
    assert " Traceback of where the remote call failed (most recent call last):" in text
    assert 'raise ValueError(f"boom on {rank}")' in text  # the remote source
    assert "tests/actor/actors.py" in text
    assert "boom on 1" in text and "boom on 3" in text
    assert "monarch_kernel/runtime" not in text
    pids = four.pid.call().get()
    for rank in (1, 3):
        assert str(pids[rank]) in text
    assert [(f.rank, f.coords, f.pid) for f in error.failures] == [
        (1, {"gpus": 1}, pids[1]),
        (3, {"gpus": 3}, pids[3]),
    ]
    assert error.values == {0: 0, 2: 20}
    assert error.unanswered == []
    assert error.extent == four.extent
    assert isinstance(error, ValueError)
    assert type(error.exception) is ValueError
    assert str(error.exception) == "boom on 1"
    assert error.args == ("boom on 1",)


def test_equal_tracebacks_are_shown_once(four: Any) -> None:
    with pytest.raises(ActorError) as caught:
        four.boom.call("same").get()
    text = str(caught.value)
    assert text.count("ValueError: same") == 1
    assert "failed on all 4 ranks" in text
    assert "ranks 0-3 (gpus=0-3)" in text


def test_different_tracebacks_are_told_apart(fails: Any) -> None:
    with pytest.raises(ActorError) as caught:
        fails.by_rank.call().get()
    error = caught.value
    assert "ranks 1-2 of 3" in str(error)
    assert "ValueError: one" in str(error) and "KeyError: 'two'" in str(error)
    assert error.values == {0: 0}
    # The types differ: the error is of none of them.
    assert not isinstance(error, ValueError | KeyError)
    assert [type(f.exception) for f in error.failures] == [ValueError, KeyError]


def test_the_text_names_ranks_of_a_slice_as_in_their_mesh(procs: Procs) -> None:
    mesh = procs(hosts=2, gpus=2).spawn("basic", Basic)
    with pytest.raises(ActorError) as caught:
        mesh.slice(gpus=1).boom_at.call([1]).get()
    error = caught.value
    assert str(error).startswith("Actor call basic.boom_at failed on rank 3 of 4 (hosts=1,gpus=1).\n")
    assert "\n  rank 3 (hosts=1,gpus=1), host " in str(error)
    assert "Rank 1 answered: its result is in `.values` of this error, by rank in the slice (0)." in str(error)
    assert error.failures[0].coords == {"hosts": 1} and error.values == {0: 0}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(ActorError, match=r"failed on ranks 2-3 of 4 \(hosts=1,gpus=0-1\)"):
        mesh.slice(hosts=1).boom.call("all of them").get()
    one = mesh.slice(hosts=1, gpus=0)
    for handle in (one, pickle.loads(pickle.dumps(one)), mesh.flatten("all").slice(all=2)):
        with pytest.raises(ActorError, match=r"boom failed on rank 2 of 4 \(hosts=1,gpus=0\)"):
            handle.boom.call_one("alone").get()
    assert mesh.flatten("all").boom.call("all").exception().message.endswith("failed on all 4 ranks.")
    answers = mesh.slice(hosts=1).boom_at.stream([0])
    with pytest.raises(ActorError, match=r"failed on rank 2 of 4 \(hosts=1,gpus=0\)"):
        [future.get() for future in answers]


def test_a_failed_rank_never_freezes_a_call(procs: Procs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_ERROR_GRACE", "0.05")

    class Mixed(Actor):
        @endpoint
        def work(self, port: Any) -> None:
            if current_rank().rank == 0:
                port.send(None)
                threading.Event().wait()
            raise ValueError("others wait for me")

    world = procs(2)
    port, receiver = Channel.open()
    call = world.spawn("mixed", Mixed).work.call(port)
    with pytest.raises(ActorError, match="others wait for me") as caught:
        call.get(PATIENCE)
    assert caught.value.unanswered == [0]
    assert "Rank 0 had not answered" in str(caught.value)
    receiver.recv().get(PATIENCE)
    world.kill().get(PATIENCE)


def test_call_one_and_choose_and_stream(four: Any) -> None:
    one = four.slice(gpus=2)
    for future in (one.boom.call_one("x"), four.boom.choose("x"), *four.boom.stream("x")):
        with pytest.raises(ValueError, match="x") as caught:
            future.get()
        assert isinstance(caught.value, ActorError)
        assert str(caught.value).startswith("Actor call basic.boom failed")


def test_errors_with_constructors_of_their_own(fails: Any) -> None:
    with pytest.raises(CustomError, match="code 7") as caught:
        fails.custom.call().get()
    assert isinstance(caught.value, ActorError)
    assert (caught.value.code, caught.value.hint) == (7, "look there")
    assert type(caught.value.exception) is CustomError


def test_errors_that_cannot_be_pickled(fails: Any) -> None:
    with pytest.raises(ActorError, match="UnpicklableError: cannot travel") as caught:
        fails.unpicklable.call().get()
    assert caught.value.exception is None or str(caught.value.exception) == "cannot travel"


def test_causes_notes_and_groups_are_shown(fails: Any) -> None:
    with pytest.raises(ValueError, match="because of that") as caught:
        fails.slice(gpus=0).chained.call_one().get()
    assert "KeyError: 'missing'" in str(caught.value)
    assert "direct cause" in str(caught.value)
    with pytest.raises(ValueError, match="the note"):
        fails.slice(gpus=0).noted.call_one().get()
    with pytest.raises(ActorError) as several:
        fails.slice(gpus=0).group.call_one().get()
    assert "several" in str(several.value)
    assert isinstance(several.value.exception, ExceptionGroup)


def test_the_whole_remote_stack_is_shown(fails: Any) -> None:
    with pytest.raises(ValueError, match="at the bottom") as caught:
        fails.slice(gpus=0).deep.call_one(3).get()
    assert "return self.deep(n - 1)" in str(caught.value)
    assert 'raise ValueError("at the bottom")' in str(caught.value)


def test_os_errors_keep_what_they_know(fails: Any) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fails.slice(gpus=0).missing_file.call_one().get()
    assert isinstance(caught.value, ActorError)
    assert caught.value.filename == "/no/such/file"
    assert caught.value.errno == 2


def test_errors_pass_through_other_actors(fails: Any, two: Any) -> None:
    with pytest.raises(ValueError) as caught:
        fails.slice(gpus=0).nested.call_one(two).get(PATIENCE)
    text = str(caught.value)
    assert isinstance(caught.value, ActorError)
    assert "fails.nested" in text
    assert "basic.boom" in text
    assert "from below" in text
    assert "other.boom.call" in text  # where the one called the other


def test_errors_can_be_sent(one: Any) -> None:
    error = one.boom.call_one("sent").exception()
    again = one.echo.call_one(error).get()
    assert isinstance(again, ActorError)
    assert isinstance(again, ValueError)
    assert str(again) == str(error)
    supervision = SupervisionError("text", endpoint="a.b", mesh_name="a", ranks=(1,), cause="c")
    back = one.echo.call_one(supervision).get()
    assert (str(back), back.endpoint, back.ranks, back.cause) == ("text", "a.b", (1,), "c")


def test_actors_survive_their_errors(two: Any) -> None:
    for _ in range(3):
        with pytest.raises(ValueError):
            two.boom.call().get()
    two.note.call(1).get()
    assert list(two.get_notes.call().get().values()) == [[1], [1]]


def test_deaths_and_errors_in_one_call(procs: Procs, faults: Any) -> None:
    class Both(Mortal):
        @endpoint
        def work(self) -> int:
            rank = current_rank().rank
            if rank == 1:
                raise ValueError("only an error")
            if rank == 2:
                os._exit(3)
            return rank

    mesh = procs(3).spawn("both", Both)
    mesh.pid.call().get()
    with pytest.raises(SupervisionError) as caught:
        mesh.work.call().get(PATIENCE)
    error = caught.value
    assert error.ranks == (2,)
    assert "exited with code 3" in str(error)
    told = {f.rank for f in error.failures} | set(error.values) | set(error.unanswered)
    assert told == {0, 1, 2}
