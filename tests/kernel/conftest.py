"""Kernels for tests: one for a file, or one for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.kernel.install import install
from tests.kernel import harness
from tests.kernel.harness import Bell, Kernel, stop_kernel


@pytest.fixture(scope="session", autouse=True)
def jupyter_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Jupyter and IPython folders of our own, with this checkout's kernelspec installed in them."""
    root = tmp_path_factory.mktemp("jupyter")
    install(prefix=str(root / "prefix"))
    wanted = {
        "JUPYTER_PATH": str(root / "prefix" / "share" / "jupyter"),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
        "JUPYTER_DATA_DIR": str(root / "data"),
        "JUPYTER_CONFIG_DIR": str(root / "config"),
        "IPYTHONDIR": str(root / "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wanted.items():
            patch.setenv(name, value)
        yield root


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """One kernel for a file's tests."""
    kernel = harness.start_kernel()
    yield kernel
    stop_kernel(kernel)


@pytest.fixture
def start_kernel() -> Iterator[Callable[..., Kernel]]:
    """Start kernels of the test's own, for tests that end or spoil them."""
    started: list[Kernel] = []

    def start(*args: Any, **options: Any) -> Kernel:
        kernel = harness.start_kernel(*args, **options)
        started.append(kernel)
        return kernel

    yield start
    for kernel in started:
        stop_kernel(kernel)


@pytest.fixture
def fresh_kernel(start_kernel: Callable[..., Kernel]) -> Kernel:
    """A kernel of the test's own."""
    return start_kernel()


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    """A bell for the test."""
    bell = Bell(tmp_path)
    yield bell
    bell.close()
