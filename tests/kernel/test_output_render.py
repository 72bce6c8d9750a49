"""How folded output looks, as text and as HTML."""

from __future__ import annotations

from monarch_kernel.kernel.output.publisher import Block, RichView, Source, TextView
from monarch_kernel.kernel.output.render import (
    FIGURE_MIME,
    PROGRESS_MIME,
    ansi_to_html,
    blocks_text,
    bundle,
    label,
    raw_line,
    strip_ansi,
)


def sources(*ranks: int, mesh: str = "m") -> frozenset[Source]:
    return frozenset(Source(mesh, rank) for rank in ranks)


def test_labels_are_compact() -> None:
    assert label(sources(0, 1, 2, 3, 7)) == "[0-3,7]"
    assert label(sources(0) | sources(1, mesh="w"), name_meshes=True) == "m[0] w[1]"
    assert "more" in label(sources(*[n * n for n in range(40)]))


def test_text_is_aligned_after_the_labels() -> None:
    blocks = [Block(sources(0, 1, 2, 3), "stdout", ("a", "b")), Block(sources(2), "stdout", ("c",))]
    assert blocks_text(blocks) == "[0-3] a\n      b\n[2]   c"


def test_html_escapes_and_carries_the_tooltip() -> None:
    view = TextView(0, (Block(sources(0), "stdout", ("<script>x</script>", "\x1b[31mred\x1b[0m")),), "1 < 2")
    shown = bundle(view, tooltip=lambda who: f'gpus=0 "{len(who)}"')
    assert "<script>" not in shown["text/html"]
    assert "&lt;script&gt;" in shown["text/html"]
    assert "gpus=0 &quot;1&quot;" in shown["text/html"]
    assert '<span style="color:#e75c58">red</span>' in shown["text/html"]
    assert "1 &lt; 2" in shown["text/html"]
    assert shown["text/plain"].endswith("\n1 < 2")


def test_what_is_empty_shows_nothing() -> None:
    assert bundle(TextView(0, ())) == {"text/plain": "", "text/html": ""}
    assert bundle(RichView(1, frozenset(), {}, {})) == {"text/plain": "", "text/html": ""}
    assert bundle(RichView(1, sources(0), {"image/png": "AA"}, {})) == {
        "image/png": "AA",
        FIGURE_MIME: {"ranks": "[0]"},
    }
    html = {"image/png": "AA", "text/html": "<b>"}
    assert bundle(RichView(1, sources(0), html, {})) == html


def test_progress_has_the_output_without_it_beside_it() -> None:
    blocks = (Block(sources(0), "stdout", ("step 7",)),)
    shown = bundle(TextView(0, blocks, "0 of 4 ranks done"))
    assert shown["text/plain"] == "[0] step 7\n0 of 4 ranks done"
    assert shown[PROGRESS_MIME] == bundle(TextView(0, blocks))
    assert PROGRESS_MIME not in bundle(TextView(0, blocks))


def test_raw_lines() -> None:
    assert raw_line(Source("m", 3), "text") == "[3] text"
    assert raw_line(Source("m", 3), "text", name_mesh=True) == "m[3] text"


def test_ansi() -> None:
    assert ansi_to_html("a<b") == "a&lt;b"
    assert ansi_to_html("\x1b[1;32mok\x1b[22m!\x1b[39m.") == (
        '<span style="font-weight:bold;color:#00a250">ok</span><span style="color:#00a250">!</span>.'
    )
    assert ansi_to_html("\x1b[38;5;196mx\x1b[m") == '<span style="color:#ff0000">x</span>'
    assert ansi_to_html("\x1b[48;2;1;2;300mx") == '<span style="background-color:#0102ff">x</span>'
    assert ansi_to_html("\x1b[2K\x1b[1Ax\x1b]0;title\x07y") == "xy"
    assert ansi_to_html("\x1b[38mx") == "x"
    assert strip_ansi("\x1b[31mred\x1b[0m\x1b[K") == "red"


def test_no_number_of_a_rank_is_too_long() -> None:
    for digits in (4, 5_000, 100_000):
        assert ansi_to_html("a\x1b[" + "1" * digits + "mb") == "ab"
        assert ansi_to_html("a\x1b[38;5;" + "9" * digits + "mb") == "ab"
    assert ansi_to_html("a\x1b[" + "1;" * 100_000 + "mb") == "ab"
    assert ansi_to_html("a\x1b[٣mb") == "a\x1b[٣mb".replace("\x1b", "")
    for number in range(1000):
        assert ansi_to_html(f"\x1b[{number}mb\x1b[38;5;{number}mc\x1b[48;2;{number};1;{number}md").endswith("d</span>")
