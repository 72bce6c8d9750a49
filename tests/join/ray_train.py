"""A program with Ray Train in the Ray at RAY_ADDRESS, whose two workers train until a file is there."""

import os
import sys
import tempfile
import time
from typing import Any

import ray
import ray.train
import ray.train.torch


def train(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = 0
    ends = torch.zeros(1)
    while not ends:
        loss = model(torch.rand(4, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        ends.fill_(float(os.path.exists(config["ends"])))
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        time.sleep(0.02)
    print(f"rank {dist.get_rank()} ends after {steps} steps", flush=True)


with tempfile.TemporaryDirectory() as storage:
    ray.init(
        log_to_driver=False,
        logging_level="error",
        runtime_env={
            "worker_process_setup_hook": "monarch_kernel.join.ray_worker",
            "env_vars": {
                "MONARCH_KERNEL_JOIN": os.environ["MONARCH_KERNEL_JOIN"],
                "PYTHONPATH": os.environ["PYTHONPATH"],
                "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",  # of a machine with other load
            },
        },
    )
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"ends": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=storage),
    )
    trainer.fit()
    ray.shutdown()
