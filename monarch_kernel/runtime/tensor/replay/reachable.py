"""What a function can reach beside its arguments, as a guard of its recordings and as the place of its effects.

From the function's globals and closure the walk goes through dicts, lists, tuples, modules (``torch.nn``), optimizers,
objects and functions of the user's, to tensors and constants. Each container is a `ContentWatch`: its content when a
recording began. A replay is right only if the content is the same: constants equal, and other objects the same ones.
Tensors may be others of the same kind; the replay then works on those. Not seen are the insides of extension types and
of libraries' objects, which are compared by identity.
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

#: Containers that a walk looks into at most; what is beyond is compared by identity.
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
    """In place of what is not there."""

    def __repr__(self) -> str:
        return "(nothing)"


MISSING: Any = NothingThere()


def is_constant(value: Any) -> bool:
    """Whether a value is compared by type and equality."""
    return isinstance(value, _CONSTANTS)


class ContentWatch:
    """The content of one container when a recording began, or when a replay last left it.

    Attributes:
        container: what is watched.
        keys: of each item; `values` are the items.
        path: how a person would write the container.
    """

    __slots__ = ("container", "keys", "path", "values")

    def __init__(self, container: Any, keys: list[Any], path: str) -> None:
        self.container = container
        self.keys = keys
        self.path = path
        self.values = self.read()

    def read(self) -> list[Any]:
        """The items now, in the order of the keys."""
        raise NotImplementedError

    def same_keys(self) -> bool:
        """Whether there are as many items, by the same keys."""
        return True

    def same(self) -> bool:
        """Whether every item is the same object."""
        return self.same_keys() and all(map(is_, self.read(), self.values))

    def assign(self, index: int, value: Any) -> None:
        """Put a value in the place of an item."""
        self.container[self.keys[index]] = value

    def name(self, index: int) -> str:
        """How a person would write an item."""
        key = self.keys[index]
        return f"{self.path}[{key!r}]" if isinstance(key, (str, int)) else f"{self.path}[{type(key).__name__}]"


class DictWatch(ContentWatch):
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


class AttributesWatch(DictWatch):
    """The attributes of an object, in its ``__dict__``."""

    __slots__ = ()

    def name(self, index: int) -> str:
        return f"{self.path}.{self.keys[index]}"


class NamesWatch(ContentWatch):
    """Some names of a namespace, whether they are there or not."""

    __slots__ = ()

    def read(self) -> list[Any]:
        get = self.container.get
        return [get(key, MISSING) for key in self.keys]

    def name(self, index: int) -> str:
        return f"{self.path}{self.keys[index]}"


class ListWatch(ContentWatch):
    """The items of a list."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return list(self.container)

    def same_keys(self) -> bool:
        return len(self.container) == len(self.keys)

    def same(self) -> bool:
        return len(self.container) == len(self.keys) and all(map(is_, self.container, self.values))


class CellsWatch(ContentWatch):
    """Variables of enclosing functions."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return [_content(cell) for cell in self.container]

    def assign(self, index: int, value: Any) -> None:
        self.container[index].cell_contents = value

    def name(self, index: int) -> str:
        return f"{self.path}{self.keys[index]}"


class GradsWatch(ContentWatch):
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
    """All that functions can reach, from some roots.

    Attributes:
        watches: the containers, those of gradients last.
        locals: tensors of this process among it, with the versions of their content.
        numbers: places of optimizers' learning rates, as (watch, index).
    """

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self.watches: list[ContentWatch] = []
        self.locals: list[tuple[torch.Tensor, int]] = []
        self.numbers: list[tuple[int, int]] = []
        self._empty: list[tuple[Any, str]] = []
        self._seen: dict[int, Any] = {}
        self._leaves: list[tuple[Tensor, str]] = []
        self._queue: deque[tuple[Any, str, frozenset[str]]] = deque((root, path, frozenset()) for root, path in roots)
        while self._queue:
            self._visit(*self._queue.popleft())
        # gradients are found last, as each may be a leaf's
        if self._leaves:
            tensors, names = zip(*self._leaves)
            self.watches.append(GradsWatch(list(tensors), list(names), ""))
        self._empties = [container for container, _ in self._empty]
        self._seen.clear()  # it kept objects alive, so that none got the id of another

    def tensors(self) -> dict[int, tuple[int, int]]:
        """For the id of each tensor's value, the first place where it is: (watch, index)."""
        found: dict[int, tuple[int, int]] = {}
        for w, watch in enumerate(self.watches):
            for i, value in enumerate(watch.values):
                if type(value) is Tensor:
                    found.setdefault(value._owner.id, (w, i))
        return found

    def changed(self) -> str | None:
        """What has been changed that a walk would see, in words; None if nothing but items of containers has."""
        for container, path in self._empty:
            if container:
                return f"{path} was empty and is not"
        for watch in self.watches:
            if not watch.same_keys():
                return f"{watch.path or 'it'} has other keys, or another length"
        return None

    def holds(self, followed: frozenset[tuple[int, int]]) -> str | None:
        """Compare with what is there now; None if a recording made then is right now.

        Tensors that are others of the same kind become the content to compare with.

        Args:
            followed: places of numbers that may have any value.

        Returns:
            What differs, in words.
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
        updates: list[tuple[ContentWatch, list[Any]]] = []
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
                    if old.requires_grad and old.is_leaf:  # its gradient has a place of its own
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

    def _watch(self, watch: ContentWatch, names: frozenset[str]) -> None:
        self.watches.append(watch)
        for i, value in enumerate(watch.values):
            if not is_constant(value) and value is not MISSING:
                self._queue.append((value, watch.name(i), names))

    def _visit(self, value: Any, path: str, names: frozenset[str]) -> None:
        kind = type(value)
        if is_constant(value) or value is MISSING:
            return
        if kind is types.ModuleType:  # each function that names a module looks at other names of it
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

    def _tensor(self, tensor: Any, path: str) -> None:
        if type(tensor) is not Tensor:
            self.locals.append((tensor, tensor._version))
        elif tensor.requires_grad and tensor.is_leaf:
            self._leaves.append((tensor, path))
            if tensor.grad is not None:
                self._queue.append((tensor.grad, f"{path}.grad", frozenset()))

    def _dict(self, value: Any, path: str, names: frozenset[str]) -> None:
        if value:
            self._watch(DictWatch(value, list(value), path), names)
        else:
            self._empty.append((value, path))

    def _list(self, value: Any, path: str, names: frozenset[str]) -> None:
        if value:
            self._watch(ListWatch(value, list(range(len(value))), path), names)
        else:
            self._empty.append((value, path))

    def _tuple(self, value: Any, path: str, names: frozenset[str]) -> None:
        for i, item in enumerate(value):
            self._queue.append((item, f"{path}[{i}]", names))

    def _names(self, space: Any, names: list[str], path: str, used: frozenset[str]) -> None:
        if names:
            self._watch(NamesWatch(space, names, path), used)

    def _function(self, value: Any, path: str, names: frozenset[str]) -> None:
        code = value.__code__
        if _is_library(code.co_filename):
            return
        used = frozenset(_names_of(code))
        space = value.__globals__
        self._names(space, [name for name in sorted(_globals_of(code)) if name in space], "", used)
        if value.__closure__:
            self._watch(CellsWatch(value.__closure__, list(code.co_freevars), ""), used)
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
        """Functions of a class of the user's, and what it has beside them."""
        for base in value.__mro__:
            if _is_library_module(base.__module__):
                continue
            if base is value or id(base) not in self._seen:
                self._seen[id(base)] = base
                space: Any = vars(base)
                names = [name for name, item in space.items() if _tells(name, item)]
                self._names(space, names, f"{base.__name__}.", frozenset())

    def _object(self, value: Any, path: str, names: frozenset[str]) -> None:
        within = getattr(value, "__wrapped__", None)
        if isinstance(within, types.FunctionType):
            self._queue.append((within, path, names))
        module = type(value).__module__
        if _is_library_module(module) and not f"{module}.".startswith(_LOOKED_INTO):
            return
        attributes: Any = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes:
            self._watch(AttributesWatch(attributes, list(attributes), path), names)
        if isinstance(value, torch.optim.Optimizer):
            self._rates(value)
        self._queue.append((type(value), path, names))

    def _rates(self, optimizer: Any) -> None:
        """Learning rates are numbers to follow, as schedulers change them at every step."""
        for group in optimizer.param_groups:
            if type(group.get("lr")) is float and id(group) not in self._seen:
                self._seen[id(group)] = group
                watch = DictWatch(group, list(group), "param_groups[...]")
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
    """Whether code is of Python, of an installed package, or of this one."""
    return os.path.realpath(file).startswith(_LIBRARIES)


def _is_library_module(name: str) -> bool:
    """The same for a module; built-in ones have no file, and neither has a notebook's."""
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_library(file)


def _tells(name: str, item: Any) -> bool:
    """Whether something in a class can make a difference to what its functions do."""
    return not (name.startswith("__") and name.endswith("__")) or isinstance(item, types.FunctionType)


def _names_of(code: types.CodeType) -> set[str]:
    """All names that code mentions, that of its inner functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def _globals_of(code: types.CodeType) -> set[str]:
    """The global variables that code uses, and its inner functions."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


def _equal(old: Any, new: Any) -> bool:
    return type(old) is type(new) and is_constant(old) and (old == new or (old != old and new != new))


def describe(value: Any) -> str:
    """A value in an explanation."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor {list(value.shape)} {kind}{', requires_grad' if value.requires_grad else ''}"
    if is_constant(value) or value is MISSING:
        return repr(value)[:60]
    return f"a {type(value).__name__}"
