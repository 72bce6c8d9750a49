"""The life of a worker: what it keeps, what it drops, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Channel, HostMesh, attach_to_workers
from monarch_kernel.errors import SupervisionError
from tests.conftest import wait_until
from tests.network.actors import Remote
from tests.network.cluster import PORT, Cluster
from tests.network.driver import forget, pause, say
from tests.waiting import patience

Clusters = Callable[..., Cluster]


def spawn(hosts: HostMesh, gpus: int = 1) -> Any:
    return hosts.spawn_procs(per_host={"gpus": gpus}).spawn("remote", Remote)


def host_names(hosts: HostMesh) -> list[str]:
    return list(spawn(hosts).host.call().get(patience(30)).values())


def stop_twice(hosts: HostMesh) -> list[Any]:
    names = []
    for _ in range(2):
        actors = spawn(hosts, 2)
        actors.breed.call().get(patience(30))
        names.append(list(actors.slice(gpus=0).host.call().get(patience(30)).values()))
        hosts.stop("enough").get(patience(30))
    pause()
    return names


def test_stop_drops_everything_and_keeps_the_workers(cluster: Clusters) -> None:
    two = cluster(2)
    run = two.control().begin(stop_twice)
    run.heard()
    two.idle()
    run.go_on()
    assert run.result() == [["host0", "host1"]] * 2


def shut_down(hosts: HostMesh) -> str:
    spawn(hosts, 2).breed.call().get(patience(30))
    hosts.shutdown().get(patience(30))
    forget(hosts)
    try:
        hosts.spawn_procs()
    except RuntimeError as error:
        return str(error)
    return ""


def test_shutdown_ends_the_workers(cluster: Clusters) -> None:
    two = cluster(2)
    assert two.control().run(shut_down) == "HostMesh has already been shut down"
    for worker in two.workers.values():
        assert worker.process.wait() == 0
        wait_until(lambda worker=worker: not worker.host.pids(), f"nothing runs on {worker.host.name}")
        assert worker.host.files() == []


def told_to_end(hosts: HostMesh) -> str:
    actors = spawn(hosts)
    actors.breed.call().get(patience(30))
    port, receiver = Channel.open()
    pending = actors.slice(hosts=1).hold.call(port)
    receiver.recv().get(patience(30))
    say("holding")
    forget(hosts)
    try:
        return f"it did not fail: {pending.get(patience(30))}"
    except SupervisionError as error:
        return str(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_end_takes_its_ranks_along(cluster: Clusters, number: int) -> None:
    """Whoever waits for them is told; the other worker goes on."""
    two = cluster(2)
    controller = two.control()
    run = controller.begin(told_to_end)
    run.heard()
    worker = two.workers["host1"]
    worker.process.signal(number)
    assert "host1" in run.result()
    assert worker.process.wait() == 0
    wait_until(lambda: not worker.host.pids(), f"nothing runs on host1:\n{worker.host.shown()}")
    assert worker.host.files() == []
    assert controller.run(host_names, workers=[two.workers["host0"].url]) == ["host0"]


SCRIPT = """
import sys
from monarch_kernel.actor import run_worker_loop_forever
run_worker_loop_forever(ca="trust_all_connections", address=sys.argv[1])
"""


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_script_that_is_a_worker(cluster: Clusters, tmp_path: Path, end: str) -> None:
    """As written for Monarch, with a listening address apart from the advertised one. Its worker ends with it."""
    one = cluster(1)
    spare = one.spare
    url = f"tcp://{spare.address}:{PORT}"
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    env = {"MONARCH_KERNEL_KEY_FILE": str(one.key_file)}
    script = spare.start([sys.executable, str(path), f"{url}@tcp://0.0.0.0:{PORT}"], env)
    controller = one.control([*one.urls, url])
    assert controller.run(host_names) == ["host0", "spare"]
    assert controller.run(ask_across) == ["from spare", "from host0"]
    script.signal(signal.SIGKILL if end == "killed" else signal.SIGINT)
    script.wait()
    wait_until(lambda: not spare.pids(), f"nothing runs on the host:\n{spare.shown()}")


def ask_across(hosts: HostMesh) -> list[Any]:
    """Each host asks the other: both know where the other listens."""
    actors = spawn(hosts)
    actors.host.call().get(patience(30))
    first, last = actors.slice(hosts=slice(0, 1)), actors.slice(hosts=slice(1, 2))
    return [
        *last.slice(hosts=0).ask.call_one(first, "from spare").get(patience(30)),
        *first.slice(hosts=0).ask.call_one(last, "from host0").get(patience(30)),
    ]


def test_a_second_worker_on_the_same_port_says_so_and_ends(cluster: Clusters) -> None:
    one = cluster(1)
    one.workers["host0"].wait_until_listening()
    listen = ["--listen", one.urls[0], "--key-file", str(one.key_file)]
    second = one.network["host0"].start([sys.executable, "-m", "monarch_kernel", "worker", *listen])
    code, _, err = second.communicate()
    assert code != 0
    assert f"{PORT}" in err
    assert "Traceback" not in err
    assert one.control().run(host_names) == ["host0"]


def other_python(hosts: HostMesh, python: str) -> list[list[str]]:
    chosen = hosts.with_python_executable(python)
    return [list(spawn(mesh).python.call().get(patience(60)).values()) for mesh in (chosen, hosts)]


def test_ranks_in_another_interpreter(cluster: Clusters, tmp_path: Path) -> None:
    python = tmp_path / "other-python"
    python.write_text(f'#!/bin/sh\nOTHER_PYTHON=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    two = cluster(2)
    assert two.control().run(other_python, str(python)) == [["yes", "yes"], ["", ""]]


async def in_a_context(workers: list[str]) -> list[str]:
    attached = attach_to_workers(ca="trust_all_connections", workers=workers)
    async with attached as hosts, hosts.spawn_procs(per_host={"gpus": 1}) as procs:
        return list((await procs.spawn("remote", Remote).host.call()).values())


def run_in_a_context(workers: list[str]) -> list[str]:
    return asyncio.run(in_a_context(workers))


def test_an_async_context_shuts_the_workers_down(cluster: Clusters) -> None:
    two = cluster(2)
    assert two.control([]).run(run_in_a_context, two.urls) == ["host0", "host1"]
    for worker in two.workers.values():
        assert worker.process.wait() == 0
