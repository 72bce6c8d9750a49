"""Endpoint handles, returned by ``mesh.method``, and their methods ``call``, ``call_one``, ``choose`` and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pickle import dumps
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from monarch_kernel.protocol.messages import Call, Death, ProcRef
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import LARGE, PLAIN, explain
from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.context import caller
from monarch_kernel.runtime.actor.definition import EndpointSpec, tell_undeliverable
from monarch_kernel.runtime.actor.extensions import TensorArgument, TensorCall, tensor_functions
from monarch_kernel.runtime.actor.ports.holders import give, pickled
from monarch_kernel.runtime.actor.ports.port import Port
from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink, Pickled
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh

R = TypeVar("R")
A = TypeVar("A")
#: The arguments of a call, ready to send.
Prepared = tuple[Pickled, Buffers, Sequence[Port[Any]], TensorCall | None]


class Endpoint(Generic[R]):
    """An endpoint of all actors of a mesh (or slice).

    The caller checks and pickles arguments. An invalid or unpicklable argument raises ``TypeError`` immediately, before
    anything is sent.
    """

    __slots__ = (
        "_actor",
        "_generation",
        "_label",
        "_mesh",
        "_name",
        "_node",
        "_propagate",
        "_spec",
        "_system",
        "_target",
    )

    def __init__(self, mesh: ActorMesh[Any], name: str, spec: EndpointSpec | None, propagate: object = None) -> None:
        self._mesh = mesh
        self._name = name
        self._spec = spec
        self._propagate = propagate
        self._label = f"{mesh._name}.{name.removesuffix('!port')}"
        # Of the mesh: its own attributes are slow, as its class has a `__getattr__`.
        self._actor = mesh._actor
        self._system = mesh._system
        self._node = mesh._system.node
        self._generation = -1  # of the node, when the target was taken
        self._target: Target

    def _current(self) -> Target:
        """Return the current target of the mesh. It changes when procs are replaced."""
        generation = self._node.generation
        if self._generation != generation:
            self._target = self._mesh._target()
            self._generation = generation
        return self._target

    def _body(self, args: tuple[object, ...], kwargs: dict[str, object], rank: int | None = None) -> Prepared:
        """Return the body of the message, its ports, and the handling of mesh tensors in it.

        Args:
            rank: the called rank, if it is a single one.
        """
        spec = self._spec
        if spec is not None and (kwargs or not spec.least <= len(args) <= spec.most):
            spec.check(args, kwargs)
        if not kwargs and PLAIN.issuperset(map(type, args)):  # the usual case
            return dumps((args, kwargs), 5), (), (), None
        try:
            return *pickled((args, kwargs)), None
        except TensorArgument:
            procs = self._current().procs
            tensors = tensor_functions().lend_arguments(self._label, procs if rank is None else (procs[rank],))
            with tensors.pickling():
                message = pickled((args, kwargs))
            return *message, tensors
        except Exception as e:
            explain(e, f"an argument of {self._label}")
            raise

    # -- verbs ------------------------------------------------------------------------------------

    def call(self, *args: object, **kwargs: object) -> Future[ValueMesh[R]]:
        """Call all ranks. The future resolves to a ``ValueMesh`` with one result per rank.

        Raises (from ``get``/``await``):
            ActorError: the endpoint raised on some ranks; the error lists them, and has the values of the others.
            SupervisionError: a rank died, before or during the call.
        """
        target = self._current()
        body, buffers, ports, tensors = self._body(args, kwargs)
        call = ManyCall(self._node, self._label, target)
        self._cast(body, buffers, ports, call._number, call, tensors=tensors)
        if tensors is not None:
            tensors.sent()
        return call

    def call_one(self, *args: object, **kwargs: object) -> Future[R]:
        """Call the only actor of this mesh.

        Raises:
            ValueError: the mesh has more than one actor; raised immediately.
        """
        target = self._current()
        if len(target.procs) != 1:
            raise ValueError(
                f"call_one requires exactly 1 actor, but mesh has {len(target.procs)}: slice it to one, or use call"
            )
        return self._single(0, target, *self._body(args, kwargs))

    def choose(self, *args: object, **kwargs: object) -> Future[R]:
        """Call one rank, chosen at random for each call."""
        target = self._current()
        rank = _any_of(target)
        return self._single(rank, target, *self._body(args, kwargs, rank))

    def stream(self, *args: object, **kwargs: object) -> StreamCall:
        """Call all ranks. Iterating yields one future per rank, in order of completion."""
        target = self._current()
        body, buffers, ports, tensors = self._body(args, kwargs)
        call = StreamCall(self._node, self._label, target)
        self._cast(body, buffers, ports, call._number, call, tensors=tensors)
        if tensors is not None:
            tensors.sent()
        return call

    def broadcast(self, *args: object, **kwargs: object) -> None:
        """Send to all ranks without waiting for answers.

        An exception in the endpoint ends the actor, because it would go unnoticed otherwise.
        """
        body, buffers, ports, tensors = self._body(args, kwargs)
        lost = self._cast(body, buffers, ports, 0, None, tensors=tensors)
        if tensors is not None:
            tensors.sent()
        if lost:
            tell_undeliverable(self._label, tuple(lost), next(iter(lost.values())).cause)

    def rref(self, *args: object, **kwargs: object) -> Any:
        """Call all ranks without waiting; the results stay on the ranks, as tensors of the active mesh.

        The endpoint's ``propagate`` determines the shapes. It is a function of the arguments (without ``self``) that
        returns tensors with the shapes and dtypes of the result, alone or in nested lists, tuples and dicts; other
        values in these are returned unchanged. With "cached", or without ``propagate``, the result of the first call of
        a kind determines the shapes, which costs a round trip. With "mocked", the endpoint itself is called here with
        None for ``self``. With "inspect", the endpoint is called for its side effects, and the reference is None. Later
        operations run when the endpoint has ended. If it raises, everything that depends on the result fails with a
        ``RemoteException``.

        Raises:
            ValueError: no mesh is active and no argument is a tensor of one, or the endpoint answers through a port.
            MixedTensorsError: the actors are not on ranks of that mesh.
            Exception: an exception of ``propagate`` for these arguments.
        """
        __tracebackhide__ = True
        target = self._current()
        spec, propagate, function = self._spec, self._propagate, None
        if self._name.endswith("!port") or (spec is not None and spec.explicit_port):
            raise ValueError(f"{self._label}.rref: it answers through a port, and a reference needs what is returned")
        if spec is not None:
            spec.check(args, kwargs)
            function = spec.function
            propagate = spec.propagate if propagate is None else propagate
        tensors = tensor_functions().refer_to_result(self._label, target, propagate, function, args, kwargs)
        with tensors.pickling():
            body, buffers, ports = pickled((args, kwargs))
        call = ManyCall(self._node, self._label, target)
        self._cast(body, buffers, ports, call._number, call, tensors=tensors)
        return tensors.sent()

    def at(self, coords: dict[str, int]) -> Endpoint[R]:
        """Return this endpoint of the actor at these coordinates. Dimensions that are not named are 0.

        Raises:
            TypeError: the mesh has no such dimension.
            IndexError: a coordinate is out of range.
        """
        first = dict.fromkeys(self._mesh.extent.names, 0)
        return Endpoint(self._mesh.slice(**first | coords), self._name, self._spec, self._propagate)

    # -- sending ----------------------------------------------------------------------------------

    def _single(
        self,
        rank: int,
        target: Target,
        body: Body,
        buffers: Buffers,
        ports: Sequence[Port[object]],
        tensors: TensorCall | None,
        held: OneCall | None = None,
    ) -> OneCall:
        """Call one rank of a target, at once or after a heal.

        Args:
            held: the pending call, if it has waited for a heal.
        """
        node = self._node
        ref = target.procs[rank]
        if held is None:
            call = OneCall(node, self._label, target, rank)
            hold = self._system.held_calls
            if hold.active and hold.keep(
                (ref.id,), partial(self._single_late, call, rank, body, buffers, ports, tensors)
            ):
                if tensors is not None:
                    tensors.sent()
                return call
        else:
            call = held
            call.retarget(target)
        if ports:
            give(ports, target, (rank,))
        link: MessageLink | None = node.links.get(ref.id)
        if link is None and (link := self._mesh._reach(ref)) is None:
            call.on_peer_dead(ref.id, node.deaths[ref.id])
        else:
            extent = target.extent
            segment = None
            if buffers or (type(body) is bytes and len(body) >= LARGE):
                body, segment = node.pack(body, buffers, [ref.id])
            sender, cell = caller()
            actor, name, number = self._actor, self._name, call._number
            message = Call(actor, name, number, rank, extent.names, extent.shape, sender, buffers, None, segment, cell)
            if tensors is not None:
                message.tensors = tensors.tensors
            if call_hooks.sending is not None:
                message.trace = call_hooks.sending(self._label, target, call).trace
            link.send(encode_header(message), body)
        if tensors is not None and held is None:
            tensors.sent()
        return call

    def _single_late(
        self,
        call: OneCall,
        rank: int,
        body: Body,
        buffers: Buffers,
        ports: Sequence[Port[object]],
        tensors: TensorCall | None,
    ) -> None:
        self._single(rank, self._current(), body, buffers, ports, tensors, call)

    def _cast(
        self,
        body: Body,
        buffers: Buffers,
        ports: Sequence[Port[object]],
        number: int,
        sink: ManyCall | StreamCall | None,
        reply_to: Any = None,
        tensors: TensorCall | None = None,
    ) -> dict[int, Death]:
        """Send to all ranks. Return the ranks known to be dead, except those reached through agents."""
        waiting = self._system.held_calls
        if waiting.active:

            def later() -> None:
                if sink is not None:
                    sink.retarget(self._current())
                lost = self._send_all(body, buffers, ports, number, sink, reply_to, tensors)
                if lost and not number:
                    tell_undeliverable(self._label, tuple(lost), next(iter(lost.values())).cause)

            if waiting.keep((ref.id for ref in self._current().procs), later):
                return {}
        return self._send_all(body, buffers, ports, number, sink, reply_to, tensors)

    def _send_all(
        self,
        body: Body,
        buffers: Buffers,
        ports: Sequence[Port[object]],
        number: int,
        sink: ManyCall | StreamCall | None,
        reply_to: ProcRef | None,
        tensors: TensorCall | None,
    ) -> dict[int, Death]:
        system = self._system
        node = self._node
        links = node.links
        target = self._current()
        if ports:
            give(ports, target)
        extent = target.extent
        sender, cell = caller()
        message = Call(
            self._actor, self._name, number, 0, extent.names, extent.shape, sender, buffers, reply_to, None, cell
        )
        if tensors is not None:
            message.tensors, message.stays = tensors.tensors, tensors.stays
        recorded = None
        if call_hooks.sending is not None:
            recorded = call_hooks.sending(self._label, target, sink)
            message.trace = recorded.trace
        if sink is not None:
            sink.asked = message.actor, message.endpoint, message.sender
        large = bool(buffers) or (type(body) is bytes and len(body) >= LARGE)
        # Through agents, a host's ranks share one copy. A host's only rank is reached faster without agents.
        direct = large and target.one_per_host and node.goes_directly(body, buffers)
        plan = None if direct else target.plan_for(system.caster)
        near: Iterable[tuple[int, ProcRef]]
        if plan is None:
            near = enumerate(target.procs)
        else:
            near = plan.near
            system.caster.cast(plan.group, message, body, sink)
        if large:
            procs = target.procs if plan is None else [ref for _, ref in near]
            for ref in procs:
                node.learn(ref)
            body, message.segment = node.pack(body, buffers, [ref.id for ref in procs if ref.id not in node.deaths])
        lost: dict[int, Death] = {}
        for rank, ref in near:
            link: MessageLink | None = links.get(ref.id)
            if link is None and (link := self._mesh._reach(ref)) is None:
                lost[rank] = node.deaths[ref.id]
                if sink is not None:
                    sink.on_peer_dead(ref.id, lost[rank])
                continue
            message.rank = rank
            link.send(encode_header(message), body)
        if recorded is not None and sink is None:
            recorded.sent()
        return lost

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            f"{self._label} is an endpoint of another process: use {self._label}.call(...), .call_one(...), "
            ".choose(...), .stream(...), .broadcast(...) or .rref(...)"
        )

    def __reduce__(self) -> Any:
        raise TypeError("an endpoint cannot be pickled: send the actor mesh")

    def __repr__(self) -> str:
        return f"<endpoint {self._label} of {self._mesh!r}>"


class PlainMethod:
    """A method of an actor that is not marked as an endpoint; ``as_endpoint`` converts it."""

    __slots__ = ("_mesh", "_name")

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise RuntimeError(
            f"{self._mesh._name}.{self._name} is not annotated as an endpoint: "
            f"mark it with @endpoint, or use as_endpoint(mesh.{self._name})"
        )

    call = call_one = choose = stream = broadcast = rref = __call__


def as_endpoint(method: object, *, propagate: object = None, explicit_response_port: bool = False) -> Endpoint[Any]:
    """Convert a method that is not marked as an endpoint: ``as_endpoint(mesh.method).call(...)``.

    Raises:
        ValueError: ``method`` is not a method of a spawned actor mesh.
    """
    if isinstance(method, Endpoint):
        return method if propagate is None else Endpoint(method._mesh, method._name, method._spec, propagate)
    if not isinstance(method, PlainMethod):
        raise ValueError(f"as_endpoint takes a method of a spawned actor mesh, not {method!r}")
    return Endpoint(method._mesh, method._name + ("!port" if explicit_response_port else ""), None, propagate)


class _Function(Protocol):
    """The part of a remote function that ``send`` uses."""

    def stream(self, *args: object, **kwargs: object) -> Iterable[_Value]: ...
    def choose(self, *args: object, **kwargs: object) -> _Value: ...
    def broadcast(self, *args: object, **kwargs: object) -> None: ...


class _Value(Protocol):
    def get(self) -> Any: ...


def send(
    endpoint: Endpoint[object] | _Function,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    port: Port[object] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Send a message; replies go to ``port``. Without a port, an exception in the endpoint ends the actor.

    Args:
        endpoint: an endpoint, or a remote function, which the ranks of the active mesh call.
        args: its arguments.
        kwargs: its keyword arguments.
        port: receives each rank's result or exception.
        selection: "choose" sends to one random rank; "all" to all ranks.

    Raises:
        TypeError: the arguments are wrong, or cannot be pickled.
    """
    if selection not in ("all", "choose"):
        raise ValueError(f"selection must be 'all' or 'choose', not {selection!r}")
    if not isinstance(endpoint, Endpoint):
        if port is None:
            endpoint.broadcast(*args, **kwargs)
            return
        choose = selection == "choose"
        given = [endpoint.choose(*args, **kwargs)] if choose else list(endpoint.stream(*args, **kwargs))
        Thread(target=_pass_on, args=(given, port), name="monarch-send", daemon=True).start()
        return
    number, reply_to = (port._number, port._ref) if port is not None else (0, None)
    if selection == "choose":
        mesh = endpoint._mesh
        endpoint = endpoint.at(dict(mesh.extent.point(_any_of(endpoint._current()))))
    body, buffers, ports, tensors = endpoint._body(args, kwargs)
    if port is not None:
        ports = (*ports, port)
    endpoint._cast(body, buffers, ports, number, None, reply_to, tensors)
    if tensors is not None:
        tensors.sent()


def _pass_on(given: Sequence[_Value], port: Port[object]) -> None:
    """Send the results of a remote function to a port, as if its ranks had sent them."""
    for rank, value in enumerate(given):
        of_rank: Port[object] = Port(port._ref, port._number, rank)
        try:
            result = value.get()
        except Exception as e:
            of_rank.exception(e)
        else:
            of_rank.send(result)


def _any_of(target: Target) -> int:
    import random

    return random.randrange(len(target.procs))


class Accumulator(Generic[A, R]):
    """Folds the results of all ranks as they arrive: ``Accumulator(ep, 0, operator.add).accumulate(...)``."""

    def __init__(self, endpoint: Endpoint[R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: object, **kwargs: object) -> Future[A]:
        """Call all ranks. The future resolves to the folded value, or raises the first error."""
        elements = list(self._endpoint.stream(*args, **kwargs))
        poller = self._endpoint._node.poller
        whole: Future[A] = Future(poller, self._endpoint._label)
        left = len(elements)
        total = self._identity

        def one(element: Future[R]) -> None:
            nonlocal left, total
            left -= 1
            try:
                total = self._combine(total, element.get())
            except Exception as e:
                whole._reject(e)
                return
            if not left:
                whole._resolve(total)

        for element in elements:
            element.add_done_callback(one)
        return whole
