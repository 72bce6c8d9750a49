"""pyverbs, and an opened card: its protection domain, memory regions and queue pairs.

pyverbs is Cython over libibverbs and never releases the GIL, so nothing here may wait inside it. It is imported only
if a card with an active port is present.
"""

from __future__ import annotations

import ctypes
import importlib
import ipaddress
import logging
import os
import secrets
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.errors import Unfit

# Find the ports of this host's cards, and the pairs of ports that reach each other.

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


# The messages by which requester and owner connect queue pairs and register a buffer.


class QueuePairEnd(msgspec.Struct, array_like=True, frozen=True):
    """One side of a queue pair."""

    number: int
    psn: int


class ConnectRequest(msgspec.Struct, array_like=True, frozen=True):
    """The requester's message: the queue pairs to connect, and those that were closed."""

    port: CardPort
    ends: tuple[QueuePairEnd, ...]
    gone: tuple[int, ...]


class ConnectAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The owner's answer: its ends, in the same order, and how its card addresses the buffer."""

    port: CardPort
    here: Gid  # address of the owner's port
    there: Gid  # address of the requester's port
    ends: tuple[QueuePairEnd, ...]
    rkey: int
    shift: int  # offset from an address of the owner to the address that its card uses


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ConnectRequest).decode
decode_answer = msgspec.msgpack.Decoder(ConnectAnswer).decode


#: The number of work requests that a queue pair holds.
DEPTH = 64
#: A packet is sent again after 4.096 us * 2**14 = 67 ms, this many times. On some cards, 7 means forever.
ACK_TIMEOUT, RETRIES = 14, 6
#: The number of address table entries that are queried.
_GIDS = 1024
#: Memory of at least this size (bytes) is faulted in before registration, because pinning it holds the GIL.
_POPULATE = 1 << 20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@cache
def pyverbs() -> SimpleNamespace:
    """Return pyverbs's classes and enums, by name.

    Raises:
        ImportError: it is not installed, or does not match the installed libibverbs.
    """
    root = logging.getLogger()
    quiet = logging.NullHandler()
    root.addHandler(quiet)  # makes the logging.basicConfig() call in pyverbs do nothing
    try:
        names: dict[str, object] = {}
        for module, wanted in {
            "addr": ("GID", "AHAttr", "GlobalRoute"),
            "cq": ("CQ",),
            "device": ("Context",),
            "mr": ("MR", "DmaBufMR"),
            "pd": ("PD",),
            "pyverbs_error": ("PyverbsError", "PyverbsRDMAError"),
            "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
            "wr": ("SGE", "SendWR"),
        }.items():
            loaded = importlib.import_module(f"pyverbs.{module}")
            names.update({name: getattr(loaded, name) for name in wanted})
        try:
            names["e"] = importlib.import_module("pyverbs.libibverbs_enums")  # since 57
        except ImportError:
            names["e"] = importlib.import_module("pyverbs.enums")
        return SimpleNamespace(**names)
    finally:
        root.removeHandler(quiet)


class Card:
    """One port of a card, opened.

    Every pyverbs object stays in ``_open`` until it is closed, so that a fork of this process keeps its copies alive:
    destroying those would destroy the originals. Objects are made, used and closed under a lock, because closing one
    twice, or using it afterwards, crashes the process.

    Raises:
        Unfit: it cannot be opened; the message has the reason.
    """

    def __init__(self, chosen: ActivePort) -> None:
        v = pyverbs()
        self._v = v
        self.name = f"{chosen.device}:{chosen.number}"
        self._open: dict[object, None] = {}  # in order of creation
        # Reentrant: a weak reference may call back at any point here, and close a region.
        self._guard = threading.RLock()
        self._closed = False
        try:
            self.context = self._own(v.Context(name=chosen.device))
            port = self.context.query_port(chosen.number)
            device = self.context.query_device()
            table = self.context.query_gid_table(_GIDS)
            self._pd = self._own(v.PD(self.context))
            self._idle_cq = self._own(v.CQ(self.context, 16, None, None, 0))
        except v.PyverbsError as e:
            raise Unfit(f"the RDMA device {chosen.device} cannot be used ({e})") from None
        only = environment.RDMA_GID_INDEX.get()
        gids = tuple(
            Gid(g.gid_index, g.gid_str(), int(g.gid_type))
            for g in table
            if g.port_num == chosen.number and only in (None, g.gid_index)
        )
        self.port = CardPort(
            chosen.device,
            chosen.number,
            chosen.ethernet,
            chosen.lid,
            gids,
            int(port.active_mtu),
            device.max_qp_rd_atom,
            device.max_qp_init_rd_atom,
            network(),
        )
        self.largest: int = port.max_msg_sz
        self.depth: int = min(DEPTH, device.max_qp_wr)

    def _own(self, thing: object) -> Any:
        self._open[thing] = None
        return thing

    @contextmanager
    def _using(self) -> Generator[Any, None, None]:
        """Return pyverbs for one use of the card."""
        with self._guard:
            if self._closed:
                raise Unfit(f"{self.name} is closed: this process is shutting its runtime down")
            yield self._v

    def end(self, thing: Any, *, wait: bool = True) -> bool:
        """Close a region, a queue pair or a completion queue, unless it is already closed.

        Args:
            wait: wait for another thread that is using the card. Otherwise return False and do nothing.
        """
        if not self._guard.acquire(blocking=wait):
            return False
        try:
            if thing in self._open:
                del self._open[thing]
                thing.close()
        finally:
            self._guard.release()
        return True

    def close(self) -> None:
        """Close the card and all its objects."""
        with self._guard:
            self._closed = True
            for thing in reversed(list(self._open)):
                self.end(thing)

    # -- memory ------------------------------------------------------------------------------------

    def register(self, address: int, length: int, *, remote: bool, writable: bool, populate: bool = True) -> Any:
        """Register memory with the card.

        Args:
            remote: peers access the memory; otherwise it serves transfers that start here.
            writable: whether the card may write to it.
            populate: the memory is CPU memory, which can be faulted in.

        Raises:
            Unfit: the memory cannot be registered; the message has the reason.
        """
        if populate and length >= _POPULATE:
            start = address // _PAGE * _PAGE
            _madvise(start, address + length - start, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
        with self._using() as v:
            try:
                return self._own(v.MR(self._pd, length, self._access(remote, writable), address=address))
            except v.PyverbsError as error:
                raise Unfit(
                    f"{length} bytes of memory cannot be registered with {self.name} ({error}); often the limit of "
                    "locked memory (ulimit -l) is too low"
                ) from None

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote: bool, writable: bool) -> object:
        """Register the memory of another device by its dma-buf. The card addresses it by offset."""
        with self._using() as v:
            try:
                return self._own(v.DmaBufMR(self._pd, length, self._access(remote, writable), dmabuf=fd, offset=offset))
            except v.PyverbsError as error:
                raise Unfit(f"{length} bytes of GPU memory cannot be registered with {self.name} ({error})") from None

    def _access(self, remote: bool, writable: bool) -> int:
        e = self._v.e
        access = e.IBV_ACCESS_REMOTE_READ if remote else 0
        if writable:
            access |= e.IBV_ACCESS_LOCAL_WRITE | (e.IBV_ACCESS_REMOTE_WRITE if remote else 0)
        return access

    # -- queue pairs -------------------------------------------------------------------------------

    def completion_queue(self) -> Any:
        """Create a completion queue for the work requests of one queue pair."""
        with self._using() as v:
            return self._own(v.CQ(self.context, self.depth + 1, None, None, 0))

    def queue_pair(self, queue: Any = None) -> tuple[Any, QueuePairEnd]:
        """Create a queue pair to connect. Without a completion queue, it only responds to its peer.

        Raises:
            Unfit: the card has none left.
        """
        v, e = self._v, self._v.e
        cap = v.QPCap(max_send_wr=self.depth if queue else 1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        cq = queue or self._idle_cq
        init = v.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=0)
        attr = v.QPAttr(port_num=self.port.number)
        attr.qp_access_flags = 0 if queue else e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        with self._using():
            try:
                pair = self._own(v.QP(self._pd, init, attr))
            except v.PyverbsError as error:
                raise Unfit(f"{self.name} cannot make a queue pair ({error})") from None
            return pair, QueuePairEnd(pair.qp_num, secrets.randbits(24))

    def connect(
        self, pair: Any, mine: QueuePairEnd, here: Gid, theirs: QueuePairEnd, there: Gid, port: CardPort, *, asks: bool
    ) -> None:
        """Connect a queue pair to one of a peer. ``asks``: this side starts transfers.

        Raises:
            Unfit: they cannot reach each other.
        """
        v = self._v
        attr = v.QPAttr(port_num=self.port.number)
        attr.qp_access_flags = 0 if asks else v.e.IBV_ACCESS_REMOTE_READ | v.e.IBV_ACCESS_REMOTE_WRITE
        attr.path_mtu = min(self.port.mtu, port.mtu)
        attr.dest_qp_num = theirs.number
        attr.rq_psn = theirs.psn
        attr.max_dest_rd_atomic = 1 if asks else min(self.port.reads_in, port.reads_out)
        attr.min_rnr_timer = 12
        if self.port.ethernet:
            route = v.GlobalRoute(dgid=v.GID(there.value), sgid_index=here.index, hop_limit=64)
            attr.ah_attr = v.AHAttr(gr=route, is_global=1, port_num=self.port.number)
        else:
            attr.ah_attr = v.AHAttr(dlid=port.lid, is_global=0, port_num=self.port.number)
        attr.sq_psn = mine.psn
        attr.max_rd_atomic = min(self.port.reads_out, port.reads_in) if asks else 1
        attr.timeout = ACK_TIMEOUT
        attr.retry_cnt = RETRIES
        attr.rnr_retry = RETRIES
        with self._using():
            if pair not in self._open:
                raise Unfit("the queue pair was closed meanwhile")
            try:
                if asks:
                    pair.to_rts(attr)
                else:
                    pair.to_rtr(attr)
            except v.PyverbsError as error:
                raise Unfit(
                    f"{self.name} ({here.value}) cannot be connected to {port.device} ({there.value}): {error}"
                ) from None
