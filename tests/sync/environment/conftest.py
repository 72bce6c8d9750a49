"""A conda channel, environments of it, and wheels: built once a session."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sync.environment import channel as channels


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a short path: the Python of this machine was built at a prefix that is short itself."""
    with tempfile.TemporaryDirectory(prefix="e") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def movable_python() -> Path:
    """The folder of this Python, which is not the system's: the system's cannot be copied to another folder."""
    base = Path(sys.base_prefix)
    if not os.path.realpath(sys.executable).startswith(str(base)) or base in (Path("/usr"), Path("/usr/local")):
        pytest.skip("this Python is not relocatable")
    return base


@pytest.fixture(scope="session")
def channel(movable_python: Path, tmp_path_factory: pytest.TempPathFactory) -> channels.Channel:
    """A conda channel with packages of text, code, a noarch one, and this machine's Python."""
    pytest.importorskip("rattler")
    if shutil.which("cc") is None or shutil.which("strip") is None:
        pytest.skip("no C compiler")
    return channels.build(tmp_path_factory.mktemp("conda"))
