"""Programs on simulated meshes, against the same programs on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.actor import this_host
from monarch_kernel.distributed import Mesh
from monarch_kernel.tensor import (
    SimulatedRates,
    Simulator,
    Stream,
    compile,  # noqa: A004  # Monarch's name
    get_active_mesh,
    inspect,
    memory,
    remote,
    set_meta,
)

WIDTH = 64


def training() -> Callable[[], Any]:
    """A step of data-parallel training, written once."""
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(16, WIDTH), torch.randn(16, WIDTH)

    def step() -> Any:
        optimizer.zero_grad()
        with set_meta("forward"):
            loss = nn.functional.mse_loss(model(inputs), targets)
        with set_meta("backward"):
            loss.backward()
        for parameter in model.parameters():
            parameter.grad.reduce_(("host", "gpu"), "avg")  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach()

    return step


PARAMETERS = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH


def test_a_training_step_on_many_ranks() -> None:
    found = []
    for hosts in (32, 512):
        sim = Simulator(hosts=hosts, gpus=8)
        with sim.mesh.activate():
            step = training()
            step()
            first = sim.step()
            loss = compile(step)()  # as it stands
            assert loss.shape == () and float(loss) == 0
        report = sim.report()
        (group,) = report.groups
        ranks = 8 * hosts
        assert len(group.ranks) == ranks and first[1] > 0
        assert group.sent.keys() == {"all-reduce"}
        assert group.sent["all-reduce"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * PARAMETERS, abs=4)
        assert report.sent == ranks * group.sent["all-reduce"]
        weights = 2 * 4 * WIDTH * WIDTH
        assert group.flops == 16 * 2 * (3 * weights - 4 * WIDTH * WIDTH)  # of the inputs there are no gradients
        kept = 4 * 4 * PARAMETERS  # parameters, gradients, two moments
        assert kept < group.kept < kept + 20_000 and group.peak > group.kept
        assert f"{ranks:,} simulated ranks" in repr(report) and "all-reduce" in repr(report)
        assert f"ranks 0-{ranks - 1}" in repr(report) and "test_simulator.py" in repr(report)
        found.append((group.operations, group.peak))
        del step, loss
    assert found[0] == found[1]


def test_memory_is_that_of_real_ranks(runtime: None) -> None:
    procs = this_host().spawn_procs(per_host={"host": 1, "gpu": 2}, name="real")
    with procs.activate():
        step = training()
        step()
        real = sum(line.nbytes[0] for line in memory().lines)
        del step
    sim = Simulator(hosts=1, gpus=2)
    with sim.mesh.activate():
        step = training()
        step()
    assert sim.report().groups[0].kept == real > 16 * PARAMETERS
    procs.stop().get()


def test_parts_of_the_mesh_have_rows_of_their_own(tmp_path: Path) -> None:
    rates = SimulatedRates(flops=1e12, memory=1e12, link=1e9, network=1e8, launch=1e-6, latency=0.0)
    sim = Simulator(hosts=2, gpus=4, rates=rates, trace_path=str(tmp_path / "t.json"))
    first, second = sim.mesh.slice(host=0), sim.mesh.slice(host=1)
    with first.activate():
        x = torch.ones(1000, requires_grad=True)
        y = x * 2
    with second.activate():
        z = y.to_mesh(second).reduce("gpu", "stack")  # type: ignore[attr-defined]
        z.sum().backward()
    report = sim.report()
    left, right = report.groups
    assert left.ranks == (0, 1, 2, 3) and right.ranks == (4, 5, 6, 7)
    assert left.sent == {"send": 4000}
    assert right.sent == {"all-gather": 12_000, "reduce-scatter": 12_000, "send": 4000}
    assert left.seconds > 2 * 4000 / 1e8 and right.kept >= 16_000 and left.kept == 3 * 4000
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "t.json").symlink_to(mine)  # as another user of a shared folder may
    path = sim.write_trace()
    assert mine.read_text() == "precious"
    trace = json.loads(Path(path).read_text())["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert len(names) == 2
    moved = [event for event in trace if event.get("cat") == "communication"]
    sends = [event for event in moved if event["name"].startswith("to_mesh")]
    assert len(moved) == 6 and len({event["ts"] for event in sends}) == 2  # each on both sides at once
    assert any(event["ph"] == "C" and event["args"]["bytes"] >= 4000 for event in trace)
    assert all("test_simulator.py:" in event["args"]["line"] for event in trace if event["ph"] == "X")


def test_words_of_set_meta_and_streams_in_the_trace(tmp_path: Path) -> None:
    sim = Simulator(hosts=1, gpus=2, group_workers=False, trace_path=str(tmp_path / "t.json"))
    other = Stream("other")
    with sim.mesh.activate():
        a = torch.ones(4, 4)
        with set_meta("outer"), set_meta("inner"):
            b = a @ a
        lent, borrow = other.borrow(b)  # type: ignore[arg-type]
        with other.activate():
            lent.relu()
        borrow.drop()
    sim.mesh.exit()
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in trace if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    slices = {event["name"]: event for event in trace if event["ph"] == "X"}
    product, relu = slices["aten.mm outer inner"], slices["aten.relu"]
    assert relu["tid"] != product["tid"] and relu["ts"] >= product["ts"] + product["dur"]


def test_memory_follows_views_writes_and_ends() -> None:
    sim = Simulator(hosts=1, gpus=1)
    with sim.mesh.activate():
        x = torch.zeros(1000)
        y = x.view(10, 100)[2:]
        assert sim.report().groups[0].kept == 4000
        x.add_(1)
        del x
        assert sim.report().groups[0].kept == 4000
        y = y * 2
        assert sim.report().groups[0].kept == 3200 and sim.report().peak == 7200
        del y
        assert sim.report().groups[0].kept == 0
        assert sim.step()[1] == 7200 / 1e6 and sim.report().groups[0].operations == 0


def test_what_needs_values_says_so() -> None:
    sim = Simulator(hosts=2, gpus=2)
    with sim.mesh.activate():
        x = torch.ones(3) * sim.mesh.rank_tensor("gpu")
        assert inspect(x, host=1).tolist() == [0, 0, 0] and x.sum().item() == 0
        with pytest.raises(RuntimeError, match="size"):
            torch.dot(x, torch.ones(4))
        with pytest.raises(TypeError, match="simulated"):
            x.nonzero()
        assert remote(lambda t: t, propagate=lambda t: t.clone())(x).shape == (3,)
    with pytest.raises(TypeError, match="SimulatedMesh"):
        Mesh.of(sim.mesh)  # type: ignore[arg-type]
    for wrong in ({"hosts": 0, "gpus": 1}, {"hosts": 1, "gpus": 1, "build_ir": True}):
        with pytest.raises(ValueError, match="Simulator"):
            Simulator(**wrong)  # type: ignore[arg-type]


def test_the_simulated_mesh_has_what_meshes_have() -> None:
    sim = Simulator(hosts=2, gpus=4)
    with sim.mesh.activate():
        mesh = get_active_mesh()
        assert mesh.names == ("host", "gpu") and mesh(host=1).names == ("gpu",)
        assert mesh.coordinates(5) == {"host": 1, "gpu": 1}
        assert mesh.rank(("host", "gpu")).dtype == torch.int64 and set(mesh.ranks) == {"host", "gpu"}
