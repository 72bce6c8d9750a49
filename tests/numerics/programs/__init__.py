"""Training programs, right by default, into which one silent error can be planted.

Each is a script of plain torch. Under torchrun it trains in parallel, and as one process it trains the whole model on
the whole batch: the reference, with the same names of modules and parameters. ``PROGRAMS`` and ``BUGS`` list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

#: The programs, and how many ranks each takes.
PROGRAMS = {
    "data_parallel": 2,
    "data_parallel_by_hand": 2,
    "tensor_parallel": 2,
    "context_parallel": 4,
    "pipeline": 2,
    "fully_sharded": 2,
    "sharded_optimizer": 2,
    "precision": 2,
}


@dataclass(frozen=True)
class Bug:
    """A silent error that a program plants.

    Args:
        program: which plants it.
        what: it is, in a few words.
        found_by: the rule that breaks, or ``"compare"``: only a comparison with the reference shows it.
        where: the module or parameter that a verdict has to name (a part of its name).
        phase: in which a comparison has to find the first difference; None if a reference cannot show it.
        compared: the module or parameter that a comparison names, if another one that is as wrong comes first in
            program order.
    """

    program: str
    what: str
    found_by: str
    where: str
    phase: str | None
    compared: str = ""


BUGS = {
    "1": Bug("data_parallel", "a parameter made after wrapping is not reduced", "replicas", "temperature", "reduction"),
    "2": Bug("data_parallel_by_hand", "gradients are summed, not averaged", "compare", "layers.0", "reduction"),
    "2b": Bug("data_parallel_by_hand", "accumulation divides the loss twice", "compare", "layers.2", "backward"),
    "3": Bug("data_parallel_by_hand", "weights are seeded by rank", "replicas", "layers.0.weight", "forward"),
    "4": Bug(
        "data_parallel",
        "one rank skips a step of the optimizer",
        "replicas",
        "layers.0.weight",
        "optimizer",
        "temperature",
    ),
    "4b": Bug(
        "data_parallel", "one rank has another learning rate", "lr", "layers.0.weight", "optimizer", "temperature"
    ),
    "5": Bug("data_parallel", "every rank reads the same shard", "data", "", "forward"),
    "6": Bug("data_parallel_by_hand", "clipping by the norm of the local gradient", "compare", "layers", "reduction"),
    "7": Bug("data_parallel", "a running mean is not reduced", "buffers", "norm.mean", "forward", "norm"),
    "8": Bug("data_parallel", "one rank loads weights after wrapping", "replicas", "layers.2.weight", "forward"),
    "9": Bug("tensor_parallel", "a norm's gradient is not reduced", "replicas", "norm.weight", "reduction"),
    "10": Bug("tensor_parallel", "a bias is added on every rank", "compare", "mlp.down", "forward"),
    "11": Bug("tensor_parallel", "rows of other ranks are not masked", "compare", "embed", "forward"),
    "12": Bug("tensor_parallel", "equal dropout masks on shards", "random", "mlp.drop", "forward"),
    "12b": Bug("tensor_parallel", "unequal dropout masks on replicas", "random", "drop", "forward"),
    "13": Bug("tensor_parallel", "rows and columns of a square weight are swapped", "compare", "attention", "forward"),
    "14": Bug("tensor_parallel", "a head is dropped", "compare", "attention", "forward"),
    "15": Bug("tensor_parallel", "the loss takes the local maximum", "compare", "loss", "forward"),
    "16": Bug("context_parallel", "positions restart in each chunk", "compare", "position", "forward"),
    "17": Bug("context_parallel", "the causal mask is local", "compare", "attention", "forward"),
    "18": Bug("context_parallel", "a loss is averaged over the wrong group", "compare", "balance", "forward"),
    "19": Bug("pipeline", "tied weights are not reduced", "compare", "embed.weight", "reduction"),
    "20": Bug("pipeline", "a micro-batch is used twice", "data", "", "forward"),
    "21": Bug("pipeline", "the loss is not divided by the micro-batches", "compare", "head", "backward"),
    "22": Bug(
        "sharded_optimizer",
        "a tied weight is sharded and updated twice",
        "updates",
        "head.weight",
        "optimizer",
        "embed.weight",
    ),
    "23": Bug(
        "fully_sharded",
        "the optimizer holds weights from before wrapping",
        "updates",
        "up.weight",
        "optimizer",
        "norm.weight",
    ),
    "24": Bug(
        "sharded_optimizer", "master weights are stale after a load", "updates", "layers", "optimizer", "embed.weight"
    ),
    "25": Bug("sharded_optimizer", "weight decay is applied on each rank", "compare", "weight", "optimizer"),
    "26": Bug("sharded_optimizer", "a gathered weight is stale after a step", "compare", "layers.1", "optimizer"),
    "27": Bug("precision", "a module runs in BF16", "compare", "scores", "forward"),
    "28": Bug("data_parallel", "one rank has a wrong bit now and then", "replicas", "layers.1.weight", "optimizer"),
    "pytorch-104336": Bug(
        "data_parallel", "a wrapped model is moved", "replicas", "layers", "reduction", "temperature"
    ),
    "x-jxmnop": Bug(
        "data_parallel", "the wrapper's forward is left out", "replicas", "layers", "reduction", "temperature"
    ),
    "accelerate-2665": Bug(
        "fully_sharded", "wrapping comes after the optimizer", "updates", "up.weight", "optimizer", "norm.weight"
    ),
    "deepspeed-1801": Bug(
        "tensor_parallel", "each rank clips by its own norm", "replicas", "norm", "reduction", "embed.weight"
    ),
    "lightning-thunder-725": Bug("precision", "autocast leaves a module out", "compare", "up", "forward"),
}
