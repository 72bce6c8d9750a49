"""A small project beside a notebook."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Project:
    """A folder with modules, and where this machine keeps synced trees.

    Args:
        folder: of the project.
        store: of synced trees.

    Attributes:
        variables: more variables for kernels that are started in it.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder = folder
        self.store = store
        self.variables: dict[str, str] = {}
        self.write("model.py", "VERSION = 'first'\n")
        self.write("data/load.py", "def load():\n    return 'first'\n")
        self.write("notes/junk.tmp", "not to be synced")
        self.write(".gitignore", "*.tmp\n")

    @property
    def env(self) -> dict[str, str]:
        """The environment of a kernel in this folder, which imports this checkout."""
        return {
            **os.environ,
            "MONARCH_KERNEL_SYNC_FOLDER": str(self.store),
            "PYTHONPATH": str(ROOT),
            **self.variables,
        }

    def write(self, path: str, text: str) -> None:
        """Write a file of the project."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def tree(self) -> Path:
        """What ranks see of it on this machine."""
        [folder] = (self.store / "w").iterdir()
        return folder / "current" / "tree"


def make_environment(folder: Path, *, usable: bool = True) -> Path:
    """A venv that has a package of its own and, if it is to be usable for ranks, what these need."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("HERE = 'in the environment'\n")
    if usable:
        (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return folder
