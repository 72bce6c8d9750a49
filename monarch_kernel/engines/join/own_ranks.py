"""Make ranks joinable that a program starts itself, as Lightning programs do.

This applies to a program run by ``python -m monarch_kernel.join`` and not started by a launcher. The program gets the
variables of docs/join.md, and a folder with a ``sitecustomize`` module is put first on its ``PYTHONPATH``, as
``opentelemetry-instrument`` does. Python processes that it starts import the module. They prepare themselves if they
are ranks, like processes after ``monarch-kernel join install``. Then they remove the folder from the path and import
the ``sitecustomize`` that they would have had.
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
    """Make processes joinable that this program starts.

    Args:
        variables: the values of environment variables by name; None leaves a variable unchanged.
    """
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *([before] if before else [])])


def at_start(folder: str) -> None:
    """Prepare a Python process that such a program has started.

    Args:
        folder: the first folder on ``PYTHONPATH``.
    """
    _leave(folder)
    spec = PathFinder.find_spec(_MODULE)
    if spec is not None and spec.loader is not None:
        sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    try:
        from monarch_kernel.engines.join.startup import at_startup

        at_startup()
    except Exception as error:  # no error of this package may fail the program
        print("warning: this process cannot be joined:", error, file=sys.stderr)


def _leave(folder: str) -> None:
    """Restore the paths that the process would have had."""
    sys.path[:] = [each for each in sys.path if each != folder]
    left = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != folder]
    if any(left):
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)
