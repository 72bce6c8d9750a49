"""Shared parts of this project's scripts: an actor, and a provider on this machine in a separate folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from monarch_kernel.actor import Actor, endpoint

T = TypeVar("T")

#: The time limit of a call, and of the end of hosts (seconds).
PATIENCE = 120.0


class Probe(Actor):
    """An actor that answers."""

    @endpoint
    def here(self) -> int:
        return os.getpid()


def first_answer(hosts: Any) -> Any:
    """Start a rank on each host and wait until all have answered; return the actors."""
    probes = hosts.spawn_procs(per_host={"gpus": 1}).spawn("probe", Probe)
    probes.here.call().get(PATIENCE)
    return probes


@contextmanager
def engine(running: Callable[[Path], AbstractContextManager[T]]) -> Generator[T]:
    """Run a provider, with the list of jobs, the keys and its other files in a folder that is removed afterwards.

    Raises:
        CannotRunError: it is not installed, or this user cannot run it here.
    """
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp") as folder:
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = f"{folder}/home"
        place = Path(folder, "engine")
        place.mkdir()
        with running(place) as daemons:
            yield daemons
