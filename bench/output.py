"""`python -m bench.output`: how long a cell takes when its ranks print far more than is shown.

8 ranks print 100,000 lines of 100 bytes each in one cell of a real kernel, 80 MB in all. Measured from the request to
the end of the cell, with the processor time of the kernel, the host agent and the ranks; and whether the log on the
host has the last line. What bounds the time is the processor time over the cores, so it means something on an idle
machine only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from monarch_kernel.kernel.install import KERNEL_NAME, install

#: The largest allowed time on an idle machine with two cores (seconds).
BAR = 1.5
#: The time limit of a cell (seconds).
PATIENCE = 120.0


def cell(client: BlockingKernelClient, code: str) -> str:
    """Run a cell, and return its output as plain text."""
    said: list[str] = []

    def hear(message: dict[str, object]) -> None:
        content = message["content"]
        assert isinstance(content, dict)
        said.append(str(content.get("text") or content.get("data", {}).get("text/plain", "")))

    reply = client.execute_interactive(code, timeout=PATIENCE, output_hook=hear)
    if reply["content"]["status"] != "ok":
        raise SystemExit(f"the cell failed: {reply['content']}")
    return "".join(said)


def processor_times(kernel: int) -> dict[str, float]:
    """Processor time of the kernel and its descendants, by process name (seconds)."""
    found: dict[str, float] = defaultdict(float)
    root = psutil.Process(kernel)
    for process in [root, *root.children(recursive=True)]:
        spent = process.cpu_times()
        found["kernel" if process is root else process.name().removeprefix("monarch-")] += spent.user + spent.system
    return found


def measure(client: BlockingKernelClient, kernel: int, ranks: int, lines: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of one such cell, and the processor time of each process."""
    code = f"%%mesh\nfor i in range({lines}): print(f'{{i:08d}} ' + 'x' * 90)\n"
    before = processor_times(kernel)
    began = time.perf_counter()
    said = cell(client, code)
    took = time.perf_counter() - began
    assert "not shown" in said and f"{lines - 1:08d}" in said, "the notice, and the last lines"
    after = processor_times(kernel)
    return took, {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.output", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mk-bench-") as folder:
        install(prefix=folder)
        os.environ.update(JUPYTER_PATH=f"{folder}/share/jupyter", JUPYTER_PREFER_ENV_PATH="0")
        # Over TCP, another process may take a port before the kernel binds it.
        manager = KernelManager(kernel_name=KERNEL_NAME, transport="ipc", ip=f"{folder}/kernel")
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=PATIENCE)
            cell(client, f"%mesh up gpus={options.ranks}")
            kernel = int(manager.provisioner.pid)  # type: ignore[union-attr]
            best = float("inf")
            for _ in range(options.rounds):
                took, spent = measure(client, kernel, options.ranks, options.lines)
                best = min(best, took)
                parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(spent.items()))
                print(f"{took:.2f} s; processor time {sum(spent.values()):.2f} s: {parts}")
            last = cell(client, "%mesh logs -r 0 -n 1")
            assert f"{options.lines - 1:08d}" in last, f"the log's last line: {last}"
        finally:
            client.stop_channels()
            manager.shutdown_kernel()
    verdict = "ok" if best < BAR else f"MISS (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    print(f"best of {options.rounds}: {best:.2f} s, bar {BAR} s: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
