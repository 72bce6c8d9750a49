"""A debugger of another process's job that dies while it has stopped all ranks: ``viewer.py FILE JOB.py LINE``."""

from __future__ import annotations

import os
import signal
import sys

from monarch_kernel import engines
from monarch_kernel.debug import get_debugger

(procs,) = engines.use("torchmonarch").attach(sys.argv[1]).proc_meshes
debugger = get_debugger()
debugger.break_at(sys.argv[2], int(sys.argv[3]), mesh=procs)
while len(debugger.stops()) < len(procs):
    debugger.wait(timeout=60)
print("stopped", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
