"""How many of the devices that an engine gave a host each rank gets."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.errors import DeviceError


def devices_each(hosts: Sequence[tuple[str, Sequence[str] | None]], ranks: int) -> int:
    """How many devices each rank gets: all alike, and none is left where that is possible.

    A process can use one MIG slice only.

    Args:
        hosts: the name of each, and the devices that the engine gave it; None: it named none.
        ranks: how many ranks each host is to have.

    Raises:
        DeviceError: a host has fewer devices than ranks; the message names it, and both numbers.
    """
    each: list[int] = []
    for host, given in hosts:
        names = given or ()
        if len(names) < ranks:
            has = f"{len(names)} ({', '.join(names)})" if names else "none"
            raise DeviceError(
                f"{ranks} rank{'s' * (ranks != 1)} on each host need a device each, and the engine gave {host} {has}: "
                "start fewer ranks on each host, or ask the engine for more GPUs"
            )
        even = len(names) % ranks == 0 and not any(name.startswith("MIG-") for name in names)
        each.append(len(names) // ranks if even else 1)
    return min(each, default=0)
