"""The launcher of processes of this machine does what every launcher does."""

from __future__ import annotations

import pytest

from monarch_kernel.launchers.base import Launcher
from monarch_kernel.launchers.process import ProcessLauncher
from tests.launchers.conformance import Conformance, Engine, clean

__all__ = ["clean"]


class ProcessEngine(Engine):
    """This machine, which gives any number of hosts at once."""

    def launcher(self) -> Launcher:
        return ProcessLauncher()


@pytest.fixture
def engine() -> Engine:
    return ProcessEngine()


class TestProcess(Conformance):
    pass
