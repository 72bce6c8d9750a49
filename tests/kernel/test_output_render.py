"""How folded output, tables and the progress line look."""

from __future__ import annotations

from monarch_kernel.kernel.output.ansi import ansi_to_html, strip_ansi
from monarch_kernel.kernel.output.render import blocks_text, bundle, label, raw_line
from monarch_kernel.kernel.output.transcript import Block, RichView, Source, TextView
from monarch_kernel.kernel.progress import CodeLocation, Progress


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
    assert bundle(RichView(1, sources(0), {"image/png": "AA"}, {})) == {"image/png": "AA"}


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


def test_progress_is_quiet_at_first_and_when_all_is_done() -> None:
    progress = Progress(range(2), now=0.0)
    assert progress.line(0.9) == ""
    assert not progress.is_due(0.9)
    assert progress.line(1.0) == "0 of 2 ranks done · waiting for 0-1"
    progress.done(0)
    progress.done(1)
    assert progress.line(2.0) == ""
    assert not progress.is_due(2.0)


def test_progress_says_where_ranks_are() -> None:
    progress = Progress(range(8), now=0.0)
    for rank in (0, 1, 3, 4, 6, 7):
        progress.done(rank)
    step = CodeLocation("train.py", 88, "step")
    progress.at({2: step, 5: step, 0: step})
    assert progress.line(5) == "6 of 8 ranks done · waiting for 2, 5 · train.py:88 in step"
    progress.at({5: CodeLocation("In[3]", 4, "<module>")})
    assert progress.line(5) == "6 of 8 ranks done · waiting for 2 at train.py:88 in step, 5 at In[3]:4"
    progress.at({2: None})
    assert progress.line(5) == "6 of 8 ranks done · waiting for 5 at In[3]:4, 2 elsewhere"


def test_progress_names_the_failed() -> None:
    progress = Progress(range(4), now=0.0)
    progress.fail(1, "ValueError: boom")
    progress.fail(3, "ValueError: boom")
    assert progress.line(2) == "0 of 4 ranks done · 1,3 failed: ValueError: boom · waiting for 0, 2"


def test_progress_tells_who_does_not_respond() -> None:
    progress = Progress(range(3), now=0.0)
    progress.silent = {0: "it is stopped (SIGSTOP)", 1: "it is stopped (SIGSTOP)"}
    progress.done(1)
    line = progress.line(100.0)
    assert line.endswith("· 0 does not respond: it is stopped (SIGSTOP)")


def test_progress_asks_once_a_second() -> None:
    progress = Progress(range(1), now=0.0)
    assert [progress.is_due(now) for now in (0.5, 1.0, 1.5, 2.0, 2.9, 3.1)] == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    assert progress.line(2.0) == "waiting for 0"
