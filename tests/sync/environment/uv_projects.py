"""A project of uv with a workspace member and packages of a folder, all made here: uv needs no network for it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sync.environment.wheels import wheel

_PROJECT = """\
[project]
name = "{name}"
version = "1.0"
requires-python = ">=3.11"
dependencies = [{dependencies}]
[project.scripts]
{name} = "{name}:main"
[build-system]
requires = ["uv_build"]
build-backend = "uv_build"
{more}"""


@dataclass(frozen=True)
class UvProject:
    """A project.

    Attributes:
        folder: with ``uv.lock``.
        links: the folder that its packages come from, or its address.
        cache: of uv.
    """

    folder: Path
    links: str
    cache: Path

    @property
    def variables(self) -> dict[str, str]:
        """What has uv use the packages of the folder, and nothing else."""
        found = {"UV_CACHE_DIR": str(self.cache), "UV_FIND_LINKS": self.links}
        return {**found, "UV_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_PYTHON": sys.executable}

    def run(self, *arguments: str, **variables: str) -> None:
        """Run uv in the project."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [_uv(), *arguments, "--quiet", "--no-config"],
            cwd=self.folder,
            env={**own, **self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr

    def sync(self, prefix: Path, *arguments: str, folder: Path | None = None) -> Path:
        """Make the project's environment at a prefix.

        Args:
            folder: the project there, instead of this one.
        """
        project = [] if folder is None else ["--project", str(folder)]
        self.run("sync", "--frozen", *project, *arguments, UV_PROJECT_ENVIRONMENT=str(prefix))
        return prefix


def _uv() -> str:
    pytest.importorskip("uv")
    return str(Path(sys.executable).with_name("uv"))


def project(root: Path) -> UvProject:
    """Make and lock a project of two packages: ``zoo``, and ``animal``, a member, which sorts before it."""
    links = root / "links"
    links.mkdir(parents=True)
    wheel(links, "one", {"one.py": "X = 1\ndef main():\n    print(X)\n"}, scripts={"one": "one:main"})
    wheel(links, "two", {"two.py": "X = 2\n"})
    made = UvProject(root / "zoo", str(links), root / "cache")
    of_workspace = "[tool.uv.workspace]\nmembers = ['packages/*']\n[tool.uv.sources]\nanimal = {workspace = true}\n"
    for name, folder, dependencies, more in (
        ("zoo", made.folder, '"animal", "one"', of_workspace),
        ("animal", made.folder / "packages" / "animal", '"two"', ""),
    ):
        (folder / "src" / name).mkdir(parents=True)
        (folder / "src" / name / "__init__.py").write_text(f"def main():\n    print({name!r}, __file__)\n")
        (folder / "pyproject.toml").write_text(_PROJECT.format(name=name, dependencies=dependencies, more=more))
    made.run("lock")
    return made
