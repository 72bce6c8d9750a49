"""The tensors of meshes that a notebook knows by a name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from typing import Any


def handle_named(expression: str, names: Mapping[str, Any]) -> Any:
    """The handle that a name, or what is reached from one by attributes and constant indices, means; else None.

    Nothing is called, so nothing happens that the user has not asked for.
    """
    if "monarch_kernel.tensor" not in sys.modules:  # the notebook has no such tensor
        return None
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body, names)
    except Exception:  # it is something else: an expression for the ranks, say
        return None
    return found if is_handle(found) else None


def is_handle(value: Any) -> bool:
    """Whether a value is a handle of a tensor on a mesh."""
    from monarch_kernel.tensor import Tensor

    return isinstance(value, Tensor)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr)
    if isinstance(node, ast.Subscript) and not is_handle(container := _value(node.value, names)):
        return container[ast.literal_eval(node.slice)]
    raise ValueError(ast.unparse(node))
