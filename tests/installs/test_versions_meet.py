"""A worker of an older version and a controller of this one, and the reverse: they work together, or say why not."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from monarch_kernel.protocol.messages import WIRE_VERSION
from tests.installs.conftest import ROOT, build_wheel, clean, environments, install
from tests.waiting import patience

#: The older version: the last one that is tagged; before the first release, a commit of the same wire.
OLDER = "7b43018e"
#: One of an older wire, which this version does not speak.
OF_AN_OLDER_WIRE = "bb85334e"
#: A program that sends cells to a new kernel of its environment, and prints what they print.
CELLS = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=120, kernel_name="monarch")
def heard(message):
    content = message["content"]
    text = content.get("text", "") or content.get("data", {}).get("text/plain", "")
    if message["msg_type"] == "error":
        text = "ERROR " + content["ename"] + ": " + content["evalue"]
    if text:
        print(text, flush=True)
try:
    for code in sys.stdin.read().split("\\n---\\n"):
        client.execute_interactive(code, timeout=120, output_hook=heard)
finally:
    client.stop_channels()
    manager.shutdown_kernel()
"""
ATTACH = """
from monarch_kernel.actor import Actor, attach_to_workers, endpoint
hosts = attach_to_workers(workers=[{url!r}], key_file={key!r})
procs = hosts.spawn_procs(per_host={{"gpus": 2}}, name="m")
---
%mesh use m
---
class Counter(Actor):
    def __init__(self, start):
        self.value = start
    @endpoint
    def add(self, by):
        self.value += by
        return self.value
    @endpoint
    def fail(self):
        raise ValueError("on purpose")
counters = procs.spawn("counters", Counter, 40)
print("added", sorted(counters.add.call(2).get().values()))
---
try:
    counters.fail.call().get()
except Exception as error:
    print("failed", type(error).__name__, "on purpose" in str(error))
---
%%mesh
x = rank + 5
print("rank", rank, x)
---
%mesh status
---
%mesh stacks
---
%mesh sync
---
%%mesh
import of_the_notebook
of_the_notebook.VALUE
---
import os, signal
victim = [status.pid for status in procs.status().get().values()][1]
os.kill(victim, signal.SIGKILL)
while not procs.dead():
    pass
print("dead", list(procs.dead()))
---
procs.stop().get()
print("stopped")
"""

#: A script that leaves a mesh behind, with an actor and a note; one that finds them, and ends the mesh.
KEEP = """
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.meshes import keep
class Counter(Actor):
    def __init__(self, start):
        self.value = start
    @endpoint
    def add(self, by):
        self.value += by
        return self.value
host = keep("t")
counters = host.hosts.spawn_procs(per_host={"gpus": 2}, name="t").spawn("counters", Counter, 10)
print(sorted(counters.add.call(1).get().values()))
host.note("loss", 0.5)
host.detach()
"""
TAKE = """
from monarch_kernel.meshes import attach, end_kept, kept, kept_ranks
print([(rank.mesh, rank.rank) for rank in kept_ranks("t")])
host = attach("t")
print(sorted(host.actors("counters").add.call(1).get().values()), host.noted("loss"))
host.detach()
end_kept("t")
print("left:", len(kept()))
"""


@dataclass(frozen=True)
class Versions:
    """Interpreters of environments that have the older version and this one."""

    old: Path
    new: Path


def last_release() -> str:
    """The last tagged version, or a commit before there was one."""
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-version:refname"], cwd=ROOT, capture_output=True, text=True
    )
    if tags.returncode:
        pytest.skip("this tree is not in git, so there is no older version to build")
    return (tags.stdout.split() or [OLDER])[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Versions]]:
    """Environments with the version of a commit, and with this one: each is made once, and found compiled later."""
    folder = tmp_path_factory.mktemp("versions")
    with environments(folder) as environment:

        @cache
        def python_with(version: Path) -> Path:
            python = environment()
            install(python, version)
            return python

        @cache
        def wheel_of(commit: str) -> Path:
            tree = folder / commit
            tree.mkdir()
            packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
            if packed.returncode:
                pytest.skip(f"this clone does not have the commit {commit}")
            subprocess.run(["tar", "x", "-C", str(tree)], input=packed.stdout, check=True)
            return build_wheel(tree, folder / f"wheel of {commit}")

        yield lambda older: Versions(python_with(wheel_of(older)), python_with(wheel))


@contextmanager
def worker(python: Path, home: Path, key: Path) -> Iterator[str]:
    """A worker of a version, on TCP; its address."""
    command = [str(python.parent / "monarch-kernel"), "worker", "--listen", "tcp://127.0.0.1:0", "--key-file", str(key)]
    with (home / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=clean(HOME=str(home)), cwd=home)
    assert process.stdout is not None
    try:
        said = process.stdout.readline().decode()
        assert said, (home / "worker.log").read_text()
        yield said.split()[-1]
    finally:
        process.terminate()
        process.wait(patience(30))
        process.stdout.close()


def run(python: Path, home: Path, code: str, program: str = CELLS, **env: str) -> str:
    """Run cells in a kernel of a version, or with another program, a script."""
    done = subprocess.run(
        [str(python), "-c", program],
        input=code,
        capture_output=True,
        text=True,
        timeout=patience(200),
        env=clean(HOME=str(home), JUPYTER_PREFER_ENV_PATH="1", **env),
        cwd=home,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("older", ["worker", "controller"])
def test_they_work_together(installed: Callable[[str], Versions], tmp_path: Path, older: str) -> None:
    versions = installed(last_release())
    far, near = (versions.old, versions.new) if older == "worker" else (versions.new, versions.old)
    here, there, key = tmp_path / "here", tmp_path / "there", tmp_path / "key"
    here.mkdir()
    there.mkdir()
    (here / "of_the_notebook.py").write_text("VALUE = 'synced'\n")
    # The key file of the older version is one for the other, too.
    subprocess.run([str(versions.old.parent / "monarch-kernel"), "keys", str(key)], check=True, capture_output=True)
    with worker(far, there, key) as url:
        check_session(run(near, here, ATTACH.format(url=url, key=str(key))))
    # The store of synced trees that one version has made is one for the other, too.
    with worker(near, there, key) as url:
        check_session(run(far, here, ATTACH.format(url=url, key=str(key))))


def check_session(said: str) -> None:
    """Check what the cells of a session have printed."""
    assert "ERROR" not in said, said
    assert "added [42, 42]" in said
    assert "failed ActorError[ValueError] True" in said
    assert "[0] rank 0 5" in said and "[1] rank 1 6" in said
    assert "synced" in said
    assert "dead [1]" in said and said.rstrip().endswith("stopped")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("older", ["mesh", "controller"])
def test_a_kept_mesh_is_taken_over(installed: Callable[[str], Versions], tmp_path: Path, older: str) -> None:
    versions = installed(last_release())
    first, then = (versions.old, versions.new) if older == "mesh" else (versions.new, versions.old)
    with tempfile.TemporaryDirectory(prefix="mk-kept-") as folder:  # a short path, for sockets
        env = {"MONARCH_KERNEL_KEPT_DIR": folder}
        assert run(first, tmp_path, "", KEEP, **env) == "[11, 11]\n"
        said = run(then, tmp_path, "", TAKE, **env)
    assert said == "[('t', 0), ('t', 1)]\n[12, 12] 0.5\nleft: 0\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("older", ["worker", "controller"])
def test_a_wire_that_is_not_spoken_is_refused(installed: Callable[[str], Versions], tmp_path: Path, older: str) -> None:
    versions = installed(OF_AN_OLDER_WIRE)
    far, near = (versions.old, versions.new) if older == "worker" else (versions.new, versions.old)
    here, there, key = tmp_path / "here", tmp_path / "there", tmp_path / "key"
    here.mkdir()
    there.mkdir()
    subprocess.run([str(versions.old.parent / "monarch-kernel"), "keys", str(key)], check=True, capture_output=True)
    with worker(far, there, key) as url:
        said = run(near, here, ATTACH.format(url=url, key=str(key)).partition("---")[0] + "hosts.initialized.get(60)")
    wires = ("10", str(WIRE_VERSION)) if older == "controller" else (str(WIRE_VERSION), "10")
    assert re.search(
        rf"ERROR .*speaks wire version {wires[0]} .* speaks {wires[1]} .*: install the .* on all hosts", said
    )
