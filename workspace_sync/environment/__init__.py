"""Copy environments (conda, venv, uv) to hosts as their installers would have created them there.

Nothing in this package needs actors. ``environment_manifest`` reads an environment at the client, ``check_compatible``
refuses hosts on which it cannot run, and ``Rewriter`` puts a host's prefix into its files.
"""

from workspace_sync.environment.editables import EditableInstall, Followed, editables, follow
from workspace_sync.environment.facts import MachineFacts, Needs, check_compatible, facts
from workspace_sync.environment.kinds import Changed, Environment, changed_distributions, distributions, environment
from workspace_sync.environment.locked import LockFile, clear, create, made_from_lock, read_lock
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest, with_sources
from workspace_sync.environment.packing import pack, unpack
from workspace_sync.environment.rewriter import Rewriter

__all__ = [
    "Changed",
    "EditableInstall",
    "Environment",
    "EnvironmentScan",
    "Followed",
    "LockFile",
    "MachineFacts",
    "Needs",
    "Rewriter",
    "changed_distributions",
    "check_compatible",
    "clear",
    "create",
    "distributions",
    "editables",
    "environment",
    "environment_manifest",
    "facts",
    "follow",
    "made_from_lock",
    "pack",
    "read_lock",
    "unpack",
    "with_sources",
]
