"""Scripts written for Monarch report here what they report under torchmonarch 0.7.0."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys

import pytest

import monarch_kernel.actor
from tests.conftest import needs
from tests.parity.compare import HERE, SCRIPTS, expected, names, output


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_written_for_monarch(script: str) -> None:
    if script in OF_TENSORS:
        needs("torch")
    if script == "numa" and not os.path.exists("/sys/devices/system/node/node0/cpulist"):
        pytest.skip("this host has no NUMA nodes")
    assert output(sys.executable, "ours", script) == expected(script)


def test_all_names_are_here() -> None:
    ours = set(monarch_kernel.actor.__all__)
    assert not set(names()) - ours
    assert all(hasattr(monarch_kernel.actor, name) for name in ours)


OF_TENSORS = ("gradients", "tensors")


def missing() -> list[str]:
    """Public modules of torchmonarch 0.7.0, and names of them, that are not here."""
    code = "import sys, monarch_kernel as ours; ours.enable_monarch_imports(); import importlib" + MISSING
    run = subprocess.run(
        [sys.executable, "-c", code, str(HERE / "modules.txt")], capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.split()


MISSING = """
for line in open(sys.argv[1]):
    module, *names = line.split()
    try:
        found = importlib.import_module(module)
    except ImportError:
        print(module)
        continue
    for name in names:
        try:
            there = hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
        except ImportError:
            there = False
        if not there:
            print(f"{module}.{name}")
"""


def test_every_public_name_is_here_or_explained() -> None:
    text = (HERE.parent.parent / "docs" / "engines.md").read_text().partition("## What is not here")[2]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    assert all(row[2].strip() for row in rows)
    patterns = {pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row[1])}
    lacking = missing()
    explained = {name: [p for p in patterns if fnmatch.fnmatchcase(name, p)] for name in lacking}
    assert not (bare := [name for name in lacking if not explained[name]]), f"say in docs/engines.md why not: {bare}"
    used = {pattern for found in explained.values() for pattern in found}
    assert patterns == used, f"docs/engines.md says that these are not here: {patterns - used}"
