"""The Ray actor that owns the worker of a host.

Ray sends the class by value, so this module imports nothing from this package: the interpreter of Ray's workers need
not have it.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

#: A placeholder for the address of the node in the command line of a worker.
ADDRESS = "NODE_ADDRESS"
#: The number of lines of a worker's output that are kept.
_LINES = 1000
#: The time limit for a worker to end in good order (seconds).
_GRACE = 6.0
#: How long the bundles of a job are kept after its last worker has failed, for a replacement (seconds).
_HOLD = 60.0
#: How long an answer waits for the announcement of a worker (seconds).
_START_GLANCE = 0.5
#: The interval at which the actor of an ended worker checks whether all others have ended, too (seconds).
_PAUSE = 1.0
#: Variables that Ray sets only for the actor's process: ranks are no Ray workers, and have a separate debugger.
_RAYS_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV")


class HostActor:
    """Starts a worker on its node, keeps it for the actor's lifetime, and reports its state.

    Args:
        job: the id of the job.
        host: the number of the host.
        group: the id of its placement group.
        argv: the command of the worker; ``ADDRESS`` in it is replaced by the address of the node.
        stdin: the input of the worker: its key and environment variables.
        mark: environment variables by which its processes are found.
        own_python: whether it runs in the interpreter of this actor.
        hold: the maximum time that the bundles of the job are kept after its last worker has failed (seconds).
    """

    def __init__(
        self,
        job: str,
        host: int,
        group: str,
        argv: Sequence[str],
        stdin: bytes,
        mark: dict[str, str],
        own_python: bool,
        hold: float,
    ) -> None:
        self._ray: ModuleType = importlib.import_module("ray")
        self._job, self._host, self._group = job, host, group
        self._hold = min(hold, _HOLD) if hold > 0 else _HOLD
        self._node: str = self._ray.get_runtime_context().get_node_id()
        self._since = time.time()
        self._said = b""
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._code: int | None = None
        self._ended_at = 0.0
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        address = self._ray.util.get_node_ip_address()
        address = f"[{address}]" if ":" in address else address
        command = [word.replace(ADDRESS, address) for word in argv]
        if own_python:
            command[0] = sys.executable
        environment = {name: value for name, value in os.environ.items() if name not in _RAYS_OWN} | mark
        if environment.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del environment["PYTHONBREAKPOINT"]
        # Its other end stays open as long as this process lives, however it ends. The worker ends with it.
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--lifeline", str(lifeline)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(lifeline,),
                start_new_session=True,
                env=environment,
            )
        except OSError as e:
            self._lines.append(f"{command[0]} cannot be run: {e.strerror}".encode())
            self._note_end(127)
        else:
            threading.Thread(target=self._follow, args=(self._process, stdin), daemon=True).start()
        finally:
            os.close(lifeline)
        threading.Thread(target=self._outlive, daemon=True).start()

    def told(self) -> dict[str, Any]:
        """Return the state of the worker as plain data. Waits a moment for a worker that is starting."""
        end = time.monotonic() + _START_GLANCE
        while not self._said and self._code is None and time.monotonic() < end:
            time.sleep(0.01)
        return {
            "node": self._node,
            "group": self._group,
            "said": self._said,
            "code": self._code,
            "last": b"" if self._code in (None, 0) else next((x for x in reversed(self._lines) if x.strip()), b""),
            "since": self._since if self._code is None else self._ended_at,
        }

    def log(self, lines: int) -> str:
        """Return the last lines that the worker has written."""
        return b"\n".join(list(self._lines)[-lines:]).decode(errors="replace") if lines > 0 else ""

    def held(self) -> float | None:
        """Return how long this host still needs the bundles of the job (seconds); None: as long as it lives."""
        if self._code is None:
            return None
        if self._code == 0 or self._stopped:
            return 0.0
        return max(0.0, self._ended_at + self._hold - time.time())

    def stop(self) -> None:
        """End the worker, in good order if it has started. Returns when it has ended."""
        self._stopped = True
        process = self._process
        if process is None:
            return
        end = time.monotonic() + _GRACE
        if self._said:  # signal only the worker, which ends its ranks
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            while self._code is None and time.monotonic() < end:
                time.sleep(0.01)
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            while self._code is None and time.monotonic() < end + _GRACE:
                time.sleep(0.01)

    # -- on threads of their own ----------------------------------------------------------------------

    def _follow(self, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(stdin)
        reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        reader.start()
        with process.stdout as out:
            for line in out:
                # The announcement is one line. Any other output of a wrapper is part of the log.
                if line.lstrip().startswith(b"{"):
                    self._said += line
                else:
                    self._lines.append(line.rstrip(b"\n"))
        code = process.wait()
        reader.join(0.5)  # its processes may share the output, and outlive it for a moment
        self._note_end(code)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._lines.append(line.rstrip(b"\n"))

    def _note_end(self, code: int) -> None:
        self._ended_at = time.time()
        self._code = code

    def _outlive(self) -> None:
        """Stay after the worker to report its end, and release the job's bundles once none of its workers is alive."""
        while self._code is None:
            time.sleep(0.05)
        while not self._all_ended():
            time.sleep(_PAUSE)
        ray = self._ray
        groups = importlib.import_module("ray.util.placement_group")
        for group, row in ray.util.placement_group_table().items():
            if row["name"].startswith(f"monarch_kernel-{self._job}-") and row["state"] != "REMOVED":
                held = groups.PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))
                ray.util.remove_placement_group(held)  # this ends the current process, too

    def _all_ended(self) -> bool:
        """Return whether all hosts of the job have ended. Only the first host checks this."""
        ray = self._ray
        try:
            named = ray.util.list_named_actors(all_namespaces=True)
            namespace = "monarch_kernel"
            hosts = [
                each["name"]
                for each in named
                if each["namespace"] == namespace and each["name"].startswith(f"{self._job}.")
            ]
            if min((int(name.rpartition(".")[2]) for name in hosts), default=self._host) != self._host:
                return False
            others = [ray.get_actor(name, namespace=namespace) for name in hosts if name != f"{self._job}.{self._host}"]
            left = [self.held(), *ray.get([other.held.remote() for other in others], timeout=_GRACE)]
        except Exception:
            return False  # Ray is queried again: an actor has ended meanwhile, is starting, or does not answer
        return all(seconds is not None and seconds <= 0 for seconds in left)
