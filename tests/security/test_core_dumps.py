"""Processes that hold a key leave no core dump; those of the user do as the user has set it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import this_host
from monarch_kernel.runtime.node import coredumps
from tests.conftest import children
from tests.workers import Start


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The limits of the user's shell: soft and hard."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != resource.RLIM_INFINITY and hard < 1 << 20:
        pytest.skip("this user may have no core dumps anyway")
    monkeypatch.setattr(coredumps, "_users", None)
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, hard))
    yield str(1 << 20), "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    resource.setrlimit(resource.RLIMIT_CORE, before)


def limits(pid: int | str) -> tuple[str, str]:
    line = next(line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max core"))
    soft, hard = line.split()[4:6]
    return soft, hard


def test_who_holds_a_key_leaves_no_core_dump(users: tuple[str, str], workers: Start) -> None:
    near, far = workers(1, "ipc"), workers(1, "tcp")
    near.attach().spawn_procs({"gpus": 1}).initialized.get()
    assert limits("self") == users, "it has no key yet"
    remote = far.attach().spawn_procs({"gpus": 1})
    remote.initialized.get()
    here = this_host().spawn_procs({"gpus": 1})
    here.initialized.get()
    assert limits("self") == ("1", users[1])
    assert limits(far[0].pid) == ("1", "1")
    assert limits(near[0].pid) == users
    below = children() - {far[0].pid}
    assert len(below) >= 8
    assert {limits(pid) for pid in below} == {users}, "agents without a key, fork servers and ranks"
