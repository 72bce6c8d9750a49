"""Read the GPUs of a host through NVML if ``nvidia-ml-py`` is installed, on a thread, while a controller watches.

The driver may block for seconds if a GPU has failed, which must not block the agent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from monarch_kernel.protocol.observation import GpuFigures
from monarch_kernel.runtime.host.devices import nvidia_gpus
from monarch_kernel.runtime.node.poller import Poller

log = logging.getLogger(__name__)

#: The interval between readings (seconds).
PERIOD = 1.0
#: The time limit for a single reading (seconds).
PATIENCE = 1.0


class GpuReader:
    """Reads GPUs between ``begin`` and ``end``.

    Attributes:
        gpus: the GPUs of the host, as last read.
        memory: the memory used by processes, by pid and the number of the GPU (bytes).
    """

    def __init__(self) -> None:
        self.gpus: list[GpuFigures] = []
        self.memory: dict[int, dict[int, int]] = {}
        self._ended: threading.Event | None = None
        self._missing = False

    def begin(self) -> None:
        """Start reading. No effect if it is already active, or NVML is missing."""
        if self._ended is None and not self._missing:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="monarch-gpus", daemon=True).start()

    def end(self) -> None:
        """Stop reading."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
        self.gpus, self.memory = [], {}

    def ask(self, poller: Poller, answer: Callable[[list[GpuFigures], dict[int, dict[int, int]]], None]) -> None:
        """Read once, and call `answer` with `gpus` and `memory` on the poller's thread; immediately if there is no GPU.

        If the driver does not answer in time, both are empty.
        """
        if self._missing or not nvidia_gpus():
            answer([], {})
            return
        if self.gpus:
            answer(self.gpus, self.memory)
            return
        waiting = [answer]

        def give(gpus: list[GpuFigures], memory: dict[int, dict[int, int]]) -> None:
            if waiting:
                waiting.pop()(gpus, memory)

        def read() -> None:
            found = read_gpus_once()
            poller.call_later(0.0, lambda: give(*found))

        threading.Thread(target=read, name="monarch-gpus", daemon=True).start()
        poller.call_later(PATIENCE, lambda: give([], {}))

    def _run(self, ended: threading.Event) -> None:
        try:
            nvml: Any = import_module("pynvml")
            nvml.nvmlInit()
        except Exception as e:  # not installed, or no driver here
            log.info("no figures of GPUs: %s", e)
            self._missing = True
            return
        try:
            while not ended.is_set():
                gpus, memory = read_gpus(nvml)
                if not ended.is_set():
                    self.gpus, self.memory = gpus, memory
                ended.wait(PERIOD)
        finally:
            nvml.nvmlShutdown()


def read_gpus_once() -> tuple[list[GpuFigures], dict[int, dict[int, int]]]:
    """Open NVML and return the result of `read_gpus`; empty without NVML or a driver."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as e:
        log.info("no figures of GPUs: %s", e)
        return [], {}
    try:
        return read_gpus(nvml)
    finally:
        nvml.nvmlShutdown()


def read_gpus(nvml: Any) -> tuple[list[GpuFigures], dict[int, dict[int, int]]]:
    """Return all GPUs, and the memory of processes on them. Values that a failed GPU does not report are 0.

    Args:
        nvml: the module ``pynvml``, initialized.
    """
    gpus: list[GpuFigures] = []
    memory: dict[int, dict[int, int]] = {}
    for index in range(nvml.nvmlDeviceGetCount()):

        def asked(what: Callable[[Any], Any], index: int = index) -> Any:
            try:
                return what(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError:
                return None

        name = asked(nvml.nvmlDeviceGetName) or ""
        use, held = asked(nvml.nvmlDeviceGetUtilizationRates), asked(nvml.nvmlDeviceGetMemoryInfo)
        gpus.append(
            GpuFigures(
                index,
                name.decode() if isinstance(name, bytes) else name,
                float(use.gpu) if use is not None else 0.0,
                held.used if held is not None else 0,
                held.total if held is not None else 0,
            )
        )
        for process in asked(nvml.nvmlDeviceGetComputeRunningProcesses) or ():
            memory.setdefault(process.pid, {})[index] = process.usedGpuMemory or 0
    return gpus, memory
