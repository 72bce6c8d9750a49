"""The built panel and widget in a checkout: found again, built when their sources have changed, and checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_project import ROOT, tracked

NEEDED = ("labextension/", "monarch_kernel/widgets/static/")
MODULES = ROOT / "labextension" / "node_modules"
needs_packages = pytest.mark.skipif(
    not (MODULES / ".installed").exists(), reason="the packages of labextension/ are not installed: no node 20"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout, as far as the bundles are concerned."""
    for path in tracked():
        name = path.relative_to(ROOT)
        if str(name).startswith(NEEDED):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / name)
    return tmp_path


def bundles(tree: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tree / "labextension" / "bundles.py"), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


def all_files(tree: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file() and not path.is_relative_to(MODULES)}


def change(tree: Path) -> None:
    """Change a word that both bundles have."""
    source = tree / "labextension" / "src" / "views" / "dom.ts"
    source.write_text(source.read_text() + "\n(globalThis as Record<string, unknown>).changed = 'by a test';\n")


def test_what_is_there_is_found_again(tree: Path) -> None:
    before = all_files(tree)
    (tree / "labextension" / "src" / "views" / "log.test.ts").write_text("// a test is no source of a bundle\n")
    done = bundles(tree, PATH="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert all_files(tree).keys() == before.keys()


def test_without_node_what_was_built_stays_and_that_is_said(tree: Path) -> None:
    change(tree)
    before = all_files(tree)
    done = bundles(tree, PATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "Note: the panel and the widget were built from other sources than those in labextension/. "
        "To build them needs node 20 or later, with npm; all else works.\n"
    )
    assert all_files(tree) == before
    checked = bundles(tree, "--check", PATH="")
    assert checked.returncode == 1
    assert "were built from other sources than those in labextension/: make bundles, and commit that" in checked.stderr


@needs_packages
def test_changed_sources_are_built_once_and_checked(tree: Path) -> None:
    (tree / "labextension" / "node_modules").symlink_to(MODULES)
    change(tree)
    assert bundles(tree, "--check").returncode == 1
    built = bundles(tree)
    assert (built.returncode, built.stdout) == (0, "Building the panel and the widget ...\n"), built.stderr
    for folder in ("labextension/prebuilt/static", "monarch_kernel/widgets/static"):
        assert any("by a test" in path.read_text() for path in (tree / folder).glob("*.js")), folder
    again = bundles(tree)
    assert (again.returncode, again.stdout) == (0, "")
    checked = bundles(tree, "--check")
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stderr


@needs_packages
def test_a_build_that_fails_says_why_and_leaves_what_there_was(tree: Path) -> None:
    (tree / "labextension" / "node_modules").symlink_to(MODULES)
    (tree / "labextension" / "src" / "index.ts").write_text("export default missing;\n")
    before = all_files(tree)
    done = bundles(tree)
    assert done.returncode == 1
    assert "npm run --silent build has failed" in done.stderr
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert all_files(tree) == before
