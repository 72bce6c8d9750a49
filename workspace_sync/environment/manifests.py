"""The manifest of an environment: its files, with what is to be done to each on a host.

An environment is scanned without ignore rules. Left out are conda's package cache and the other environments of a
base environment (``pkgs``, ``envs``, ``conda-bld``), and compiled modules that no installer's record lists, so that an
import at the client does not change the environment. Hosts compile those when they import them.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from workspace_sync.environment.contents import Contents
from workspace_sync.environment.facts import Needs, python_id
from workspace_sync.environment.kinds import Environment, NamedPrefix, environment
from workspace_sync.environment.prefixes import Decisions, decide, glibc_floor, read_records
from workspace_sync.model.manifest import Folder, Manifest, seal
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, Scan, scan

#: What is left out of an environment; its own ``.meshignore`` may say more.
RULES = b"""\
!*
/pkgs/
/envs/
/conda-bld/
/.cache/
"""


@dataclass
class EnvironmentScan:
    """An environment as it is to be on hosts.

    Attributes:
        environment: what it is.
        manifest: its files.
        needs: what a host must have.
        notes: what a person should know.
        scan: the scan of its folder, which reads content.
    """

    environment: Environment
    manifest: Manifest
    needs: Needs
    notes: list[str]
    scan: Scan

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read one piece of content by its digest (``Scan.read``)."""
        self.scan.read(digest, into)


def environment_manifest(
    env: Environment | NamedPrefix | str | os.PathLike[str],
    index: Index,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> EnvironmentScan:
    """Scan an environment.

    Args:
        env: which one: its prefix, a uv project, or a ``CondaEnvironment``.
        index: remembers what it was, apart from the index of the workspace's folders.
        progress: as of ``scan``.
        cancelled: as of ``scan``.

    Raises:
        ScanError: it is none, cannot be read, or does not hold still.
    """
    about = environment(env)
    workspace = Workspace({about.folder: ""}, links="keep")
    scanned = scan(workspace, index, rules=RULES, progress=progress, cancelled=cancelled)
    contents = Contents(about.folder, os.fsencode(about.prefix))
    found = read_records(scanned.manifest, contents)
    decisions = decide(about, scanned.manifest, contents, found)
    manifest = applied(scanned.manifest, decisions, os.fsencode(about.prefix), os.fsencode(about.folder))
    floor, machines = glibc_floor(manifest, contents)
    needs = Needs(
        about.prefix,
        bool(machines),
        floor,
        about.base,
        python_id(about.base) if about.base else "",
        about.version,
    )
    return EnvironmentScan(about, manifest, needs, decisions.notes, scanned)


def applied(manifest: Manifest, decisions: Decisions, prefix: bytes, folder: bytes) -> Manifest:
    """A manifest with the decisions in it; what it shares with the one given is not copied."""
    changed: dict[bytes, Folder] = {}

    def of(path: bytes) -> Folder:
        if path not in changed:
            old = manifest.folders[path]
            changed[path] = Folder(old.mode, dict(old.files), dict(old.links), dict(old.folders))
        return changed[path]

    for path, how in decisions.rewrites.items():
        parent, _, name = path.rpartition(b"/")
        files = of(parent).files
        files[name] = msgspec.structs.replace(files[name], rewrite=how)
    for path in decisions.dropped:
        parent, _, name = path.rpartition(b"/")
        del of(parent).files[name]
    for path, each in manifest.folders.items():
        for name, target in each.links.items():
            if (inside := _inside(target, prefix, folder)) is not None:
                of(path).links[name] = posixpath.relpath(inside or b".", path or b".")
    gone: set[bytes] = set()
    for path in [p for p in changed if p.endswith(b"__pycache__")]:
        each = changed[path]
        if not (each.files or each.links or each.folders):
            parent, _, name = path.rpartition(b"/")
            del of(parent).folders[name]
            gone.add(path)
    folders = {path: changed.get(path, each) for path, each in manifest.folders.items() if path not in gone}
    return seal(folders, [path for path in changed if path not in gone])


def _inside(target: bytes, prefix: bytes, folder: bytes) -> bytes | None:
    """The path in the environment that an absolute link leads to; None: it leads elsewhere."""
    for root in (prefix, folder):
        if target == root:
            return b""
        if target.startswith(root + b"/"):
            return target[len(root) + 1 :]
    return None
