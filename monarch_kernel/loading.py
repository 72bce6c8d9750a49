"""What makes loading this package quick: msgspec without ``typing_extensions``, and no garbage collection meanwhile."""

from __future__ import annotations

import builtins
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any

_TYPING_EXTENSIONS = "typing_extensions"


class NoCollection:
    """A block without garbage collection, which would look through all that is loaded, again and again."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()


def load_msgspec() -> None:
    """Import msgspec without ``typing_extensions``, which takes as long as all else of msgspec to load.

    msgspec takes from there, if it can, what ``typing`` has itself since Python 3.11. Other imports of it, now and
    later, on this thread and on others, find it as ever.
    """
    if "msgspec" in sys.modules or _TYPING_EXTENSIONS in sys.modules:
        return
    finder: Any = _Finder()  # not derived from importlib.abc, which takes milliseconds to import
    sys.meta_path.insert(0, finder)
    try:
        import msgspec  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds the module of msgspec that imports ``typing_extensions``, and has that import fail there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        spec = PathFinder.find_spec(name, path) if name == "msgspec._utils" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
            execute(module)

        spec.loader.exec_module = exec_module
        return spec


def _import(name: str, *others: Any) -> Any:
    if name == _TYPING_EXTENSIONS:
        raise ImportError(f"{name} is not needed here")
    return builtins.__import__(name, *others)
