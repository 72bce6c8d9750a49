"""``python -m tests.notebooks`` makes the environment of the notebook on TorchTitan; `make test` calls it."""

from __future__ import annotations

import sys

from bench.environments import EnvironmentFailed, python_above

try:
    python_above("titan")
except EnvironmentFailed as error:
    sys.exit(str(error))
