"""How far a cell is, as data and in one line."""

from __future__ import annotations

from monarch_kernel.kernel.progress import CodeLocation, Progress


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


def test_progress_names_ranks_that_do_not_respond() -> None:
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


def test_the_line_is_made_of_data() -> None:
    progress = Progress(range(6), now=0.0)
    progress.done(0)
    progress.fail(1, "ValueError: boom")
    progress.behind(2, "In[3] since 10:00:00")
    progress.at({3: CodeLocation("train.py", 88, "step"), 4: CodeLocation("train.py", 88, "step")})
    progress.silent = {5: "it is stopped (SIGSTOP)", 0: "it has ended"}
    assert progress.report(0.5) is None
    report = progress.report(2.0)
    assert report is not None
    assert (report.total, report.done, report.waiting) == (6, 1, (3, 4, 5))
    assert report.locations == {CodeLocation("train.py", 88, "step"): [3, 4]}
    assert report.failed == {"ValueError: boom": [1]}
    assert report.queued == {"In[3] since 10:00:00": [2]}
    assert report.silent == {"it is stopped (SIGSTOP)": [5]}
