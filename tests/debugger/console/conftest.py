"""Kernels for the tests that type into cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel import harness
from tests.kernel.conftest import fresh_kernel as fresh_kernel
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import start_kernel as start_kernel
from tests.kernel.harness import Kernel


@pytest.fixture(scope="module")
def kernel(runtime: None) -> Iterator[Kernel]:
    """One kernel for a file's tests; it ends before the file is searched for what is left behind."""
    kernel = harness.start_kernel()
    yield kernel
    harness.stop_kernel(kernel)
