"""A kernel whose environment lacks anywidget has no live views: meshes show themselves as HTML."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel, which does not find anywidget, and with a mesh `m` of 2 ranks."""
    kernel.ok("import sys\nsys.modules['anywidget'] = None")
    kernel.ok("%mesh up --procs 2\nfrom monarch_kernel import get_mesh\nm = get_mesh('m')")
    return kernel


@pytest.mark.parametrize("shown", ["m", "m.show()", "%mesh status"])
def test_html_without_a_word(mesh: Kernel, shown: str) -> None:
    out = mesh.ok(shown)
    assert out.result is not None
    assert set(out.result) == {"text/plain", "text/html"}
    assert "2 idle" in out.result["text/html"]
    assert not out.stderr
