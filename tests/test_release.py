"""`make release`: what it refuses, what it writes, and that two builds of one commit have the same bytes."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from monarch_kernel import __version__
from release import release
from release.release import ReleaseError
from tests.test_project import ROOT

LOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.0.1 (2026-01-02)\n\n- The first.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the files that a release changes, all committed."""
    tree = tmp_path / "tree"
    for name in (release.VERSION_FILE, release.RECIPE, *release.PANEL):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "CHANGELOG.md").write_text(LOG)
    git(tree, "init", "--quiet")
    commit(tree)
    return tree


def git(tree: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "x")


def refused(tree: Path, version: str) -> str:
    with pytest.raises(ReleaseError) as caught:
        release.check_start(tree, version)
    return str(caught.value)


def test_a_tree_that_is_ready(tree: Path) -> None:
    release.check_start(tree, "0.9.0")
    release.check_start(tree, "0.9.0rc1")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("nine", "'nine' is not a version; write one such as 0.9.0 or 0.9.0rc1"),
        ("0.9", "0.9 does not have the form of a release"),
        ("v0.9.0", "v0.9.0 does not have the form of a release"),
        ("0.9.0.dev1", "0.9.0.dev1 does not have the form of a release"),
        ("0.9.0+local", "0.9.0+local does not have the form of a release"),
        ("0.0.9", f"0.0.9 is not newer than {__version__}, the version in monarch_kernel/_version.py"),
    ],
)
def test_a_version_that_cannot_be_released(tree: Path, version: str, why: str) -> None:
    assert refused(tree, version).startswith(why)


def test_changes_that_are_not_committed(tree: Path) -> None:
    (tree / "left.txt").write_text("x")
    assert refused(tree, "0.9.0") == ("the tree has uncommitted changes (1), such as left.txt: commit or remove them")


def test_a_version_that_was_released(tree: Path) -> None:
    git(tree, "tag", "v0.9.0")
    assert refused(tree, "0.9.0") == "the tag v0.9.0 exists already; a released version is never made again"


def test_a_changelog_without_news(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(LOG.replace("### Added\n\n- A thing.\n\n", ""))
    commit(tree)
    assert refused(tree, "0.9.0") == ("CHANGELOG.md has nothing under '## Unreleased': say what has changed for users")


@pytest.mark.parametrize(("version", "of_npm"), [("0.9.0", "0.9.0"), ("0.9.0rc1", "0.9.0-rc1")])
def test_the_version_is_written_everywhere(tree: Path, version: str, of_npm: str) -> None:
    release.set_version(tree, version)
    assert release.current_version(tree) == version
    package, lock = (json.loads((tree / name).read_text()) for name in release.PANEL)
    assert package["version"] == lock["version"] == lock["packages"][""]["version"] == of_npm
    assert f'  version: "{version}"\n' in (tree / release.RECIPE).read_text()
    # Nothing else is changed, not even the form.
    for name in release.PANEL:
        old, new = ((folder / name).read_text().splitlines() for folder in (ROOT, tree))
        assert len(old) == len(new)
        assert all("version" in a for a, b in zip(old, new, strict=True) if a != b)


def test_the_changes_get_their_version_and_day(tree: Path) -> None:
    release.write_changelog(tree, "0.9.0", datetime.date(2027, 1, 31))
    text = (tree / "CHANGELOG.md").read_text()
    assert text == LOG.replace("## Unreleased\n", "## Unreleased\n\n## 0.9.0 (2027-01-31)\n")
    assert release.section(text, "## Unreleased") == ""
    assert release.section(text, "## 0.9.0") == "### Added\n\n- A thing."
    assert release.section(text, "## 0.0.1") == "- The first."


def test_a_command_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"^sh -c echo why; exit 3 failed \(exit status 3\):\nwhy\n$"):
        release.run(["sh", "-c", "echo why; exit 3"], tmp_path)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not in git")
def test_two_builds_of_a_commit_have_the_same_bytes(tmp_path: Path) -> None:
    files = release.build_twice(ROOT, tmp_path, "1700000000")
    assert sorted(path.suffix for path in files.iterdir()) == [".gz", ".whl"]


def test_builds_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(({"a.whl": "1", "a.tar.gz": "2"}, {"a.whl": "1", "a.tar.gz": "3"}))
    monkeypatch.setattr(release, "build", lambda *_: next(digests))
    with pytest.raises(ReleaseError, match=r"two builds of one commit differ: .*; compare them with diffoscope"):
        release.build_twice(ROOT, tmp_path, "0")


def test_the_recipe_for_conda_asks_for_what_the_wheel_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "release" / "recipe.yaml").read_text()
    assert f'version: "{__version__}"' in recipe
    for requirement in (f"python {project['requires-python']}", *project["dependencies"]):
        name, floor = requirement.replace("python >=", "python>=").split(">=")
        assert f"    - {name} >={floor}\n" in recipe, requirement
