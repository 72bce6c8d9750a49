"""A controller that imports the package and starts 8 ranks on this host: ``python -m bench.launch.controller start``.

Each of several fresh interpreters reports the time of its import, and the time from there to the first answers.
"""

from __future__ import annotations

import json
import subprocess
import sys

from bench.measure import QUICK, emit, percentile, run, version
from monarch_kernel._version import __version__

TIMES = 5 if QUICK else 15
RANKS = 8
PROGRAM = f"""
import time
began = time.perf_counter()
import monarch_kernel.actor as actors
imported = time.perf_counter()

class Probe(actors.Actor):
    @actors.endpoint
    def here(self):
        return 1

probes = actors.this_host().spawn_procs(per_host={{"gpus": {RANKS}}}).spawn("probe", Probe)
assert len(list(probes.here.call().get(60).values())) == {RANKS}
answered = time.perf_counter()
print([(imported - began) * 1e3, (answered - imported) * 1e3])
actors.shutdown_context().get(60)
"""


def start() -> None:
    """Start one controller after the other; the first writes the byte code and is not counted."""
    taken: list[list[float]] = []
    for _ in range(1 + TIMES):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
        taken.append(json.loads(done.stdout))
    for metric, times in zip(("import_ms", "answer_ms"), zip(*taken[1:])):
        emit(metric, round(percentile(times, 0.5), 1), n=TIMES, best=round(min(times), 1))


if __name__ == "__main__":
    version(monarch_kernel=__version__)
    run({"start": start})
