"""Calls, casts, ports and output over four hosts, which nothing breaks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Channel, HostMesh
from monarch_kernel.errors import ActorError
from tests.conftest import needs
from tests.network.actors import Remote
from tests.network.cluster import Cluster, Controller
from tests.network.driver import pause
from tests.waiting import patience

NAMES = ["host0", "host1", "host2", "host3"]
MB = 1 << 20


def spawn(hosts: HostMesh, **per_host: int) -> Any:
    return hosts.spawn_procs(per_host=per_host or {"gpus": 2}).spawn("remote", Remote)


# -- where things are -------------------------------------------------------------------------


def places(hosts: HostMesh) -> dict[str, Any]:
    actors = spawn(hosts)
    everywhere = actors.host.call().get(patience(30))
    return {
        "sizes": dict(hosts.sizes),
        "all": [[dict(point), value] for point, value in everywhere.items()],
        "third": list(actors.slice(hosts=2).host.call().get(patience(30)).values()),
        "last two": sorted(future.get(patience(30)) for future in actors.slice(hosts=slice(2, 4)).host.stream()),
        "one": actors.slice(hosts=1, gpus=1).host.call_one().get(patience(30)),
        "shown": repr(hosts),
    }


def test_hosts_by_name_and_place(controller: Controller) -> None:
    seen = controller.run(places)
    assert seen["sizes"] == {"hosts": 4}
    assert seen["all"] == [[{"hosts": h, "gpus": g}, NAMES[h]] for h in range(4) for g in range(2)]
    assert seen["third"] == ["host2", "host2"]
    assert seen["last two"] == ["host2", "host2", "host3", "host3"]
    assert seen["one"] == "host1"
    assert all(name in seen["shown"] for name in NAMES)


def some_hosts(hosts: HostMesh) -> list[str]:
    chosen = hosts.slice(hosts=slice(1, 3))
    return list(spawn(chosen, gpus=1).host.call().get(patience(30)).values())


def test_procs_on_a_slice_of_the_hosts(controller: Controller) -> None:
    assert controller.run(some_hosts) == ["host1", "host2"]


def two_meshes(hosts: HostMesh) -> list[list[str]]:
    return [list(spawn(hosts, gpus=1).host.call().get(patience(30)).values()) for _ in range(2)]


def test_two_workers_only(shared: Cluster, controller: Controller) -> None:
    urls = [shared.workers["host3"].url, shared.workers["host0"].url]
    assert controller.run(two_meshes, workers=urls) == [["host3", "host0"]] * 2


def spawned_by_a_rank(hosts: HostMesh) -> list[list[str]]:
    actors = spawn(hosts.slice(hosts=slice(0, 1)), gpus=1)
    return [actors.spawn_beside.call_one(hosts.slice(hosts=slice(n, n + 2))).get(patience(60)) for n in (0, 2)]


def test_a_rank_starts_procs_on_other_hosts(controller: Controller) -> None:
    assert controller.run(spawned_by_a_rank) == [["host0", "host1"], ["host2", "host3"]]


def lean_ranks(hosts: HostMesh) -> list[list[str]]:
    return list(spawn(hosts.slice(hosts=slice(0, 1)), gpus=1).modules.call().get(patience(30)).values())


def test_ranks_know_nothing_of_tls(controller: Controller) -> None:
    names = controller.run(lean_ranks)[0]
    assert "monarch_kernel.runtime.node.tcp" not in names  # the module ssl itself is part of asyncio
    assert not {"zmq", "cryptography"} & {name.split(".")[0] for name in names}


# -- messages ---------------------------------------------------------------------------------


def errors(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts, gpus=1)
    actors.initialized.get(patience(30))
    try:
        actors.boom.call([1, 3]).get(patience(30))
    except ActorError as error:
        healthy = sorted(set(error.values.values())) if isinstance(error.values, dict) else None
        return [str(error), healthy]
    return []


def test_an_error_tells_which_hosts_failed(controller: Controller) -> None:
    text = controller.run(errors)[0]
    assert "no luck on host1" in text
    assert "no luck on host3" in text


def between(hosts: HostMesh) -> Any:
    actors = spawn(hosts, gpus=1)
    actors.host.call().get(patience(30))
    first, last = actors.slice(hosts=0), actors.slice(hosts=slice(2, 4))
    return first.ask.call_one(last, "hello").get(patience(30)), [
        future.get(patience(30)) for future in actors.slice(hosts=slice(1, 4)).ask.stream(first, "x")
    ]


def test_actors_call_each_other_across_hosts(controller: Controller) -> None:
    assert controller.run(between) == [["hello", "hello"], [["x"]] * 3]


def direct(hosts: HostMesh, size: int) -> int:
    actors = spawn(hosts.slice(hosts=slice(0, 2)), gpus=1)
    actors.host.call().get(patience(30))
    one, other = actors.slice(hosts=0), actors.slice(hosts=1)
    pause()
    return one.relay.call_one(other, size).get(patience(60))


def test_hosts_talk_to_each_other_directly(shared: Cluster, controller: Controller) -> None:
    """What goes from one host to another does not pass through the controller."""
    run = controller.begin(direct, 8 * MB)
    run.heard()
    before = [shared.network.traffic(host) for host in shared.network.hosts]
    run.go_on()
    assert run.result() == 8 * MB
    home, host0, host1, *_ = (shared.network.traffic(host) - was for host, was in zip(shared.network.hosts, before))
    assert host0 > 8 * MB
    assert host1 > 8 * MB
    assert home < MB


def ports(hosts: HostMesh) -> list[Any]:
    actors = spawn(hosts.slice(hosts=slice(0, 2)), gpus=1)
    port, receiver = Channel.open()
    actors.send.call(port, "to the controller").get(patience(30))
    got = [receiver.recv().get(patience(30)) for _ in range(2)]
    meeting = actors.slice(hosts=1).meet.call_one(port)
    remote = receiver.recv().get(patience(30))
    actors.slice(hosts=0).send.call_one(remote, "from host to host").get(patience(30))
    got.append(meeting.get(patience(30)))
    meeting = actors.slice(hosts=0).meet.call_one(port)
    receiver.recv().get(patience(30)).send("from the controller")
    return [*got, meeting.get(patience(30))]


def test_ports_work_across_hosts(controller: Controller) -> None:
    said = ["to the controller", "to the controller", "from host to host", "from the controller"]
    assert controller.run(ports) == said


def shared_singleton(hosts: HostMesh) -> list[int]:
    return sorted(spawn(hosts, gpus=1).common_pid.call().get(patience(60)).values())


def test_the_jobs_controllers_are_the_same_for_all_hosts(controller: Controller) -> None:
    """``get_or_spawn_controller``, called on several hosts at once, gives one actor."""
    pids = controller.run(shared_singleton)
    assert len(pids) == 4
    assert len(set(pids)) == 1


def order(hosts: HostMesh, rounds: int) -> list[list[int]]:
    """Casts and direct calls to the same actors, in turn."""
    actors = spawn(hosts, gpus=1)
    each = [actors.slice(hosts=n) for n in range(4)]
    actors.host.call().get(patience(30))
    for n in range(0, rounds, 4):
        actors.note.broadcast(n)
        for one in each:
            one.note.broadcast(n + 1)
        actors.slice(hosts=slice(0, 4)).note.broadcast(n + 2)
        for one in each:
            one.note.call(n + 3)
    return list(actors.get_notes.call().get(patience(60)).values())


def test_messages_arrive_in_order_over_a_slow_wire(shared: Cluster, controller: Controller) -> None:
    with shared.network.slow(shared.network["host2"], delay=0.01, jitter=0.008, loss=0.005):
        assert controller.run(order, 200) == [list(range(200))] * 4


def order_between(hosts: HostMesh, rounds: int) -> list[list[int]]:
    actors = spawn(hosts, gpus=1)
    actors.host.call().get(patience(30))
    actors.slice(hosts=0).tell_in_turn.call_one(actors.slice(hosts=slice(1, 4)), rounds).get(patience(60))
    return list(actors.slice(hosts=slice(1, 4)).get_notes.call().get(patience(60)).values())


def test_a_ranks_casts_and_calls_arrive_in_order(shared: Cluster, controller: Controller) -> None:
    with shared.network.slow(shared.network["host1"], delay=0.01, jitter=0.008):
        assert controller.run(order_between, 100) == [list(range(100))] * 3


# -- large values -----------------------------------------------------------------------------


def large(hosts: HostMesh, kind: str) -> list[Any]:
    actors = spawn(hosts.slice(hosts=slice(0, 2)), gpus=1)
    if kind == "bytes":
        value: Any = bytes(range(256)) * (16 * MB // 256)
    elif kind == "numpy":
        value = importlib.import_module("numpy").arange(2 * MB, dtype="float64").reshape(2, MB)
    else:
        value = importlib.import_module("torch").arange(4.0 * MB)
    back = actors.echo.call(value).get(patience(60))
    return [one == value if kind == "bytes" else bool((one == value).all()) for one in back.values()]


@pytest.mark.parametrize("kind", ["bytes", "numpy"])
def test_sixteen_megabytes_there_and_back(controller: Controller, kind: str) -> None:
    pytest.importorskip("numpy")
    assert controller.run(large, kind) == [True, True]


@pytest.mark.torch
def test_a_large_tensor_there_and_back(shared: Cluster) -> None:
    """By a controller of its own: what it has imported, ranks get, too."""
    needs("torch")
    controller = shared.control(shared.urls[:1])
    assert controller.run(large, "torch") == [True]
    controller.finish()


def many(hosts: HostMesh) -> int:
    actors = spawn(hosts)
    return sum(
        sum(future.get(patience(60)).values()) for future in [actors.size_of.call(b"x" * 1000) for _ in range(200)]
    )


def test_many_calls_at_once(controller: Controller) -> None:
    assert controller.run(many) == 200 * 8 * 1000


# -- output, scripts and several controllers --------------------------------------------------


def shout(hosts: HostMesh, text: str) -> None:
    spawn(hosts, gpus=1).shout.call(text).get(patience(30))


def test_output_of_remote_ranks_reaches_the_controller(controller: Controller) -> None:
    controller.run(shout, "greetings")
    for name in NAMES:
        controller.wait_for_log(f"greetings from {name}")
        controller.wait_for_log(f"greetings complains from {name}")


SCRIPT = """
import socket, sys
from monarch_kernel.actor import Actor, attach_to_workers, endpoint

class Mine(Actor):
    def __init__(self, tag):
        self.tag = tag

    @endpoint
    async def where(self):
        return f"{self.tag}@{socket.gethostname()}"

hosts = attach_to_workers(ca="trust_all_connections", workers=sys.argv[1:])
mine = hosts.spawn_procs(per_host={"gpus": 2}).spawn("mine", Mine, "a")
print(*mine.where.call().get().values())
"""


def test_a_script_whose_classes_are_its_own(shared: Cluster, tmp_path: Path) -> None:
    """Nothing of it is left when it ends, and it has nothing to say about that."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"MONARCH_KERNEL_KEY_FILE": str(shared.key_file)}
    process = shared.network["controller"].start([sys.executable, str(script), *shared.urls[:2]], env)
    assert process.communicate() == (0, "a@host0 a@host0 a@host1 a@host1\n", "")
    shared.idle()


def hold(hosts: HostMesh) -> list[str]:
    actors = spawn(hosts, gpus=1)
    port, receiver = Channel.open()
    pending = actors.hold.call(port)
    held = [receiver.recv().get(patience(30)) for _ in range(4)]
    pause()
    for _, _, one in held:
        one.send(None)
    return list(pending.get(patience(30)).values())


def test_two_controllers_on_the_same_workers(shared: Cluster, controller: Controller) -> None:
    """Each has its procs to itself, and the end of one is nothing to the other."""
    other = shared.control(shared.urls[:2])
    run = controller.begin(hold)
    run.heard()
    assert other.run(two_meshes) == [["host0", "host1"]] * 2
    other.finish()
    run.go_on()
    assert run.result() == ["held"] * 4
