"""The built panel and widget: found again by a digest of their sources, built anew when that has changed, checked.

What is built is in git, so that a clone and a wheel have it where there is no node. `make` runs this before it
installs, hatchling calls its hook when it builds a wheel or an sdist, and `make check` asks for `--check`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: What the bundles are made from, in labextension/; what they are; and the record of which sources they belong to.
SOURCES = ("src/**/*", "style/*", "schema/*", "package*.json", "tsconfig.json", "build.mjs", "builder.config.cjs")
BUNDLES = ("labextension/prebuilt/**/*", "monarch_kernel/widgets/static/*")
RECORD = "labextension/bundles.json"
OLDEST_NODE = 20


class BundleError(Exception):
    """The bundles are not what they must be, or cannot be built; the message says which, and what to do."""


def _digest(root: Path, patterns: tuple[str, ...]) -> str:
    """Of the names and contents of the files that patterns name, without tests; "" where a pattern names none."""
    found = [{path for path in root.glob(pattern) if path.is_file()} for pattern in patterns]
    if not all(found):
        return ""
    digest = hashlib.sha256()
    for path in sorted(set[Path]().union(*found)):
        if not path.name.endswith(".test.ts"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def state(root: Path) -> dict[str, str]:
    """The digests of the sources and of the bundles as they are now; "" of bundles that are not there."""
    return {"sources": _digest(root / "labextension", SOURCES), "bundles": _digest(root, BUNDLES)}


def fault(root: Path) -> str | None:
    """What is wrong with the bundles, as the part of a sentence; None when they are what the record says."""
    now = state(root)
    if not now["bundles"]:
        return "the panel and the widget are not built"
    try:
        recorded = json.loads((root / RECORD).read_text())
    except (OSError, ValueError):  # a merge that is not resolved is no JSON
        recorded = {}
    if recorded == now:
        return None
    if recorded.get("sources") == now["sources"]:
        return "the panel and the widget are not as they were built"
    return "the panel and the widget were built from other sources than those in labextension/"


def npm() -> str | None:
    """Where npm is, if there is a node that is new enough."""
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return shutil.which("npm") if int(said.removeprefix("v").partition(".")[0]) >= OLDEST_NODE else None


def install_packages(root: Path) -> Path:
    """Install what the bundles are built and tested with, once for each lock file; the folder that has it.

    Raises:
        BundleError: there is no node, or npm has failed.
    """
    folder = root / "labextension" / "node_modules"
    stamp = folder / ".installed"
    wanted = hashlib.sha256((root / "labextension" / "package-lock.json").read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    found = npm()
    if found is None:
        raise BundleError(f"that needs node {OLDEST_NODE} or later, with npm")
    print("Installing what the panel of JupyterLab is built with (300 MB, half a minute) ...", flush=True)
    _run([found, "--prefix", str(folder.parent), "ci", "--ignore-scripts", "--loglevel=error"], folder.parent)
    stamp.write_text(wanted)
    return folder


def build(root: Path, target: Path) -> None:
    """Build the bundles of `root` in a folder of their own, and put them into `target` when all are there.

    Raises:
        BundleError: there is no node, or the build has failed.
    """
    packages = install_packages(root)
    with tempfile.TemporaryDirectory(prefix="monarch-kernel-bundles-") as folder:
        copy = Path(folder)
        shutil.copytree(
            root / "labextension",
            copy / "labextension",
            ignore=shutil.ignore_patterns("node_modules", "lib", "prebuilt"),
        )
        (copy / "labextension" / "node_modules").symlink_to(packages)
        _run(["npm", "run", "--silent", "build"], copy / "labextension")
        for built in ("labextension/prebuilt", "monarch_kernel/widgets/static"):
            shutil.rmtree(target / built, ignore_errors=True)
            shutil.copytree(copy / built, target / built)
    (target / RECORD).write_text(json.dumps({**state(target), "sources": state(root)["sources"]}, indent=2) + "\n")


def ensure(root: Path) -> None:
    """Build what is not built, or not from these sources; where there is no node, say so and leave what there is.

    Raises:
        BundleError: the build has failed.
    """
    wrong = fault(root)
    if wrong is None:
        return
    if npm() is None:
        print(f"Note: {wrong}. To build them needs node {OLDEST_NODE} or later, with npm; all else works.")
        return
    print("Building the panel and the widget ...", flush=True)
    build(root, root)


def check(root: Path) -> None:
    """See that the bundles are what their sources give, by building them beside these; says so where there is no node.

    Raises:
        BundleError: they are not, or the build has failed.
    """
    if npm() is None:
        print(f"Not checked: that the panel and the widget are what their sources give (needs node {OLDEST_NODE}).")
    else:
        with tempfile.TemporaryDirectory(prefix="monarch-kernel-bundles-") as folder:
            (Path(folder) / "labextension").mkdir()
            build(root, Path(folder))
            fresh = _digest(Path(folder), BUNDLES)
        if fresh != state(root)["bundles"]:
            raise BundleError("the panel and the widget are not what their sources give: make bundles, and commit that")
    wrong = fault(root)
    if wrong is not None:
        raise BundleError(f"{wrong}: make bundles, and commit that")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise BundleError(f"{' '.join(command)} has failed with exit code {done.returncode}:\n{said}")


def get_build_hook() -> type[Any]:
    """What hatchling calls before it builds: a wheel or an sdist without the bundles is not made."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class BundlesHook(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            wrong = fault(Path(self.root))
            # In a checkout whose sources are being worked on, the bundles of before may be installed.
            if wrong is not None and not (version == "editable" and state(Path(self.root))["bundles"]):
                self.app.abort(
                    f"monarch_kernel cannot be packed: {wrong}. Run `make bundles`, which needs node and npm."
                )

    return BundlesHook


def main() -> None:
    """Command line; with no option, see that the bundles are there and as their sources are."""
    parser = argparse.ArgumentParser(description="Build, find again and check the panel and the widget.")
    parser.add_argument("--packages", action="store_true", help="also install what their tests and checks need")
    parser.add_argument("--build", action="store_true", help="build them, whatever is there")
    parser.add_argument("--check", action="store_true", help="build them elsewhere, and compare")
    given = parser.parse_args()
    lock = os.open(ROOT / "labextension", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # two targets may be made at a time
    try:
        if given.check:
            check(ROOT)
            return
        if given.build:
            build(ROOT, ROOT)
        else:
            ensure(ROOT)
        if given.packages and npm() is not None:
            install_packages(ROOT)
    except BundleError as error:
        sys.exit(f"labextension: {error}")


if __name__ == "__main__":
    main()
