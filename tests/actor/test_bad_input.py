"""Wrong input: one clear sentence at the caller, at once, and nothing has changed."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from monarch_kernel.actor import Actor, BootstrapCommand, endpoint, this_host
from monarch_kernel.meshes import list_proc_meshes
from tests.actor.actors import Basic
from tests.actor.conftest import Procs


@pytest.mark.parametrize(
    ("per_host", "message"),
    [
        ({"gpus": 0}, "gpus=0 must be a whole number of at least 1"),
        ({"gpus": -2}, "gpus=-2 must be a whole number of at least 1"),
        ({"gpus": 1.5}, "gpus=1.5 must be a whole number"),
        ({"gpus": "4"}, "gpus='4' must be a whole number"),
        ({"gpus": True}, "gpus=True must be a whole number"),
        ({"gpus": 1_000_000}, "asks for 1000000 processes on one host; at most 4096"),
        ({"a": 1000, "b": 1000}, "asks for 1000000 processes on one host; at most 4096"),
        ({"no name": 1}, "'no name' cannot name a dimension: use an identifier"),
        ({"": 1}, "'' cannot name a dimension"),
        ({3: 1}, "3 cannot name a dimension"),
    ],
)
def test_sizes_and_names(per_host: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        this_host().spawn_procs(per_host=per_host)
    assert list_proc_meshes() == []


def test_per_host_must_be_a_mapping() -> None:
    for wrong in (4, [4], "gpus"):
        with pytest.raises(TypeError, match="per_host=.* must map names of dimensions to sizes, as in {'gpus': 4}"):
            this_host().spawn_procs(per_host=wrong)  # type: ignore[arg-type]
    assert list_proc_meshes() == []


def test_labels_that_overlap(procs: Procs) -> None:
    import copy

    from monarch_kernel.runtime.mesh.shape import Extent, Region

    host = copy.copy(this_host())
    host._shape = Region.from_extent(Extent(("hosts",), (1,)))
    with pytest.raises(ValueError, match="the hosts have a dimension 'hosts' already: choose another name"):
        host.spawn_procs(per_host={"hosts": 2})


#: Called with what its types exclude.
WRONG: Any = BootstrapCommand


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"env": {"A": 1}}, TypeError, "env: A=1 must be a string, or None to remove it"),
        ({"env": {"A": "x\0"}}, ValueError, "env: A='x.x00' contains a NUL character"),
        ({"name": 5}, TypeError, "name=5 must be a string"),
        ({"preload": "json"}, TypeError, "preload='json' must be a sequence of names of modules"),
        ({"preload": [json]}, TypeError, "preload=.* must be a sequence of names of modules"),
        ({"bootstrap_command": "python"}, TypeError, "'python' is not a BootstrapCommand: use default_bootstrap_cmd"),
        ({"bootstrap_command": lambda _point: None}, TypeError, "None is not a BootstrapCommand"),
        ({"bootstrap_command": WRONG("sh", args="-c")}, TypeError, "args='-c' must be a sequence"),
        ({"bootstrap_command": WRONG("sh", args=(1,))}, TypeError, "1 in its command line must be a string"),
        ({"bootstrap_command": WRONG(5)}, TypeError, "5 in its command line must be a string"),
        (
            {"bootstrap_command": WRONG("sh", env={"A": 1})},
            TypeError,
            "bootstrap_command: env: A=1 must be a string, or None",
        ),
        ({"env": {"A=B": "1"}}, ValueError, "env: 'A=B' cannot name an environment variable"),
        ({"env": {"": "1"}}, ValueError, "env: '' cannot name an environment variable"),
        ({"bootstrap": 5}, TypeError, "bootstrap must be callable, not int"),
        ({"bootstrap": threading.Lock().acquire}, TypeError, "bootstrap .*cannot be pickled"),
        ({"proc_bind": [{"cpus": "0"}] * 3}, ValueError, "proc_bind has 3 entries, but .* makes 2 processes"),
        (
            {"proc_bind": [{"nodes": "0"}] * 2},
            ValueError,
            "'nodes' is none of 'cpunodebind', 'membind', 'physcpubind', 'cpus'",
        ),
        ({"proc_bind": [{"cpus": "x"}] * 2}, ValueError, "proc_bind.0.: 'x' is not a list of CPUs"),
    ],
)
def test_options_of_spawn_procs(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        this_host().spawn_procs(per_host={"gpus": 2}, **options)
    assert list_proc_meshes() == []


def test_what_is_not_an_actor(procs: Procs) -> None:
    class NoActor:
        pass

    world = procs(1)
    for wrong, name in ((NoActor, "NoActor"), (int, "int"), (Basic(), "Basic"), ("Basic", "'Basic'"), (len, "len")):
        with pytest.raises(
            ValueError, match=f"{name}.* is not an Actor class: derive it from monarch_kernel.actor.Actor"
        ):
            world.spawn("wrong", wrong)  # type: ignore[arg-type]
    for name in ("", None, 3):
        with pytest.raises(TypeError, match="the name must be a non-empty string"):
            world.spawn(name, Basic)  # type: ignore[arg-type]
    assert world.spawn("right", Basic).echo.call_one(1).get() == 1


def test_names_that_an_endpoint_cannot_have(procs: Procs) -> None:
    class Sized(Actor):
        @endpoint
        def size(self) -> int:
            return 1

    with pytest.raises(ValueError, match="Sized.size: an endpoint cannot be called 'size', which is an attribute"):
        procs(1).spawn("sized", Sized)


def test_constructor_arguments(procs: Procs) -> None:
    world = procs(1)
    with pytest.raises(TypeError, match=r"Basic\(tag: .*\).*: too many positional arguments"):
        world.spawn("basic", Basic, 1, 2)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'colour'"):
        world.spawn("basic", Basic, colour="red")

    class Needs(Actor):
        def __init__(self, x: int) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        world.spawn("needs", Needs)
    with pytest.raises(TypeError, match="an argument of its constructor cannot be pickled: cannot pickle"):
        world.spawn("needs", Needs, threading.Lock())

    class Stubborn:
        def __getstate__(self) -> Any:
            raise KeyError("not me")

        def __call__(self) -> None: ...

    with pytest.raises(KeyError) as caught:
        world.spawn("needs", Needs, Stubborn())
    assert caught.value.__notes__ == ["Needs or an argument of its constructor cannot be pickled"]
    with pytest.raises(KeyError):
        this_host().spawn_procs(bootstrap=Stubborn())
    assert world.spawn("basic", Basic, "x").get_tag.call_one().get() == "x"


def test_arguments_of_endpoints(two: Any) -> None:
    one = two.slice(gpus=0)
    for verb in (two.add.call, one.add.call_one, two.add.choose, two.add.stream, two.add.broadcast):
        with pytest.raises(TypeError, match=r"add\(.*\).*: missing a required argument: 'a'"):
            verb()
        with pytest.raises(TypeError, match="too many positional arguments"):
            verb(1, 2, 3)
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'd'"):
            verb(1, d=3)
        with pytest.raises(TypeError, match="multiple values for argument 'a'"):
            verb(1, a=3)
    assert list(two.add.call(1, 2, c=3).get().values()) == [6, 6]


def test_arguments_that_cannot_be_pickled(two: Any) -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("not me")

    for verb in (two.note.call, two.slice(gpus=0).note.call_one, two.note.choose, two.note.stream, two.note.broadcast):
        with pytest.raises(
            TypeError, match="an argument of basic.note cannot be pickled: cannot pickle '_thread.lock'"
        ):
            verb(threading.Lock())
        with pytest.raises(ZeroDivisionError, match="not me") as caught:  # as it was raised
            verb([Stubborn()])
        assert caught.value.__notes__ == ["an argument of basic.note cannot be pickled"]
        with pytest.raises(TypeError, match="an argument of basic.note cannot be pickled"):
            verb(x for x in "abc")
    # Nobody has got anything.
    assert list(two.get_notes.call().get().values()) == [[], []]


def test_an_argument_that_cannot_be_unpickled_fails_that_call_only(two: Any) -> None:
    from monarch_kernel.actor import ActorError

    with pytest.raises(ActorError, match="only here"):
        two.note.call(OnlyHere()).get()
    assert list(two.get_notes.call().get().values()) == [[], []]


def _fail(*_args: Any) -> None:
    raise ImportError("only here")


class OnlyHere:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> Any:
        return (_fail, ())


def test_a_result_that_cannot_be_pickled(procs: Procs) -> None:
    from monarch_kernel.actor import ActorError

    class Returns(Actor):
        @endpoint
        def lock(self) -> Any:
            return threading.Lock()

        @endpoint
        def fine(self) -> int:
            return 1

    mesh = procs(2).spawn("returns", Returns)
    with pytest.raises(ActorError, match="cannot pickle '_thread.lock' object"):
        mesh.lock.call().get()
    assert list(mesh.fine.call().get().values()) == [1, 1]


def test_a_result_that_cannot_be_unpickled_here(two: Any) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    with pytest.raises(Exception, match="not a number"):
        two.echo.call(Bad()).get()
    assert list(two.echo.call(1).get().values()) == [1, 1]


def test_endpoints_that_do_not_exist(two: Any) -> None:
    with pytest.raises(AttributeError, match=r"Basic has no endpoint 'missing' \(its endpoints: add, boom, .*where\)"):
        two.missing
    with pytest.raises(TypeError, match=r"use basic.echo.call\(...\), .call_one\(...\)"):
        two.echo(1)
    with pytest.raises(ValueError, match="no device mesh is active"):
        two.echo.rref(1)


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        ({"gpus": 2}, IndexError, "2"),
        ({"gpus": -1}, IndexError, "-1"),
        ({"hosts": 0}, TypeError, "mesh does not have a dimension 'hosts'; its dimensions are 'gpus'"),
        ({"gpus": "a"}, TypeError, "'a'"),
        ({"gpus": slice(2, 2)}, (IndexError, ValueError), "gpus"),
    ],
)
def test_slices(two: Any, select: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        two.slice(**select)
    with pytest.raises(error, match=message):
        next(iter(two._system.proc_meshes.values())).slice(**select)
    assert list(two.echo.call(1).get().values()) == [1, 1]


def test_splits_and_renames(procs: Procs) -> None:
    mesh = procs(4).spawn("basic", Basic)
    with pytest.raises(ValueError, match="3"):
        mesh.split(gpus=("a", "b"), b=3)
    with pytest.raises((TypeError, ValueError)):
        mesh.rename(hosts="x")
    with pytest.raises(ValueError):
        mesh.split(gpus=("a", "b"), b=2).rename(a="b")
    with pytest.raises(ValueError, match="sparse"):
        procs(hosts=2, gpus=3).slice(gpus=slice(0, 2)).flatten("x")


def test_options_of_logging_option(procs: Procs) -> None:
    world = procs(1)
    with pytest.raises(RuntimeError, match="aggregate_window_sec needs stream_to_client=True"):
        world.logging_option(aggregate_window_sec=3)
    for level, error in (("INFO", TypeError), (1.5, TypeError), (-1, ValueError), (999, ValueError)):
        with pytest.raises(error):
            world.logging_option(level=level)  # type: ignore[arg-type]
    for window, error in ((-1, ValueError), (1.5, TypeError), ("3", TypeError)):
        with pytest.raises(error):
            world.logging_option(stream_to_client=True, aggregate_window_sec=window)  # type: ignore[arg-type]
    world.logging_option(level=30).get(60)


def test_the_decorators() -> None:
    with pytest.raises(TypeError, match="@endpoint marks methods, not int"):
        endpoint(5)

    with pytest.raises(TypeError):
        endpoint(explicit=True)  # type: ignore[call-arg]


def test_base_methods_of_meshes() -> None:
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 2: slice it"):
        this_host().spawn_procs(per_host={"x": 2}).spawn("basic", Basic).echo.call_one(1)
