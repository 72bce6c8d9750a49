"""A project of uv with a workspace member and packages of a folder, all made here: uv needs no network for it."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        links: the folder that its packages come from.
        cache: of uv.
        index: the address of an index that has them; empty: they come from the folder, and the lock has no hashes.
    """

    folder: Path
    links: Path
    cache: Path
    index: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """What has uv use the packages of the folder or index, and nothing else."""
        found = {"UV_CACHE_DIR": str(self.cache), "UV_PYTHON": sys.executable}
        if self.index:
            return {**found, "UV_DEFAULT_INDEX": self.index}
        return {**found, "UV_FIND_LINKS": str(self.links), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}

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


@contextmanager
def served(links: Path) -> Iterator[str]:
    """An index of the wheels of a folder, on this machine alone; its address."""

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rpartition("/")[2]
            if name.endswith(".whl"):
                body, kind = (links / name).read_bytes(), "application/octet-stream"
            else:
                files = [(each.name, hashlib.sha256(each.read_bytes()).hexdigest()) for each in links.glob(f"{name}-*")]
                text = "".join(f'<a href="/files/{file}#sha256={digest}">{file}</a>' for file, digest in files)
                body, kind = f"<!DOCTYPE html><html><body>{text}</body></html>".encode(), "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


def packages(links: Path) -> Path:
    """A folder of the wheels that a project needs; one of them is worth not to be sent."""
    links.mkdir(parents=True)
    wheel(links, "one", {"one.py": "X = 1\ndef main():\n    print(X)\n"}, scripts={"one": "one:main"})
    wheel(links, "two", {"two.py": "X = 2\n", "two_data.bin": random.Random(2).randbytes(1 << 20)})
    return links


def project(root: Path, links: Path, index: str = "") -> UvProject:
    """Make and lock a project of two packages: ``zoo``, and ``animal``, a member, which sorts before it."""
    made = UvProject(root / "zoo", links, root / "cache", index)
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
