"""Where a heal gets new hosts: some that wait, or a job that asks its engine for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh


@runtime_checkable
class HostSource(Protocol):
    """Something that replaces lost hosts, such as ``monarch_kernel.job.EngineJob``."""

    def replacements(self, gone: Sequence[str], timeout: float) -> HostMesh:
        """New hosts in the places of lost ones.

        Args:
            gone: the ids of the lost hosts' agents.
            timeout: how long that may take (seconds).

        Returns:
            As many new hosts, attached, in the same order.

        Raises:
            RuntimeError: there are none; the message says why.
        """
        ...
