"""Which of the devices that an engine gave a host each rank gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from monarch_kernel.actor import current_rank
from monarch_kernel.errors import DeviceError
from monarch_kernel.workers import device_environment


def share(names: Sequence[str], ranks: int) -> int:
    """How many of a host's devices each of its ranks gets: all alike, and none is left where that is possible.

    A process can use one MIG slice only.
    """
    even = len(names) % ranks == 0 and not any(name.startswith("MIG-") for name in names)
    return max(1, len(names) // ranks) if even else 1


@dataclass(frozen=True)
class OwnDevices:
    """A bootstrap of ranks: each sees only its own share of the devices of its host, also on a host that replaces one.

    Attributes:
        ranks: how many ranks each host has.
        each: how many devices each rank gets.
    """

    ranks: int
    each: int

    def __call__(self) -> None:
        """Restrict this process to its devices.

        Raises:
            DeviceError: its host has fewer.
        """
        slot = current_rank().rank % self.ranks
        os.environ.update(device_environment(slot, self.each, os.uname().nodename))

    def of(self, names: Sequence[str], slot: int) -> tuple[str, ...]:
        """The devices of the rank with this number on a host that has these."""
        return tuple(names[slot * self.each : (slot + 1) * self.each])


def own_devices(hosts: Sequence[tuple[str, Sequence[str] | None]], ranks: int) -> OwnDevices:
    """How the devices of some hosts are shared among their ranks.

    Args:
        hosts: the name of each, and the devices that the engine gave it; None: it named none.
        ranks: how many ranks each host is to have.

    Raises:
        DeviceError: a host has fewer devices than ranks; the message names it, and both numbers.
    """
    for host, names in hosts:
        if len(names or ()) < ranks:
            has = f"{len(names)} ({', '.join(names)})" if names else "none"
            raise DeviceError(
                f"{ranks} rank{'s' * (ranks != 1)} on each host need a device each, and the engine gave {host} {has}: "
                "start fewer ranks on each host, or ask the engine for more GPUs"
            )
    return OwnDevices(ranks, min(share(names or (), ranks) for _, names in hosts))
