"""What is unpickled, and who can have written it: docs/security.md lists each module that does so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_kernel

ROOT = Path(monarch_kernel.__file__).parent.parent
#: What unpickles, by its full name; and methods by their own, whatever they are of.
_UNPICKLERS = re.compile(
    r"(_?pickle|cloudpickle|dill|joblib|marshal|shelve|torch|serialize|monarch_kernel\.protocol\.serialize)"
    r"\.(load|loads|Unpickler|open)"
    r"|torch\.distributed\.checkpoint(\.\w+)*\.load"
    r"|.*\.(all_gather|gather|scatter|broadcast|send|recv)_object(_list)?"
)
#: Such names of what reads plain data, and of functions of ours.
_PLAIN = re.compile(r"(json|tomllib)\.(load|loads)|(monarch_kernel|workspace_sync)\..*")
_LIKELY = ("load", "loads", "Unpickler")
#: Methods of this name that unpickle nothing.
OTHERS = {
    "monarch_kernel/cli/monarch.py": "entry points of installed packages",
    "monarch_kernel/launchers/base.py": "entry points of installed packages",
    "monarch_kernel/launchers/lightning.py": "entry points of installed packages",
    "workspace_sync/sources.py": "the index of a scan, by msgspec",
    "workspace_sync/scanning/scanner.py": "the index of a scan, by msgspec",
}


def unpicklers_in(code: str | bytes) -> set[str]:
    """The names of what unpickles that a module uses, called or not."""
    tree = ast.parse(code)
    own = {node.name: f"monarch_kernel.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = own | dict(_imported(tree))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = _full_name(node, imported)
            if _UNPICKLERS.fullmatch(name):
                found.add(name)
        if isinstance(node, ast.Call):
            name = _full_name(node.func, imported)
            if name.rpartition(".")[2] in _LIKELY and not _PLAIN.fullmatch(name):
                found.add(name)
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What each imported name stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, imported)}.{node.attr}"
    return "?"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(x)",
        "import pickle as p\np.load(x)",
        "from pickle import loads as read\nread(x)",
        "from pickle import Unpickler\nclass Mine(Unpickler): pass",
        "import pickle\nread = pickle.loads",
        "import cloudpickle\ncloudpickle.loads(x)",
        "from monarch_kernel.protocol.serialize import loads\nloads(x)",
        "import torch\ntorch.load(x)",
        "from torch.distributed.checkpoint.state_dict_loader import load as read\nread(x)",
        "group.all_gather_object(x, y)",
        "import marshal\nmarshal.load(x)",
        "from elsewhere import loads\nloads(x)",
        "reader_of(x).load()",
    ],
)
def test_what_unpickles_is_found(code: str) -> None:
    assert unpicklers_in(code)


@pytest.mark.parametrize(
    "code", ["import json\njson.loads(x)", "import tomllib\ntomllib.load(x)", "pickle.dumps(x)", "x.load_state_dict(y)"]
)
def test_what_does_not_is_not(code: str) -> None:
    assert not unpicklers_in(code)


def test_everything_that_is_unpickled_is_listed_with_who_can_have_written_it() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.partition("\n## What is unpickled\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("| ") and "`" in row]
    assert rows and all(who.strip() for _, who, _ in rows)
    listed = {path for *_, where in rows for path in re.findall(r"`([\w/]+\.py)`", where)}
    words = re.compile(rb"load|Unpickler|_object")
    found: set[str] = set()
    for package in ("monarch_kernel", "workspace_sync"):
        for path in (ROOT / package).rglob("*.py"):
            code = path.read_bytes()
            if words.search(code) and unpicklers_in(code):
                found.add(str(path.relative_to(ROOT)))
    # Paths are below the folder of the package, as elsewhere in docs/.
    assert {f"monarch_kernel/{path}" for path in listed} == found - OTHERS.keys()
    assert found >= OTHERS.keys()
