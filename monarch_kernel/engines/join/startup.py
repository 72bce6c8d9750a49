"""Decide at the start of a Python with ``MONARCH_KERNEL_JOIN`` whether it is a rank and is to be prepared for joining.

Launchers and tools have the variable, too, but are not ranks. Neither are the processes that a rank starts, which
`prepare` recognises by a mark. This module imports only the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise

from monarch_kernel.engines.join.identity import identity
from monarch_kernel.engines.join.listener import prepare_or_warn

#: Console scripts that start ranks, or have nothing to do with them.
_SCRIPTS = re.compile(
    r"torchrun|torchx|accelerate(-.+)?|deepspeed(\.pt)?|ds|ds_.+|fabric|lightning|horovodrun|ray|rllib|serve|tune|dask.*"
    r"|pip[\d.]*|uv|uvx|conda|mamba|poetry|pytest|ipython3?|jupyter.*|monarch-kernel|debugpy.*|tensorboard|wandb.*|py-spy"
)
#: Packages whose modules, run as programs, are such.
_PACKAGES = re.compile(
    r"torch|torchx|accelerate|deepspeed|lightning|lightning_fabric|pytorch_lightning|horovod|ray|dask|distributed|pip|uv"
    r"|ensurepip|venv|virtualenv|pytest|IPython|ipykernel(_launcher)?|jupyter(_.+|lab)?|notebook|monarch_kernel|debugpy"
    r"|multiprocessing|joblib|wandb|tensorboard"
)
_begun = False
_WITH_VALUE = "WX"  # options of Python that have one


def at_startup() -> None:
    """Make this process joinable if it is a rank. Python reads the lines of virtual environments twice."""
    global _begun
    if not _begun and is_rank(sys.orig_argv):
        _begun = True
        prepare_or_warn()


def is_rank(command: Sequence[str]) -> bool:
    """Return whether this command line of Python appears to be a rank's."""
    kind, program = _program(command)
    if kind == "m":
        return not _PACKAGES.fullmatch(program.partition(".")[0])
    if kind == "c":
        return not program.lstrip().startswith(("from multiprocessing", "from joblib"))
    if not program:  # a prompt, or a program from standard input
        return identity().rank >= 0
    parts = os.path.abspath(program).split(os.sep)
    packages = [after for part, after in pairwise(parts) if part.endswith("-packages")]
    return not (_SCRIPTS.fullmatch(parts[-1]) or any(_PACKAGES.fullmatch(package) for package in packages))


def _program(command: Sequence[str]) -> tuple[str, str]:
    """Return what a command line of Python runs: ("m", module), ("c", code) or ("", script)."""
    words = iter(command[1:])
    for word in words:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, "")
        elif word.startswith("-") and word != "-":
            for at, letter in enumerate(word[1:], 2):
                if letter in "mc":
                    return letter, word[at:] or next(words, "")
                if letter in _WITH_VALUE:
                    if not word[at:]:
                        next(words, "")
                    break
        else:
            return "", "" if word == "-" else word
    return "", ""
