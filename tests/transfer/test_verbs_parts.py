"""What the verbs backend decides without a device: which ports meet, how transfers are cut, which memory is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from monarch_kernel.rdma import is_ibverbs_available
from monarch_kernel.runtime.transfer.memory import Layout, Memory, common_runs, memory_of
from monarch_kernel.runtime.transfer.verbs import regions
from monarch_kernel.runtime.transfer.verbs.backend import _worth_spanning, why_not
from monarch_kernel.runtime.transfer.verbs.card import CardPort, Gid, find_ports, network, pair
from monarch_kernel.runtime.transfer.verbs.regions import owner_of
from tests.waiting import patience

IB, V1, V2 = 0, 1, 2


def port(*gids: tuple[str, int], device: str = "mlx5_0", ethernet: bool = True, host: str = "a") -> CardPort:
    return CardPort(device, 1, ethernet, 7, tuple(Gid(i, v, k) for i, (v, k) in enumerate(gids)), 5, 16, 16, host)


def fabric(root: Path, device: str, **ports: str) -> None:
    """A device as sysfs shows it; ``p1="ACTIVE 400 InfiniBand"``."""
    (root / device).mkdir(parents=True)
    (root / device / "node_type").write_text("4: RNIC\n" if device.startswith("iw") else "1: CA\n")
    for name, text in ports.items():
        state, rate, layer = text.split()
        folder = root / device / "ports" / name[1:]
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{4 if state == 'ACTIVE' else 1}: {state}\n")
        (folder / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
        (folder / "link_layer").write_text(f"{layer}\n")
        (folder / "lid").write_text("0x1f\n")


def test_active_ports_are_found_the_fastest_first(tmp_path: Path) -> None:
    fabric(tmp_path, "mlx5_0", p1="ACTIVE 100 Ethernet")
    fabric(tmp_path, "mlx5_1", p1="DOWN 400 InfiniBand", p2="ACTIVE 400 InfiniBand")
    fabric(tmp_path, "iwarp0", p1="ACTIVE 800 Ethernet")
    (tmp_path / "broken").mkdir()
    both = [(p.device, p.number, p.ethernet, p.lid, p.rate) for p in find_ports("", str(tmp_path))]
    assert both == [("mlx5_1", 2, False, 31, 400.0), ("mlx5_0", 1, True, 31, 100.0)]
    assert [p.device for p in find_ports("mlx5_0, mlx5_1", str(tmp_path))] == ["mlx5_0", "mlx5_1"]
    assert [p.number for p in find_ports("mlx5_1:2", str(tmp_path))] == [2]
    assert find_ports("mlx5_1:1,mlx5_7", str(tmp_path)) == []
    assert find_ports("", str(tmp_path / "none")) == []


def test_the_best_addresses_of_the_same_kind_meet() -> None:
    link, four, other = "fe80::1", "::ffff:10.0.0.1", "::ffff:192.168.0.1"
    mine = port((link, V1), (link, V2), (four, V1), (four, V2), (other, V2))
    theirs = port(("fe80::2", V2), ("::ffff:192.168.0.9", V2), ("::ffff:10.0.0.9", V1), host="b")
    met = pair(mine, theirs)
    assert met is not None and (met[0].value, met[1].value) == (other, "::ffff:192.168.0.9")
    met = pair(port((link, V1)), port(("fe80::2", V1), ("2001:db8::1", V2), host="b"))
    assert met is not None and met[0].kind == V1
    assert pair(port((four, V1)), port((four, V2), host="b")) is None
    assert pair(port((four, V2)), port(("2001:db8::1", V2), host="b")) is None
    assert pair(mine, port(("fe80::1", IB), ethernet=False, host="b")) is None


def test_loopback_is_for_one_network_namespace_and_one_port() -> None:
    loopback = (("fe80::200:ff:fe00:0", V2), ("::ffff:127.0.0.1", V2))
    met = pair(port(*loopback, device="rxe0"), port(*loopback, device="rxe0"))
    assert met is not None and met[0].value == "::ffff:127.0.0.1"
    assert pair(port(*loopback, device="rxe0"), port(*loopback, device="rxe0", host="b")) is None
    assert pair(port(loopback[1], device="rxe0"), port(loopback[1], device="rxe1")) is None
    assert network() == network()


def test_infiniband_ports_meet_within_a_subnet() -> None:
    one = port(("fe80:0:0:1::1", IB), ethernet=False)
    assert pair(one, port(("fe80:0:0:1::2", IB), ethernet=False, host="b")) is not None
    assert pair(one, port(("fe80:0:0:2::2", IB), ethernet=False, host="b")) is None


def test_work_requests_are_in_one_piece_on_both_sides() -> None:
    mine, theirs = Layout(1000, ((3, 20),), 10), Layout(5000, ((2, 100),), 20)
    assert list(common_runs(mine, 0, theirs, 5, 30, 8)) == [
        (1000, 5005, 8),
        (1008, 5013, 2),
        (1020, 5015, 5),
        (1025, 5100, 5),
        (1040, 5105, 8),
        (1048, 5113, 2),
    ]
    assert list(common_runs(Layout(0, (), 10), 2, Layout(50, (), 10), 0, 5, 100)) == [(2, 50, 5)]


def test_gaps_are_read_too_where_that_is_cheaper() -> None:
    assert _worth_spanning(Layout(0, ((1000, 64),), 8))
    assert not _worth_spanning(Layout(0, ((4, 1 << 20),), 1 << 18))
    assert not _worth_spanning(Layout(0, (), 8))


def test_regions_may_be_kept_only_of_arrays_that_own_their_data() -> None:
    array = np.zeros((4, 4))
    assert owner_of(memory_of(array)) is array
    assert owner_of(memory_of(array[1:, ::2].T)) is array
    assert owner_of(memory_of(np.frombuffer(bytearray(8), "u1"))) is None
    assert owner_of(memory_of(bytearray(8))) is None
    torch = pytest.importorskip("torch")
    assert owner_of(memory_of(torch.zeros(4))) is None
    assert owner_of(memory_of(torch.zeros(4).numpy())) is None


class FakeCard:
    """Says what it was asked to register."""

    def register(self, *where: int, **how: bool) -> Any:
        return where, how

    register_dmabuf = register


def test_gpu_memory_is_registered_by_its_offset_in_a_dma_buf(monkeypatch: pytest.MonkeyPatch) -> None:
    fds: list[int] = []

    class Driver:
        code = 0

        def cuPointerSetAttribute(self, *_: Any) -> None:  # noqa: N802
            pass

        def cuMemGetHandleForAddressRange(self, fd: Any, start: int, size: int, *_: Any) -> int:  # noqa: N802
            assert (start, size) == (0x10000, 0x2000)
            fd._obj.value = os.open("/dev/null", os.O_RDONLY)
            fds.append(fd._obj.value)
            return self.code

    driver, card, kind = Driver(), cast("Any", FakeCard()), {"remote": True, "writable": False}
    monkeypatch.setattr(regions, "_cuda", lambda: driver)
    memory = Memory(Layout(0x10100, ((2, 0x1000),), 16), None, device="cuda:0")
    assert regions.register(card, memory, remote=True, writable=False) == (
        ((fds[0], 0x100, 0x1010), kind),
        -0x10000,
    )
    with pytest.raises(OSError):
        os.fstat(fds[0])
    driver.code = 801  # not supported: nvidia-peermem may know the address
    region, shift = regions.register(card, memory, remote=True, writable=False)
    assert region == ((0x10100, 0x1010), {**kind, "populate": False}) and not shift
    os.close(fds[1])
    assert regions.register(card, memory_of(bytearray(8)), remote=False, writable=True)[0][1]["writable"]


@pytest.mark.skipif(bool(find_ports()), reason="this host has an RDMA device")
def test_a_host_without_a_device_says_so_and_pays_nothing() -> None:
    assert not is_ibverbs_available()
    assert why_not() == "no InfiniBand or RoCE card with an active port"
    code = (
        "import sys, monarch_kernel.rdma as r; r.is_ibverbs_available(); r.RDMABuffer(bytearray(8)); "
        "assert not [m for m in sys.modules if m.startswith('pyverbs')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))
