"""The code of live views, which npm builds from ``labextension/src/widget``; wheels carry it."""

from __future__ import annotations

from pathlib import Path

#: In a checkout it is there once `make venv` has found a node.
BUNDLE = Path(__file__).parent / "static" / "mesh.js"
