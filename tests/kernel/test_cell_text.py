"""What the text of a cell says, before it is run."""

from __future__ import annotations

import pytest

from monarch_kernel.kernel.cell import blank_lines, ends_quietly, header_lines, is_mesh_cell, split_header


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("%%mesh\nx", True),
        ("\n  %%mesh m -r 0\nx", True),
        ("%%mesh", True),
        ("%%meshes\nx", False),
        ("%mesh ls", False),
        ("x\n%%mesh\ny", False),
        ("", False),
    ],
)
def test_which_cells_are_for_ranks(text: str, wanted: bool) -> None:
    assert is_mesh_cell(text) is wanted


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("%%mesh m\nx\ny", ("%%mesh m\n", "x\ny")),
        ("\n%%mesh\n", ("\n%%mesh\n", "")),
        ("%%mesh", None),
        ("x = 1\ny", None),
    ],
)
def test_a_cell_is_cut_below_its_first_line(text: str, wanted: tuple[str, str] | None) -> None:
    assert split_header(text) == wanted


def test_the_body_keeps_its_line_numbers() -> None:
    assert header_lines("%%mesh\nx\ny\n", "x\ny\n") == 1
    assert header_lines("\n\n%%mesh\nx", "x") == 3
    assert header_lines("", "not in it") == 1
    assert blank_lines("\n  \nx") == 2
    assert blank_lines("x") == 0


@pytest.mark.parametrize(
    "source, quiet",
    [("x;", True), ("x;  # why\n\n", True), ("x", False), ("';'", False), ("def f():\n    x;\n", True), ("(", False)],
)
def test_a_semicolon_at_the_end(source: str, quiet: bool) -> None:
    assert ends_quietly(source) is quiet
