"""Prepare train.py for PyTorch's own tools: the debug server, or Flight Recorder files on demand.

With NCCL, a rank writes its file on a command through a pipe. gloo does not support this, so a thread writes the file.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
from torch.distributed.debug import start_debug_server


def record(rank: int) -> None:
    """Write the Flight Recorder's file when `dump` appears."""
    while not Path("dump").exists():
        time.sleep(0.05)
    trace = _dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    Path(f"new_{rank}").write_bytes(trace)
    Path(f"new_{rank}").rename(f"fr/rank_{rank}")


def main() -> None:
    """Train."""
    sys.path.insert(0, os.getcwd())
    dist.init_process_group("gloo")
    if port := os.environ.get("DEBUG_PORT"):
        start_debug_server(int(port), fetch_timeout=5)  # a minute, by default
    if os.environ.get("TORCH_FR_BUFFER_SIZE"):
        threading.Thread(target=record, args=(dist.get_rank(),), daemon=True).start()
    import train  # type: ignore[import-not-found]

    train.train()


if __name__ == "__main__":
    main()
