"""``python -m tests.engines`` makes the environment of torchmonarch, for the tests here; `make test` calls it."""

from __future__ import annotations

import sys

from bench.environments import EnvironmentFailed, python_above

try:
    python_above("torchmonarch")
except EnvironmentFailed as error:
    sys.exit(str(error))
