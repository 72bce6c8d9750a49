"""Find all objects that a function can reach besides its arguments, to guard its recordings and locate its effects.

From the function's globals and closure, the walk follows dicts, lists, tuples, modules (``torch.nn``), optimizers, and
objects and functions of the user, to tensors and constants. A `ContentSnapshot` has the content of each container when
a recording began. A replay is valid only if the content is unchanged: equal constants, and otherwise the same objects.
Tensors may be replaced by others of the same kind, which the replay then uses. Extension types and objects of libraries
are compared by identity, not by content.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch

from monarch_kernel import programs
from monarch_kernel.runtime.tensor.controller.handle import Tensor

#: The maximum number of containers that a walk inspects. Further containers are compared by identity.
MOST = 50_000

_CONSTANTS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis))
_LIBRARIES = tuple(
    {
        os.path.join(os.path.realpath(path), "")
        for path in (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    }
    | {os.path.join(os.path.dirname(os.path.realpath(file)), "") for file in (torch.__file__, programs.__file__)}
)
#: Packages of torch whose objects have attributes that a program sets.
_LOOKED_INTO = ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")


class NothingThere:
    """Marks a missing item."""

    def __repr__(self) -> str:
        return "(nothing)"


MISSING: Any = NothingThere()


def is_constant(value: object) -> bool:
    """Return whether a value is compared by type and equality."""
    return isinstance(value, _CONSTANTS)


class ContentSnapshot:
    """The content of one container when a recording began, or after the last replay.

    Attributes:
        container: the watched container.
        keys: the key of each item; `values` are the items.
        path: the expression for the container.
    """

    __slots__ = ("container", "keys", "path", "values")

    def __init__(self, container: Any, keys: list[Any], path: str) -> None:
        self.container = container
        self.keys = keys
        self.path = path
        self.values = self.read()

    def read(self) -> list[Any]:
        """Return the current items, in the order of the keys."""
        raise NotImplementedError

    def same_keys(self) -> bool:
        """Return whether the container has the same number of items and the same keys."""
        return True

    def same(self) -> bool:
        """Return whether every item is the same object."""
        return self.same_keys() and all(map(is_, self.read(), self.values))

    def assign(self, index: int, value: Any) -> None:
        """Replace an item."""
        self.container[self.keys[index]] = value

    def name(self, index: int) -> str:
        """Return the expression for an item."""
        key = self.keys[index]
        return f"{self.path}[{key!r}]" if isinstance(key, (str, int)) else f"{self.path}[{type(key).__name__}]"


class DictSnapshot(ContentSnapshot):
    """All items of a dict (or of a mapping that cannot be assigned to)."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return list(self.container.values())

    def same_keys(self) -> bool:
        container = self.container
        return len(container) == len(self.keys) and all(map(is_, container, self.keys))

    def same(self) -> bool:
        container = self.container
        return (
            len(container) == len(self.keys)
            and all(map(is_, container.values(), self.values))
            and all(map(is_, container, self.keys))
        )


class AttributesSnapshot(DictSnapshot):
    """The attributes of an object, in its ``__dict__``."""

    __slots__ = ()

    def name(self, index: int) -> str:
        return f"{self.path}.{self.keys[index]}"


class NamesSnapshot(ContentSnapshot):
    """Some names of a namespace, which may be missing."""

    __slots__ = ()

    def read(self) -> list[Any]:
        get = self.container.get
        return [get(key, MISSING) for key in self.keys]

    def name(self, index: int) -> str:
        return f"{self.path}{self.keys[index]}"


class ListSnapshot(ContentSnapshot):
    """The items of a list."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return list(self.container)

    def same_keys(self) -> bool:
        return len(self.container) == len(self.keys)

    def same(self) -> bool:
        return len(self.container) == len(self.keys) and all(map(is_, self.container, self.values))


class CellsSnapshot(ContentSnapshot):
    """The variables of enclosing functions."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return [_content(cell) for cell in self.container]

    def assign(self, index: int, value: Any) -> None:
        self.container[index].cell_contents = value

    def name(self, index: int) -> str:
        return f"{self.path}{self.keys[index]}"


class GradsSnapshot(ContentSnapshot):
    """The gradients of leaf tensors."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return [tensor.grad for tensor in self.container]

    def assign(self, index: int, value: Any) -> None:
        self.container[index].grad = value

    def name(self, index: int) -> str:
        return f"{self.keys[index]}.grad"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING


class ReachableState:
    """All objects that functions can reach from some roots.

    Attributes:
        watches: the containers, those of gradients last.
        locals: the local tensors among them, with the versions of their content.
        numbers: places of optimizers' learning rates, as (watch, index).
    """

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self.watches: list[ContentSnapshot] = []
        self.locals: list[tuple[torch.Tensor, int]] = []
        self.numbers: list[tuple[int, int]] = []
        self._empty: list[tuple[object, str]] = []
        self._seen: dict[int, object] = {}
        self._leaves: list[tuple[Tensor, str]] = []
        self._queue: deque[tuple[object, str, frozenset[str]]] = deque(
            (root, path, frozenset()) for root, path in roots
        )
        while self._queue:
            self._visit(*self._queue.popleft())
        # gradients come last, because each may belong to a leaf found earlier
        if self._leaves:
            tensors, names = zip(*self._leaves)
            self.watches.append(GradsSnapshot(list(tensors), list(names), ""))
        self._empties = [container for container, _ in self._empty]
        self._seen.clear()  # kept objects alive, so that no other object got their ids

    def tensors(self) -> dict[int, tuple[int, int]]:
        """Return, for the id of each tensor's value, its first place: (watch, index)."""
        found: dict[int, tuple[int, int]] = {}
        for w, watch in enumerate(self.watches):
            for i, value in enumerate(watch.values):
                if type(value) is Tensor:
                    found.setdefault(value._owner.id, (w, i))
        return found

    def changed(self) -> str | None:
        """Describe a change that a walk would detect; None if at most items of containers have changed."""
        for container, path in self._empty:
            if container:
                return f"{path} was empty and is not"
        for watch in self.watches:
            if not watch.same_keys():
                return f"{watch.path or 'it'} has other keys, or another length"
        return None

    def holds(self, followed: frozenset[tuple[int, int]]) -> str | None:
        """Compare with the current state. Return None if a recording made then is valid now.

        Tensors that were replaced by others of the same kind become the reference for later comparisons.

        Args:
            followed: places of numbers that may have any value.

        Returns:
            A description of the difference.
        """
        if any(self._empties):
            return self.changed()
        for tensor, version in self.locals:
            if tensor._version != version:
                return f"a tensor of this process, {list(tensor.shape)}, was written"
        different = [w for w, watch in enumerate(self.watches) if not watch.same()]
        return self._differs(different, followed) if different else None

    def _differs(self, different: list[int], followed: frozenset[tuple[int, int]]) -> str | None:
        replaced: dict[int, Tensor] = {}
        updates: list[tuple[ContentSnapshot, list[object]]] = []
        for w in different:
            watch = self.watches[w]
            if not watch.same_keys():
                return f"{watch.path} has other keys, or another length"
            now = watch.read()
            for i, (old, new) in enumerate(zip(watch.values, now)):
                if old is new:
                    continue
                if type(old) is Tensor and type(new) is Tensor:
                    if new._spec is not old._spec or new.requires_grad != old.requires_grad:
                        return f"{watch.name(i)} is {describe(new)} and was {describe(old)}"
                    if old.requires_grad and old.is_leaf:  # its gradient has a separate place
                        return f"{watch.name(i)} is another tensor with a gradient"
                    if replaced.setdefault(old._owner.id, new)._owner.id != new._owner.id:
                        return f"{watch.name(i)} and another place had the same tensor, and have two"
                elif not (_equal(old, new) or ((w, i) in followed and type(new) is float)):
                    return f"{watch.name(i)} is {describe(new)} and was {describe(old)}"
            updates.append((watch, now))
        if replaced:
            for w, watch in enumerate(self.watches):
                if w not in different:
                    for i, value in enumerate(watch.values):
                        if type(value) is Tensor and value._owner.id in replaced:
                            return f"{watch.name(i)} and another place had the same tensor, and have two"
            if len({new._owner.id for new in replaced.values()}) < len(replaced):
                return "two places had two tensors, and have the same"
        for watch, now in updates:
            watch.values = now
        return None

    # -- the walk -----------------------------------------------------------------------------------

    def _watch(self, watch: ContentSnapshot, names: frozenset[str]) -> None:
        self.watches.append(watch)
        for i, value in enumerate(watch.values):
            if not is_constant(value) and value is not MISSING:
                self._queue.append((value, watch.name(i), names))

    def _visit(self, value: Any, path: str, names: frozenset[str]) -> None:
        kind = type(value)
        if is_constant(value) or value is MISSING:
            return
        if kind is types.ModuleType:  # each function that names a module uses other names of it
            if not _is_library_module(value.__name__):
                self._names(vars(value), [name for name in sorted(names) if name in vars(value)], f"{path}.", names)
            return
        if id(value) in self._seen or len(self.watches) > MOST:
            return
        self._seen[id(value)] = value
        if kind is Tensor or isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif kind in _WALKS:
            _WALKS[kind](self, value, path, names)
        elif isinstance(value, dict):
            self._dict(value, path, names)
        elif isinstance(value, (list, deque)):
            self._list(value, path, names)
        elif isinstance(value, tuple):
            self._tuple(value, path, names)
        elif isinstance(value, type):
            self._class(value, path)
        else:
            self._object(value, path, names)

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if type(tensor) is not Tensor:
            self.locals.append((tensor, tensor._version))
        elif tensor.requires_grad and tensor.is_leaf:
            self._leaves.append((tensor, path))
            if tensor.grad is not None:
                self._queue.append((tensor.grad, f"{path}.grad", frozenset()))

    def _dict(self, value: Any, path: str, names: frozenset[str]) -> None:
        if value:
            self._watch(DictSnapshot(value, list(value), path), names)
        else:
            self._empty.append((value, path))

    def _list(self, value: Any, path: str, names: frozenset[str]) -> None:
        if value:
            self._watch(ListSnapshot(value, list(range(len(value))), path), names)
        else:
            self._empty.append((value, path))

    def _tuple(self, value: Any, path: str, names: frozenset[str]) -> None:
        for i, item in enumerate(value):
            self._queue.append((item, f"{path}[{i}]", names))

    def _names(self, space: object, names: list[str], path: str, used: frozenset[str]) -> None:
        if names:
            self._watch(NamesSnapshot(space, names, path), used)

    def _function(self, value: Any, path: str, names: frozenset[str]) -> None:
        code = value.__code__
        if _is_library(code.co_filename):
            return
        used = frozenset(_names_of(code))
        space = value.__globals__
        self._names(space, [name for name in sorted(_globals_of(code)) if name in space], "", used)
        if value.__closure__:
            self._watch(CellsSnapshot(value.__closure__, list(code.co_freevars), ""), used)
        for default in (value.__defaults__, value.__kwdefaults__):
            if default:
                self._queue.append((default, f"defaults of {value.__name__}", used))

    def _method(self, value: Any, path: str, names: frozenset[str]) -> None:
        self._queue.append((value.__func__, path, names))
        self._queue.append((value.__self__, path.rpartition(".")[0] or path, names))

    def _partial(self, value: Any, path: str, names: frozenset[str]) -> None:
        for part in (value.func, value.args, value.keywords):
            self._queue.append((part, path, names))

    def _class(self, value: type, path: str) -> None:
        """Walk the functions of a user's class, and its other attributes."""
        for base in value.__mro__:
            if _is_library_module(base.__module__):
                continue
            if base is value or id(base) not in self._seen:
                self._seen[id(base)] = base
                space = vars(base)
                names = [name for name, item in space.items() if _tells(name, item)]
                self._names(space, names, f"{base.__name__}.", frozenset())

    def _object(self, value: object, path: str, names: frozenset[str]) -> None:
        within = getattr(value, "__wrapped__", None)
        if isinstance(within, types.FunctionType):
            self._queue.append((within, path, names))
        module = type(value).__module__
        if _is_library_module(module) and not f"{module}.".startswith(_LOOKED_INTO):
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes:
            self._watch(AttributesSnapshot(attributes, list(attributes), path), names)
        if isinstance(value, torch.optim.Optimizer):
            self._rates(value)
        self._queue.append((type(value), path, names))

    def _rates(self, optimizer: Any) -> None:
        """Follow learning rates as numbers, because schedulers change them at every step."""
        for group in optimizer.param_groups:
            if type(group.get("lr")) is float and id(group) not in self._seen:
                self._seen[id(group)] = group
                watch = DictSnapshot(group, list(group), "param_groups[...]")
                self._watch(watch, frozenset())
                self.numbers.append((len(self.watches) - 1, watch.keys.index("lr")))


_WALKS: dict[type, Callable[[ReachableState, Any, str, frozenset[str]], None]] = {
    dict: ReachableState._dict,
    list: ReachableState._list,
    tuple: ReachableState._tuple,
    types.FunctionType: ReachableState._function,
    types.MethodType: ReachableState._method,
    functools.partial: ReachableState._partial,
}


@functools.cache
def _is_library(file: str) -> bool:
    """Return whether code belongs to Python, to an installed package or to this package."""
    return os.path.realpath(file).startswith(_LIBRARIES)


def _is_library_module(name: str) -> bool:
    """Return whether a module is a library module. Built-in modules and those of notebooks have no file."""
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_library(file)


def _tells(name: str, item: object) -> bool:
    """Return whether an item of a class can affect its functions."""
    return not (name.startswith("__") and name.endswith("__")) or isinstance(item, types.FunctionType)


def _names_of(code: types.CodeType) -> set[str]:
    """Return all names that code and its inner functions mention."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the global variables that code and its inner functions use."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


def _equal(old: object, new: object) -> bool:
    return type(old) is type(new) and is_constant(old) and (old == new or (old != old and new != new))


def describe(value: object) -> str:
    """Format a value for an explanation."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor {list(value.shape)} {kind}{', requires_grad' if value.requires_grad else ''}"
    if is_constant(value) or value is MISSING:
        return repr(value)[:60]
    return f"a {type(value).__name__}"
