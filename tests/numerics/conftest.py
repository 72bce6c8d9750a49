"""Fixtures that tests of the magics share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import harness
from tests.kernel.conftest import stop_kernel
from tests.kernel.harness import Kernel


@pytest.fixture(scope="module")
def notebook(folder: Path) -> Iterator[Kernel]:
    """A notebook, whose data lies in the folder that the test names."""
    kernel = harness.start_kernel()
    try:
        yield kernel
    finally:
        stop_kernel(kernel)
