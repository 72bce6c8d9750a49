"""Make a release: ``make release VERSION=0.9.0``, or with ``DRY_RUN=1`` everything but its commit and its tag.

All work happens in a temporary clone of HEAD, so that a release that fails leaves nothing behind: the version is set,
the panel is built for it, the changelog gets its section, the suite runs, and wheel and sdist are built twice and must
have the same bytes. They are checked and tried in a fresh environment. Only then the commit and the tag come into this
repository, and the files into ``dist/``. Nothing is pushed or uploaded: RELEASING.md says how.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
#: The source of the version, and the recipe, which has a copy of it in quotes, too.
VERSION_FILE = "monarch_kernel/_version.py"
RECIPE = "release/recipe.yaml"
PANEL = ("labextension/package.json", "labextension/package-lock.json")
#: The heading under which changes are noted, and what is left below it after a release.
UNRELEASED = "## Unreleased"
#: The targets that must pass.
SUITE = ("check", "test", "test-engines")
#: The notebook that is run from the wheel, and the extra that it needs.
DEMO, DEMO_EXTRA = "notebooks/01_quickstart.ipynb", "demo"


class ReleaseError(Exception):
    """The release cannot be made. The message says why, and what to do."""


def run(command: Sequence[str | Path], folder: Path, **env: str) -> str:
    """Run a command to its end, and return what it has printed.

    Raises:
        ReleaseError: it has failed; the message has the end of its output.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ReleaseError(f"{' '.join(words)} failed (exit status {done.returncode}):\n{text[-4000:]}")
    return text


# -- before -----------------------------------------------------------------------------------------------


def check_start(root: Path, version: str) -> None:
    """Check that the repository is in a state from which this version can be released.

    Raises:
        ReleaseError: it is not.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise ReleaseError(f"{version!r} is not a version; write one such as 0.9.0 or 0.9.0rc1") from None
    if str(wanted) != version or len(wanted.release) != 3 or wanted.local or wanted.dev is not None:
        raise ReleaseError(f"{version} does not have the form of a release; write one such as 0.9.0 or 0.9.0rc1")
    current = current_version(root)
    if wanted <= Version(current):
        raise ReleaseError(f"{version} is not newer than {current}, the version in {VERSION_FILE}")
    changed = run(["git", "status", "--porcelain"], root).splitlines()
    if changed:
        raise ReleaseError(
            f"the tree has uncommitted changes ({len(changed)}), such as {changed[0].split()[-1]}: "
            "commit or remove them"
        )
    if run(["git", "tag", "--list", f"v{version}"], root).strip():
        raise ReleaseError(f"the tag v{version} exists already; a released version is never made again")
    if not section((root / "CHANGELOG.md").read_text(), UNRELEASED):
        raise ReleaseError(f"CHANGELOG.md has nothing under {UNRELEASED!r}: say what has changed for users")


def current_version(root: Path) -> str:
    """Return the version that the sources have."""
    found = re.search(r'__version__ = "(.+)"', (root / VERSION_FILE).read_text())
    if found is None:
        raise ReleaseError(f"{VERSION_FILE} names no version")
    return found[1]


def section(changelog: str, heading: str) -> str:
    """Return the text below a heading of the changelog, up to the next one; "" if there is none."""
    found = re.search(rf"^{re.escape(heading)}[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


# -- the commit -------------------------------------------------------------------------------------------


def set_version(tree: Path, version: str) -> None:
    """Write the version to all files that have it."""
    current = current_version(tree)
    for name in (VERSION_FILE, RECIPE):
        path = tree / name
        path.write_text(path.read_text().replace(f'"{current}"', f'"{version}"'))
    # npm wants three numbers, and a dash before anything else.
    of_npm = re.sub(r"^(\d+\.\d+\.\d+)\.?(?=[a-z])", r"\1-", version)
    for name in PANEL:
        package = json.loads((tree / name).read_text())
        package["version"] = of_npm
        if "packages" in package:
            package["packages"][""]["version"] = of_npm
        (tree / name).write_text(json.dumps(package, indent=2, ensure_ascii=False) + "\n")


def write_changelog(tree: Path, version: str, day: datetime.date) -> None:
    """Give the changes since the last release their version and day."""
    path = tree / "CHANGELOG.md"
    path.write_text(path.read_text().replace(UNRELEASED, f"{UNRELEASED}\n\n## {version} ({day.isoformat()})", 1))


def make_commit(tree: Path, version: str) -> str:
    """Set the version, build the panel for it, and commit. Return the time of the commit (Unix time)."""
    set_version(tree, version)
    write_changelog(tree, version, datetime.datetime.now(datetime.UTC).date())
    reuse_packages(tree)
    run([sys.executable, "labextension/bundles.py", "--build"], tree)
    run(["git", "add", "--all"], tree)
    run(["git", "commit", "--quiet", "--message", f"Release {version}"], tree)
    return run(["git", "show", "--no-patch", "--format=%ct", "HEAD"], tree).strip()


def reuse_packages(tree: Path) -> None:
    """Link the packages of this checkout into a clone whose lock file differs only in the version of the panel."""
    lock, modules = (Path("labextension") / name for name in ("package-lock.json", "node_modules"))
    stamp = ROOT / modules / ".installed"
    if not stamp.is_file() or stamp.read_text() != digest(ROOT / lock):
        return  # they are not there, or of another lock file: the clone installs its own
    shutil.copytree(ROOT / modules, tree / modules, symlinks=True, copy_function=link_or_copy)
    copied = tree / modules / ".installed"
    copied.unlink()  # it may be a link
    copied.write_text(digest(tree / lock))


def link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it where the folders are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- files --------------------------------------------------------------------------------------------------


def build(clone: Path, into: Path, epoch: str) -> dict[str, str]:
    """Build wheel and sdist of the clone's HEAD from a tree of its own. Return their digests by name."""
    tree = Path(tempfile.mkdtemp(prefix="tree", dir=into.parent))
    packed = into.parent / f"{tree.name}.tar"
    run(["git", "archive", "--output", packed, "HEAD"], clone)
    run(["tar", "--extract", "--touch", "--file", packed, "--directory", tree], clone)
    run([sys.executable, "-m", "hatchling", "build", "-d", into], tree, SOURCE_DATE_EPOCH=epoch)
    return {path.name: digest(path) for path in sorted(into.iterdir())}


def build_twice(clone: Path, folder: Path, epoch: str) -> Path:
    """Build the files in two trees, and compare them. Return the folder of the first ones.

    Raises:
        ReleaseError: they differ.
    """
    first, second = (build(clone, folder / name, epoch) for name in ("first", "second"))
    if first != second or len(first) != 2:
        raise ReleaseError(f"two builds of one commit differ: {first} and {second}; compare them with diffoscope")
    return folder / "first"


def check_files(files: Path, clone: Path, folder: Path, demo: bool) -> None:
    """Check the metadata, and install the wheel in a fresh environment and use it there."""
    tools = environment(folder / "tools")
    run([tools, "-m", "pip", "install", "--quiet", "twine"], folder)
    run([tools, "-m", "twine", "check", "--strict", *sorted(files.iterdir())], folder)
    (wheel,) = files.glob("*.whl")
    python = environment(folder / "fresh")
    extra = f"[{DEMO_EXTRA}]" if demo else ""
    pins = clone / "constraints" / "py{}.{}.txt".format(*sys.version_info)
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", pins]
    run([*install, f"monarch_kernel{extra} @ {wheel.as_uri()}"], folder)
    run([python, "-m", "pip", "check"], folder)
    run([python.parent / "monarch-kernel", "doctor", "kernel", "kernelspec"], folder)
    if demo:
        run([python, clone / "notebooks" / "run.py", clone / DEMO, "--out", folder / "demo"], folder)


def environment(folder: Path) -> Path:
    """Make an environment; return its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


# -- the release --------------------------------------------------------------------------------------------


def release(version: str, *, dry_run: bool, suite: bool, demo: bool) -> None:
    """Make the release. See the module.

    Raises:
        ReleaseError: a step has failed.
    """
    say(f"1/6 the repository, for {version}")
    check_start(ROOT, version)
    with tempfile.TemporaryDirectory(prefix="release") as name:
        folder = Path(name)
        clone = folder / "clone"
        run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], folder)
        for key in ("user.name", "user.email"):
            value = subprocess.run(["git", "config", key], cwd=ROOT, capture_output=True, text=True).stdout.strip()
            if value:
                run(["git", "config", key, value], clone)
        say("2/6 version, panel and changelog, committed in a clone")
        epoch = make_commit(clone, version)
        say(f"3/6 make {' '.join(SUITE)}" if suite else "3/6 the suite, which is left out")
        if suite:
            run(["make", *SUITE], clone)
        say("4/6 wheel and sdist, twice")
        files = build_twice(clone, folder, epoch)
        say("5/6 their metadata, and a fresh environment")
        check_files(files, clone, folder, demo)
        say("6/6 nothing, as this is a dry run" if dry_run else f"6/6 the commit, the tag v{version}, and dist/")
        if not dry_run:
            finish(clone, files, version)
        for path in sorted(files.iterdir()):
            print(f"    {path.name}  {digest(path)}")


def finish(clone: Path, files: Path, version: str) -> None:
    """Bring the commit and the tag into this repository, and the files into ``dist/``."""
    notes = section((clone / "CHANGELOG.md").read_text(), f"## {version}")
    run(["git", "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", f"{version}\n\n{notes}"], clone)
    run(["git", "pull", "--quiet", "--ff-only", "--no-rebase", clone, "HEAD"], ROOT)
    run(["git", "fetch", "--quiet", clone, f"refs/tags/v{version}:refs/tags/v{version}"], ROOT)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(files, dist)


def say(step: str) -> None:
    """Print a step as it begins."""
    print(step, flush=True)


def main() -> int:
    """Command line: VERSION [--dry-run [--skip-suite] [--skip-demo]]."""
    parser = argparse.ArgumentParser(description="Make a release; see RELEASING.md.")
    parser.add_argument("version", help="such as 0.9.0")
    parser.add_argument("--dry-run", action="store_true", help="leave this repository as it is")
    parser.add_argument("--skip-suite", action="store_true", help="without the tests; only in a dry run")
    parser.add_argument("--skip-demo", action="store_true", help="without the quickstart notebook; only in a dry run")
    given = parser.parse_args()
    if (given.skip_suite or given.skip_demo) and not given.dry_run:
        parser.error("only a dry run may leave steps out")
    try:
        release(given.version, dry_run=given.dry_run, suite=not given.skip_suite, demo=not given.skip_demo)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
