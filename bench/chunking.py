"""`python -m bench.chunking`: how large files are best cut, by bytes that a change sends and by seconds.

The script creates pairs of files, before and after a change: a real shared library with 4 KB overwritten, and with a
line inserted at the start; two builds of a library whose source changed in one function; a log that grew; a checkpoint
with one new tensor, and one with a tensor that grew. Each method cuts both files into chunks; the chunks that only the
second file has would be sent. "fixed, found again" is the method of workspace_sync. Content-defined cuts use the gear
hash of FastCDC: with numpy, and with pyfastcdc (`pip install pyfastcdc`) if it is installed.

Source: W. Xia et al., "FastCDC: a Fast and Efficient Content-Defined Chunking Approach for Data Deduplication",
USENIX ATC '16.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from workspace_sync.scanning.hashing import ANCHOR, CHUNK, Cuts, again, even

Cut = Callable[[memoryview], list[int]]


# -- methods: the ends of the chunks ----------------------------------------------------------------


def fixed(size: int) -> Cut:
    """Cut into chunks of one size."""
    return lambda data: [*range(size, len(data), size), len(data)]


_GEAR = np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32)


def gear(average: int) -> Cut:
    """Cut where the hash of the last 32 bytes has leading zeros, at a quarter to four times the average."""
    threshold = np.uint32((1 << 32) // average)
    step = 1 << 22

    def cut(data: memoryview) -> list[int]:
        candidates: list[int] = []
        array = np.frombuffer(data, dtype=np.uint8)
        for start in range(0, len(array), step):
            first = max(0, start - 31)
            hashes = _GEAR[array[first : start + step]]
            # The sum over 32 bytes, each shifted by its age, computed by doubling the window five times.
            for window in (1, 2, 4, 8, 16):
                hashes[window:] += hashes[:-window] << np.uint32(window)
            candidates += (np.flatnonzero(hashes[start - first :] < threshold) + start + 1).tolist()
        ends: list[int] = []
        last = 0
        for end in candidates:
            while end - last > 4 * average:
                last += 4 * average
                ends.append(last)
            if end - last >= average // 4:
                last = end
                ends.append(end)
        while len(data) - last > 4 * average:
            last += 4 * average
            ends.append(last)
        return [*ends, len(data)] if last < len(data) else ends

    return cut


def fastcdc(average: int) -> Cut | None:
    """Cut in the same way by the compiled code of pyfastcdc; None if it is not installed."""
    try:
        from pyfastcdc import FastCDC  # type: ignore[import-not-found]
    except ImportError:
        return None
    chunker: Any = FastCDC(avg_size=average, min_size=average // 4, max_size=4 * average)
    return lambda data: [chunk.offset + chunk.length for chunk in chunker.cut_buf(data)]


def found_again(before: bytes) -> Cut:
    """Cut as ``workspace_sync`` does: cuts of one size, found again by the bytes that follow them."""
    sizes = even(len(before))
    anchors = b"".join(before[i : i + ANCHOR].ljust(ANCHOR, b"\0") for i in range(0, len(before), CHUNK))
    known = Cuts(sizes, anchors)
    return lambda data: [
        *itertools.accumulate(again(known, len(data), lambda at, length: bytes(data[at : at + length])))
    ]


def ways() -> Iterator[tuple[str, Cut]]:
    """Iterate over the methods that do not use the previous file, with their names."""
    for size in (256, 1024, 4096):
        yield f"fixed {size} KiB", fixed(size << 10)
    for size in (64, 256):
        yield f"gear (numpy) {size} KiB", gear(size << 10)
        compiled = fastcdc(size << 10)
        if compiled is not None:
            yield f"pyfastcdc {size} KiB", compiled


# -- pairs of files ----------------------------------------------------------------------------------


def pairs(folder: Path, size: int) -> Iterator[tuple[str, bytes, bytes]]:
    """Iterate over (name of the change, before, after); large files are truncated to this size (bytes)."""
    torch_folder = Path(torch.__file__).parent / "lib"
    library = max(torch_folder.glob("*.so*"), key=lambda path: path.stat().st_size)
    data = library.read_bytes()[:size]
    middle = len(data) // 2
    yield "4 KB edited in place", data, data[:middle] + random.Random(1).randbytes(4096) + data[middle + 4096 :]
    yield "one line put in front", data, b"# a line that was not here\n" + data
    yield "a rebuilt library", *builds(folder)
    log = b"".join(b"step %07d loss %.6f\n" % (i, 1 / (i + 1)) for i in range(size // 28))
    yield "a log that grew by 1 %", log, log + b"".join(b"step %07d again\n" % i for i in range(len(log) // 2000))
    yield "a checkpoint, one tensor new", *checkpoints(folder, size, grown=False)
    yield "a checkpoint, one tensor grown", *checkpoints(folder, size, grown=True)


def builds(folder: Path) -> tuple[bytes, bytes]:
    """Build a shared library before and after a change of one of its functions."""
    found: list[bytes] = []
    for changed in (False, True):
        lines = [
            f"double f{i}(double *x, int n) {{ double s = {i}; for (int k = 0; k < n; k++) s += x[k] * {i % 97}; "
            "return s; }"
            for i in range(20_000)
        ]
        if changed:
            lines[7_000] = "double f7000(double *x, int n) { return n > 3 ? x[0] + x[1] * x[2] : f6999(x, n) / 2; }"
        source = folder / "built.c"
        source.write_text("\n".join(lines))
        target = folder / "built.so"
        subprocess.run(["gcc", "-O1", "-g", "-shared", "-fPIC", "-o", target, source], check=True)
        found.append(target.read_bytes())
    return found[0], found[1]


def checkpoints(folder: Path, size: int, *, grown: bool) -> tuple[bytes, bytes]:
    """Create a torch checkpoint before and after one tensor of 16 changed, or grew by a row."""
    generator = torch.Generator().manual_seed(1)
    rows = size // 16 // 4096
    state = {f"layer{i}.weight": torch.randn(rows, 1024, generator=generator) for i in range(16)}
    path = folder / "model.pt"
    torch.save(state, path)
    before = path.read_bytes()
    state["layer5.weight"] = torch.randn(rows + grown, 1024, generator=generator)
    torch.save(state, path)
    return before, path.read_bytes()


# -- measuring ---------------------------------------------------------------------------------------


def chunks(data: bytes, cut: Cut) -> dict[bytes, int]:
    """Return the digests and sizes of the chunks."""
    view = memoryview(data)
    found: dict[bytes, int] = {}
    start = 0
    for end in cut(view):
        found[blake3(view[start:end]).digest()] = end - start
        start = end
    return found


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description="How large files are best cut.")
    parser.add_argument("--megabytes", type=int, default=256, help="the size of the large files (default: %(default)s)")
    args = parser.parse_args()
    machine = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"files of up to {args.megabytes} MB; {machine}; speed is of cutting and hashing")
    with tempfile.TemporaryDirectory() as folder:
        for what, before, after in pairs(Path(folder), args.megabytes * 1_000_000):
            print(f"\n{what} ({len(after) / 1e6:.0f} MB)")
            print(f"  {'cut':24} {'sent':>12} {'share':>8} {'pieces sent':>12} {'of':>7} {'GB/s':>6}")
            for name, first, cut in (
                *((name, cut, cut) for name, cut in ways()),
                ("fixed, found again", fixed(CHUNK), found_again(before)),
            ):
                have = chunks(before, first)
                started = time.perf_counter()
                now = chunks(after, cut)
                seconds = time.perf_counter() - started
                new = [size for digest, size in now.items() if digest not in have]
                print(
                    f"  {name:24} {sum(new) / 1e6:9.2f} MB {sum(new) / len(after):8.2%} {len(new):12} {len(now):7} "
                    f"{len(after) / seconds / 1e9:6.2f}"
                )


if __name__ == "__main__":
    main()
