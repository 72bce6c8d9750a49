"""Environments in a real kernel: ranks that run in one, and the offer to sync what a cell has installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernel.harness import Kernel
from tests.kernel.screen import text
from tests.sync.kernel.project import Project, make_environment

SEE = "%%mesh\nimport sys\nsys.prefix"


def test_ranks_run_in_an_environment(kernel: Kernel, project: Project, tmp_path: Path) -> None:
    env = make_environment(tmp_path / "env")
    out = kernel.ok(f"%mesh up --procs 2 --env {env} --env COLOUR=blue")
    assert f", in {env}, ready in" in out.stdout
    assert text(kernel.ok(SEE)) == f"[0-1] '{env}'"
    assert text(kernel.ok("%%mesh\nimport only_there, os, model\nonly_there.HERE, os.environ['COLOUR'], model.VERSION"))
    assert "it runs in" in kernel.run("%mesh up --procs 2 --reuse --env COLOUR=blue").evalue
    kernel.ok("%mesh restart")
    assert text(kernel.ok(SEE)) == f"[0-1] '{env}'"


def test_environments_that_do_not_serve(kernel: Kernel, project: Project, tmp_path: Path) -> None:
    env = make_environment(tmp_path / "env", usable=False)
    conda = tmp_path / "envs" / "training"
    (conda / "conda-meta").mkdir(parents=True)
    kernel.ok(f"import os; os.environ['CONDA_ENVS_PATH'] = {str(conda.parent)!r}")
    mistakes = [
        ("nowhere", "there is no environment 'nowhere': give its name, or its path; conda has training"),
        ("trainin", r"there is no environment 'trainin' \(did you mean training\?\)"),
        ("training", "environment .*/envs/training has no Python"),
        (str(project.folder), "is no environment"),
        (f"{tmp_path}/none", "there is no environment at"),
        (str(env), "ranks cannot run in .*: ModuleNotFoundError: .*; install monarch_kernel there"),
        (f"{env} --env {conda}", "ranks run in one environment, not in"),
    ]
    for name, said in mistakes:
        out = kernel.run(f"%mesh up --procs 1 --env {name}")
        assert out.ename == "UsageError", name
        assert re.search(f"^%mesh up: .*{said}", out.evalue), out.evalue
    assert "No mesh is up" in kernel.ok("%mesh ls").stdout


def test_a_mesh_syncs_first(kernel: Kernel, project: Project) -> None:
    out = kernel.ok("%mesh up --procs 2 --sync")
    assert re.search(r"ready in .*\n  tree [0-9a-f]{8}: 3 files, .* sent to 1 host", out.stdout), out.stdout
    project.write("model.py", "VERSION = 'second'\n")
    see = "%%mesh\nimport model\nmodel.VERSION"
    assert text(kernel.ok(see)) == "[0-1] 'first'"
    kernel.ok("%mesh restart")  # syncs again
    assert text(kernel.ok(see)) == "[0-1] 'second'"
    assert "there is no folder" in kernel.run("%mesh sync nowhere").evalue


@pytest.mark.parametrize("synced", [True, False])
def test_an_installation_is_offered_to_hosts(kernel: Kernel, tmp_path: Path, synced: bool) -> None:
    [packages] = make_environment(tmp_path / "env", usable=False).glob("lib/python*/site-packages")
    (packages / "old-1.0.dist-info").mkdir()
    kernel.ok(f"import sys; sys.prefix = {str(tmp_path / 'env')!r}")
    kernel.ok(f"%mesh up --procs 1 {'--sync' if synced else ''}")
    out = kernel.ok(
        f"!echo uv pip install demo; mkdir {packages}/demo-2.1.dist-info; rmdir {packages}/old-1.0.dist-info"
    )
    said = "installed demo 2.1; removed old: %mesh sync --env brings this to the hosts of m"
    assert (said in out.stdout) == synced, out.stdout
    assert "%mesh sync" not in kernel.ok(f"!echo pip install demo; ls {packages}").stdout
