"""Which distributions an environment has, cheaply enough to ask before and after a cell that runs pip."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from workspace_sync.environment.kinds import Environment

#: What identifies an installed distribution: its version, and size and time of its list of files.
Installed = tuple[str, int, int]


@dataclass(frozen=True)
class Changed:
    """What an installer has changed.

    Attributes:
        added: distributions that are new, with their versions.
        changed: those with another version, or installed again: (version before, version now).
        removed: those that are gone, with their versions.
    """

    added: dict[str, str]
    changed: dict[str, tuple[str, str]]
    removed: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def distributions(environment: Environment) -> dict[str, Installed]:
    """The distributions of an environment by name, those with metadata in ``site-packages`` and conda's packages."""
    found: dict[str, Installed] = {}
    for site in environment.site_packages:
        folder = os.path.join(environment.prefix, site)
        for entry in os.scandir(folder):
            stem, suffix = os.path.splitext(entry.name)
            if suffix not in (".dist-info", ".egg-info"):
                continue
            name, _, version = stem.partition("-")
            found[name.replace("_", "-").lower()] = version, *_stamp(os.path.join(entry.path, "RECORD"), entry.path)
    conda = os.path.join(environment.prefix, "conda-meta")
    for entry in os.scandir(conda) if os.path.isdir(conda) else ():
        parts = entry.name.removesuffix(".json").rsplit("-", 2)
        if entry.name.endswith(".json") and len(parts) == 3:
            found.setdefault(parts[0], (parts[1], *_stamp(entry.path, entry.path)))
    return found


def _stamp(path: str, otherwise: str) -> tuple[int, int]:
    for each in (path, otherwise):
        try:
            about = os.stat(each)
        except OSError:
            continue
        return about.st_size, about.st_mtime_ns
    return 0, 0


def changed_distributions(before: Mapping[str, Installed], after: Mapping[str, Installed]) -> Changed:
    """What differs between two moments."""
    return Changed(
        {name: after[name][0] for name in sorted(after.keys() - before.keys())},
        {
            name: (before[name][0], after[name][0])
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        },
        {name: before[name][0] for name in sorted(before.keys() - after.keys())},
    )
