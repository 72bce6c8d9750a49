"""Actor definitions: the base class ``Actor``, endpoint decorators, and the specs derived from a class."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.runtime.actor.context import context, current

if TYPE_CHECKING:
    from inspect import Signature
    from logging import Logger


# Detect async functions without ``inspect``, whose import takes a tenth of the import time of this package.

_COROUTINE = 0x80  # inspect.CO_COROUTINE


def is_coroutine_function(function: object) -> bool:
    """Return the same as ``inspect.iscoroutinefunction``."""
    if type(function) is FunctionType and not function.__dict__:  # marks of ``inspect`` are in ``__dict__``
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function)


_STARRED = 0x4 | 0x8  # inspect.CO_VARARGS, CO_VARKEYWORDS


class Undeliverable(msgspec.Struct, frozen=True):
    """A message whose receiver is dead.

    Attributes:
        what: the endpoint as ``mesh.endpoint``, or the port.
        ranks: the ranks of the addressed mesh that cannot be reached; empty for a port.
        cause: why the first of them is dead.
    """

    what: str
    ranks: tuple[int, ...]
    cause: str


def tell_undeliverable(what: str, ranks: tuple[int, ...], cause: str) -> bool:
    """Let the running actor handle a message that cannot be delivered; returns whether the actor handled it."""
    here = current.get()
    instance = here.actor_instance if here is not None else None
    handler = getattr(getattr(instance, "object", None), "_handle_undeliverable_message", None)
    return handler is not None and bool(handler(Undeliverable(what, ranks, cause)))


HOOKS = ("__supervise__", "__cleanup__", "__restore__")


class Actor:
    """Base class of actors: objects in a proc that handle messages one at a time.

    Methods marked ``@endpoint`` can be called from other processes. They are all ``def`` or all ``async def``.

    Optional hooks, of the same kind as the endpoints (``__supervise__`` of an async actor may be a plain ``def``):

    * ``__supervise__(self, failure) -> bool``: called when a mesh that this actor spawned has failed, before waiting
      messages. Return true if the failure is handled.
    * ``__cleanup__(self, error)``: called when the actor ends; ``error`` is None if it was stopped on purpose. Calls
      that are still pending then are dropped.
    * ``__restore__(self, state)``: called when this actor replaces a dead one; ``state`` is the last result of the
      ``checkpoint`` endpoint of its predecessor.
    * ``_handle_undeliverable_message(self, envelope) -> bool``: see below.

    The proc's main thread runs its first actor. Every other actor has a separate thread.
    """

    #: Set in tools that run on a program's procs (a debugger, a cell runner): if a proc dies, its owner is notified of
    #: the proc, but not of the tool.
    __tool__ = False

    #: Set in tools that any process may call: no exception of an endpoint ends them, whoever sent the message.
    __outlives_errors__ = False

    #: Set in tools that never use a proc's main thread, even if they are spawned before the program's own actors.
    __background__ = False

    @property
    def logger(self) -> Logger:
        """A logger named after the actor and its rank."""
        import logging

        instance = context().actor_instance
        return logging.getLogger(f"monarch_kernel.actors.{instance.name}.{instance.rank.rank}")

    def _handle_undeliverable_message(self, envelope: Undeliverable) -> bool:
        """Handle a message from this actor whose receiver is known to be dead. Return true if it is handled.

        This is called inside ``broadcast()`` or ``Port.send()``, which then return normally. If it returns false, a
        broadcast is dropped anyway, and ``send`` raises ``ConnectionError``. Messages lost in transit are not reported.
        """
        return False


class EndpointProperty:
    """A method of an actor class that is marked as an endpoint."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        propagate: object = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        self.function = function
        self.propagate = propagate
        self.explicit_response_port = explicit_response_port
        self.instrument = instrument
        self.concurrent = concurrent
        self.is_async = is_coroutine_function(function)
        if self.is_async and not function.__module__.startswith("monarch_kernel."):
            import_module("asyncio")  # fork servers load it, too, if it is loaded here
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__wrapped__ = function
        try:  # a bound method has its function's attributes, so an instance's endpoint has this one, too
            function._method = function  # pyright: ignore[reportFunctionMemberAccess]
        except (AttributeError, TypeError):  # not a function of Python
            pass

    @property
    def _method(self) -> Callable[..., object]:
        """The plain function; programs written for Monarch read it, for ``inspect.getsource`` say."""
        return self.function

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # Inside its own actor, an endpoint is a plain method.
        return self.function.__get__(instance, owner)


def _decorate(function: object, options: dict[str, Any]) -> object:
    if function is None:
        return lambda f: _decorate(f, options)
    if isinstance(function, EndpointProperty):
        raise ValueError(f"{function.__name__} is already an endpoint: use either @endpoint or @concurrent_endpoint")
    if not callable(function):
        raise TypeError(f"@endpoint marks methods, not {type(function).__name__}")
    return EndpointProperty(function, **options)


def endpoint(
    method: object = None,
    *,
    propagate: object = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark a method of an ``Actor`` as callable from other processes.

    Args:
        propagate: shape propagation for tensor results ("cached", "inspect", "mocked", or a function).
        explicit_response_port: the method gets a ``Port`` as its first argument, and may answer through it at any time.
        instrument: whether traces show its calls.
    """
    options = {
        "propagate": propagate,
        "explicit_response_port": explicit_response_port,
        "instrument": instrument,
    }
    return _decorate(method, options)


def concurrent_endpoint(
    method: object = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark an ``async def`` endpoint whose calls run concurrently: each is a task beside further messages.

    Tasks that still run when the actor ends are cancelled before ``__cleanup__``.
    """
    options = {
        "propagate": propagate,
        "explicit_response_port": explicit_response_port,
        "instrument": instrument,
        "concurrent": True,
    }
    if method is None:
        return lambda f: concurrent_endpoint(f, **{k: v for k, v in options.items() if k != "concurrent"})
    if isinstance(method, EndpointProperty):
        raise ValueError(f"{method.__name__} is already an endpoint: use either @endpoint or @concurrent_endpoint")
    if not is_coroutine_function(method):
        raise ValueError(
            f"@concurrent_endpoint needs an async def, which {getattr(method, '__name__', method)!r} is not"
        )
    return _decorate(method, options)


class EndpointSpec:
    """The description of an endpoint for its callers: how to check its arguments, and how it answers."""

    __slots__ = (
        "_signature",
        "concurrent",
        "explicit_port",
        "function",
        "is_async",
        "least",
        "most",
        "name",
        "propagate",
    )

    def __init__(self, name: str, prop: EndpointProperty) -> None:
        self.name = name
        self.describe(prop)

    def describe(self, prop: EndpointProperty) -> None:
        """Adopt the description of a method. Existing handles of callers follow it."""
        self.function = prop.function
        self.explicit_port = prop.explicit_response_port
        self.concurrent = prop.concurrent
        self.is_async = prop.is_async
        self.propagate = prop.propagate
        self._signature: Signature | None = None
        # Most calls pass positional arguments only. Counting them is enough, and twenty times as fast as binding.
        self.least, self.most = self._counts()

    def _counts(self) -> tuple[int, int]:
        """Count the positional arguments of a call: the least and the most.

        (1, 0), which no call matches, if they must be bound.
        """
        skipped = self._skipped
        function = self.function
        if type(function) is FunctionType and function.__dict__.keys() <= {"_method"}:  # then it is as its code says
            code = function.__code__
            if code.co_kwonlyargcount or code.co_flags & _STARRED:
                return 1, 0
            most = max(0, code.co_argcount - skipped)
            return max(0, most - len(function.__defaults__ or ())), most
        rest = list(self._bound_signature().parameters.values())
        if any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in rest):
            return 1, 0
        return sum(p.default is p.empty for p in rest), len(rest)

    @property
    def _skipped(self) -> int:
        """How many parameters callers do not pass: the actor, and the port."""
        return 2 if self.explicit_port else 1

    def _bound_signature(self) -> Signature:
        signature = self._signature
        if signature is None:
            import inspect  # takes a quarter of a rank's start, and most endpoints do without

            parameters = list(inspect.signature(self.function).parameters.values())
            signature = self._signature = inspect.Signature(parameters[self._skipped :])
        return signature

    def check(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise the ``TypeError`` that calling the method with these arguments would raise."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        signature = self._bound_signature()
        try:
            signature.bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{self.name}{signature}: {e}") from None


class ActorSpec:
    """The endpoints of an actor class, and whether it is sync or async."""

    __slots__ = ("background", "cls", "endpoints", "is_async", "outlives_errors", "tool")

    def __init__(self, cls: type, reserved: frozenset[str]) -> None:
        self.cls = cls
        self._read(reserved)

    def reread(self) -> None:
        """Describe the class again after its definition was changed in place. Specs of remaining endpoints are kept.

        Raises:
            ValueError: the class is no longer valid, or has become async or sync. Nothing is changed then.
        """
        new = ActorSpec(self.cls, frozenset())
        if new.is_async != self.is_async and self.endpoints:
            kinds = ("async", "sync") if self.is_async else ("sync", "async")
            raise ValueError(f"the endpoints of {self.cls.__name__} were {kinds[0]} and are {kinds[1]} now")
        for name in list(new.endpoints):
            old = self.endpoints.get(name)
            if old is not None:
                old.describe(_static_attributes(self.cls)[name])
                new.endpoints[name] = old
        self.is_async, self.tool, self.background = new.is_async, new.tool, new.background
        self.outlives_errors = new.outlives_errors
        self.endpoints = new.endpoints

    def _read(self, reserved: frozenset[str]) -> None:
        cls = self.cls
        self.endpoints: dict[str, EndpointSpec] = {}
        kinds: dict[bool, list[str]] = {True: [], False: []}
        for name, prop in sorted(_static_attributes(cls).items()):
            if isinstance(prop, EndpointProperty):
                if name in reserved:
                    raise ValueError(
                        f"{cls.__name__}.{name}: an endpoint cannot be called {name!r}, "
                        "which is an attribute of every actor mesh: rename it"
                    )
                self.endpoints[name] = EndpointSpec(name, prop)
                kinds[prop.is_async].append(name)
        if kinds[True] and kinds[False]:
            raise ValueError(
                f"{cls.__name__} mixes both async and sync endpoints (async: {', '.join(kinds[True])}; "
                f"sync: {', '.join(kinds[False])}): make them all async def, or all def"
            )
        self.is_async = bool(kinds[True])
        for hook in HOOKS:
            function = getattr(cls, hook, None)
            if function is None:
                continue
            is_async = is_coroutine_function(function)
            if not self.endpoints:
                self.is_async = self.is_async or is_async
            elif is_async != self.is_async and (is_async or hook != "__supervise__"):
                kind = "async def" if self.is_async else "def"
                raise ValueError(f"{cls.__name__}.{hook} must be {kind}, like the endpoints of {cls.__name__}")
        self.tool = bool(getattr(cls, "__tool__", False))
        self.background = bool(getattr(cls, "__background__", False))
        self.outlives_errors = bool(getattr(cls, "__outlives_errors__", False))


def _static_attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, without invoking descriptors."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        found.update(vars(base))
    return found


def class_label(cls: type) -> str:
    """Return the name of a class in fault reports."""
    return f"{cls.__module__}.{cls.__qualname__}"


_specs: dict[type, ActorSpec] = {}


def spec_of(cls: object, reserved: frozenset[str]) -> ActorSpec:
    """Return the (cached) description of an actor class.

    Raises:
        ValueError: not an ``Actor``, sync and async mixed, or a reserved name.
    """
    spec = _specs.get(cls) if isinstance(cls, type) else None
    if spec is None:
        if not isinstance(cls, type) or not issubclass(cls, Actor):
            what = cls.__name__ if isinstance(cls, type) else repr(cls)
            raise ValueError(f"{what} is not an Actor class: derive it from monarch_kernel.actor.Actor")
        spec = ActorSpec(cls, reserved)
        _specs[cls] = spec
    return spec


def known_specs(cls: type) -> list[ActorSpec]:
    """Return the descriptions that this process has of an actor class and of classes derived from it."""
    return [spec for each, spec in list(_specs.items()) if issubclass(each, cls)]


def check_constructor(cls: type, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raise the ``TypeError`` that ``cls(*args, **kwargs)`` would raise for its arguments."""
    if not args and not kwargs and cls.__init__ is object.__init__ and cls.__new__ is object.__new__:
        return  # the usual case; it takes milliseconds to parse the signature of a built-in constructor from its text
    import inspect

    try:
        signature = inspect.signature(cls)
    except ValueError:  # a built-in constructor without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise TypeError(f"{cls.__name__}{signature}: {e}") from None
