"""What runs a notebook when a cell fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat

from monarch_kernel.kernel.install import DISPLAY_NAME, KERNEL_NAME
from tests.notebooks.test_notebooks import Run, run  # noqa: F401  # run is a fixture


def test_a_cell_that_fails_is_told_and_nothing_stays(
    run: Callable[[Path], Run],  # noqa: F811
    tmp_path: Path,
) -> None:
    cells = [
        nbformat.v4.new_code_cell("from monarch.actor import this_host", id="fine"),
        nbformat.v4.new_code_cell("await this_host().spawn_procs({'gpus': 2})", id="procs"),
        nbformat.v4.new_code_cell("1 / 0", id="broken"),
        nbformat.v4.new_code_cell("print('never')", id="never"),
    ]
    kernelspec = {"name": KERNEL_NAME, "display_name": DISPLAY_NAME}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    result = run(tmp_path / "broken.ipynb")
    assert result.status == 1
    assert "Failed in cell 3 (broken)" in result.printed
    assert "ZeroDivisionError: division by zero" in result.printed
    assert result.error("broken") == "ZeroDivisionError"
    assert result.outputs("never") == []
