"""This project's client: ``python -m bench.sync.our_client``."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import msgspec

from bench.sync.service import serve
from monarch_kernel.actor import Actor, attach_to_workers, current_rank, endpoint, shutdown_context
from workspace_sync import CondaEnvironment, Workspace
from workspace_sync import sync as sync_workspace

hosts: Any = None
readers: dict[str, Any] = {}


class Reader(Actor):
    """A rank that imports a module of the workspace."""

    @endpoint
    def value(self, trees: list[str], name: str) -> int:
        """Return the value of the module, imported as if for the first time; ``trees`` has the place on each host."""
        tree = trees[current_rank().rank]
        if tree not in sys.path:
            sys.path.insert(0, tree)
            sys.dont_write_bytecode = True
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name).VALUE


def attach(workers: list[str], key: str) -> None:
    """Connect to workers."""
    global hosts
    hosts = attach_to_workers(workers=workers, key_file=key)


def sync(source: str, count: int | None = None, env: str | None = None) -> dict[str, Any]:
    """Sync a folder or an environment to all hosts or the first ones; return the seconds and data of the receipt."""
    some = hosts if count is None else hosts.slice(hosts=slice(0, count))
    workspace = Workspace(dirs=[source] if source else [])
    began = time.perf_counter()
    report = sync_workspace(some, workspace, env=None if env is None else CondaEnvironment(env))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "sent": report.sent,
        "received": [host.received for host in report.hosts],
        "folders": [host.path for host in report.hosts],
        "phases": msgspec.structs.asdict(report.phases),
    }


def spawn(source: str) -> None:
    """Spawn a rank on each host, which will be queried for its imports."""
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    readers[source] = procs.spawn("reader", Reader)


def imported(source: str, module: str, value: int) -> dict[str, Any]:
    """Sync, and make all ranks import the module; return the seconds until the last one has this value."""
    began = time.perf_counter()
    result = sync(source)
    tree = f"current/tree/{os.path.basename(source)}"
    places = [os.path.join(folder, tree) for folder in result["folders"]]
    found = {value for _, value in readers[source].value.call(places, module).get(60)}
    seconds = time.perf_counter() - began
    if found != {value}:
        raise RuntimeError(f"ranks have imported {found} instead of {value}")
    return {**result, "seconds": seconds}


def memory() -> float:
    """Return the largest resident size so far (MB)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    serve({"attach": attach, "sync": sync, "spawn": spawn, "imported": imported, "memory": memory})
    if hosts is not None:
        shutdown_context().get(60)
