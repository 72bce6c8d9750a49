"""Which stop a front end is shown, and when: pure, without any debugger."""

from __future__ import annotations

from typing import Any

from monarch_kernel.debugger.dap.stop_table import StopQueue

A, B, C, KERNEL = 1_000_000, 1_000_001, 1_000_002, 1


def stop(queue: StopQueue, thread: int) -> list[tuple[str, int]]:
    return brief(queue.stopped(thread, {"reason": "breakpoint"}))


def brief(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["event"], event["body"]["threadId"]) for event in events]


def test_one_stop_is_shown_and_the_others_wait_for_their_turn() -> None:
    queue = StopQueue()
    assert stop(queue, A) == [("stopped", A)]
    assert stop(queue, B) == []
    assert stop(queue, KERNEL) == []
    assert queue.threads == [A, B, KERNEL]
    assert brief(queue.resumed(A)) == [("continued", A), ("stopped", B)]
    assert brief(queue.resumed(B)) == [("continued", B), ("stopped", KERNEL)]
    assert brief(queue.resumed(KERNEL)) == [("continued", KERNEL)]
    assert queue.threads == []


def test_a_thread_that_goes_on_without_being_shown_leaves_in_silence() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    assert queue.resumed(B) == []  # JupyterLab would clear what it shows of A
    assert brief(queue.resumed(A)) == [("continued", A)]


def test_a_step_keeps_the_focus() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    queue.step(A)
    assert queue.resumed(A) == []
    assert stop(queue, C) == []
    assert stop(queue, A) == [("stopped", A)]
    assert queue.threads == [A, B, C]


def test_a_step_that_takes_long_gives_the_focus_away_and_gets_in_line() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    queue.step(A)
    queue.resumed(A)
    assert brief(queue.overdue()) == [("continued", A), ("stopped", B)]
    assert queue.overdue() == []
    assert stop(queue, A) == []
    assert queue.threads == [B, A]


def test_a_long_step_is_shown_when_it_ends_if_no_other_thread_is_stopped() -> None:
    queue = StopQueue()
    stop(queue, A)
    queue.step(A)
    queue.resumed(A)
    assert brief(queue.overdue()) == [("continued", A)]
    assert stop(queue, A) == [("stopped", A)]


def test_a_step_that_has_ended_in_time_is_not_overdue() -> None:
    queue = StopQueue()
    stop(queue, A)
    queue.step(A)
    queue.resumed(A)
    stop(queue, A)
    assert queue.overdue() == []


def test_a_step_of_a_thread_that_is_not_shown_takes_no_focus() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    queue.step(B)
    queue.resumed(B)
    assert stop(queue, B) == []
    assert queue.shown == A


def test_a_refused_step_changes_nothing() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    queue.step(A)
    queue.hold()
    assert brief(queue.resumed(A)) == [("continued", A), ("stopped", B)]


def test_the_focus_goes_where_it_is_sent() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B), stop(queue, C)
    assert brief(queue.focus(C)) == [("stopped", C)]
    assert queue.threads == [C, A, B]
    assert brief(queue.resumed(C)) == [("continued", C), ("stopped", A)]


def test_a_dead_thread_is_over() -> None:
    queue = StopQueue()
    stop(queue, A), stop(queue, B)
    assert brief(queue.gone(A)) == [("continued", A), ("stopped", B)]
    queue.step(B)
    queue.resumed(B)
    stop(queue, C)
    assert brief(queue.gone(B)) == [("continued", B), ("stopped", C)]
    assert queue.gone(B) == []


def test_a_front_end_that_was_reloaded_is_shown_the_same_stop() -> None:
    queue = StopQueue()
    assert queue.show_again() == []
    stop(queue, A), stop(queue, B)
    assert brief(queue.show_again()) == [("stopped", A)]


def test_a_front_end_with_a_list_of_threads_hears_of_every_stop_and_keeps_its_focus() -> None:
    queue = StopQueue(lists_threads=True)
    (first,) = queue.stopped(A, {"reason": "breakpoint", "allThreadsStopped": True})
    assert first["body"] == {"reason": "breakpoint", "threadId": A, "allThreadsStopped": False}
    (second,) = queue.stopped(B, {"reason": "breakpoint"})
    assert second["body"]["preserveFocusHint"] is True
    assert brief(queue.resumed(B)) == [("continued", B)]
    queue.step(A)
    assert brief(queue.resumed(A)) == [("continued", A)]
    (again,) = queue.stopped(A, {"reason": "step"})
    assert "preserveFocusHint" not in again["body"]
    assert brief(queue.gone(A)) == [("continued", A), ("thread", A)]
    assert queue.gone(B)[-1]["body"] == {"reason": "exited", "threadId": B}
