"""TorchTitan's Llama debug model, with tensor parallelism under FSDP2, on CPUs: ``python titan.py WHAT FOLDER``.

``record``, ``rules`` and ``capture`` train on the ranks of torchrun; ``compare`` and ``replay`` run in one process
afterwards. The last line that is printed is JSON. `accelerator` is a module of the notebook on TorchTitan.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerator  # pyright: ignore[reportMissingImports]  # before torchtitan asks for one
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
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
    parser.add_argument("what", choices=("record", "rules", "capture", "compare", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--rank", type=int, default=0)
    found = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    target = found.folder / found.name
    if found.what == "compare":
        print(json.dumps(compared(target)))
    elif found.what == "replay":
        print(json.dumps(replayed(found.folder, target, found.rank)))
    else:
        answer = trained(found.what, found.folder, target)
        if answer is not None:
            print(json.dumps(answer))


def trained(what: str, folder: Path, target: Path) -> list[str] | None:
    """Train three steps, which are recorded, watched or captured; of rules, rank 0 returns those that broke."""
    from monarch_kernel.numerics import capture, record
    from monarch_kernel.numerics.rules import rules

    made = trainer(folder, 3)
    broken: list[str] = []
    context: Any = nullcontext()
    if what == "record":
        context = record(target.name, made.model_parts[0], steps=2, folder=target, full=True)
    elif what == "rules":
        context = rules(every=1, report=lambda each: broken.append(str(each)))
    try:
        if what == "capture":
            taken = capture(target.name, folder=target)
            made.train()
            assert taken.state == "written", taken.state
        else:
            with context:
                made.train()
    finally:
        made.close()
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return broken if first and what == "rules" else None


def compared(target: Path) -> dict[str, Any]:
    """Compare a recording with one process."""
    from monarch_kernel.numerics import Recording
    from monarch_kernel.numerics.reference import compare_with_reference

    found = compare_with_reference(Recording.open(target), f"{__file__}:build_model")
    return {"equal": found.equal, "compared": found.compared, "text": str(found)}


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
