"""What a machine offers, and which hosts are refused."""

from __future__ import annotations

import platform
import sys
import sysconfig

import msgspec
import pytest

from workspace_sync.environment.facts import MachineFacts, Needs, check_compatible, facts
from workspace_sync.model.errors import IncompatibleError

HERE = MachineFacts("client", "Linux", "x86_64", "glibc", (2, 36), "3.11.7")
NEEDS = Needs("/envs/a", native=True, glibc=(2, 35))


def host(**changes: object) -> MachineFacts:
    return msgspec.structs.replace(HERE, host="node7", **changes)


def test_facts_of_this_machine() -> None:
    here = facts([sys.base_prefix, "/nowhere"])
    assert (here.system, here.machine) == (platform.system(), platform.machine())
    assert here.libc in ("glibc", "musl") and len(here.libc_version) >= 2
    assert here.bases[sys.base_prefix].startswith(platform.python_version() + " cpython-")
    assert f" {sysconfig.get_config_var('SOABI')} " in here.bases[sys.base_prefix]
    assert here.bases["/nowhere"] == ""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=MachineFacts) == here
    assert (
        check_compatible(here, here, Needs("/envs/a", base=sys.base_prefix, base_id=here.bases[sys.base_prefix])) == []
    )


@pytest.mark.parametrize(
    "other, needs, said",
    [
        (host(machine="aarch64"), NEEDS, "node7: it is for Linux on x86_64, and the host has Linux on aarch64"),
        (host(libc="musl", libc_version=(1, 2)), NEEDS, "it is for glibc 2.36, and the host has musl 1.2"),
        (host(libc_version=(2, 17)), NEEDS, r"need glibc 2.35 \(the client has 2.36\), and the host has 2.17"),
        (
            host(),
            Needs("/v", base="/py", base_id="3.11.7 x 12"),
            "a venv of the Python at /py .* the host has none there",
        ),
        (
            host(bases={"/py": "3.11.9 x 34"}),
            Needs("/v", base="/py", base_id="3.11.7 x 12"),
            r"another Python there \(3.11.9 x 34\)",
        ),
    ],
)
def test_hosts_that_are_refused(other: MachineFacts, needs: Needs, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said) as e:
        check_compatible(HERE, other, needs)
    assert needs.prefix in str(e.value) and "node7" in str(e.value)


def test_hosts_that_are_taken() -> None:
    assert check_compatible(HERE, host(libc_version=(2, 35)), NEEDS) == []
    # Nothing compiled: neither the machine nor the C library counts.
    assert check_compatible(HERE, host(machine="aarch64", libc="musl"), Needs("/envs/a", native=False)) == []
    assert check_compatible(HERE, host(driver="550.54"), NEEDS) == [
        "NVIDIA's driver is absent at the client and 550.54 on node7"
    ]
    (note,) = check_compatible(HERE, host(libc_version=(2, 31)), Needs("/envs/a"))
    assert "glibc 2.31, older than the client's 2.36" in note
