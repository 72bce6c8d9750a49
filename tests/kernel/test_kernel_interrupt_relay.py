"""Which press means what, and what the relay does about it: a clock and targets that the test moves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence

import pytest

from monarch_kernel.kernel.interrupts.interrupt_relay import (
    ANSWER_GRACE,
    ESCALATION_WINDOW,
    Escalate,
    Forward,
    Interruption,
    InterruptRelay,
    PressLogic,
)
from monarch_kernel.kernel.interrupts.sigint_handler import SigintHandler
from monarch_kernel.runtime.node import node


class Ranks:
    """A target whose ranks answer when the test says so."""

    def __init__(self, name: str = "m", size: int = 4) -> None:
        self.name = name
        self.running = set(range(size))
        self.interrupts = 0
        self.killed: list[int] = []
        self.broken = False

    def describe(self) -> str:
        return f"mesh '{self.name}'"

    def interrupt(self) -> object:
        if self.broken:
            raise ConnectionError("the agent is gone")
        self.interrupts += 1
        return None

    def unanswered(self) -> set[int]:
        return self.running

    def kill(self, ranks: Sequence[int]) -> object:
        self.killed.extend(ranks)
        return None


class Rig:
    """A relay with a clock that only the test and its own sleeping move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.default: list[Ranks] = []
        self.told: list[tuple[object, str]] = []
        self.relay = InterruptRelay(
            notify=lambda cell, text: self.told.append((cell, text)),
            default_targets=lambda: self.default,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def press(self, cell: object = "cell", idle: bool = False) -> None:
        self.relay.press(cell, idle)
        assert self.relay.flush(30)


class KeptRanks(Ranks):
    """Ranks that outlive the kernel, until its shutdown has let go of them."""

    def __init__(self, rig: Rig) -> None:
        super().__init__("kept")
        self.rig = rig
        self.shut_down_when_asked = False

    @property
    def outlives_kernel(self) -> bool:
        if self.shut_down_when_asked:
            self.rig.relay.ending.set()
        return not self.rig.relay.ending.is_set()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.relay.stop()


# -- the logic -----------------------------------------------------------------------------------------


def test_a_press_is_forwarded_and_a_second_within_the_window_escalates() -> None:
    logic, target = PressLogic(), Ranks()
    assert logic.press(10.0, "a", (target,)) == Forward("a", (target,))
    assert logic.press(10.0 + ESCALATION_WINDOW, "a", (target,)) == Escalate("a", 10.0 + ANSWER_GRACE)


def test_a_press_after_the_window_is_a_first_one_again() -> None:
    logic = PressLogic()
    logic.press(10.0, "a")
    assert logic.press(12.1, "a") == Forward("a", ())
    assert logic.press(12.2, "a") == Escalate("a", 12.1 + ANSWER_GRACE)


def test_the_press_after_an_escalation_is_a_first_one() -> None:
    logic = PressLogic()
    logic.press(10.0, "a")
    logic.press(10.1, "a")
    assert logic.press(10.2, "a") == Forward("a", ())


def test_an_idle_press_escalates_the_cell_that_the_first_one_ended() -> None:
    logic = PressLogic()
    logic.press(10.0, "a")
    assert logic.press(11.0, None, idle=True) == Escalate("a", 10.0 + ANSWER_GRACE)


def test_an_idle_press_with_nothing_to_stop_means_nothing() -> None:
    logic = PressLogic()
    assert logic.press(10.0, None, idle=True) is None
    assert logic.press(10.1, "a") == Forward("a", ())


def test_a_press_in_another_cell_is_that_cells_first() -> None:
    logic = PressLogic()
    logic.press(10.0, "a")
    assert logic.press(10.5, "b") == Forward("b", ())
    assert logic.press(10.6, "b") == Escalate("b", 10.5 + ANSWER_GRACE)


# -- the relay -----------------------------------------------------------------------------------------


def test_a_second_press_kills_what_did_not_answer_and_names_it(rig: Rig) -> None:
    target = Ranks(size=8)
    with rig.relay.active(target):
        rig.press()
        assert (target.interrupts, target.killed) == (1, [])
        target.running = {1, 5, 6, 7}
        rig.now += 1.0
        rig.press()
    assert target.killed == [1, 5, 6, 7]
    assert rig.told == [("cell", "Killed ranks 1,5-7 of mesh 'm': no answer to the interrupt.")]


def test_nothing_is_killed_and_nothing_said_when_all_have_answered(rig: Rig) -> None:
    target = Ranks()
    with rig.relay.active(target):
        rig.press()
        target.running = set()
        rig.press()
    assert (target.killed, rig.told) == ([], [])


def test_a_double_click_leaves_the_ranks_time_to_answer(rig: Rig) -> None:
    target = Ranks()
    with rig.relay.active(target):
        rig.relay.press("cell")
        rig.relay.press("cell")
        assert rig.relay.flush(30)
    assert rig.now == pytest.approx(100.0 + ANSWER_GRACE)


def test_the_second_press_concerns_the_targets_of_the_first_though_their_cell_has_ended(rig: Rig) -> None:
    target = Ranks(size=1)
    with rig.relay.active(target):
        rig.press()
    rig.press(None, idle=True)
    assert target.killed == [0]
    assert rig.told == [("cell", "Killed rank 0 of mesh 'm': no answer to the interrupt.")]


def test_a_target_that_goes_before_the_press_is_dealt_with_is_still_interrupted(rig: Rig) -> None:
    # KeyboardInterrupt takes the cell out of its `with` block before the relay's thread has run.
    target = Ranks()
    rig.relay.add(target)
    rig.relay.press("cell")
    rig.relay.remove(target)
    assert rig.relay.flush(30)
    assert target.interrupts == 1


def test_default_targets_count_only_when_no_target_is_active(rig: Rig) -> None:
    mesh, cell = Ranks("mesh"), Ranks("cell")
    rig.default = [mesh]
    rig.press("plain")
    with rig.relay.active(cell):
        rig.press("mesh cell")
    assert (mesh.interrupts, cell.interrupts) == (1, 1)


def test_what_runs_in_the_background_is_interrupted_only_when_the_kernel_is_idle(rig: Rig) -> None:
    background = Ranks()
    rig.relay.add(background, background=True)
    rig.press("other cell")
    assert background.interrupts == 0
    rig.now += 10
    rig.press(None, idle=True)
    assert background.interrupts == 1
    rig.relay.remove(background)
    rig.now += 10
    rig.press(None, idle=True)
    assert background.interrupts == 1


def test_a_target_that_fails_is_named_and_the_others_are_interrupted(rig: Rig) -> None:
    broken, fine = Ranks("broken"), Ranks("fine")
    broken.broken = True
    with rig.relay.active(broken), rig.relay.active(fine):
        rig.press()
    assert fine.interrupts == 1
    assert [text for _, text in rig.told] == ["The interrupt did not reach mesh 'broken': the agent is gone"]


# -- the handler ---------------------------------------------------------------------------------------


def press(handler: SigintHandler) -> None:
    handler(signal.SIGINT, None)


def test_an_idle_kernel_is_not_interrupted(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)
    press(handler)


def test_a_busy_kernel_is_interrupted_where_it_stands(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)
    handler.begin()
    with pytest.raises(KeyboardInterrupt):
        press(handler)
    handler.end()
    press(handler)


def test_a_press_before_the_cells_code_begins_counts_when_it_does(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)
    handler.begin()
    with handler.request("cell"):
        press(handler)
        with pytest.raises(KeyboardInterrupt), handler.interruptible():
            pytest.fail("the cell's code ran")


def test_a_press_after_the_cells_code_spares_its_reply_and_the_next_cell(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)
    handler.begin()
    with handler.request("cell"):
        with handler.interruptible():
            pass
        press(handler)
    handler.end()
    handler.begin()
    with handler.request("next"), handler.interruptible():
        pass


def test_a_press_while_a_message_is_sent_waits_until_it_is_sent(rig: Rig) -> None:
    retries: list[None] = []
    handler = SigintHandler(rig.relay)
    handler.retry = lambda: retries.append(None)
    code = compile("signal.raise_signal(signal.SIGALRM); sent = True", node.__file__, "exec")
    scope = {"signal": signal}
    before = signal.signal(signal.SIGALRM, handler)
    try:
        handler.begin()
        exec(code, scope)
        assert (scope["sent"], len(retries)) == (True, 1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGALRM)
        assert len(retries) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_gets_a_plain_keyboard_interrupt(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Ranks()
    rig.default = [target]
    handler = SigintHandler(rig.relay)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(KeyboardInterrupt):
        press(handler)
    monkeypatch.undo()
    assert rig.relay.flush(30)
    assert target.interrupts == 0


def test_an_awaiting_cell_is_cancelled_and_an_idle_loop_woken(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)

    async def cell() -> None:
        with handler.interruptible():
            # From the loop, when both tasks wait.
            asyncio.get_running_loop().call_soon(signal.setitimer, signal.ITIMER_REAL, 0.01)
            await asyncio.Event().wait()

    async def kernel() -> None:
        handler.begin()
        with handler.request("cell"):
            task = asyncio.ensure_future(cell())
            with handler.awaiting(task), pytest.raises(asyncio.CancelledError):
                await task
        assert handler.cancelled

    before = signal.signal(signal.SIGALRM, handler)
    try:
        asyncio.run(kernel())
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_cell_that_computes_between_awaits_is_interrupted_where_it_stands(rig: Rig) -> None:
    handler = SigintHandler(rig.relay)

    async def cell() -> str:
        try:
            with handler.interruptible():
                press(handler)
        except KeyboardInterrupt:
            return "interrupted"
        return "went on"

    async def kernel() -> str:
        handler.begin()
        with handler.request("cell"):
            task = asyncio.ensure_future(cell())
            with handler.awaiting(task):
                return await task

    assert asyncio.run(kernel()) == "interrupted"


def test_a_second_interrupt_by_command_concerns_what_the_first_has_interrupted() -> None:
    def interruption(running: dict[int, str], calls: dict[int, int]) -> Interruption:
        names = {rank: frozenset({name}) for rank, name in running.items()}
        return Interruption(10.0, names, {rank: frozenset({number}) for rank, number in calls.items()})

    first = interruption({0: "cells.run", 1: "cells.run", 2: "cells.run", 3: "?"}, {0: 7, 1: 7, 3: 7})
    assert first.may_escalate(12.0) and not first.may_escalate(12.1)
    # Rank 0 still answers call 7, rank 1 another one. What an earlier kernel has called has no number here.
    later = interruption({0: "cells.run", 1: "cells.run", 2: "cells.run", 3: "?"}, {0: 7, 1: 8, 3: 7})
    assert first.unanswered(later) == [0, 2, 3]
    assert first.unanswered(interruption({0: "actor.step", 2: "?", 3: "cells.run"}, {0: 7, 3: 7})) == [2, 3]
    assert interruption({}, {}).unanswered(later) == []


# -- the end of the kernel ----------------------------------------------------------------------------------


def test_ranks_that_outlive_the_kernel_are_not_interrupted_as_it_ends(rig: Rig) -> None:
    ranks = KeptRanks(rig)
    rig.default = [ranks]
    rig.press()
    assert ranks.interrupts == 1  # the kernel goes on
    ranks.shut_down_when_asked = True  # the shutdown comes between the press and the look at its targets
    rig.now += 60
    rig.press()
    assert ranks.interrupts == 1 and ranks.killed == []
