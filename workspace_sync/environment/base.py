"""The Python that a venv was made from, and that is outside of it.

A venv has links and a ``home`` that lead to it. A host either has the same one at the same path (``python_id`` tells),
or it is sent along, in the folder ``.python`` of the environment, if it is relocatable: those of uv, pyenv and conda
are, the system's is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from workspace_sync.environment.contents import Contents
from workspace_sync.environment.kinds import Environment, read_config
from workspace_sync.environment.memory import Judged, recall, recall_contents, remember
from workspace_sync.environment.prefixes import Decisions, applied, glibc_floor, is_stale
from workspace_sync.model.errors import IncompatibleError
from workspace_sync.model.manifest import Folder, Manifest, Rewrite, delta, seal
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, Scan, scan

#: Where the environment has it on hosts.
PLACE = b".python"
# Tests and static libraries are not needed to run anything.
_RULES = """\
!*
/pkgs/
/envs/
/conda-bld/
/share/doc/
/share/man/
/lib/*.a
/lib/python{version}/test/
/lib/python{version}/config-*/*.a
"""


def base_scan(
    environment: Environment,
    index: Index,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[Scan, Judged]:
    """Scan the Python of a venv.

    Args:
        index: remembers what it was, apart from that of the environment.

    Raises:
        IncompatibleError: it cannot be sent along; the message says why.
        ScanError: it cannot be read, or does not hold still.
    """
    base = os.path.realpath(environment.base)
    _check_relocatable(environment, base)
    rules = _RULES.format(version=environment.version)
    config = read_config(environment.prefix) or {}
    if config.get("include-system-site-packages", "").lower() != "true":
        rules += f"/lib/python{environment.version}/site-packages/*\n"
    scanned = scan(
        Workspace({base: ""}, links="keep"), index, rules=rules.encode(), progress=progress, cancelled=cancelled
    )
    prefix = os.fsencode(base)
    judged = recall(index, prefix, scanned.manifest.digest)
    if judged is None:
        contents = Contents(base, prefix, recall_contents(index, prefix))
        manifest = applied(scanned.manifest, _decide(scanned.manifest, contents), prefix, prefix)
        floor, machines = glibc_floor(manifest, contents)
        judged = Judged(prefix, scanned.manifest.digest, delta(None, manifest), [], bool(machines), floor)
        remember(index, judged, scanned.manifest, contents.known)
    return scanned, judged


def _check_relocatable(environment: Environment, base: str) -> None:
    what = f"the venv {environment.prefix} was made from the Python at {environment.base}"
    if base in ("/", "/usr", "/usr/local"):
        raise IncompatibleError(
            f"{what}, which belongs to the system and cannot be sent along: install the same Python on the hosts, or "
            "make the environment from a Python of uv, pyenv or conda"
        )
    if not os.path.isdir(os.path.join(base, "lib", f"python{environment.version}")):
        raise IncompatibleError(
            f"{what}, which has no lib/python{environment.version}: make the environment anew from a Python that is "
            "there"
        )


def _decide(manifest: Manifest, contents: Contents) -> Decisions:
    made = Decisions()
    for path, entry in manifest.files():
        content = contents.content(path, entry)
        if content.form == "pyc":
            if is_stale(path, content, manifest):
                made.dropped.add(path)
        elif content.runpath:
            made.rewrites[path] = Rewrite("runpath", contents.prefix, 0, (), ((contents.prefix, PLACE),))
    return made


def with_base(manifest: Manifest, base: Manifest, environment: Environment) -> Manifest:
    """The manifest of a venv with its Python in it."""
    folders = {PLACE + b"/" + path if path else PLACE: folder for path, folder in base.folders.items()}
    folders = {path: _copy(folder) for path, folder in folders.items()}
    folders.update(manifest.folders)
    root = folders[b""] = _copy(folders[b""])
    root.folders[PLACE] = base.digest
    changed = [b"", PLACE]
    prefix = os.fsencode(environment.prefix)
    named = [os.fsencode(path) for path in dict.fromkeys((environment.base, os.path.realpath(environment.base)))]
    if (entry := root.files.get(b"pyvenv.cfg")) is not None:
        how = Rewrite("home", prefix, 0, (), tuple((path, PLACE) for path in named))
        root.files[b"pyvenv.cfg"] = msgspec.structs.replace(entry, rewrite=how)
    for path, folder in manifest.folders.items():
        for name, target in folder.links.items():
            for each in named:
                if target.startswith(each + b"/"):
                    if path not in changed:
                        changed.append(path)
                        folders[path] = _copy(folders[path])
                    up = b"../" * (path.count(b"/") + 1) if path else b""
                    folders[path].links[name] = up + PLACE + target[len(each) :]
                    break
    return seal(folders, changed)


def _copy(folder: Folder) -> Folder:
    return Folder(folder.mode, dict(folder.files), dict(folder.links), dict(folder.folders), folder.digest)
