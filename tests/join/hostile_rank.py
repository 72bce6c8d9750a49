"""A rank of the tests whose owner attacks viewers: whatever they ask it, it answers with a pickle that makes a file.

``python hostile_rank.py GATE FILE`` ends when GATE is there; a viewer that unpickles an answer makes FILE.
"""

import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import monarch_kernel.join  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.engines.hosted import tool_actor
from monarch_kernel.protocol.messages import OK


class Evil:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.file),)


def answer(actor: tool_actor.ToolActor, endpoint: str, origin: str, work: object, answer: tool_actor.Answer) -> None:
    answer(OK, pickle.dumps(Evil(sys.argv[2])))


tool_actor.ToolActor._handle = answer  # type: ignore[method-assign]
runpy.run_path(os.path.join(os.path.dirname(__file__), "waiting.py"))
