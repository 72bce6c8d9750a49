"""Find the ports of this host's cards, and the pairs of ports that reach each other."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable

import msgspec

from monarch_kernel import environment

CLASS = "/sys/class/infiniband"
LOOPBACK = 1


class Gid(msgspec.Struct, array_like=True, frozen=True):
    """An address of a port."""

    index: int
    value: str  # as an IPv6 address
    kind: int  # IBV_GID_TYPE_*: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2

    @property
    def scope(self) -> int:
        """The rank of its scope, from worst to best: link-local, loopback (``LOOPBACK``), routed IPv6, IPv4."""
        address = ipaddress.IPv6Address(self.value)
        if address.ipv4_mapped is not None:
            return LOOPBACK if address.ipv4_mapped.is_loopback else 3
        return LOOPBACK if address.is_loopback else 0 if address.is_link_local else 2

    @property
    def subnet(self) -> int:
        """The subnet prefix (InfiniBand)."""
        return int(ipaddress.IPv6Address(self.value)) >> 64


class CardPort(msgspec.Struct, array_like=True, frozen=True):
    """The properties of a port that a peer needs."""

    device: str
    number: int
    ethernet: bool
    lid: int
    gids: tuple[Gid, ...]
    mtu: int  # IBV_MTU_*
    reads_in: int  # the maximum number of READs that it serves concurrently
    reads_out: int  # the maximum number of READs in flight
    network: str  # see network()


def network() -> str:
    """Return the network namespace of this process, in which its loopback addresses are valid."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()}-{os.stat('/proc/self/ns/net').st_ino:x}"


def pair(mine: CardPort, theirs: CardPort) -> tuple[Gid, Gid] | None:
    """Return the best two addresses of two ports, of the same kind; None if the ports cannot reach each other."""
    if mine.ethernet != theirs.ethernet:
        return None
    best: tuple[tuple[int, ...], Gid, Gid] | None = None
    for a in mine.gids:
        for b in theirs.gids:
            rank = _rank(a, b, mine, theirs)
            if rank is not None and (best is None or rank > best[0]):
                best = rank, a, b
    return best and best[1:]


def _rank(a: Gid, b: Gid, mine: CardPort, theirs: CardPort) -> tuple[int, ...] | None:
    if a.kind != b.kind:
        return None
    if not mine.ethernet:
        return (0,) if a.subnet == b.subnet else None
    same_network = mine.network == theirs.network
    if LOOPBACK in (a.scope, b.scope):
        # A loopback address reaches only the port itself.
        if not same_network or (mine.device, mine.number, a.value) != (theirs.device, theirs.number, b.value):
            return None
    elif a.scope != b.scope or (a.value == b.value and not same_network):
        return None
    both = int(ipaddress.IPv6Address(a.value)) ^ int(ipaddress.IPv6Address(b.value))
    # RoCE v2 before v1, then the widest scope, then the longest common prefix.
    return a.kind, a.scope, 128 - both.bit_length()


class ActivePort(msgspec.Struct, frozen=True):
    """An active port of this host."""

    device: str
    number: int
    ethernet: bool
    lid: int
    rate: float  # Gb/s


def find_ports(wanted: str | None = None, root: str = CLASS) -> list[ActivePort]:
    """Return the active ports of the InfiniBand and RoCE cards, or of the named ones; best (or first named) first."""
    wanted = environment.RDMA_DEVICE.get() if wanted is None else wanted
    active = sorted(_active(root), key=lambda port: (-port.rate, port.device, port.number))
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        return active
    chosen: list[ActivePort] = []
    for name in names:
        device, _, number = name.partition(":")
        chosen += [p for p in active if p.device == device and number in ("", str(p.number))][:1]
    return chosen


def _active(root: str) -> Iterable[ActivePort]:
    try:
        devices = os.listdir(root)
    except OSError:
        return
    for device in devices:
        try:
            # iWARP cards ("4: RNIC") set up connections differently.
            if not _read(root, device, "node_type").startswith("1:"):
                continue
            for number in os.listdir(os.path.join(root, device, "ports")):
                port = os.path.join(root, device, "ports", number)
                if _read(port, "state").startswith("4:"):
                    rate = float((_read(port, "rate").split() or ["0"])[0])
                    ethernet = _read(port, "link_layer") == "Ethernet"
                    yield ActivePort(device, int(number), ethernet, int(_read(port, "lid"), 16), rate)
        except (OSError, ValueError):
            continue  # it was removed meanwhile


def _read(*path: str) -> str:
    with open(os.path.join(*path)) as f:
        return f.read().strip()
