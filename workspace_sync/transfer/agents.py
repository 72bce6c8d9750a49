"""Agents, started when they are first needed: one for each host, however many meshes it is in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.introspection import ToolHost, spawn_tool
from workspace_sync.transfer.agent import SyncAgent


@dataclass(frozen=True, slots=True)
class AgentLink:
    """The agent of one host.

    Attributes:
        host: where it is.
        procs: its process.
        actor: what requests are sent to.
    """

    host: ToolHost
    procs: Any
    actor: Any

    @property
    def alive(self) -> bool:
        """Whether its process has not ended, as far as is known here."""
        return not self.procs._stopped and not self.procs.dead()


_lock = threading.Lock()
_agents: dict[str, AgentLink] = {}


def agents_of(hosts: Sequence[ToolHost]) -> list[AgentLink]:
    """The agents of some hosts; those that do not run yet are being started, and take requests at once."""
    with _lock:
        for key in [key for key, link in _agents.items() if not link.alive]:
            del _agents[key]
        for host in hosts:
            if host.key not in _agents:
                procs = spawn_tool(host, "workspace_sync")
                _agents[host.key] = AgentLink(host, procs, procs.spawn("workspace_sync", SyncAgent, host.name))
        return [_agents[host.key] for host in hosts]
