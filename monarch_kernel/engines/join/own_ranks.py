"""Programs that start their ranks themselves, as those of Lightning do: what they start can be joined, too.

A program that ``python -m monarch_kernel.join`` runs, and that no launcher has started, gets the variables of
docs/join.md, and in front of its ``PYTHONPATH`` a folder with a ``sitecustomize``, as ``opentelemetry-instrument``
does. Pythons that it starts import that, prepare themselves as those of ``monarch-kernel join install`` do if they are
ranks, and are without the folder then, with the ``sitecustomize`` that they would have had.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "at_start")
_MODULE = "sitecustomize"


def prepare_own_ranks(variables: Mapping[str, object]) -> None:
    """Let what this program starts be prepared.

    Args:
        variables: of the environment, by their names; those that are None stay as they are.
    """
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *([before] if before else [])])


def at_start(folder: str) -> None:
    """In a Python that such a program has started.

    Args:
        folder: the first on ``PYTHONPATH``.
    """
    _leave(folder)
    spec = PathFinder.find_spec(_MODULE)
    if spec is not None and spec.loader is not None:
        sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    try:
        from monarch_kernel.engines.join.startup import at_startup

        at_startup()
    except Exception as error:  # the program must not fail for us
        print("warning: this process cannot be joined:", error, file=sys.stderr)


def _leave(folder: str) -> None:
    """Have the paths as they would be."""
    sys.path[:] = [each for each in sys.path if each != folder]
    left = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != folder]
    if any(left):
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)
