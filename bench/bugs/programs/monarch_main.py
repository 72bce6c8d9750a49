"""The program in an actor of torchmonarch: monarch_main.py RANKS."""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]
from monarch.spmd import setup_torch_elastic_env  # type: ignore[import-not-found]


class Program(Actor):  # type: ignore[misc]
    """Runs train.py of its folder."""

    @endpoint  # type: ignore[misc]
    def train(self) -> None:
        """Train."""
        sys.path.insert(0, os.getcwd())
        import train  # type: ignore[import-not-found]

        train.train()


def main() -> None:
    """Run it on all ranks."""
    procs: Any = this_host().spawn_procs(per_host={"gpus": int(sys.argv[1])})
    setup_torch_elastic_env(procs)
    procs.spawn("program", Program).train.call().get()


if __name__ == "__main__":
    main()
