"""Call functions after a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


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
