"""Fixtures that tests of numerics share."""

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch in this process, as ranks have.

    Sums then have one order, and no thread burns processor time while it waits for another one.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
