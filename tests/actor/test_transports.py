"""``enable_transport``: accepted as in Monarch, and refused where Monarch refuses it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monarch_kernel.actor import enable_transport
from tests.actor.actors import PATIENCE


def _run(program: str) -> str:
    """What a script prints, one line for each call that was refused."""
    header = """
from monarch_kernel.actor import ChannelTransport, enable_transport, this_proc

def attempt(transport):
    try:
        enable_transport(transport)
    except RuntimeError as e:
        print(e)

"""
    command = [sys.executable, "-c", header + program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


@pytest.mark.parametrize(
    "transport", ["'tcp'", "'ipc'", "'metatls-hostname'", "'tcp://node1:1'", "ChannelTransport.Unix"]
)
def test_before_the_first_use(transport: str) -> None:
    assert _run(f"attempt({transport})\nattempt({transport})\nthis_proc()\nattempt({transport})") == ""


def test_another_one_later() -> None:
    assert "has already chosen 'tcp'" in _run("attempt('tcp')\nattempt('ipc')")
    assert _run("attempt('tcp')\nattempt(ChannelTransport.TcpWithHostname)") == ""


def test_after_the_first_use() -> None:
    assert "comes too late" in _run("this_proc()\nattempt('tcp')")


@pytest.mark.parametrize("wrong", ["udp", "", 3, "udp://node1:1"])
def test_unknown_ones(wrong: object) -> None:
    with pytest.raises(ValueError):
        enable_transport(wrong)  # pyright: ignore[reportArgumentType]
