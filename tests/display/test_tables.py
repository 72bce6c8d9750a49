"""Tables as plain data, as text and as HTML."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monarch_kernel.display.tables import AsTable, TableView, table_html, table_text

MESHES = TableView(["mesh", "ranks"], [["m", "4"], ["<w>", "16"]], right=[1], caption="two")


def test_a_table_as_text() -> None:
    assert table_text(MESHES) == "two\nmesh  ranks\nm         4\n<w>      16"


def test_columns_are_as_wide_as_a_terminal_shows_their_cells() -> None:
    view = TableView(["", "mesh", "ranks"], [["*", "日本", "4"], ["", "e\u0301", ""]])
    assert table_text(view) == "   mesh  ranks\n*  日本  4\n   e\u0301"


def test_cells_of_several_lines_stay_in_their_column() -> None:
    view = TableView(["rank", "value"], [["0", "one\ntwo"], ["1", "three"]])
    assert table_text(view) == "rank  value\n0     one\n      two\n1     three"


def test_cells_are_shown_as_they_are() -> None:
    cell = "[bold]x[/bold] :smile: " + "long " * 200 + "end"
    assert table_text(TableView([], [["a", cell]])) == f"a  {cell}"


def test_a_table_without_rows_has_its_headings() -> None:
    assert table_text(TableView(["mesh", "ranks"], [], note="none")) == "mesh  ranks\nnone"
    assert table_text(TableView([], [])) == ""


@pytest.mark.parametrize("name, value", [("FORCE_COLOR", "1"), ("COLUMNS", "20"), ("TTY_COMPATIBLE", "1")])
def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert table_text(TableView(["a"], [["x" * 100]])) == "a\n" + "x" * 100


def test_columns_without_content_go_and_the_others_keep_their_side() -> None:
    view = TableView(["a", "empty", "b"], [["1", "", "x"], ["22", "", "y"]], right=[0, 1])
    assert table_text(view.without_empty_columns()) == " a  b\n 1  x\n22  y"


def test_html_is_escaped() -> None:
    html = table_html(TableView(["<h>"], [["<w>"]], caption="<c>", note="<n>"))
    assert "&lt;h&gt;" in html and "&lt;w&gt;" in html and "&lt;c&gt;" in html and "&lt;n&gt;" in html
    assert not any(part in html for part in ("<h>", "<w>", "<c>", "<n>"))
    assert html.count("<tr>") == 2


def test_an_object_shows_its_table() -> None:
    class Meshes(AsTable):
        def table(self) -> TableView:
            return MESHES

    assert repr(Meshes()) == table_text(MESHES)
    assert Meshes()._repr_html_() == table_html(MESHES)


def test_rich_is_imported_when_a_table_is_shown_and_not_before() -> None:
    code = (
        "import sys\nfrom monarch_kernel.display.tables import TableView, table_html, table_text\n"
        "table_html(TableView([], []))\nassert 'rich' not in sys.modules\n"
        "table_text(TableView([], []))\nassert 'rich' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
