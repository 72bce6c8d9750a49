"""A program with two actors in the Ray at RAY_ADDRESS, whose workers can be joined, until a file is there."""

import os
import sys
import time

import ray

ray.init(
    log_to_driver=False,
    logging_level="error",
    runtime_env={
        "worker_process_setup_hook": "monarch_kernel.join.ray_worker",
        "env_vars": {"MONARCH_KERNEL_JOIN": "actors", "PYTHONPATH": os.environ["PYTHONPATH"]},
    },
)


@ray.remote
class Holder:
    def pid(self) -> int:
        return os.getpid()


holders = [Holder.remote() for _ in range(2)]
print("pids", *ray.get([each.pid.remote() for each in holders]), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
ray.shutdown()
