"""Follow floats in a recording, so that a replay computes them again instead of repeating their values.

An optimizer's step counter and the numbers computed from it (bias corrections) differ at every step, as does a learning
rate that a scheduler sets. While a function is recorded, such a number is a `FollowedFloat`: its arithmetic is recorded
as source code, which a replay runs. torch passes it through its operations like the symbolic floats of its own
compiler. If a program needs the plain number (a comparison, `math.sqrt`), a guard limits the replay to that number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS: dict[str, Callable[..., object]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class HostProgram:
    """The source lines that a replay runs on the controller, and their objects.

    Attributes:
        lines: the lines of Python, in order.
        names: objects that the lines name.
        rates: the variables that a replay passes in, in order.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.rates: list[str] = []
        self._numbers: dict[str, FollowedNode] = {}
        self._made = 0

    def name(self, thing: object) -> str:
        """Return a name for an object in the lines."""
        name = f"c{len(self.names)}"
        self.names[name] = thing
        return name

    def variable(self) -> str:
        """Return a new variable."""
        self._made += 1
        return f"v{self._made}"

    def rate(self) -> str:
        """Return the variable of a number that a replay passes in."""
        self.rates.append(f"r{len(self.rates)}")
        return self.rates[-1]

    def variables(self) -> list[str]:
        """Return all variables that the lines set, and the rates."""
        return [*self.rates, *(f"v{k}" for k in range(1, self._made + 1))]

    def number(self, value: float, source: str) -> FollowedNode:
        """Return the number of an expression. Equal expressions give the same number."""
        node = self._numbers.get(source)
        if node is None:
            variable = self.variable()
            self.lines.append(f"{variable} = {source}")
            node = self._numbers[source] = FollowedNode(self, value, variable)
        return node

    def require(self, source: str) -> None:
        """Limit the replay to cases in which this expression is true."""
        line = f"if not ({source}): return None"
        if line not in self.lines:
            self.lines.append(line)


class FollowedNode:
    """The object through which torch passes a followed float into an operation.

    torch's C++ code determines the names of the methods.
    """

    def __init__(self, program: HostProgram, value: float, variable: str) -> None:
        self.program = program
        self.value = value
        self.variable = variable

    def guard_float(self, file: str, line: int) -> float:
        """Return the plain number. The recording is valid only for this value from here on."""
        self.program.require(f"{self.variable} == {self.value!r}")
        return self.value

    def is_float(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def _graph_repr(self) -> str:
        return repr(self.value)


class GivenFloat(float):
    """A plain float that a replay computes again. An operation receives it in place of a `FollowedFloat`."""

    variable: str

    @classmethod
    def of(cls, followed: torch.SymFloat) -> GivenFloat:
        """Return the float for a number that torch has passed on."""
        node = followed.node
        if not isinstance(node, FollowedNode):
            raise TypeError(f"a symbolic float of torch's compiler ({followed}) cannot go to a mesh")
        given = cls(node.value)
        given.variable = node.variable
        return given


class FollowedFloat(torch.SymFloat):
    """A float that a replay computes again. Arithmetic with numbers returns followed floats; `float()` adds a guard."""

    node: FollowedNode

    def __init__(self, node: FollowedNode) -> None:
        super().__init__(node)

    def __bool__(self) -> bool:
        return self != 0

    def __float__(self) -> float:
        return self.node.guard_float("", 0)

    def __format__(self, spec: str) -> str:
        return format(self.node.value, spec)

    def __repr__(self) -> str:
        return repr(self.node.value)

    def __hash__(self) -> int:
        return hash(float(self))

    def __neg__(self) -> FollowedFloat:
        return FollowedFloat(self.node.program.number(-self.node.value, f"-{self.node.variable}"))

    def __abs__(self) -> FollowedFloat:
        node: FollowedNode = self.node
        return FollowedFloat(node.program.number(float.__abs__(node.value), f"abs({node.variable})"))


def _operand(x: object) -> tuple[object, str] | None:
    """Return the value and source of an operand; None if it is not a number."""
    if isinstance(x, torch.SymFloat) and isinstance(x.node, FollowedNode):
        return x.node.value, x.node.variable
    if type(x) in (int, float, bool):
        plain: Any = x
        return plain, f"({plain!r})" if math.isfinite(plain) else f"float({str(plain)!r})"
    return None


def _binary(symbol: str, reflected: bool) -> Callable[..., object]:
    compute = _OPERATORS[symbol]

    def method(self: FollowedFloat, other: object) -> object:
        operand = _operand(other)
        if operand is None:
            return NotImplemented
        mine = (self.node.value, self.node.variable)
        (left, left_source), (right, right_source) = (operand, mine) if reflected else (mine, operand)
        program = self.node.program
        return FollowedFloat(program.number(compute(left, right), f"{left_source} {symbol} {right_source}"))

    return method


def _comparison(symbol: str) -> Callable[..., object]:
    compute = _COMPARISONS[symbol]

    def method(self: FollowedFloat, other: object) -> object:
        operand = _operand(other)
        if operand is None:
            return NotImplemented
        found = compute(self.node.value, operand[0])
        self.node.program.require(f"({self.node.variable} {symbol} {operand[1]}) is {found}")
        return found

    return method


for _symbol, _name in (
    ("+", "add"),
    ("-", "sub"),
    ("*", "mul"),
    ("/", "truediv"),
    ("//", "floordiv"),
    ("%", "mod"),
    ("**", "pow"),
):
    setattr(FollowedFloat, f"__{_name}__", _binary(_symbol, False))
    setattr(FollowedFloat, f"__r{_name}__", _binary(_symbol, True))
for _symbol, _name in (("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"), ("==", "eq"), ("!=", "ne")):
    setattr(FollowedFloat, f"__{_name}__", _comparison(_symbol))
