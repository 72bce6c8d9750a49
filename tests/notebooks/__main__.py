"""``python -m tests.notebooks NAME`` makes the environment of a notebook: titan or marimo; `make test` calls it."""

from __future__ import annotations

import sys

from bench.environments import EnvironmentFailed, python_above

try:
    python_above(sys.argv[1], torch=sys.argv[1] == "titan")
except EnvironmentFailed as error:
    sys.exit(str(error))
