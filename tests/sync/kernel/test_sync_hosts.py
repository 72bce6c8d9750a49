"""`%mesh sync` to several hosts, one of which fails; an interrupt; a plain ipykernel, and a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.kernel.harness import Kernel, stop_kernel
from tests.kernel.screen import text
from tests.sync.kernel.project import Project
from tests.waiting import patience
from tests.workers import team


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """``workers(store, store)``: the URLs of workers with these stores."""
    with team("ipc") as members:

        def start(*stores: Path) -> list[str]:
            for store in stores:
                members.start(env={"MONARCH_KERNEL_SYNC_FOLDER": str(store)})
            return members.urls

        yield start


def attach(kernel: Kernel, urls: list[str]) -> None:
    kernel.ok(f"from monarch_kernel.actor import attach_to_workers\nhosts = attach_to_workers(workers={urls!r})")


def test_a_host_that_fails_is_named(
    kernel: Kernel, project: Project, tmp_path: Path, workers: Callable[..., list[str]]
) -> None:
    stores = [tmp_path / "one", tmp_path / "two"]
    stores[1].write_text("a file where the store should be")
    attach(kernel, workers(*stores))
    out = kernel.run("%mesh sync --on hosts")
    assert out.ename == "UsageError"
    assert re.search(r"^%mesh sync: 1 of 2 hosts stay on the tree that they have", out.evalue), out.evalue
    assert "sync again when this is mended" in out.evalue.lower() and str(stores[1]) not in out.evalue
    receipt = text(out)  # without the progress line, which a sync that takes longer has meanwhile
    assert re.search(r"^node1 +failed +0 .*\n(.*\n)*node1: .*/two", receipt, re.MULTILINE), receipt
    stores[1].unlink()
    assert re.search(r"^node1 +[0-9a-f]{8} +new ", kernel.ok("%mesh sync --on hosts").text, re.MULTILINE)
    kernel.ok("world = hosts.spawn_procs(name='world')")
    seen = text(kernel.ok("%%mesh world\nimport model\nmodel.__file__"))
    assert [f"{store}/w/" in seen for store in stores] == [True, True], seen


def test_an_interrupt_changes_nothing(kernel: Kernel, project: Project) -> None:
    """The stop button, while a host does not answer; until then the cell shows how far the sync is."""
    kernel.ok("%mesh sync")
    trees = "w/*/slots/tree-*/**/load.py"
    wait_until(lambda: len(list(project.store.glob(trees))) == 2, "the tree that the next sync changes is there")
    project.write("model.py", "VERSION = 'second'\n")
    kernel.ok("from workspace_sync.transfer import host_work")
    pids = kernel.ok("[pid for link in host_work._agents.values() for pid in link.procs.pids().values()]").text
    [agent] = [int(pid) for pid in re.findall(r"\d+", pids)]
    os.kill(agent, signal.SIGSTOP)
    try:
        cell = kernel.send("%mesh sync")
        cell.until(lambda out: any("sync: " in shown.get("text/plain", "") for shown in out.displays))
        kernel.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
    finally:
        os.kill(agent, signal.SIGCONT)
    assert (project.tree / "model.py").read_text() == "VERSION = 'first'\n"
    assert cell.outcome.updates[-1]["text/plain"] == "", "the progress line is gone"
    assert re.search("new +1 ", kernel.ok("%mesh sync").text)
    assert (project.tree / "model.py").read_text() == "VERSION = 'second'\n"


def test_a_plain_ipykernel(start: Callable[..., Kernel], project: Project) -> None:
    kernel = start("python3")
    kernel.ok("%load_ext monarch_kernel")
    out = kernel.ok("%mesh sync")
    assert out.result is not None and "<table>" in out.result["text/html"]
    kernel.ok("%mesh up --procs 2")
    assert str(project.tree) in text(kernel.ok("%%mesh\nimport model\nmodel.__file__"))
    kernel.ok("%unload_ext monarch_kernel")


def test_a_terminal(project: Project) -> None:
    code = "%load_ext monarch_kernel\n%mesh sync\n%mesh sync --watch\n%mesh sync --unwatch\n%mesh sync nowhere\n"
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]
    done = subprocess.run(
        command, input=code, capture_output=True, text=True, timeout=patience(60), cwd=project.folder, env=project.env
    )
    assert re.search(r"tree [0-9a-f]{8}: 3 files", done.stdout), done.stdout + done.stderr
    assert re.search(r"^\S+ +[0-9a-f]{8} +new +3 ", done.stdout, re.MULTILINE), done.stdout
    assert f"no longer watched: {project.folder}" in done.stdout
    assert "UsageError: %mesh sync: there is no folder" in done.stdout + done.stderr


def test_a_kept_mesh_that_began_outside_of_the_tree_is_named(
    start: Callable[..., Kernel], project: Project, tmp_path: Path
) -> None:
    """Its host agent is not the one that the first sync told of the tree, so its ranks began where the kernel works."""
    project.variables["MONARCH_KERNEL_KEPT_DIR"] = str(tmp_path / "kept")
    kernel = start()
    kernel.ok("%mesh sync")
    kernel.ok("%mesh up late --procs 1 --keep")
    try:
        named = "of mesh late do not run this tree: they started before the first sync"
        assert named in kernel.ok("%mesh sync").text
        assert named not in kernel.ok("%mesh sync").text, "it is said once"
        assert "mesh late: restarted: rank 0" in kernel.ok("%mesh sync --restart").stdout
        where = "%%mesh late\nimport model, os\nmodel.__file__.startswith(os.environ['WORKSPACE_DIR'])"
        assert text(kernel.ok(where)) == "[0] True"
    finally:
        kernel.ok("%mesh down late")


def test_a_kept_mesh_stays_in_the_tree(start: Callable[..., Kernel], project: Project, tmp_path: Path) -> None:
    """The next kernel syncs to it, and its ranks and the ones that it starts follow."""
    project.variables["MONARCH_KERNEL_KEPT_DIR"] = str(tmp_path / "kept")
    first = start()
    first.ok("%mesh up kept --procs 1 --keep --sync")
    use = "%%mesh kept\nimport model, os\nmodel.VERSION, model.__file__.startswith(os.environ['WORKSPACE_DIR'])"
    assert text(first.ok(use)) == "[0] ('first', True)"
    stop_kernel(first)
    second = start()
    try:
        second.ok("%mesh attach kept")
        project.write("model.py", "VERSION = 'second'\n")
        assert "reloaded: model" in second.ok("%mesh sync --reload").text
        assert text(second.ok(use)) == "[0] ('second', True)"
        second.ok(
            "import monarch_kernel, os, signal, time\nmesh = monarch_kernel.get_mesh('kept')\n"
            "os.kill(mesh.pids().item(gpus=0), signal.SIGKILL)\nwhile not mesh.dead():\n    time.sleep(0.01)"
        )
        second.ok("%mesh heal")
        assert text(second.ok(use)) == "[0] ('second', True)"
    finally:
        second.ok("%mesh down kept")
