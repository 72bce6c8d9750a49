"""A mesh comes up, works and leaves nothing behind wherever it is started: odd folders, few descriptors, no network.

The scripts of all cases run at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.actors import PATIENCE
from tests.actor.conftest import Script

ROOT = Path(__file__).parents[2]

SCRIPT = """
from monarch_kernel.actor import Actor, endpoint, this_host

class Summer(Actor):
    @endpoint
    def sum(self, data):
        print("a rank prints")
        return len(data) + sum(data[:10])

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2})
    print(list(procs.spawn("summer", Summer).sum.call(bytes([1]) * 1_000_000).get(60).values()))
    procs.stop().get(60)
"""

#: What a shell does before it becomes the script; ``$TMPDIR`` is a folder of the case's own.
CASES = {
    "as it is": "",
    "a full disk": "mount -t tmpfs -o size=64k none $TMPDIR; dd if=/dev/zero of=$TMPDIR/fill 2>/dev/null || true",
    "a read-only disk": "mount -t tmpfs -o ro none $TMPDIR",
    "a temporary folder that is not there": "export TMPDIR=/nonexistent",
    "a path of 140 characters": "export TMPDIR=$TMPDIR/$(printf 'x%.0s' $(seq 140)); mkdir $TMPDIR",
    "no home": "unset HOME",
    "32 descriptors": "ulimit -n 32",
    "no network": "true",
    "IPv6 only": "ip link set lo up; ip addr del 127.0.0.1/8 dev lo",
    "a host name that nobody knows": "hostname no-such-host.invalid",
}
NAMESPACES = {
    "a full disk": "--mount",
    "a read-only disk": "--mount",
    "no network": "--net",
    "IPv6 only": "--net",
    "a host name that nobody knows": "--uts",
}


def _start(case: str, path: Path) -> Script:
    token = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="mkt")
    env = {**os.environ, "MK_TEST_SCRIPT": token, "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    command = ["sh", "-ec", f"{CASES[case]}\nexec {sys.executable} {path}"]
    if case in NAMESPACES:
        command = ["unshare", NAMESPACES[case], *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    return Script(process, token, folder)


def why_not(case: str) -> str:
    """Why a case cannot be had here."""
    if case not in NAMESPACES:
        return ""
    tried = subprocess.run(["unshare", NAMESPACES[case], "true"], capture_output=True, text=True, timeout=PATIENCE)
    if case == "IPv6 only" and not Path("/proc/sys/net/ipv6").exists():
        return "this machine has no IPv6"
    return tried.stderr.strip()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Script]]:
    path = tmp_path_factory.mktemp("surroundings") / "script.py"
    path.write_text(SCRIPT)
    made = {case: _start(case, path) for case in CASES if not why_not(case)}
    yield made
    for script in made.values():
        if script.process.poll() is None:
            script.kill()
        for stream in (script.process.stdout, script.process.stderr):
            assert stream is not None
            stream.close()
        shutil.rmtree(script.folder, ignore_errors=True)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_works_and_leaves_nothing(case: str, scripts: dict[str, Script]) -> None:
    if case not in scripts:
        pytest.skip(f"{case} cannot be had here, and was NOT tested: {why_not(case)}")
    code, out, err = scripts[case].finish()
    assert (code, err) == (0, ""), out
    assert sorted(out.splitlines()) == ["[1000010, 1000010]", "a rank prints", "a rank prints"]
    if case == "a path of 140 characters":
        (long,) = Path(scripts[case].folder).iterdir()
        assert not list(long.iterdir())
        long.rmdir()
    scripts[case].check_gone()


def test_too_few_descriptors_are_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["sh", "-c", f"ulimit -n 14; exec {sys.executable} {tmp_path / 'script.py'}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
