"""What one call costs is counted, not timed, and may not grow unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from tests.actor.conftest import Script

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


def test_ranks_load_no_module_for_an_actor_of_a_script_after_their_fork(script: Callable[[str], Script]) -> None:
    """Each would cost every rank its time and its pages: these three once cost 1.9 MB of private memory."""
    loaded = script("""
        import sys
        import numpy
        from monarch_kernel.actor import Actor, endpoint, this_host

        class Modules(Actor):
            def __init__(self):
                self.numpy = numpy

            @endpoint
            def loaded(self):
                names = list(sys.modules)
                return names[names.index("numpy") :]  # which the fork server's template has loaded last

        modules = this_host().spawn_procs(per_host={"gpus": 2}).spawn("modules", Modules)
        modules.loaded.call().get()
        for names in modules.loaded.call().get().values():
            print(*[name for name in names if name.startswith("monarch_kernel")])
        """)
    code, out, err = loaded.finish()
    assert (code, out.split()) == (0, []), (out, err)
