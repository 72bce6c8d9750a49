"""Divide the GPUs that a provider assigned to a host's worker among the ranks of the host.

Providers set environment variables: ``CUDA_VISIBLE_DEVICES`` (indices, UUIDs, or UUIDs of MIG slices), or on AMD
``ROCR_VISIBLE_DEVICES`` and ``HIP_VISIBLE_DEVICES``. Slurm sets those of all vendors, whatever GPUs there are, unless
its configuration names one. If no variable is set, as over ssh, all GPUs of the host count. This module loads no GPU
library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

#: Variables that restrict a process to some devices, most physical first. On AMD GPUs, a later one applies within the
#: selection of an earlier one; NVIDIA GPUs use only the last one.
_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_NVIDIA = "/proc/driver/nvidia/gpus"
_AMD = "/sys/class/kfd/kfd/topology/nodes"


class DeviceError(ValueError):
    """Ranks request more devices than the provider assigned to their host. The message has both numbers."""


class Devices(NamedTuple):
    """Devices, and the variable that restricts a process to some of them."""

    variable: str
    names: tuple[str, ...]


def devices_here(environ: Mapping[str, str] | None = None) -> Devices | None:
    """Return the devices that a process with this environment (by default, this one's) may use.

    None: the host has none.
    """
    environ = os.environ if environ is None else environ
    nested = _amd() and not nvidia_gpus()
    for variable in _VARIABLES if nested else (_VARIABLES[-1], *_VARIABLES[:-1]):
        if variable in environ:
            return Devices(variable, _names(environ[variable]))
    for variable, found in (("CUDA_VISIBLE_DEVICES", nvidia_gpus()), ("ROCR_VISIBLE_DEVICES", _amd())):
        if found:
            return Devices(variable, tuple(map(str, range(found))))
    return None


def device_environment(slot: int, each: int, host: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that restrict a rank to its devices.

    Args:
        slot: the number of the rank on its host.
        each: how many devices each rank gets.
        host: the name of the host, for the error.

    Raises:
        DeviceError: the host has fewer devices, or a rank would get several MIG slices, of which CUDA uses only one.
    """
    environ = os.environ if environ is None else environ
    found = devices_here(environ)
    names = found.names if found is not None else ()
    if found is None or (slot + 1) * each > len(names):
        has = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise DeviceError(
            f"rank {slot} of {host} needs {'device' if each == 1 else f'{each} devices, up to number'} "
            f"{(slot + 1) * each - 1}, and the engine gave {host} {has}: spawn fewer ranks on each host, or ask the "
            "engine for more GPUs"
        )
    mine = names[slot * each : (slot + 1) * each]
    if each > 1 and any(name.startswith("MIG-") for name in mine):
        raise DeviceError(f"a process of {host} can use one MIG slice only, not {each}: give each rank one device")
    chosen = {found.variable: ",".join(mine)}
    for variable in _VARIABLES[_VARIABLES.index(found.variable) + 1 :]:
        if variable in environ:  # it applies within the remaining selection
            chosen[variable] = ",".join(map(str, range(each)))
    return chosen


def _names(text: str) -> tuple[str, ...]:
    names: list[str] = []
    for name in text.split(","):
        if not name.strip() or name.strip() in ("-1", "NoDevFiles"):  # CUDA ignores what follows an invalid one
            break
        names.append(name.strip())
    return tuple(names)


def nvidia_gpus() -> int:
    """Return the number of NVIDIA GPUs of this host."""
    try:
        return len(os.listdir(_NVIDIA))
    except OSError:
        return 0


def _amd() -> int:
    try:
        return sum(_gpu_id(f"{_AMD}/{node}/gpu_id") not in ("", "0") for node in os.listdir(_AMD))
    except OSError:
        return 0


def _gpu_id(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
