"""GPUs that an engine gave: which a rank gets, and what is said when there are too few."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, attach_to_workers, endpoint
from monarch_kernel.errors import DeviceError, SupervisionError
from monarch_kernel.runtime.host import devices
from monarch_kernel.runtime.host.devices import Devices, device_environment, devices_here
from tests.workers import team, workers

__all__ = ["workers"]

MIG = "MIG-4a8e1f9c-0f6e-5d3a-9d57-7f7d3d1f2a10"


class Shown(Actor):
    """Tells which devices its process sees."""

    @endpoint
    def variables(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES")}


@pytest.mark.parametrize(
    "environ, slot, each, chosen",
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 1, {"CUDA_VISIBLE_DEVICES": "5"}),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ({"CUDA_VISIBLE_DEVICES": f"GPU-1f,{MIG}"}, 1, 1, {"CUDA_VISIBLE_DEVICES": MIG}),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, 0, 1, {"HIP_VISIBLE_DEVICES": "2"}),
        (
            {"ROCR_VISIBLE_DEVICES": "2,3,4,5", "HIP_VISIBLE_DEVICES": "0,1,2,3"},
            1,
            2,
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
    ],
)
def test_each_rank_gets_its_own(environ: dict[str, str], slot: int, each: int, chosen: dict[str, str]) -> None:
    assert device_environment(slot, each, "node1", environ) == chosen


def test_variables_of_all_makers_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm does where its configuration does not say of what make the GPUs are."""
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
    environ = dict.fromkeys(names, "0,1")
    assert device_environment(1, 1, "node1", environ) == {"CUDA_VISIBLE_DEVICES": "1"}
    # AMD's libraries count by one variable within what the other leaves.
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "gpu_id").write_text("5095\n")
    monkeypatch.setattr(devices, "_AMD", str(tmp_path))
    monkeypatch.setattr(devices, "_NVIDIA", str(tmp_path / "nowhere"))
    within = {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert device_environment(1, 1, "node1", environ) == within


@pytest.mark.parametrize(
    "environ, each, said",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, "rank 2 of node1 needs device 2, and the engine gave node1 2 (0, 1)"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, "the engine gave node1 none"),
        ({"CUDA_VISIBLE_DEVICES": ",".join([MIG] * 6)}, 2, "a process of node1 can use one MIG slice only, not 2"),
    ],
)
def test_what_cannot_be_given_is_an_error(environ: dict[str, str], each: int, said: str) -> None:
    with pytest.raises(DeviceError) as caught:
        device_environment(2, each, "node1", environ)
    assert said in str(caught.value)


def test_invalid_and_empty_lists_name_no_device() -> None:
    assert devices_here({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == Devices("CUDA_VISIBLE_DEVICES", ("0",))
    assert devices_here({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == Devices("CUDA_VISIBLE_DEVICES", ())


def test_ranks_of_a_worker_see_their_own_devices_after_a_heal_too() -> None:
    with team("ipc") as nodes:
        nodes.start(env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
        hosts = attach_to_workers(workers=nodes.urls)
        procs = hosts.spawn_procs(per_host={"gpus": 2}, devices=2)
        shown: Any = procs.spawn("shown", Shown)
        expected = [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
        assert list(shown.variables.call().get().values()) == expected
        assert [status.devices for status in procs.status().get().values()] == ["4,5", "6,7"]
        procs.slice(gpus=1).kill("to be healed").get()
        procs.heal().get()
        assert list(shown.variables.call().get().values()) == expected
        with pytest.raises(SupervisionError, match=r"rank 2 of node0 needs 2 devices, up to number 5, and .*4 \(4, 5"):
            hosts.spawn_procs(per_host={"gpus": 3}, devices=2).initialized.get()
        hosts.stop().get()
