"""What a rank finds when it starts from a server that has been running for long."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from monarch_kernel.actor import Actor, endpoint, this_host


class Importer(Actor):
    """Imports by name, in its own process."""

    @endpoint
    def value(self, module: str) -> int:
        return importlib.import_module(module).VALUE


def test_a_folder_of_the_path_that_came_later_is_seen_by_new_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "later"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    first = this_host().spawn_procs().spawn("i", Importer)
    with pytest.raises(Exception, match="No module named 'came_later'"):
        first.value.call_one("came_later").get()
    folder.mkdir()
    (folder / "came_later.py").write_text("VALUE = 5\n")
    assert this_host().spawn_procs().spawn("i", Importer).value.call_one("came_later").get() == 5
