"""A workspace of Python files whose text tests change."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from workspace_sync.reload.in_place import reload_here
from workspace_sync.reload.refresh_report import ModuleReport


class Sources:
    """Files below a folder, imported and reloaded in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, **files: str) -> list[str]:
        """Write modules by name (``a__b`` is ``a/b.py``, ``a__init`` is ``a/__init__.py``); returns their paths."""
        paths: list[str] = []
        for name, text in files.items():
            parts = ["__init__" if part == "init" else part for part in name.split("__")]
            path = self.folder.joinpath(*parts).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.stat().st_mtime if path.exists() else 0.0
            path.write_text(textwrap.dedent(text))
            if path.stat().st_mtime < before + 1:  # bytecode knows its source by the second
                os.utime(path, (before + 1, before + 1))
            paths.append(str(path))
        return paths

    def load(self, name: str, text: str) -> Any:
        """Write a module and import it."""
        self.write(**{name.replace(".", "__"): text})
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def reload(self, **files: str) -> dict[str, ModuleReport]:
        """Change modules, and reload what is stale; the reports by name."""
        self.write(**files)
        return {report.name: report for report in reload_here()}

    def edit(self, module: ModuleType, text: str) -> ModuleReport:
        """Change one module, and reload it."""
        name = module.__name__
        return self.reload(**{name.replace(".", "__"): text})[name]

    def drop(self) -> None:
        """Forget all modules of the folder."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]
