"""The environment of JupyterHub and of collaboration, and a browser; skipped, and said so, where either is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.environments import EnvironmentFailed, python_for
from tests.browser.conftest import browser, chromium

__all__ = ["browser", "chromium"]


@pytest.fixture(scope="session")
def hub_python() -> Path:
    """The interpreter that has JupyterHub, and JupyterLab with jupyter-collaboration."""
    try:
        return python_for("hub")
    except EnvironmentFailed as error:
        pytest.skip(str(error))
