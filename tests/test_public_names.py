"""What users may import stays importable: `public_names.txt` lists it, and what the documentation shows works.

A name that is added to a façade is added to the list (the failing test prints the lines). No name leaves the list
without a line in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import collections
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.aliases import _PRIVATE, _PUBLIC, PublicLoader

ROOT = Path(__file__).resolve().parent.parent
LISTED = [line for line in (Path(__file__).parent / "public_names.txt").read_text().split() if line]
FACADES = sorted({line.partition(":")[0] for line in LISTED})

# Façades that use one name for different things: each follows Monarch's module of that name, or its own subject.
DIFFERENT = {
    "attach": "actor.attach takes the address of a worker, meshes.attach the name of a kept mesh",
    "capture": "numerics.capture is of a training step; errors.capture is that of Monarch, of an exception",
    "configure": "config.configure changes settings of the runtime, rdma.configure those of the data plane",
    "Group": "debug.Group is a group of stopped ranks, spmd.Group a process group",
    "heal_mesh": "the package's own is a thin function, so that importing it costs little",
    "get_mesh": "the package's own is a thin function, so that importing it costs little",
    "enable_monarch_imports": "the package's own is a thin function, so that importing it costs little",
}


def offered(facade: str) -> set[str]:
    module = importlib.import_module(facade)
    return {f"{facade}:{name}" for name in getattr(module, "__all__", ())}


@pytest.mark.parametrize("facade", FACADES)
def test_every_listed_name_can_be_imported(facade: str) -> None:
    module = importlib.import_module(facade)
    names = [name for line in LISTED for owner, _, name in [line.partition(":")] if owner == facade]
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{facade} has lost {missing}"


@pytest.mark.parametrize("facade", FACADES)
def test_every_offered_name_is_listed(facade: str) -> None:
    assert not (new := sorted(offered(facade) - set(LISTED))), "add to tests/public_names.txt:\n" + "\n".join(new)


@pytest.mark.parametrize("package", ["monarch_kernel", "monarch"])
def test_modules_without_a_file_are_imported_first(package: str) -> None:
    program = f"""
import sys
import monarch_kernel
monarch_kernel.enable_monarch_imports()
import {package}.common.tensor as first
assert "torch" not in sys.modules  # until a name is used
from {package} import memory
from {package}.builtins.random import seed_remote
from {package}.exceptions import *
from monarch_kernel.actor import ActorError as ours
assert ActorError is ours and memory.record_memory_history and first.Tensor
import {package}.builtins as functions
assert functions.random.seed_remote is seed_remote
try:
    import {package}.common.nothing
except ModuleNotFoundError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (f"No module named '{package}.common.nothing'\n", "")


def test_the_private_names_of_monarch_are_where_the_table_says() -> None:
    for module, places in _PRIVATE.items():
        for place in places:
            owner, _, renamed = place.partition(":")
            found = importlib.import_module(f"monarch_kernel.{owner}" if owner else "monarch_kernel")
            theirs, _, ours = renamed.partition("=")
            assert not renamed or hasattr(found, ours or theirs), f"{module}: {place}"


def test_the_package_knows_which_modules_have_no_file() -> None:
    # An update of a checkout may leave an empty folder of that name, which is a module to the finder of files.
    for path in _PUBLIC:
        assert type(importlib.import_module(f"monarch_kernel.{path}").__loader__) is PublicLoader, path


def test_a_name_means_the_same_in_every_facade() -> None:
    objects: dict[str, list[tuple[str, object]]] = collections.defaultdict(list)
    for line in LISTED:
        facade, _, name = line.partition(":")
        objects[name].append((facade, getattr(importlib.import_module(facade), name)))
    differing = {
        name: [facade for facade, _ in found]
        for name, found in objects.items()
        if any(thing is not found[0][1] for _, thing in found)
    }
    assert differing.keys() == DIFFERENT.keys(), differing


def shown_code() -> Iterator[tuple[str, str]]:
    """(file, text) of each piece of code in the README, the documentation and the notebooks."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield path.name, path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            yield path.name, "".join(cell["source"])


STATEMENT = re.compile(r"from (monarch(?:_kernel)?[\w.]*) import (\([^)]*\)|[\w, ]+)")


def shown_imports() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of each `from monarch_kernel.X import name` in them, `monarch.X` taken as ours."""
    for file, text in shown_code():
        for module, names in STATEMENT.findall(text):
            try:
                statement = ast.parse(f"from {module} import {names.rstrip(', ')}").body[0]
            except SyntaxError:  # prose after the names, or `import ...`
                continue
            assert isinstance(statement, ast.ImportFrom)
            for alias in statement.names:
                yield file, re.sub(r"^monarch(?=\.|$)", "monarch_kernel", module), alias.name


def test_every_import_that_the_documentation_shows_works() -> None:
    shown = sorted(set(shown_imports()))
    assert len(shown) > 20, "the documentation is no longer read by this test"
    wrong: list[str] = []
    for file, module, name in shown:
        found = importlib.import_module(module)
        if name != "*" and not hasattr(found, name):
            wrong.append(f"{file}: from {module} import {name}")
    assert not wrong, "\n".join(wrong)
