"""Transfers over a real verbs device: the tests of ``tests/rdma_guest/verbs_in_guest.py``, in a virtual machine.

The machine has a Soft-RoCE device, and the host's files; see ``tests/rdma_guest/run.sh``. It is booted once for all.
"""

from __future__ import annotations

import ast
import glob
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.waiting import patience

GUEST = Path(__file__).parents[1] / "rdma_guest"
SCRIPT = GUEST / "run.sh"
TESTS = GUEST / "verbs_in_guest.py"
DEBIAN = "/usr/lib/python3/dist-packages"
#: Seconds that the guest may take at least; about 50 on two cores.
LIMIT = 400
#: How many times as long as its boot it may take, if that is more: a machine that is only slow is slow at both.
BOOTS = 40


@dataclass
class Case:
    """What became of one test in the guest."""

    name: str
    trouble: str  # empty: it passed


def names() -> list[str]:
    """The guest's tests: those that its file defines, and those that it imports."""
    found: list[str] = []
    for node in ast.parse(TESTS.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("test_")]


def why_not() -> str:
    """Why there can be no guest here; empty if there may be one. Builds it if need be."""
    if os.geteuid():
        return "needs root, to install QEMU and to read every file for the guest"
    built = subprocess.run([SCRIPT, "--build"], capture_output=True, text=True, timeout=LIMIT)
    if built.returncode:
        return f"{SCRIPT.name} --build failed:\n{built.stderr[-2000:]}"
    if not glob.glob(f"{DEBIAN}/pyverbs/device{sysconfig.get_config_var('EXT_SUFFIX')}"):
        version = "{}.{}".format(*sys.version_info)
        return f"the system's pyverbs (python3-pyverbs) is for another Python than this one, {version}"
    return ""


def wait_for(guest: subprocess.Popen[bytes], booted: Path) -> str:
    """Until the guest has ended by itself, or has taken too long and is ended; then what to say of that."""
    began = time.monotonic()
    limit: float = LIMIT
    while guest.poll() is None:
        took = time.monotonic() - began
        if limit == LIMIT and booted.exists():
            limit = max(LIMIT, BOOTS * took)
        if took > limit:
            guest.terminate()
            guest.wait(patience(30))
            return f", after {took:.0f} s{'' if booted.exists() else ' without having booted'}"
        time.sleep(0.2)  # no event tells of either
    return ""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    """What became of the guest's tests, by function."""
    trouble = why_not()
    if trouble:
        pytest.skip(f"no RDMA guest, so the verbs backend was NOT tested: {trouble}")
    results, path = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("path")
    (path / "pyverbs").symlink_to(f"{DEBIAN}/pyverbs")  # this alone, not all that the system has
    report = results / "report.xml"
    booted = results / "booted"
    pytest_run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(TESTS), f"--junitxml={report}"]
    command = ["bash", "-c", f"touch {booted}; exec {shlex.join(pytest_run)}"]
    # One processor: QEMU emulates atomic instructions, and what waits on another processor, at several times the cost.
    options = ["-c", "1", "-w", str(results), "-C", str(GUEST.parents[1]), "-e", f"PYTHONPATH={path}", "-t", "0"]
    with (results / "output").open("wb+") as said:
        ran = subprocess.Popen([SCRIPT, *options, "--", *command], stdout=said, stderr=subprocess.STDOUT)
        late = wait_for(ran, booted)
        output = (results / "output").read_bytes().decode(errors="replace")
    print(output)
    if ran.returncode == 125 and not late:
        pytest.skip(f"the RDMA guest does not boot here, so the verbs backend was NOT tested:\n{output[-2000:]}")
    assert report.exists(), f"the guest's tests came to no end (exit code {ran.returncode}{late}):\n{output[-5000:]}"
    cases: dict[str, list[Case]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        trouble = "\n".join(
            f"{part.tag}: {part.get('message')}\n{part.text}" for part in case if part.tag != "system-out"
        )
        cases.setdefault(name.partition("[")[0], []).append(Case(name, trouble))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(0)  # the guest has its own, which grows with its boot
@pytest.mark.parametrize("name", names())
def test_in_the_guest(guest: dict[str, list[Case]], name: str) -> None:
    assert guest.get(name), f"{name} was not run"
    failed = [f"{case.name}\n{case.trouble}" for case in guest[name] if case.trouble]
    assert not failed, "\n\n".join(failed)
