"""Rules on the ranks of a mesh or of a joined job, begun and read from a controller."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_kernel.debugger.controller.query import Answers, ask
from monarch_kernel.numerics.claims import BrokenRule
from monarch_kernel.numerics.control import NumericsError, problem_of

#: How long ranks may take to begin (they load torch's hooks) and to answer (seconds).
BEGIN, ANSWER = 30.0, 5.0
#: How often rank 0 is asked for broken rules (seconds).
PERIOD = 1.0


class MeshRules:
    """Rules that the ranks of a mesh check, until `end`.

    Args:
        mesh: a mesh of processes, or a joined job.
        names: the rules; all by default.
        every: check every Nth step.
        stop: stop in the debugger after a step that certainly breaks a rule.
        placements: how parameters that are plain tensors lie on ranks, by patterns of names.
        say: called with the text of each broken rule, from a thread.

    Raises:
        NumericsError: a rank is dead, did not answer or refused; the message names it.
    """

    def __init__(
        self,
        mesh: Any,
        names: Sequence[str] | None = None,
        *,
        every: int = 10,
        stop: bool = False,
        placements: Mapping[str, Any] | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        from monarch_kernel.numerics.rules import begin_here

        self.mesh, self.every, self.stop = mesh, every, stop
        self._say = say
        self._lock = threading.Lock()
        self._count = 0  # of broken rules that were shown
        self._over = threading.Event()
        options = {"every": every, "stop": stop, "placements": dict(placements or {})}
        answers = ask(
            mesh, begin_here, None if names is None else list(names), uuid.uuid4().hex, options, timeout=BEGIN
        )
        if problem := problem_of(answers):
            self._over.set()
            self._end_on_ranks()
            raise NumericsError(problem)
        self.names: list[str] = next(iter(answers.values.values()))
        self._thread = threading.Thread(target=self._poll, name="rules of a mesh", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it ended, or its mesh did."""
        return self._over.is_set()

    def report(self) -> str:
        """Return one line on what was checked and found so far."""
        from monarch_kernel.numerics.rules import report_here

        return self._read(ask(self.mesh, report_here, ranks=[0], timeout=ANSWER))

    def end(self) -> str:
        """End it on all ranks; returns the last report."""
        self._over.set()
        self._thread.join(ANSWER + PERIOD)
        return self._read(self._end_on_ranks())

    def _end_on_ranks(self) -> Answers:
        from monarch_kernel.numerics.rules import end_here

        # Claims that are on their way are judged first.
        return ask(self.mesh, end_here, timeout=2 * ANSWER)

    def _poll(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self.report()
            except (RuntimeError, ValueError):  # the mesh was stopped
                self._over.set()

    def _read(self, answers: Answers) -> str:
        """Show new broken rules of rank 0, and return its summary."""
        report = answers.values.get(0)
        if report is None:
            return f"Rank 0 does not answer: {problem_of(answers) or 'it is busy'}."
        broken: list[dict[str, Any]] = report["broken"]
        with self._lock:
            new, self._count = broken[self._count :], max(self._count, len(broken))
        for each in new:
            self._say(str(BrokenRule.from_dict(each)))
        return str(report["summary"])
