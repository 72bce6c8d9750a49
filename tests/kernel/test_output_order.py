"""What ranks put out and what the cell itself prints stand in the order in which they happened."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel, Outcome
from tests.kernel.screen import lines, text

ACTOR = """
import subprocess, sys
from IPython.display import display
from monarch_kernel.actor import Actor, endpoint, get_or_spawn_controller, this_host

class Worker(Actor):
    @endpoint
    def step(self, n):
        print("step", n)
    @endpoint
    def child(self, n):
        subprocess.run(["echo", f"child {n}"])
    @endpoint
    def quiet(self):
        return 7
    @endpoint
    def fail(self):
        print("about to fail")
        raise ValueError("no luck")

class Async(Actor):
    @endpoint
    async def begin(self, n):
        print("begun", n, end="")

procs = this_host().spawn_procs({"gpus": 2}, name="order")
workers = procs.spawn("workers", Worker)
workers.quiet.call().get()
others = procs.spawn("others", Async)
"""


@pytest.fixture(scope="module")
def workers(kernel: Kernel) -> Kernel:
    """The file's kernel with an actor mesh of two."""
    kernel.ok(ACTOR)
    return kernel


def shown(outcome: Outcome) -> list[str]:
    """The lines of a cell, with equal ones of both ranks as one: a busy machine may show each as it comes."""
    found: list[str] = []
    for line in lines(outcome):
        if found and {found[-1][:4], line[:4]} == {"[0] ", "[1] "} and found[-1][4:] == line[4:]:
            found[-1] = f"[0-1] {line[4:]}"
        else:
            found.append(line)
    return found


def test_a_loop_of_print_call_print_shows_each_step_in_its_place(workers: Kernel) -> None:
    outcome = workers.ok("for n in range(5):\n    print('---', n)\n    await workers.step.call(n)\nprint('end')")
    assert shown(outcome) == [line for n in range(5) for line in (f"--- {n}", f"[0-1] step {n}")] + ["end"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("others.begin.call(n).get()", "begun {}"),  # a line that is not finished, of an async actor
        ("workers.child.call(n).get()", "child {}"),  # plain bytes of another process
        ("workers.slice(gpus=0).step.call_one(n).get()", "step {}"),
        ("[f.get() for f in workers.step.stream(n)]", "step {}"),
    ],
)
def test_whatever_writes_and_however_it_is_called(workers: Kernel, call: str, said: str) -> None:
    outcome = workers.ok(f"for n in range(3):\n    print('---', n)\n    {call}\nprint('end')")
    ranks = "[0]" if "call_one" in call else "[0-1]"
    assert shown(outcome) == [line for n in range(3) for line in (f"--- {n}", f"{ranks} {said.format(n)}")] + ["end"]


def test_without_anything_between_them_the_lines_of_ranks_stay_together(workers: Kernel) -> None:
    outcome = workers.ok("for n in range(3):\n    await workers.step.call(n)\nprint('end')")
    assert lines(outcome) == ["[0-1] step 0", "      step 1", "      step 2", "end"]
    assert len(outcome.displays) == 1


def test_displays_results_and_errors_have_their_places_too(workers: Kernel) -> None:
    outcome = workers.ok("await workers.step.call(1)\ndisplay(1.5)\nawait workers.step.call(2)\n'the result'")
    assert shown(outcome) == ["[0-1] step 1", "1.5", "[0-1] step 2", "'the result'"]
    outcome = workers.run("print('first')\nawait workers.fail.call()")
    assert shown(outcome) == ["first", "[0-1] about to fail", "ActorError[ValueError]"]


def test_what_was_printed_before_is_here_when_a_quiet_call_returns(workers: Kernel) -> None:
    # The second call names the mark of the first, which nobody waited for.
    outcome = workers.ok("workers.step.broadcast(9)\nawait workers.quiet.call()\nprint('end')")
    assert shown(outcome) == ["[0-1] step 9", "end"]


def test_a_stopped_host_agent_holds_a_call_up_for_a_moment_only(workers: Kernel) -> None:
    outcome = workers.ok(
        "import os, signal, time\n"
        "from monarch_kernel.runtime.actor.process import get_system\n"
        "agent = get_system().agent_process.pid\n"
        "os.kill(agent, signal.SIGSTOP)\n"
        "try:\n"
        "    values = [workers.step.call(n).get(20) for n in range(3)]\n"
        "finally:\n"
        "    os.kill(agent, signal.SIGCONT)\n"
        "print(len(values), 'calls')"
    )
    assert "3 calls" in outcome.stdout
    assert "step 2" in text(outcome)
