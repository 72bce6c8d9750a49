"""A job in which rank 1 fails, and the others wait for it in a collective."""

import torch
import torch.distributed as dist


def parse(row: int) -> float:
    if dist.get_rank() == 1 and row == 3:
        raise ValueError(f"row {row} is no number")
    return float(row)


dist.init_process_group("gloo")
for number in range(10):
    total = torch.tensor([parse(number)])
    dist.all_reduce(total)
