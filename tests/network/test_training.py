"""A training run over several hosts that goes on when one of them has gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import HostMesh, MeshFailure
from monarch_kernel.spmd import ProcessGroups
from tests.conftest import needs
from tests.network.cluster import Cluster
from tests.network.driver import pause
from tests.network.training import Trainer

needs("torch")
pytestmark = pytest.mark.torch

#: To start, to join and to step (seconds).
LONG = 60.0


def train(hosts: HostMesh) -> list[Any]:
    """Two ranks on each of two hosts, and a spare: steps, the loss of a host, and steps again."""
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs(
        {"gpus": 2}, preload=("torch", "torch._dynamo"), spares=hosts.slice(hosts=2)
    )
    trainers = procs.spawn("trainer", Trainer)
    groups = ProcessGroups(procs)
    trainers.join.call(groups.form().get(LONG)).get(LONG)
    before = [list(trainers.step.call().get(LONG).values()) for _ in range(3)]
    pause()
    failed = ""
    try:
        trainers.step.call().get(LONG)
    except MeshFailure as error:
        failed = str(error)
    group = groups.form(patience=2.0).get(LONG)
    joined = list(trainers.join.call(group).get(LONG).values())
    after = list(trainers.step.call().get(LONG).values())
    replaced = [(one.rank, one.old_host, one.host) for one in group.healed.replaced]
    return [before, failed, replaced, joined, after, list(trainers.sum_of_weights.call().get(LONG).values())]


@pytest.mark.parametrize("victim", ["host0", "host1"])  # the first has the store where the ranks meet
def test_a_host_is_lost_and_training_goes_on_with_a_spare(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: str
) -> None:
    """Nobody hears of it but by silence. The group, its store and gloo use the addresses by which hosts are reached."""
    # torch warns of names that it cannot find, and leaves a folder behind.
    torch_env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    # 1 s, as in other tests, is too short beside hosts that load torch: those that live would count as lost.
    three = cluster(3, {"MONARCH_KERNEL_HEARTBEAT_TIMEOUT": "3", **torch_env})
    run = three.control().begin(train)
    run.heard(LONG)
    three.network.vanish(three.network[victim])
    run.go_on()
    before, failed, replaced, joined, after, weights = run.result(LONG)
    assert before == [[1] * 4, [2] * 4, [3] * 4]
    assert victim in failed
    lost = [0, 1] if victim == "host0" else [2, 3]
    assert replaced == [[rank, victim, "host2"] for rank in lost]
    assert (joined, after) == ([3] * 4, [4] * 4)
    assert len(set(weights)) == 1
