"""What is read of actor classes without ``inspect`` is what ``inspect`` would have read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.runtime.actor.definition import EndpointProperty, EndpointSpec, is_coroutine_function, spec_of


def _none(self: Any) -> None: ...
def _some(self: Any, a: int, b: int = 2) -> None: ...
def _only(self: Any, a: int, /, b: int = 2) -> None: ...
def _named(self: Any, a: int, *, b: int = 2) -> None: ...
def _starred(self: Any, a: int, *rest: int) -> None: ...
def _keywords(self: Any, a: int = 1, **rest: int) -> None: ...
def _all_defaults(self: Any = None, a: int = 1) -> None: ...


@functools.wraps(_named)
def _wrapped(*args: Any, **kwargs: Any) -> None: ...


async def _async(self: Any, a: int) -> None: ...


CALLS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    *(((1,) * count, {}) for count in range(5)),
    *(((1,) * count, {"b": 1}) for count in range(3)),
    ((), {"a": 1}),
    ((1,), {"unknown": 1}),
]
FUNCTIONS = [_none, _some, _only, _named, _starred, _keywords, _all_defaults, _wrapped, _async]


@pytest.mark.parametrize("port", [False, True], ids=["", "port"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_call_is_refused_as_its_signature_refuses_it(function: Callable[..., Any], port: bool) -> None:
    spec = EndpointSpec("method", EndpointProperty(function, explicit_response_port=port))
    parameters = list(inspect.signature(function).parameters.values())[2 if port else 1 :]
    signature = inspect.Signature(parameters)
    for args, kwargs in CALLS:
        expected = _refuses(lambda a, k: signature.bind(*a, **k), args, kwargs)
        assert _refuses(spec.check, args, kwargs) == expected, f"{args}, {kwargs}"


def _refuses(check: Callable[[Any, Any], object], args: tuple[int, ...], kwargs: dict[str, int]) -> bool:
    try:
        check(args, kwargs)
    except TypeError:
        return True
    return False


def test_async_functions_are_told_as_inspect_tells_them() -> None:
    functions = [*FUNCTIONS, functools.partial(_async), functools.partial(_some), print, _Base().method, _Base]
    mark = getattr(inspect, "markcoroutinefunction", None)
    if mark is not None:  # since Python 3.12
        functions.append(mark(lambda: None))
    for function in functions:
        assert is_coroutine_function(function) == inspect.iscoroutinefunction(function), function


class _Base(Actor):
    @endpoint
    def kept(self) -> None: ...
    @endpoint
    def hidden(self) -> None: ...
    async def method(self) -> None: ...


class _Derived(_Base):
    hidden = None

    @endpoint
    def added(self) -> None: ...


def test_endpoints_are_inherited_and_hidden_as_attributes_are() -> None:
    assert list(spec_of(_Derived, frozenset()).endpoints) == ["added", "kept"]
