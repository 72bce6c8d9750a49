"""Who is told of which death: the ownership tree, without any I/O."""

from __future__ import annotations

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent
from monarch_kernel.runtime.supervision import OwnedMesh, Tree

KILLED = Death("killed by SIGKILL")


def refs(*names: str) -> tuple[ProcRef, ...]:
    return tuple(ProcRef(name, f"/run/{name}.sock", "host", "agent", "/run/agent.sock") for name in names)


def mesh(name: str, owner: str, *procs: str) -> OwnedMesh:
    return OwnedMesh(name, name, owner, Extent(("gpus",), (len(procs),)), refs(*procs))


def told(notices: list) -> list[tuple[str, str, list[int]]]:
    return [(n.mesh.owner, n.mesh.name, n.ranks) for n in notices]


def test_a_dead_proc_concerns_every_actor_mesh_on_it_and_not_the_proc_mesh() -> None:
    tree = Tree()
    tree.spawned_procs(mesh("procs", "root", "p0", "p1"))
    tree.spawned_actors(mesh("a", "root", "p0", "p1"))
    tree.spawned_actors(mesh("b", "other", "p1"))
    assert told(tree.proc_died("p1", KILLED)) == [("root", "a", [1]), ("other", "b", [0])]


def test_a_dead_proc_without_actors_concerns_the_owner_of_the_proc_mesh() -> None:
    tree = Tree()
    tree.spawned_procs(mesh("procs", "root", "p0", "p1"))
    assert told(tree.proc_died("p0", KILLED)) == [("root", "procs", [0])]


def test_a_tool_on_a_proc_does_not_tell_of_its_death() -> None:
    tree = Tree()
    tree.spawned_procs(mesh("procs", "root", "p0", "p1"))
    tool = mesh("debugger", "root", "p0", "p1")
    tool.tool = True
    tree.spawned_actors(tool)
    assert told(tree.proc_died("p0", KILLED)) == [("root", "procs", [0])]
    tree.spawned_actors(mesh("a", "root", "p1"))
    assert told(tree.proc_died("p1", KILLED)) == [("root", "a", [0])]


def test_each_death_is_told_once() -> None:
    tree = Tree()
    tree.spawned_actors(mesh("a", "root", "p0", "p1"))
    assert told(tree.actor_failed("a", 0, KILLED)) == [("root", "a", [0])]
    assert tree.actor_failed("a", 0, KILLED) == []
    assert tree.proc_died("p0", KILLED) == [], "the actor there was dead already"
    assert told(tree.proc_died("p1", KILLED)) == [("root", "a", [1])]
    assert tree.proc_died("p1", KILLED) == []


def test_what_was_stopped_on_purpose_is_no_failure() -> None:
    tree = Tree()
    tree.spawned_actors(mesh("a", "root", "p0"))
    tree.spawned_procs(mesh("procs", "root", "p0"))
    tree.stopped("a")
    assert tree.actor_failed("a", 0, KILLED) == []
    assert told(tree.proc_died("p0", KILLED)) == [("root", "procs", [0])]
    tree.stopped("procs")
    tree.stopped("procs")
    assert tree.proc_died("p0", KILLED) == []


def test_a_proc_that_was_told_to_stop_is_no_failure() -> None:
    tree = Tree()
    tree.spawned_actors(mesh("a", "root", "p0"))
    assert tree.proc_died("p0", Death("stopped", "stopped")) == []


def test_the_key_names_the_event_that_a_call_may_have_reported() -> None:
    tree = Tree()
    tree.spawned_actors(mesh("a", "root", "p0", "p1"))
    assert [n.key for n in tree.actor_failed("a", 1, KILLED)] == [("a", "p1")]
    assert [n.key for n in tree.proc_died("p0", KILLED)] == ["p0"]


def test_what_this_process_has_killed_is_nobodys_failure() -> None:
    tree = Tree()
    tree.spawned_procs(mesh("procs", "root", "p0", "p1"))
    tree.spawned_actors(mesh("a", "root", "p0", "p1"))
    tree.ending(["p1"])
    assert told(tree.proc_died("p1", KILLED)) == []
    assert told(tree.proc_died("p0", KILLED)) == [("root", "a", [0])]
