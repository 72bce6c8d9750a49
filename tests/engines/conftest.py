"""A kernel with a mesh, on each engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.environments import EnvironmentFailed, python_above
from tests.kernel import harness
from tests.kernel.conftest import jupyter_folders  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture
from tests.kernel.harness import Kernel, stop_kernel

ENGINES = ("monarch_kernel", "torchmonarch")


def python_of(engine: str) -> str:
    """The interpreter that has an engine; skips the test if there is none."""
    if engine == "monarch_kernel":
        return sys.executable
    try:
        return str(python_above(engine))
    except EnvironmentFailed as error:
        pytest.skip(str(error))


def start(engine: str, folder: Path) -> Kernel:
    """A kernel on an engine."""
    spec = folder / "kernels" / engine
    spec.mkdir(parents=True, exist_ok=True)
    argv = [python_of(engine), "-m", "monarch_kernel", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": engine, "language": "python"}))
    path = f"{folder}{os.pathsep}{os.environ.get('JUPYTER_PATH', '')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", path)
        patch.setenv("MONARCH_KERNEL_ENGINE", engine)
        return harness.start_kernel(engine)


@pytest.fixture(scope="package", params=ENGINES)
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with a mesh `m` of two ranks; all tests of one engine share it."""
    kernel = start(request.param, tmp_path_factory.mktemp("engines"))
    try:
        kernel.ok("%mesh up --procs 2")
        yield kernel
    finally:
        stop_kernel(kernel)
