"""What a watch in a kernel sees: the mesh in use, and the cells that ranks run, by the names that people know."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.harness import Kernel

WATCH = """
import threading
from monarch_kernel.watch import watch
seen = watch(period=0.05)
lines, changed = set(), threading.Condition()
def note(delta):
    with changed:
        lines.update((rank.state.value, rank.doing) for rank in delta.ranks.values())
        lines.update(("current", mesh.name) for mesh in delta.meshes.values() if mesh.current)
        changed.notify_all()
def wait_for(line):
    with changed:
        assert changed.wait_for(lambda: line in lines, 30), (line, lines)
told = seen.subscribe(note, since=0)
"""


def test_cells_and_the_mesh_in_use_are_seen(fresh_kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fresh_kernel.ok("%mesh up alpha --procs 2")
    fresh_kernel.ok(WATCH)
    fresh_kernel.ok("wait_for(('current', 'alpha'))")
    ran = fresh_kernel.ok(
        f"%%mesh -a -o ran\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    )
    number = next(m["content"]["execution_count"] for m in ran.messages if m["msg_type"] == "execute_input")
    fresh_kernel.ok(f"wait_for(('running', 'cell [{number}]'))")
    gate.touch()
    fresh_kernel.ok("ran.result(30)")
    fresh_kernel.ok("%mesh up beta --procs 1")
    fresh_kernel.ok("wait_for(('current', 'beta'))")
    fresh_kernel.ok("lines.clear()")
    fresh_kernel.ok("%mesh use alpha")
    fresh_kernel.ok("wait_for(('current', 'alpha'))")
    fresh_kernel.ok("seen.snapshot(); seen.close()")
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
