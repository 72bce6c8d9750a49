"""Evaluate an expression in a rank: among the names of an actor, of the rank's `__main__`, or of a frame."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Actor
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import main_names, tensor_value

#: The file name of the expression in tracebacks.
FILE = "<diff>"


@dataclass(frozen=True, slots=True)
class Question:
    """An expression, and the namespace in which to evaluate it.

    Attributes:
        expression: the Python expression.
        token: the key under which its value is kept.
        actor: the unique name of the actor mesh whose actor is `self`; "" for the rank's `__main__`.
        grads: read the gradients of a module instead of its parameters.
        limit: the time limit for reading the value (seconds).
        tensor: the key of an engine and the number of a value: that tensor is the value, whatever the expression.
    """

    expression: str
    token: str
    actor: str = ""
    grads: bool = False
    limit: float = 30.0
    tensor: tuple[str, int] | None = None


def evaluate(question: Question) -> tuple[Any, str]:
    """Evaluate the expression. Return the value, and the namespace if it is not the default one."""
    if question.tensor is not None:
        return tensor_value(*question.tensor), ""
    code = compile(question.expression, FILE, "eval")
    if question.actor:
        found = tool_runtime().actors_here(question.actor)
        if question.actor not in found:
            raise LookupError("the actor is gone from this process")
        if found[question.actor] is None:
            raise LookupError("the actor is not there yet: its __init__ is still running")
        return eval(code, _names_of(found[question.actor])), ""
    names = main_names()
    if "self" not in names and _mentions(code, "self"):
        actors = user_actors()
        if len(actors) > 1:
            known = ", ".join(sorted(name for name, _ in actors))
            raise LookupError(
                f"there are several actors here ({known}), so self is ambiguous: pass the mesh of one of them, not "
                "its procs"
            )
        for name, actor in actors:
            return eval(code, _names_of(actor)), f"actor {name}"
    try:
        return eval(code, names), ""
    except NameError as error:
        actors = user_actors()
        if not actors or getattr(error, "name", None) in (None, "self"):
            raise
        known = " or ".join(sorted(name for name, _ in actors))
        raise NameError(f"{error} in the rank's namespace; the attributes of actor {known} are under self") from None


def _mentions(code: types.CodeType, name: str) -> bool:
    """Return whether an expression uses a name, including in its comprehensions and lambdas."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return name in code.co_names or any(_mentions(each, name) for each in inner)


def user_actors() -> list[tuple[str, Any]]:
    """Return the actors of this process that are not tools, with the names under which they were spawned."""
    return [
        (uid.rsplit("-", 1)[0], actor)
        for uid, actor in tool_runtime().actors_here().items()
        if actor is not None and not getattr(type(actor), "__tool__", False)
    ]


def _names_of(actor: Any) -> dict[str, Any]:
    """Return the names that the methods of an actor's class see, and `self`."""
    names: dict[str, Any] = {}
    for kind in reversed(type(actor).__mro__):
        if kind.__module__ == Actor.__module__:
            continue
        for member in vars(kind).values():
            function = inspect.unwrap(member)
            if isinstance(function, types.FunctionType):
                # A class that was pickled by value has separate globals for each method.
                names.update(function.__globals__)
    return {**names, "self": actor}


def evaluate_in(question: Question, frame: types.FrameType) -> Any:
    """Evaluate the expression in a frame."""
    # A single namespace, so that comprehensions and lambdas in the expression also see the locals.
    names = {**frame.f_globals, **frame.f_locals}
    return eval(compile(question.expression, FILE, "eval"), names)
