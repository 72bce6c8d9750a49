"""Run rsync, to one daemon or to several in parallel: ``python -m bench.sync.rsync_client``."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from typing import Any

from bench.sync.service import serve


def sync(source: str, targets: list[str], options: list[str]) -> dict[str, Any]:
    """Make the targets equal to a folder; return the seconds, and the bytes that all processes have sent."""
    began = time.perf_counter()
    running = [
        subprocess.Popen(
            ["rsync", "-a", "--delete", "--stats", *options, f"{source}/", target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for target in targets
    ]
    said = [process.communicate() for process in running]
    seconds = time.perf_counter() - began
    for process, (_, error) in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"rsync ended with {process.returncode}: {error.strip()[-300:]}")
    sent = [re.search(r"Total bytes sent: ([\d,]+)", out) for out, _ in said]
    return {"seconds": seconds, "sent": sum(int(each[1].replace(",", "")) for each in sent if each)}


def memory() -> float:
    """Return the largest resident size of any rsync so far (MB)."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


if __name__ == "__main__":
    serve({"sync": sync, "memory": memory})
