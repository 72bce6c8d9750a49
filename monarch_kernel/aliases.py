"""``import monarch`` imports this package: code written for Monarch runs unchanged.

Only names that exist here are aliased; any other ``monarch.X`` raises an ``ImportError`` that says so.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from monarch_kernel import environment

#: Set in the environment of ranks whose controller has enabled the alias.
VARIABLE = environment.IMPORTS

_ALIAS = "monarch"
_OURS = "monarch_kernel"


class _Finder:
    """Resolves ``monarch`` and ``monarch.X`` to the module objects ``monarch_kernel`` and ``monarch_kernel.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(_ALIAS + "."):
            return None
        ours = _OURS + fullname[len(_ALIAS) :]
        from importlib.util import find_spec

        try:
            if find_spec(ours) is None:
                return None
        except ModuleNotFoundError:  # its message names our package, but the program imports monarch's
            return None
        loader: Any = self  # not derived from importlib.abc, which takes milliseconds to import
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=fullname == _ALIAS)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(_OURS + spec.name[len(_ALIAS) :])
        # The import system is about to overwrite these attributes; an alias must not rename the aliased module.
        self._saved = (module.__spec__, getattr(module, "__loader__", None), module.__package__)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__, module.__loader__, module.__package__ = self._saved


_finder: _Finder | None = None


def enable_monarch_imports(prefer_installed: bool = False) -> bool:
    """Make ``import monarch`` (and ``monarch.actor``, ...) import this package.

    Args:
        prefer_installed: do nothing if the real ``monarch`` is installed.

    Returns:
        Whether ``monarch`` is this package now.

    Raises:
        RuntimeError: the real Monarch has already been imported.
    """
    global _finder
    loaded = sys.modules.get(_ALIAS)
    if loaded is not None and loaded is not sys.modules.get(_OURS):
        if prefer_installed:
            return False
        raise RuntimeError(
            "the real monarch has been imported in this process: call enable_monarch_imports() before anything "
            "imports it"
        )
    if _finder is not None:
        return True
    if prefer_installed:
        from importlib.util import find_spec  # not always: it takes a rank a millisecond to load

        if find_spec(_ALIAS) is not None:
            return False
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    return True


def enabled() -> bool:
    """Whether ``monarch`` is this package in this process."""
    return _finder is not None


def disable_monarch_imports() -> None:
    """Undo ``enable_monarch_imports``."""
    global _finder
    if _finder is not None:
        sys.meta_path.remove(_finder)
        _finder = None
        ours = {name for name in sys.modules if name.partition(".")[0] == _ALIAS}
        for name in ours:
            del sys.modules[name]
