"""Processes that a prepared rank starts beside its job: they make reports, or call a meeting point.

Standard library only: ranks load it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from monarch_kernel import environment, programs

#: What would make such a process look like a rank.
_OF_RANKS = (
    *(environment.JOIN.name, environment.JOIN_ON_HANG.name, environment.JOIN_RANK),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


def start_helper(words: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
    """Start this interpreter with these words.

    It has a session of its own, so what ends the job, or interrupts it, lets it finish; and no standard streams, as
    launchers wait until nobody has those of their ranks.

    Args:
        lock: a descriptor that it inherits; a lock of it is held as long as it lives.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environ.get("PYTHONPATH", "")]))
    return programs.start(
        [sys.executable, "-P", *words],
        cwd="/",
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,
    )


def say(text: str) -> None:
    """Write a line to the job's log; not to ``sys.stderr``, which a program may have replaced."""
    if sys.__stderr__ is not None:
        print(text, file=sys.__stderr__, flush=True)
