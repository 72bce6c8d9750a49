"""What the runtime says that tools offer it, they offer."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from monarch_kernel.runtime.actor import extensions


def functions(protocol: type[Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]


OFFERED = [
    pytest.param(module, function, id=f"{module}.{name}")
    for protocol, module in extensions.MODULES.items()
    for name, function in functions(protocol)
]


@pytest.mark.parametrize("module, wanted", OFFERED)
def test_tools_offer_what_the_runtime_calls(module: str, wanted: Any) -> None:
    offered = inspect.signature(getattr(importlib.import_module(module), wanted.__name__))
    parameters = list(inspect.signature(wanted).parameters.values())[1:]  # without self
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    offered.bind(*positional, **named)  # raises TypeError where the call would not fit
