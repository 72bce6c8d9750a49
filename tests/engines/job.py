"""A job of Monarch that a notebook of another process looks into: ``job.py FILE GATE``. It ends when GATE is there."""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import Any

from monarch.actor import Actor, endpoint, this_host  # pyright: ignore[reportMissingImports]  # run by its own Python


class Trainer(Actor):  # pyright: ignore[reportUntypedBaseClass]  # as above
    """Trains until it is told to stop."""

    @endpoint
    def train(self, gate: str) -> int:
        """Take steps until there is a file."""
        steps = 0
        while not os.path.exists(gate):
            steps = self.step(steps)
        return steps

    def step(self, steps: int) -> int:
        """One step."""
        time.sleep(0.01)
        return steps + 1


def main(file: str, gate: str) -> None:
    """Start to train, write the mesh's pickle, and wait for the end."""
    procs: Any = this_host().spawn_procs({"gpus": 2}, name="job")
    result = procs.spawn("trainers", Trainer).train.call(gate)
    with open(f"{file}.new", "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        pickle.dump(procs, out)
    os.rename(f"{file}.new", file)
    print("steps:", [steps for _, steps in result.get()], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
