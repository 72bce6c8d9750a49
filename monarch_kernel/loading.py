"""Speed up the import of this package: skip two slow imports of msgspec, and pause garbage collection."""

from __future__ import annotations

import builtins
import gc
import os
import sys
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
