"""Import hooks: skip two slow imports of msgspec, pause garbage collection, and call back after an import."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

_TYPING_EXTENSIONS = "typing_extensions"
#: Maps an importing module to (module, replacement): the import of the slow module returns the replacement, or raises
#: ImportError if it is None.
_INSTEAD: dict[str, tuple[str, object]] = {
    # Optional for msgspec: since Python 3.11, ``typing`` has the names that it needs.
    "msgspec._utils": (_TYPING_EXTENSIONS, None),
    # msgspec imports uuid, which needs only the name of the system from this module.
    "uuid": ("platform", SimpleNamespace(system=lambda: os.uname().sysname)),
}


class NoCollection:
    """Context manager that pauses garbage collection, which would scan all loaded modules again and again."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()


def load_msgspec() -> None:
    """Import msgspec without ``typing_extensions`` and ``platform``, which take half of its loading time.

    Other imports of these two modules are not affected, on any thread.
    """
    if "msgspec" in sys.modules or _TYPING_EXTENSIONS in sys.modules:
        return
    finder = _Finder()  # not derived from importlib.abc, which takes milliseconds to import
    sys.meta_path.insert(0, finder)
    try:
        import msgspec  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Import finder that replaces one import of each module in ``_INSTEAD``."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        spec = PathFinder.find_spec(name, path) if name in _INSTEAD else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        skipped, instead = _INSTEAD[name]

        def importing(wanted: str, *others: Any) -> object:
            if wanted != skipped or wanted in sys.modules:
                return builtins.__import__(wanted, *others)
            if instead is None:
                raise ImportError(f"{wanted} is not needed here")
            return instead

        def exec_module(module: ModuleType) -> None:
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": importing}
            execute(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name: str, then: Callable[[object], object]) -> None:
    """Call ``then(module)`` once this process has imported the module ``name``; at once if it already has."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, then))  # type: ignore[arg-type]


class _Watcher:
    """A finder that lets one import proceed, and then calls back."""

    def __init__(self, name: str, then: Callable[[object], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec  # takes as long to load as this module

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
