"""Kernels in a project of the test's own, with a store of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import harness
from tests.kernel.conftest import jupyter_folders, start_kernel
from tests.kernel.harness import Kernel
from tests.sync.kernel.project import Project

__all__ = ["jupyter_folders", "start_kernel"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder with a notebook's modules."""
    return Project(tmp_path / "project", tmp_path / "store")


@pytest.fixture
def start(project: Project, start_kernel: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Start a kernel in the project's folder."""

    def begin(name: str = harness.KERNEL_NAME, **options: Any) -> Kernel:
        return start_kernel(name, cwd=str(project.folder), env=project.env, **options)

    return begin


@pytest.fixture
def kernel(start: Callable[..., Kernel]) -> Kernel:
    """A kernel in the project's folder."""
    return start()
