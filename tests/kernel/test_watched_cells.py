"""What a watch in a kernel sees: the mesh in use, and the cells that ranks run, by the names that people know."""

from __future__ import annotations

from tests.kernel.harness import Kernel

WATCH = """
import threading
from monarch_kernel.watch import watch
seen = watch(period=0.05)
lines, enough = [], threading.Event()
def note(delta):
    lines.extend((rank.state.value, rank.doing) for rank in delta.ranks.values())
    lines.extend(("current", mesh.name) for mesh in delta.meshes.values() if mesh.current)
told = seen.subscribe(note, since=0)
"""
# Until the ranks have been seen in the cell; how long the cell takes otherwise is no matter.
CELL = "import time\ntime.sleep(1.5)"


def test_cells_and_the_mesh_in_use_are_seen(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("%mesh up alpha --procs 2")
    fresh_kernel.ok(WATCH)
    ran = fresh_kernel.ok(f"%%mesh\n{CELL}")
    number = next(m["content"]["execution_count"] for m in ran.messages if m["msg_type"] == "execute_input")
    fresh_kernel.ok("%mesh up beta --procs 1")
    fresh_kernel.ok("%mesh use alpha")
    ended = "seen.snapshot(); seen.close(); print(*sorted(set(lines)), sep='\\n')"
    text = fresh_kernel.ok(ended).stdout
    assert f"('running', 'cell [{number}]')" in text
    assert "('current', 'alpha')" in text
    assert "('current', 'beta')" in text
    fresh_kernel.ok("%mesh down alpha\n%mesh down beta")


def test_status_is_replaced_in_place_while_it_is_watched(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("%mesh up alpha --procs 2")
    ran = fresh_kernel.ok("%mesh status --watch --for 2.5")
    assert len(ran.displays) == 1
    assert ran.updates  # for how long ranks do what they do grows
    for data in (*ran.displays, *ran.updates):
        assert "alpha" in data["text/plain"]
        assert "<table>" in data["text/html"]
    cell = fresh_kernel.send("%mesh status --watch")
    cell.until(lambda out: bool(out.displays))
    fresh_kernel.interrupt()
    assert cell.wait().status == "ok"
    refused = fresh_kernel.run("%mesh status --for 3")
    assert "goes with --watch" in refused.evalue
