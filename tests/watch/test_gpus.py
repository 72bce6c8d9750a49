"""What is read of GPUs. NVML itself needs a GPU; here its answers are those of its documentation."""

from __future__ import annotations

import types
from typing import Any

from monarch_kernel.protocol.observation import GpuFigures
from monarch_kernel.runtime.host.host_observer import GpuReader, read_gpus
from tests.conftest import wait_until


class NVMLError(Exception):
    """As of pynvml."""


def lost(_handle: int) -> Any:
    raise NVMLError("GPU is lost")


def test_a_gpu_that_has_failed_has_its_place_and_no_figures() -> None:
    def told(handle: int, value: Any) -> Any:
        return value if handle == 0 else lost(handle)

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: told(handle, b"H100"),
        nvmlDeviceGetUtilizationRates=lambda handle: told(handle, types.SimpleNamespace(gpu=73, memory=20)),
        nvmlDeviceGetMemoryInfo=lambda handle: told(handle, types.SimpleNamespace(used=5, total=80)),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: told(
            handle, [types.SimpleNamespace(pid=7, usedGpuMemory=4), types.SimpleNamespace(pid=8, usedGpuMemory=None)]
        ),
    )
    gpus, memory = read_gpus(nvml)
    assert gpus == [GpuFigures(0, "H100", 73.0, 5, 80), GpuFigures(1, "", 0.0, 0, 0)]
    assert memory == {7: {0: 4}, 8: {0: 0}}


def test_without_a_gpu_the_reader_ends_by_itself() -> None:
    import threading

    reader = GpuReader()
    reader.begin()
    wait_until(lambda: reader._missing or bool(reader.gpus), "it has looked")
    reader.end()
    wait_until(lambda: all(t.name != "monarch-gpus" for t in threading.enumerate()), "its thread has ended")
