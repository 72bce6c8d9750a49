"""Errors of calls on meshes: what failed on which ranks, where, and which ranks answered.

`ActorError`: an endpoint raised. `SupervisionError`: a rank can no longer answer. `MeshFailure`: passed to the owner of
a mesh when a part of the mesh dies. `error_text` formats their messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, cast

import msgspec

from monarch_kernel.protocol.faults import Fault, static_base
from monarch_kernel.protocol.messages import Death
from monarch_kernel.runtime.actor import error_text
from monarch_kernel.runtime.actor.error_text import Called
from monarch_kernel.runtime.mesh.shape import Extent


class RankFailure(msgspec.Struct, frozen=True):
    """One failed rank of the called mesh or slice: its location, and the fault that it raised or its death."""

    rank: int
    coords: dict[str, int]
    host: str
    pid: int
    proc: str
    fault: Fault | None = None
    death: Death | None = None

    @property
    def exception(self) -> BaseException | None:
        """The exception that it raised; None if there is none, or if it cannot be rebuilt here."""
        return self.fault.rebuild() if self.fault is not None else None

    @property
    def message(self) -> str:
        """The type and message of its exception, or the cause of its death."""
        if self.fault is not None:
            return f"{self.fault.type_name}: {self.fault.message}"
        return self.death.cause if self.death is not None else "unknown"


class _Outcome(msgspec.Struct):
    """The data of an `ActorError`, in one attribute because the original's type may use the same names."""

    exception: BaseException | None
    message: str
    call_name: str = ""
    extent: Extent | None = None
    called: Called | None = None
    failures: list[RankFailure] = msgspec.field(default_factory=list)
    values: dict[int, object] = msgspec.field(default_factory=dict)
    unanswered: list[int] = msgspec.field(default_factory=list)
    released: list[RankFailure] = msgspec.field(default_factory=list)
    text: str | None = None


_OUTCOME = "_monarch_outcome"
# Taken from the base class, as a subclass may have a property called `args`.
_set_args = BaseException.__dict__["args"].__set__


class ActorError(Exception):
    """An endpoint raised on one or more ranks of a call.

    `str()` shows every failing rank, and equal tracebacks once. If this is safe, the error is also an instance of the
    original exception's type, so that `except ValueError` catches a remote ValueError. `exception` is the original
    exception itself.
    """

    #: The type that this class combines with ActorError, if any.
    _original_type: type[Exception] | None = None

    # A subclass made by `_class_for` also inherits from a foreign type, which may define any of the methods below with
    # side effects or other arguments. As this class defines them, Python finds these first.
    __getattribute__ = BaseException.__getattribute__
    __setattr__ = BaseException.__setattr__
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init_subclass__(cls) -> None:
        """Do nothing, so that the foreign type's version is not called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> ActorError:
        """Create the error with the C base class only, without the foreign type's `__new__`."""
        return cast("ActorError", static_base(cls).__new__(cls))

    def __init__(self, exception: BaseException | None = None, message: str = "An actor call failed.") -> None:
        self.__dict__[_OUTCOME] = _Outcome(exception, message)
        _set_args(self, (exception, message))

    @property
    def _outcome(self) -> _Outcome:
        return self.__dict__[_OUTCOME]

    @property
    def exception(self) -> BaseException | None:
        """The exception of the first failing rank; None if it could not be sent or read."""
        return self._outcome.exception

    @property
    def message(self) -> str:
        """Which call failed on which ranks, in one sentence."""
        return self._outcome.message

    @property
    def failures(self) -> list[RankFailure]:
        """Every failing rank, in rank order; `released` has the ranks that only waited for them in a collective."""
        return self._outcome.failures

    @property
    def released(self) -> list[RankFailure]:
        """Ranks that waited in `torch.distributed` for failed ranks, until the runtime ended their wait."""
        return self._outcome.released

    @property
    def values(self) -> dict[int, Any]:
        """Results of the ranks that answered, by rank."""
        return self._outcome.values

    @property
    def unanswered(self) -> list[int]:
        """Ranks that had not answered when this was raised."""
        return self._outcome.unanswered

    @property
    def extent(self) -> Extent | None:
        """The shape of the mesh or slice that was called; ranks here are ranks in it.

        The text names ranks of a slice by their ranks in the mesh as spawned.
        """
        return self._outcome.extent

    def without_values(self) -> ActorError:
        """Return the same error without the results of the ranks that answered, which may be large."""
        outcome = self._outcome
        if outcome.extent is None:
            return ActorError(outcome.exception, outcome.message)
        failures = [*outcome.failures, *outcome.released]
        plain = type(self) is ActorError
        return build_actor_error(
            outcome.call_name, outcome.extent, failures, {}, outcome.unanswered, outcome.called, plain
        )

    def __str__(self) -> str:
        outcome = self._outcome
        if outcome.text is None:
            outcome.text = _actor_error_text(outcome)
        return outcome.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_repr(self.exception)}, {self.message!r})"

    def __reduce__(self) -> tuple[object, ...]:
        outcome = self._outcome
        if outcome.extent is None:
            return ActorError, (outcome.exception, outcome.message)
        failures = [*outcome.failures, *outcome.released]
        parts = (outcome.call_name, outcome.extent, failures, outcome.values, outcome.unanswered, outcome.called)
        return build_actor_error, (*parts, type(self) is ActorError)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return self.__reduce__()


def build_actor_error(
    call_name: str,
    extent: Extent,
    failures: Sequence[RankFailure],
    values: Mapping[int, object],
    unanswered: Sequence[int],
    called: Called | None = None,
    plain: bool = False,
) -> ActorError:
    """Build the error for a call that failed on at least one rank.

    `call_name` is as in `actor.endpoint`; `called` names the ranks, by default as in `extent`. When all
    failing ranks raised the same type, the error is also an instance of that type, unless that could run foreign code
    or mislead (see `_class_for`), or `plain` is set, as for constructors and bootstraps.
    """
    failures, released = _own_and_released(failures)
    # Unpickled once, not for every rank: the types of the other exceptions are known by name.
    exception = failures[0].exception
    types = {(f.fault.module, f.fault.qualname) for f in failures if f.fault is not None}
    cls = ActorError
    if exception is not None and len(types) == 1 and not plain:
        cls = _class_for(exception)
    called = called or Called(extent)
    error = cls(exception, error_text.headline(f"Actor call {call_name}", called, [f.rank for f in failures]))
    outcome = error._outcome  # pyright: ignore[reportPrivateUsage]
    outcome.call_name = call_name
    outcome.extent = extent
    outcome.called = called
    outcome.failures = failures
    outcome.values = dict(values)
    outcome.unanswered = list(unanswered)
    outcome.released = released
    if cls is not ActorError and exception is not None:
        _copy_state(exception, error)
    return error


def _own_and_released(failures: Sequence[RankFailure]) -> tuple[list[RankFailure], list[RankFailure]]:
    """Split failures into the ranks' own and those caused by others; if others caused all, all count as own."""
    ordered = sorted(failures, key=lambda failure: failure.rank)
    own = [failure for failure in ordered if failure.fault is None or not failure.fault.of_peer]
    if not own:
        return ordered, []
    return own, [failure for failure in ordered if failure.fault is not None and failure.fault.of_peer]


def _actor_error_text(outcome: _Outcome) -> str:
    if outcome.called is None:
        return outcome.message
    lines = [outcome.message, *error_text.tracebacks(outcome.failures, outcome.called)]
    lines += error_text.released(outcome.released, outcome.failures, outcome.called)
    lines += error_text.answers(outcome.values, outcome.unanswered, outcome.called)
    return "\n".join(lines)


class MeshFailure(Exception):
    """The death of a part of a mesh. It is the argument of the owner's `__supervise__` and of the fault hook."""

    #: For the runtime: the key under which a pending call marks this failure as reported.
    key: Any = None

    @staticmethod
    def was_raised() -> bool:
        """Return whether a call has already raised this failure."""
        return False

    def __init__(
        self,
        mesh_name: str,
        reason: str = "",
        *,
        mesh: str = "",
        ranks: Sequence[int] = (),
        extent: Extent | None = None,
        death: Death | None = None,
        owner: str = "",
        actor_class: str = "",
    ) -> None:
        self.mesh_name = mesh_name
        self.reason = reason
        #: The class of its actors, with its module; "" for a mesh of processes.
        self.actor_class = actor_class
        #: The name under which the mesh was spawned.
        self.mesh = mesh or mesh_name
        #: The dead ranks of the mesh as spawned.
        self.ranks = tuple(ranks)
        self.extent = extent
        self.death = death
        #: The owner of the mesh, which may handle the failure, or did not handle it.
        self.owner = owner
        #: What died, where and why, in one line.
        self.headline = error_text.mesh_failure(self.mesh, self.ranks, extent, reason, death)
        super().__init__(f"MeshFailure: {self.headline}")

    @classmethod
    def of(
        cls,
        name: str,
        mesh_name: str,
        extent: Extent | None,
        ranks: Sequence[int],
        death: Death,
        owner: str = "",
        actor_class: str = "",
    ) -> MeshFailure:
        """Return the failure of ranks of one mesh that died in the same way."""
        return cls(
            mesh_name,
            death.cause,
            mesh=name,
            ranks=ranks,
            extent=extent,
            death=death,
            owner=owner,
            actor_class=actor_class,
        )

    def report(self) -> str:
        """Render a report in several lines: the dead ranks, the place and cause, the owner, and the last output."""
        lines = [self.headline]
        if self.actor_class and self.ranks and self.extent is not None:
            text = error_text.have_failed(self.actor_class, self.mesh, self.ranks, Called(self.extent))
            lines.append(f"{text} ({error_text.rank_numbers(self.ranks)}).")
        if self.owner:
            lines.append(f"  Mesh {self.mesh!r} was owned by {self.owner}.")
        if self.death is not None and self.death.detail:
            lines += [f"  {line}" for line in self.death.detail.rstrip().split("\n")]
        if self.__cause__ is not None:
            lines.append(f"caused by: {self.__cause__}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _mesh_failure, (
            self.mesh_name,
            self.reason,
            self.mesh,
            self.ranks,
            self.extent,
            self.death,
            self.key,
            self.owner,
            self.actor_class,
        )


class SupervisionError(MeshFailure, RuntimeError):
    """A call cannot be answered, because a rank's process, actor or host died or was stopped.

    It is a `MeshFailure`, so that a loop can catch it, heal the mesh and repeat the failed step. As in Monarch, it is
    also a `RuntimeError`.
    """

    def __init__(
        self,
        message: str = "",
        *,
        endpoint: str = "",
        mesh_name: str = "",
        ranks: Sequence[int] = (),
        cause: str = "",
        extent: Extent | None = None,
        failures: Sequence[RankFailure] = (),
        values: Mapping[int, Any] | None = None,
        unanswered: Sequence[int] = (),
    ) -> None:
        Exception.__init__(self, message)
        self.headline = message.partition("\n")[0]
        self.actor_class = ""
        #: The call, as in `actor.endpoint`.
        self.endpoint = endpoint
        self.mesh = self.mesh_name = mesh_name
        #: The ranks of the called mesh that cannot answer.
        self.ranks = tuple(ranks)
        #: Why the first of them cannot answer.
        self.cause = self.reason = cause
        self.extent = extent
        #: Every failing rank: dead ranks, and ranks whose endpoint raised.
        self.failures = list(failures)
        self.death = next((failure.death for failure in self.failures if failure.death is not None), None)
        #: Results of the ranks that answered, by rank.
        self.values = dict(values or {})
        #: Ranks that had not answered when this was raised.
        self.unanswered = list(unanswered)
        self.owner = ""

    def without_values(self) -> SupervisionError:
        """Return the same error without the results of the ranks that answered, which may be large."""
        error = copy(self)
        error.values = {}
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # Other attributes (notes) are not sent: the pickle contains only what happened.
        state = {
            "endpoint": self.endpoint,
            "mesh": self.mesh,
            "mesh_name": self.mesh_name,
            "ranks": self.ranks,
            "cause": self.cause,
            "reason": self.reason,
            "death": self.death,
            "extent": self.extent,
            "failures": self.failures,
            "values": self.values,
            "unanswered": self.unanswered,
        }
        return type(self), self.args, state


def build_supervision_error(
    call_name: str,
    mesh_name: str,
    extent: Extent,
    failures: Sequence[RankFailure],
    values: Mapping[int, object],
    unanswered: Sequence[int],
    actor_class: str = "",
    called: Called | None = None,
) -> SupervisionError:
    """Build the error for a call over at least one dead rank; ranks that raised are listed, too.

    `called` names the ranks, by default as in `extent`.
    """
    called = called or Called(extent)
    failures, released = _own_and_released(failures)
    dead = [failure for failure in failures if failure.death is not None]
    raised = [failure for failure in failures if failure.fault is not None]
    lines = error_text.deaths(f"Endpoint call {call_name}() failed: ", mesh_name, dead, called)
    failed = [failure for failure in dead if failure.death is not None and not failure.death.kind.intended]
    if actor_class and failed and failed[0].death is not None:
        ranks = [failure.rank for failure in failed]
        text = error_text.have_failed(actor_class, mesh_name, ranks, called)
        cause = f"{failed[0].death.cause} ({error_text.rank_numbers(called.ranks(ranks))})"
        lines.append(f"{text}: the mesh is unhealthy with reason: {cause}")
    if raised:
        lines.append(error_text.headline("The endpoint also", called, [failure.rank for failure in raised]))
        lines += error_text.tracebacks(raised, called)
    lines += error_text.released(released, failures, called)
    lines += error_text.answers(values, unanswered, called)
    return SupervisionError(
        "\n".join(lines),
        endpoint=call_name,
        mesh_name=mesh_name,
        ranks=[failure.rank for failure in dead],
        cause=dead[0].death.cause if dead and dead[0].death is not None else "",
        extent=extent,
        failures=[*failures, *released],
        values=values,
        unanswered=unanswered,
    )


def build_port_error(groups: Sequence[tuple[str, Extent, Sequence[RankFailure]]]) -> SupervisionError:
    """Build the error of a `recv()` if all holders of the port are gone; by mesh: name, extent, dead ranks."""
    lines: list[str] = []
    for mesh_name, extent, failures in groups:
        head = "  " if lines else "recv() failed, as all holders of the port are gone: "
        lines += error_text.deaths(head, mesh_name, failures, Called(extent))
    mesh_name, extent, failures = groups[-1]
    deaths = [failure.death for failure in failures if failure.death is not None]
    return SupervisionError(
        "\n".join(dict.fromkeys(lines)),
        endpoint="recv",
        mesh_name=mesh_name,
        ranks=[failure.rank for failure in failures],
        cause=deaths[0].cause if deaths else "",
        extent=extent,
        failures=[failure for _, _, group in groups for failure in group],
    )


def _mesh_failure(
    mesh_name: str,
    reason: str,
    mesh: str,
    ranks: tuple[int, ...],
    extent: Extent | None,
    death: Death | None,
    key: object,
    owner: str,
    actor_class: str,
) -> MeshFailure:
    failure = MeshFailure(
        mesh_name, reason, mesh=mesh, ranks=ranks, extent=extent, death=death, owner=owner, actor_class=actor_class
    )
    failure.key = key
    return failure


# Types whose handlers would mistake a remote failure for something else: the end of an iteration, a file that does not
# parse (tracebacks then print its line instead of the message), a group to split, or the caller's own timeout, which
# the handler would retry although the result never changes.
_MISLEADING = (StopIteration, StopAsyncIteration, SyntaxError, BaseExceptionGroup, TimeoutError)


def _class_for(exception: BaseException) -> type[ActorError]:
    """ActorError, or a subclass that inherits from the exception's type as well."""
    cls = type(exception)
    if isinstance(exception, ActorError):  # the error crossed several processes
        original = exception._original_type  # pyright: ignore[reportPrivateUsage]
        return ActorError if original is None else _combined(original)
    if cls is Exception or type(cls) is not type or not issubclass(cls, Exception):
        return ActorError  # a custom metaclass would run foreign code
    return ActorError if issubclass(cls, _MISLEADING) else _combined(cls)


@lru_cache(maxsize=256)
def _combined(original: type[Exception]) -> type[ActorError]:
    # The module is the one that users import ActorError from, as tracebacks show it.
    names = {"__module__": "monarch_kernel.errors", "__doc__": ActorError.__doc__, "_original_type": original}
    try:
        return type(f"ActorError[{original.__name__}]", (ActorError, original), names)
    except TypeError:  # their memory layouts cannot be combined, or the original forbids subclasses
        return ActorError


def _copy_state(source: BaseException, target: ActorError) -> None:
    """Copy the original's attributes and `args` to the combined error, without running code of its type."""
    _set_args(target, source.args)
    for cls in type(source).__mro__:
        for name, member in vars(cls).items():
            if not isinstance(member, MemberDescriptorType | GetSetDescriptorType) or name == "args":
                continue
            if name.startswith("__") or cls in (AttributeError, NameError):  # Python suggests names from their `name`
                continue
            try:
                value = member.__get__(source)
                member.__set__(target, value)
            except (AttributeError, TypeError, ValueError):  # unset, or read-only
                continue
    for name, value in vars(source).items():
        if name not in ("__notes__", _OUTCOME):
            target.__dict__.setdefault(name, value)


def _repr(exception: BaseException | None) -> str:
    try:
        return repr(exception)
    except Exception:  # user code
        return f"<{type(exception).__qualname__}>"
