"""Kernels in a project of the test's own, with a store of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import harness
from tests.kernel.conftest import jupyter_folders
from tests.kernel.harness import Kernel, stop_kernel
from tests.sync.kernel.project import Project

__all__ = ["jupyter_folders"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder with a notebook's modules."""
    return Project(tmp_path / "project", tmp_path / "store")


@pytest.fixture
def start(project: Project) -> Iterator[Callable[..., Kernel]]:
    """Start a kernel in the project's folder."""
    started: list[Kernel] = []

    def begin(name: str = harness.KERNEL_NAME, **options: Any) -> Kernel:
        kernel = harness.start_kernel(name, cwd=str(project.folder), env=project.env, **options)
        started.append(kernel)
        return kernel

    yield begin
    for kernel in started:
        stop_kernel(kernel)


@pytest.fixture
def kernel(start: Callable[..., Kernel]) -> Kernel:
    """A kernel in the project's folder."""
    return start()
