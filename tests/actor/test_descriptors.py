"""How many descriptors each process may have open: a large mesh is not limited by the user's soft limit."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.actor.conftest import Script
from tests.conftest import wait_until

pytestmark = pytest.mark.own_runtime

#: The agent needs three for each rank, so 60 would not carry 20 ranks; the controller and rank 0 need one.
MESH = """
import json, os, resource, subprocess

SOFT, RANKS = 60, 56
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))

import psutil
from monarch_kernel.actor import Actor, endpoint, this_host

def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

class Peer(Actor):
    @endpoint
    def limits(self):
        pid = os.fork()
        if pid == 0:
            os._exit(soft() == SOFT)
        forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ran = subprocess.run(["sh", "-c", "ulimit -Sn"], capture_output=True, text=True).stdout
        return soft(), bool(forked), int(ran)

    @endpoint
    def ask_all(self, peers):
        return len(list(peers.limits.call().get(60).values()))

    @endpoint
    def own(self):
        pid = os.fork()
        if pid == 0:
            os._exit(soft() == SOFT)
        return soft(), bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": RANKS})
    peers = procs.spawn("peer", Peer)
    told = {"hard": min(hard, 1 << 20)}
    told["ranks"] = sorted(set(peers.limits.call().get(60).values()))
    told["asked"] = peers.slice(gpus=0).ask_all.call_one(peers.slice(gpus=slice(1, RANKS))).get(60)
    told["busy rank"] = peers.slice(gpus=0).own.call_one().get(60)
    agent = psutil.Process().children()[0]
    told["agent"] = [p.rlimit(psutil.RLIMIT_NOFILE)[0] for p in (agent, agent.children()[0])]
    told["controller"] = soft()
    print(json.dumps(told))
"""


def test_a_mesh_is_larger_than_the_soft_limit_and_user_code_keeps_that(script: Callable[[str], Script]) -> None:
    code, out, err = script(MESH).finish()
    assert (code, err) == (0, "")
    told = json.loads(out)
    hard = told["hard"]
    if hard < 4 * 60:
        pytest.skip(f"the hard limit of this machine ({hard}) leaves nothing to raise")
    assert told["ranks"] == [[60, True, 60]], "an idle rank has the limit of the user's shell"
    assert told["asked"] == 55
    assert told["busy rank"] == [hard, True], "links to all others need more; what it forks has the user's limit"
    assert told["agent"] == [hard, hard], "the agent and its fork server"
    assert told["controller"] == hard


def test_a_worker_has_what_the_system_allows(workers: Callable[..., Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        (worker,) = workers(1, "ipc")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    process = psutil.Process(worker.pid)

    def limits() -> list[int]:
        return [p.rlimit(psutil.RLIMIT_NOFILE)[0] for p in (process, *process.children())]

    wait_until(lambda: limits() == [min(hard, 1 << 20)] * 2, "it and its fork server have raised theirs")
