"""``StoreJob``: the hosts of a program that torchrun has started, found through the store of its ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
from typing import Any, Protocol

from monarch_kernel.actor import HostMesh, attach_to_workers
from monarch_kernel.launchers.job import Job, JobState, Path
from monarch_kernel.workers import make_job_folder, remove_job_folder, start_worker_loop_forever

#: The time limit for a worker to listen, and to answer (seconds).
_START_TIME = 60.0


class StoreLike(Protocol):
    """The used methods of a store, such as ``torch.distributed.TCPStore``: ``get`` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class StoreJob(Job):
    """The hosts of a running program: one worker for each local rank 0, which ends with the process of that rank.

    Args:
        worker_addrs: the URLs of the workers, in the order of the hosts.
        name: the name of the mesh.
    """

    def __init__(self, worker_addrs: list[str], name: str) -> None:
        super().__init__()
        self._workers = list(worker_addrs)
        self._name = name
        self._mesh: HostMesh | None = None

    @classmethod
    def from_store(
        cls,
        store: StoreLike,
        *,
        monarch_port: int = 0,
        name: str = "monarch_worker",
        transport: str = "ipc",
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> StoreJob | None:
        """Create a worker on each host. Every rank calls this; global rank 0 gets the job, and the others get None.

        Args:
            store: the store that the ranks share. Only addresses are written there, no keys.
            monarch_port: the port at which workers listen, with ``tcp``; 0: any free port.
            name: the name of the mesh.
            transport: ``ipc`` (all ranks are on this machine) or ``tcp``, for which every host has the team's key
                (``MONARCH_KERNEL_KEY_FILE``).
            rank, local_rank, world_size, local_world_size: by default the values in torchrun's environment.

        Raises:
            RuntimeError: a worker could not start; the error names each one on global rank 0, and the local one on
                others.
            ValueError: the transport is unknown, or the rank is neither given nor in the environment.
        """
        here = _number(rank, "RANK")
        local = _number(local_rank, "LOCAL_RANK")
        step = _number(local_world_size, "LOCAL_WORLD_SIZE")
        hosts = _number(world_size, "WORLD_SIZE") // step
        if transport not in ("ipc", "tcp"):
            raise ValueError(f"transport={transport!r}: there are ipc and tcp")
        failed: Exception | None = None
        if local == 0:
            told: dict[str, str] = {}
            try:
                told["url"] = _start_worker(transport, monarch_port)
            except Exception as e:  # rank 0 waits for this, and reports it
                failed, told["error"] = e, f"{socket.gethostname()}: {e}"
            store.set(f"{name}/{here // step}", json.dumps(told))
        if here == 0:
            found = [json.loads(store.get(f"{name}/{host}")) for host in range(hosts)]
            if errors := [each["error"] for each in found if "error" in each]:
                raise RuntimeError(f"{len(errors)} of {hosts} workers could not start: {'; '.join(errors)}")
            return cls([each["url"] for each in found], name)
        if failed is not None:
            raise RuntimeError(f"the worker of this host could not start: {failed}") from failed
        return None

    def state(self, cached_path: Path | None = None) -> JobState:
        """Return the hosts, attached. Nothing is stored, as they end with their program."""
        return super().state(cached_path)

    def can_run(self, spec: Job) -> bool:
        """Return whether this job satisfies another one: always false, as it belongs to no other program."""
        return False

    def _start(self) -> None:
        pass

    def _hosts(self) -> dict[str, HostMesh]:
        if self._mesh is None:
            self._mesh = attach_to_workers(workers=self._workers, name=self._name, timeout=_START_TIME)
        return {self._name: self._mesh}

    def _end(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.stop("the job was killed").get()  # the workers belong to their ranks

    def _is_alive(self) -> bool:
        return True

    def _spec(self) -> Any:
        return self._workers, self._name

    def _fields(self) -> dict[str, Any]:
        return {"worker_addrs": self._workers, "name": self._name}

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> StoreJob:
        return cls(**fields)


def _number(given: int | None, variable: str) -> int:
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise ValueError(f"{variable} is not set: run the program by torchrun, or give {variable.lower()}=")
    return int(text)


def _start_worker(transport: str, port: int) -> str:
    """Start a worker that ends with this process. Return its URL."""
    if transport == "tcp":
        return start_worker_loop_forever(address=f"tcp://{socket.getfqdn()}:{port}").url.get(_START_TIME)
    folder = make_job_folder()

    def remove() -> None:
        folder.close()
        with contextlib.suppress(OSError):
            remove_job_folder(folder.path)

    atexit.register(remove)
    return start_worker_loop_forever(address=f"ipc://{folder.path}/worker.sock").url.get(_START_TIME)
