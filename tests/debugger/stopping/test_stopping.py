"""The tracer on every Python that it is for: this one, and others of this machine, which need no packages."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("bodies", "bodies_stepping", "bodies_looking")
VERSIONS = ("3.11", "3.12", "3.13")
#: How long all bodies of a module may take in one Python (seconds); the runner ends each that hangs before.
LIMIT = 170


def bodies(module: str) -> list[str]:
    """The names of the tests in a module."""
    found = importlib.import_module(f"tests.debugger.stopping.{module}")
    functions = inspect.getmembers(found, inspect.isfunction)
    return [name for name, each in functions if each.__module__ == found.__name__ and not name.startswith("_")]


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{version}")
    # A name on the path may stand for a Python that is not installed.
    return found if found and re.match(rf"Python {version}\.", _output(found, "--version")) else None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False).stdout


@functools.cache
def results(version: str, module: str) -> tuple[dict[str, str | None], str]:
    """What each body raised there (None: nothing), and how Python ended."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed here: its tracer is not tested")
    command = [python, "-m", "tests.debugger.stopping.runner", f"tests.debugger.stopping.{module}", *bodies(module)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(found), f"exit code {done.returncode}\n{done.stderr[-8000:]}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in bodies(module)])
def test_body(version: str, module: str, name: str) -> None:
    """See the body of that name."""
    found, errors = results(version, module)
    assert name in found, f"it has not come to an end: {errors}"
    assert found[name] is None, found[name]
