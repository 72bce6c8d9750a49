"""Call actors among operations on tensors: handles as arguments of endpoints, and as references to their results.

The streams of the argument tensors wait until the endpoint has ended. Later operations see its writes, and their writes
do not affect it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_flatten

from monarch_kernel.runtime.tensor.api.activation import active_target, tensor_mesh
from monarch_kernel.runtime.tensor.api.fetching import argument_key
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.borrowing import TensorLoan, ranks_in, region_of
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.calls import TakeResult, WaitForCall, described
from monarch_kernel.runtime.tensor.rank.objects import ResultLike

if TYPE_CHECKING:
    from collections.abc import Callable


class LentArguments:
    """A call of an endpoint with tensors of a mesh among its arguments.

    Attributes:
        tensors, stays: see ``extensions.TensorCall``.
    """

    stays = False

    def __init__(self, label: str, procs: Sequence[object]) -> None:
        self._label = label
        self._procs = procs
        self._waits: list[tuple[TensorMesh, tuple[int, ...], int]] = []

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        return tuple((mesh.engine.key, token) for mesh, _, token in self._waits)

    @contextmanager
    def pickling(self) -> Generator[None]:
        """Implement ``extensions.TensorCall``."""
        loan = TensorLoan(self._procs)
        with loan:
            yield
        self._waits = loan.send()

    def sent(self) -> Any:
        """Make the streams wait for the end of the call."""
        for mesh, ranks, token in self._waits:
            key = ("wait for call", self._label, ranks)
            mesh.call(WaitForCall(self._label, ranks), lambda _: None, float(token), key=key)


class ResultReference(LentArguments):
    """A call of an endpoint whose result stays on the ranks."""

    stays = True

    def __init__(self, label: str, target: Any, propagate: object, function: Any, arguments: object) -> None:
        self._mesh = _mesh_of_results(label, target, arguments)
        mesh, engine = self._mesh, self._mesh.engine
        if engine.recording is not None:
            engine.recording.stop(f"it calls {label}")
        mesh.check_alive()
        self._inputs = handles_in(arguments)
        self._key, self._like = _expected(mesh, label, propagate, function, arguments)
        super().__init__(label, target.procs)
        self._token = engine.new_number()

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        return (*super().tensors, (self._mesh.engine.key, self._token))

    def sent(self) -> Any:
        """Return the handles of the tensors that stay on the ranks, in the structure of the endpoint's result."""
        self._waits = [wait for wait in self._waits if wait[0].stream is not self._mesh.stream]
        super().sent()
        mesh = self._mesh
        if self._like is None:
            self._like = mesh.engine.extras[_CACHED][self._key] = _asked(mesh, self._label, self._token)
        like = self._like
        made = mesh.call(
            TakeResult(self._label, like, getattr(mesh, "key", None)),
            lambda _: like.fakes() or None,
            float(self._token),
            key=("take result", self._label, like.key),
        )
        return without_gradient(f"what {self._label} gave", like.filled(mesh.objects(like, made)), self._inputs)


#: The key under which an engine stores the forms of endpoint results, by kind of call.
_CACHED = "results of endpoints"


def lend_arguments(label: str, procs: Sequence[object]) -> LentArguments:
    """Create a call with handles among its arguments, in order with the handles' streams.

    An actor receives the value itself, not a copy.

    Args:
        label: the name of the endpoint.
        procs: the processes that are called.

    Raises:
        MixedTensorsError: an actor is in a process that is not a rank of a tensor's mesh.
    """
    return LentArguments(label, procs)


def refer_to_result(
    label: str, target: object, propagate: object, function: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> ResultReference:
    """Create a call whose result stays on the ranks; see `Endpoint.rref`."""
    return ResultReference(label, target, propagate, function, (args, kwargs))


def _mesh_of_results(label: str, target: Any, arguments: object) -> TensorMesh:
    """Return the mesh of the ranks of these actors: the active mesh, or a part of it."""
    handles = handles_in(arguments)
    if active_target()[0] is None and handles:
        base = handles[0]._spec.mesh
    else:
        base = tensor_mesh()
    engine = base.engine
    ranks = ranks_in(engine, target.procs)
    if list(ranks) == list(base.ranks):
        return base
    region = region_of(target.extent.names, target.extent.shape, ranks)
    if region is None or not set(ranks) <= set(base.ranks):
        raise MixedTensorsError(
            f"{label}.rref: its actors are not on ranks of mesh {base.name}: activate the mesh that they are on"
        )
    return engine.mesh_of(engine.world._new_with_region(region), base.stream)


def _expected(
    mesh: TensorMesh, label: str, propagate: object, function: Callable[..., object], arguments: object
) -> tuple[object, ResultLike | None]:
    """Return the form of a call's result and its key; None in place of the form if it is unknown before the call."""
    flat, tree = tree_flatten(arguments)
    key = label, propagate, function, tree, tuple(map(argument_key, flat))
    known = mesh.engine.extras.setdefault(_CACHED, {})
    if key in known:
        return key, known[key]
    if propagate is None or propagate == "cached":
        return key, None
    if propagate == "inspect":
        known[key] = ResultLike(None)
    elif propagate == "mocked" and function is not None and not inspect.iscoroutinefunction(function):
        known[key] = mesh.propagated(functools.partial(function, None), arguments)
    elif callable(propagate):
        known[key] = mesh.propagated(propagate, arguments)
    else:
        raise ValueError(
            f"{label}: propagate={propagate!r} is not possible: give a function of its arguments (without self) that "
            'returns tensors like its results; "inspect", if it is called for what it does; "mocked", to call it with '
            'None for self (if it is no coroutine); or "cached"'
        )
    return key, known[key]


def _asked(mesh: TensorMesh, label: str, token: int) -> ResultLike:
    """Fetch the form of the result of a call in progress, in one round trip."""
    engine = mesh.engine
    engine.plan.synchronised(f"the shapes of {label}")
    found: list[object] = engine.ask(mesh, functools.partial(described, label, token))
    for place, other in enumerate(found):
        if ResultLike(other).key != ResultLike(found[0]).key:
            raise ValueError(
                f"{label}.rref: its result on rank {place} ({other}) is unlike that on rank 0 ({found[0]}) of mesh "
                f"{mesh.name}, so that no tensor can stand for both: use call()"
            )
    return ResultLike(found[0])
