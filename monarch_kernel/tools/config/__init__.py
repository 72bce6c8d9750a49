"""Describe a request for hosts and a workspace, with the names of ``monarch.tools.config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workspace_sync.model.workspace import Workspace

__all__ = ["NOT_SET", "Config", "Workspace"]

NOT_SET = "__NOT_SET__"
"""A field of `Config` that the program has not set."""


@dataclass
class Config:
    """A request for hosts, in the form of programs for Monarch and TorchX.

    Attributes:
        scheduler: the name of a scheduler of TorchX.
        scheduler_args: its arguments.
        workspace: the workspace that is synced to the hosts.
        dryrun: whether the request is only shown.
        appdef: the program to run: an ``AppDef`` of TorchX.
    """

    scheduler: str = NOT_SET
    scheduler_args: dict[str, Any] = field(default_factory=dict[str, Any])
    workspace: Workspace = field(default_factory=Workspace)
    dryrun: bool = False
    appdef: Any = None
