"""The ``__main__`` of a rank: definitions sent from the ``__main__`` of a script or notebook, which no rank executes.

Classes and functions that are pickled by value are found there by name, so that ``pickle``, ``multiprocessing``,
``typing.get_type_hints``, ``inspect.getsource`` and compilers find them as in the process that defined them. The module
keeps none of them alive. Variables of cells that run on the rank take precedence: they are in the module itself.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Final

MAIN = "__main__"
#: The maximum length of a source that is sent with functions (characters).
LONGEST_SOURCE = 1_000_000

_MISSING: Final = object()
_real_names = vars(types.ModuleType)["__dict__"].__get__

#: Classes and functions of another ``__main__`` that are alive here, by the number of their arrival.
_arrived: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class RankMain(types.ModuleType):
    """The module ``__main__`` of a rank. Its ``__dict__`` is a merged copy while there are received definitions."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = _MISSING if _is_dunder(name) else _sent(name)
        if value is _MISSING:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}")
        return value

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        own: dict[str, object] = _real_names(self)
        sent: dict[str, object] = {}
        for each in list(_arrived.values()):
            sent.update(_names_with(each))
        return _Merged(own, sent) if sent.keys() - own.keys() else own


class _Merged(dict[str, object]):
    """The result of ``vars(__main__)``. Assignments to it are made in the module."""

    def __init__(self, own: dict[str, object], sent: dict[str, object]) -> None:
        super().__init__(sent)
        super().update(own)
        self._own = own

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, value)
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._own.pop(name, None)

    def pop(self, name: str, *default: object) -> object:
        self._own.pop(name, None)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: object = None) -> object:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: object, **kwargs: object) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def install_rank_main() -> None:
    """Replace this process's ``__main__``, which belongs to the program that started the rank or its child process."""
    if type(sys.modules.get(MAIN)) is not RankMain:
        main = RankMain(MAIN)
        _real_names(main)["__builtins__"] = sys.modules["builtins"]
        sys.modules[MAIN] = main


def main_names() -> dict[str, Any]:
    """Return the variables of this process's ``__main__``, where cells of a rank run, without received definitions."""
    names: dict[str, object] = _real_names(sys.modules[MAIN])
    return names


def arrived(value: object) -> None:
    """Record a class or function that was created here from another process's ``__main__``."""
    if value.__module__ == MAIN and type(sys.modules.get(MAIN)) is RankMain:
        _arrived[next(_numbers)] = value


def arrivals() -> int:
    """Return a number that is larger than those of all classes and functions that have arrived."""
    return next(_numbers)


def arrived_before(value: object, number: int) -> bool:
    """Return whether a class or function existed here before ``arrivals`` returned ``number``, or was defined here."""
    return all(at < number for at, each in list(_arrived.items()) if each is value)


def _sent(name: str) -> object:
    """Find the latest received value of this name whose class or function is alive."""
    for each in reversed(list(_arrived.values())):
        value = _names_with(each).get(name, _MISSING)
        if value is not _MISSING:
            return value
    return _MISSING


def _names_with(value: Any) -> dict[str, object]:
    """List the names of the sender's ``__main__`` that came with a class or function: its own and those it uses."""
    if isinstance(value, type):
        annotations = vars(value).get("__annotations__")
        names = annotations.scope if type(annotations) is Annotations else {}
    else:
        names = value.__globals__
    found = {name: each for name, each in names.items() if not _is_dunder(name)}
    if "." not in value.__qualname__:
        found[value.__qualname__] = value
    return found


def _is_dunder(name: str) -> bool:
    return name[:2] == "__" == name[-2:]


# -- annotations ------------------------------------------------------------------------------


class Annotations(dict[str, object]):
    """Annotations of a class, some of them as text, with the names of its ``__main__`` that this text contains."""

    def __init__(self, annotations: dict[str, object], scope: dict[str, object]) -> None:
        super().__init__(annotations)
        self.scope = scope

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


def names_in_text(annotations: dict[str, object]) -> frozenset[str]:
    """List the names in those annotations that are text, as under ``from __future__ import annotations``."""
    found: set[str] = set()
    for annotation in annotations.values():
        for text in _texts(annotation):
            found |= _names_in(text)
    return frozenset(found)


def _texts(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    elif type(annotation).__name__ == "ForwardRef":
        yield annotation.__forward_arg__
    else:
        for each in getattr(annotation, "__args__", None) or ():
            yield from _texts(each)


@functools.lru_cache(maxsize=1024)
def _names_in(text: str) -> frozenset[str]:
    import ast  # with `linecache` and `zlib`, only for what goes by value

    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= _names_in(node.value)
    return frozenset(found)


# -- sources ----------------------------------------------------------------------------------

Source = tuple[str, bytes]
#: By file: the lines that were packed, and the packed text. The same object is sent once per message.
_packed: dict[str, tuple[list[str], Source]] = {}


def source_of(function: types.FunctionType) -> Source | None:
    """Pack the text of a function's file or cell; None if there is none."""
    import linecache
    import zlib

    if function.__globals__.get("__name__") != MAIN:  # a library made it, as it does for a dataclass
        return None
    file = function.__code__.co_filename
    lines = linecache.getlines(file)
    if not lines:
        return None
    known = _packed.get(file)
    if known is None or known[0] is not lines:
        text = "".join(lines)
        if len(text) > LONGEST_SOURCE:
            return None
        known = _packed[file] = lines, (file, zlib.compress(text.encode(errors="replace"), 1))
    return known[1]


def keep_source(source: Source) -> None:
    """Make the text received with a function available to ``linecache``, if this process has no such file."""
    import linecache
    import zlib

    file, packed = source
    if file not in linecache.cache:
        # An entry with one element is a function that is called when the file is read and is not on disk.
        linecache.cache[file] = (lambda: zlib.decompress(packed).decode(),)  # type: ignore[assignment]


def file_of_class(cls: type) -> str | None:
    """Find the file or cell of a class, as recorded in its methods; None if there is none."""
    for member in vars(cls).values():
        function = getattr(member, "__func__", member)
        function = getattr(function, "__wrapped__", function)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_qualname.startswith(f"{cls.__qualname__}."):
            file: str = code.co_filename
            return file
    return None


def find_files_of_classes(inspect: Any) -> None:
    """Make ``inspect.getsource`` find classes of ``__main__``, although their module has no file."""
    getfile = inspect.getfile

    @functools.wraps(getfile)
    def getfile_of_main(value: object) -> object:
        file = file_of_class(value) if isinstance(value, type) and value.__module__ == MAIN else None
        return getfile(value) if file is None else file

    inspect.getfile = getfile_of_main
