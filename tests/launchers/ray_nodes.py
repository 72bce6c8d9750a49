"""A real Ray of this machine: a head without resources and nodes with two devices each, in a network namespace.

Its processes belong to one of their own (``python -m tests.launchers.ray_nodes``), which nobody started: what Ray
starts during a test is no process that the test has left. That one does what it is told on its standard input.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, describe
from tests.launchers.engines import CannotRunError
from tests.launchers.namespace import own_network
from tests.waiting import Deadline, patience

NODES = ("n1", "n2")
#: A node that is lost is noticed in a second and not in twelve, or later where a living one is slow to answer.
_CONFIG = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": int(patience(300)),
    "health_check_failure_threshold": 3,
}
#: Its autoscaler can add no nodes, and says so.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    # A node starts some Python of its own, and gives up where that takes 30 s, on any machine.
    "RAY_agent_register_timeout_ms": f"{patience(60) * 1000:.0f}",
    "RAY_worker_register_timeout_seconds": f"{patience(60):.0f}",
    "RAY_gcs_server_port_wait_time_s": f"{patience(30):.0f}",
    "RAY_gcs_server_request_timeout_seconds": f"{patience(60):.0f}",
}
_MEMORY = 80 * 2**20


class Ray:
    """The cluster, from the tests' side."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets need a short path
        os.mkdir(f"{self.folder}/ray")  # for the address of "the" cluster of this machine, which is another one
        self._log = open(f"{self.folder}/nodes.log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launchers.ray_nodes", self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **_SETTINGS, "RAY_TMPDIR": self.folder},
        )
        self._process.wait(patience(60))  # it has left another one behind
        self.address = self._answer()["address"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(f"{self.folder}/nodes.log").read_text()[-3000:]
        return json.loads(line)

    def _say(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(words)}\n".encode())
        self._process.stdin.flush()
        self._answer()

    def add(self, node: str) -> None:
        """Another node, which is there when this returns."""
        self._say("add", node)

    def lose(self, node: str) -> None:
        """A node is gone at once, with all that runs on it."""
        self._say("lose", node)

    def processes(self) -> list[int]:
        """All living processes that belong to it."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid() and alive(int(entry.name)):
                try:
                    if self.folder.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()  # until it has ended
        self._process.stdout.close()
        self._log.close()
        end = Deadline(20)
        while (left := self.processes()) and end.left():
            time.sleep(0.02)
        shown = [describe(pid) for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder)
        assert not shown, f"Ray's tests left processes: {shown}"


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Ray]:
    """A Ray for the tests of a module, to which this program is connected as one that uses Ray itself."""
    ray = pytest.importorskip("ray", reason="ray is not installed: monarch_kernel[ray]")
    try:
        with own_network():
            cluster = Ray()
            os.environ["RAY_ADDRESS"] = cluster.address
            try:
                ray.init(namespace="a_program", log_to_driver=False, logging_level="error")
                yield cluster
            finally:
                del os.environ["RAY_ADDRESS"]
                ray.shutdown()
                cluster.close()
    except CannotRunError as why:
        pytest.skip(str(why))


def _patient(find: Callable[..., Any]) -> Callable[..., Any]:
    """Looks for a node that starts for as long as this machine needs: Ray gives it 30 s on any machine."""

    def get_node(*args: Any, **options: Any) -> Any:
        end = Deadline(60)
        while True:
            try:
                return find(*args, **options)
            except RuntimeError:
                if not end.left():
                    raise
                time.sleep(0.1)

    return get_node


def main(folder: str) -> None:
    """Keep the cluster, and do what the tests say."""
    if os.fork():
        os._exit(0)
    os.setsid()
    with suppress(PermissionError):  # else it is as slow as what runs beside it, and loses nodes that are there
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    from ray._private import services
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _MEMORY, "temp_dir": folder}
    services.get_node = _patient(services.get_node)
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _CONFIG})
    nodes: dict[str, Any] = {}

    def add(*names: str) -> None:
        for name in names:
            nodes[name] = cluster.add_node(
                wait=False, node_name=name, num_cpus=4, num_gpus=2, object_store_memory=_MEMORY, resources={"slot": 1}
            )
        cluster.wait_for_nodes(patience(30))

    try:
        add(*NODES)
        print(json.dumps({"address": cluster.address}), file=out, flush=True)
        for line in sys.stdin:
            what, name = line.split()
            if what == "add":
                add(name)
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print("{}", file=out, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
