"""What makes loading this package quick: msgspec without ``typing_extensions`` and ``platform``, and no garbage
collection meanwhile."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

_TYPING_EXTENSIONS = "typing_extensions"
#: By module: what one of its imports gets instead of a module that takes long to load; None: an ImportError.
_INSTEAD: dict[str, tuple[str, Any]] = {
    # msgspec takes from it, if it can, what ``typing`` has itself since Python 3.11.
    "msgspec._utils": (_TYPING_EXTENSIONS, None),
    # uuid, which msgspec loads, asks it for the name of the system, and for no more.
    "uuid": ("platform", SimpleNamespace(system=lambda: os.uname().sysname)),
}


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
    """Import msgspec without ``typing_extensions`` and ``platform``, which take as long as all else of it to load.

    Other imports of them, now and later, on this thread and on others, find them as ever.
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
    """Finds the modules of ``_INSTEAD``, and changes one import of each."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        spec = PathFinder.find_spec(name, path) if name in _INSTEAD else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        skipped, instead = _INSTEAD[name]

        def importing(wanted: str, *others: Any) -> Any:
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
