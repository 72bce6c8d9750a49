"""TorchTitan's Llama debug model, with tensor parallelism under FSDP2, on CPUs: ``python titan.py FOLDER``.

It trains on four ranks, and then compares and replays that in this process. The ranks are those of torchrun's agent,
forked when this process has loaded TorchTitan, which computes longer than all of their steps. The last line that is
printed is JSON. `accelerator` is a module of the notebook on TorchTitan.
"""

from __future__ import annotations

import argparse
import json
import logging
import uuid
import warnings
from pathlib import Path
from typing import Any

import accelerator  # pyright: ignore[reportMissingImports]  # before torchtitan asks for one
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torchtitan.config import ConfigManager  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3 import Transformer, llama3_args  # pyright: ignore[reportMissingImports]
from torchtitan.train import Trainer  # pyright: ignore[reportMissingImports]

assert accelerator
#: Of the debug model, the first layers are as good as all six.
llama3_args["debugmodel"].n_layers = 2
LENGTH = 64


def build_model() -> torch.nn.Module:
    """Build the whole model, for the reference."""
    arguments = llama3_args["debugmodel"]
    arguments.max_seq_len = LENGTH
    return Transformer(arguments)


def trainer(folder: Path, steps: int) -> Any:
    """Build TorchTitan's trainer on this rank."""
    config = ConfigManager().parse_args(
        [
            f"--job.config_file={folder / 'debug.toml'}",
            f"--job.dump_folder={folder / 'dump'}",
            f"--model.hf_assets_path={folder / 'tokenizer'}",
            f"--training.dataset_path={folder / 'data'}",
            f"--training.seq_len={LENGTH}",
            f"--training.steps={steps}",
            "--parallelism.tensor_parallel_degree=2",
            "--checkpoint.no-enable",
            "--metrics.no-enable-wandb",
            "--metrics.no-enable-tensorboard",
        ]
    )
    made = Trainer(config)
    for module in made.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale sums
    return made


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("titan")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=4,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    broken = elastic_launch(config, trained)(folder)
    found = {name: compared(folder / name) for name in ("right", "wrong")}
    found |= {"broken": [broken[rank] for rank in sorted(broken)], "replay": replayed(folder, folder / "step", 3)}
    print(json.dumps(found))


def trained(folder: Path) -> list[str]:
    """Train steps that are captured, recorded, recorded with a wrong rank, and watched; return the broken rules.

    Each training builds a trainer. They share the process group, and the imports, which compute longer than all steps.
    """
    from monarch_kernel.numerics import capture, record
    from monarch_kernel.numerics.rules import rules

    made = trainer(folder, 3)  # the first one, as in the process that replays: groups of both have the same names
    taken = capture("step", folder=folder / "step")
    made.train()
    assert taken.state == "written", taken.state
    made.close()
    made = trainer(folder, 3)
    with record("right", made.model_parts[0], steps=2, folder=folder / "right", full=True):
        made.train()
    made.close()
    made = trainer(folder, 1)
    if dist.get_rank() % 2:  # one rank of each pair of tensor parallelism
        layer = made.model_parts[0].layers["1"].feed_forward.w2
        forward = layer.forward
        layer.forward = lambda given: forward(given) * 1.05
    with record("wrong", made.model_parts[0], steps=1, folder=folder / "wrong", full=True):
        made.train()
    made.close()
    broken: list[str] = []
    made = trainer(folder, 3)
    with rules(every=1, report=lambda each: broken.append(str(each))):
        made.train()
    made.close()
    dist.destroy_process_group()
    return broken


def compared(target: Path) -> dict[str, Any]:
    """Compare a recording with one process."""
    from monarch_kernel.numerics import Recording
    from monarch_kernel.numerics.reference import compare_with_reference

    found = compare_with_reference(Recording.open(target), f"{__file__}:build_model")
    first = found.first and [found.first.phase, found.first.module, found.first.tensor]
    return {"equal": found.equal, "compared": found.compared, "first": first, "text": str(found)}


def replayed(folder: Path, target: Path, rank: int) -> dict[str, Any]:
    """Replay the captured step of a rank."""
    from monarch_kernel.numerics import replay

    with replay(target, rank=rank, quiet=True) as running:
        trainer(folder, 3).train()
    report = running.report
    return {
        "equal": report.equal,
        "gradients": report.gradients,
        "updated": report.updated,
        "collectives": report.collectives,
        "text": report.text(),
    }


if __name__ == "__main__":
    main()
