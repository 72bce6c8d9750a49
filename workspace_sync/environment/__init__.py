"""Environments: conda's, venvs and uv projects, on hosts as their installers would have made them there.

No function here needs actors. ``environment_manifest`` reads an environment at the client, ``check_compatible`` refuses
hosts on which it cannot run, and ``Rewriter`` puts a host's prefix into its files.
"""

from workspace_sync.environment.editables import EditableInstall, Followed, editables, follow
from workspace_sync.environment.facts import MachineFacts, Needs, check_compatible, facts
from workspace_sync.environment.kinds import Environment, environment
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest
from workspace_sync.environment.rewriter import Rewriter

__all__ = [
    "EditableInstall",
    "Environment",
    "EnvironmentScan",
    "Followed",
    "MachineFacts",
    "Needs",
    "Rewriter",
    "check_compatible",
    "editables",
    "environment",
    "environment_manifest",
    "facts",
    "follow",
]
