"""Every attack on one real worker, at small counts; ``python -m tests.attacks`` runs them by the ten thousand."""

from __future__ import annotations

from monarch_kernel.protocol.casts import CastBranch, CastGroup
from monarch_kernel.protocol.gateway_messages import MeetFrame
from monarch_kernel.protocol.keys import load_keys
from monarch_kernel.protocol.messages import ProcRef, encode
from tests.attacks.__main__ import COUNTS
from tests.attacks.holder import Holder, framed, hello
from tests.attacks.storm import storm
from tests.workers import Start
from tests.workers import workers as workers

#: What the worker may have open, of which strangers get a quarter.
DESCRIPTORS = 256


def test_a_storm(workers: Start) -> None:
    team = workers(0, "tcp")
    team.start(descriptors=DESCRIPTORS)
    report = storm(team, {kind: 400 if kind == "silent" else 30 for kind in COUNTS})
    assert not report.failures, report
    assert report.calls and report.arrivals
    assert report.memory < 230_000_000, report
    assert report.descriptors < DESCRIPTORS // 2, report
    assert report.logged < 3_000, team[0].log()
    before, _, fault = team[0].log().partition("Traceback")
    assert not fault, f"{before[-1000:]}Traceback{fault[:4000]}"
    assert team[0].process.poll() is None


def test_what_nobody_handles_is_a_line_and_its_number(workers: Start) -> None:
    team = workers(1, "tcp")
    assert team.key_file is not None
    keys, port = load_keys(team.key_file), int(team[0].url.rpartition(":")[2])
    for number in range(5):
        with Holder(port, keys) as holder:
            holder.send(hello(f"attacker-{number}") + framed(encode(MeetFrame(1))) * 500 + framed(b"\xc1"))
            assert holder.said().startswith("received data is not a message of this version")
    log = team[0].log()
    assert log.count("MeetFrame") == 1
    assert log.count("WARNING the link to attacker-") == 1


def test_branches_of_a_cast_that_lead_nowhere_end_the_link_alone(workers: Start) -> None:
    team = workers(1, "tcp")
    assert team.key_file is not None
    keys, port = load_keys(team.key_file), int(team[0].url.rpartition(":")[2])
    ref = ProcRef("attacker", "", "attacker", "attacker", "", "site-attacker", "attacker")
    for branches, wrong in (
        ([], "Expected `array` of length >= 1 - at `$[3]`"),
        ([CastBranch(ref, 2, [], []), CastBranch(ref, 0, [], [])], "Expected `int` >= 1 - at `$[3][1][1]`"),
    ):
        with Holder(port, keys) as holder:
            holder.send(hello("attacker") + framed(encode(CastGroup(1, ref, branches))))
            assert holder.said() == f"received data is not a message of this version ({wrong})"
    assert "is a bug in monarch_kernel" not in team[0].log()
