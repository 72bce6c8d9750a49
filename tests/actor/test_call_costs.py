"""What one call costs is counted, not timed, and may not grow unseen."""

from __future__ import annotations

import json
import subprocess
import sys

#: Functions of this package, and system calls, of one call: at its caller, and at a rank that it runs on. To lower a
#: number, change it. To raise one, say why beside it.
COSTS = {
    "call_one": {"caller": [22, 5], "rank": [16, 3]},
    "call": {"caller": [67, 19], "rank": [16, 3]},  # on 8 ranks
}


def test_a_call_costs_no_more_functions_and_system_calls_than_it_did() -> None:
    program = [sys.executable, "-m", "tests.actor.count_calls"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == COSTS
