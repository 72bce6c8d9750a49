"""Query ranks for modules that are older than their files, and refresh them in one of three ways."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

from monarch_kernel.actor import ActorError, ProcMesh, SupervisionError
from monarch_kernel.introspection import Whole, between_messages, sources_changed, whole_of
from monarch_kernel.meshes import actor_meshes_on, format_ranks, list_proc_meshes, respawn_actors
from monarch_kernel.workers import placement_of
from workspace_sync.model.sync_report import StaleModule
from workspace_sync.reload.in_place import Pairs, Reloader, reload_here
from workspace_sync.reload.loaded import enter_new_tree, loaded_modules
from workspace_sync.reload.refresh_report import (
    EVERY,
    FAILED,
    RELOADED,
    STALE,
    ModuleReport,
    ModuleSelection,
    RankReport,
    Refreshed,
)

How = Literal["reload", "respawn", "restart"]
When = Literal["idle", "now"]

#: The interval at which a wait for ranks checks whether they still respond (seconds).
_LOOK = 0.2

_agents: dict[str, Any] = {}
_lock = threading.Lock()


def contact(procs: ProcMesh, folders: Iterable[tuple[str, str]] | None = None, timeout: float = 10.0) -> Refreshed:
    """Make ranks record their imports from a workspace.

    Call it before the first switch: modules that a rank has imported until then are compared with the current files.

    Args:
        procs: a proc mesh, or a slice of one.
        folders: as for ``refresh``.
        timeout: for all ranks together (seconds).
    """
    return _all(procs, "watch", timeout, _pairs(procs, folders))


def enter(procs: ProcMesh, folders: Iterable[tuple[str, str]] | None = None, timeout: float = 10.0) -> Refreshed:
    """Notify ranks that their hosts have switched to another tree.

    They re-enter their working directory if it was in an earlier tree, and drop their caches of imports and source
    lines. ``refresh`` does this, too. Their reports name the modules of which they have an older version
    (``stale_in``).
    """
    return _all(procs, "enter", timeout, _pairs(procs, folders))


def stale_modules(
    procs: ProcMesh,
    changed: Collection[str] | None = None,
    *,
    folders: Iterable[tuple[str, str]] | None = None,
    timeout: float = 10.0,
) -> list[StaleModule]:
    """Return the modules of which ranks have imported an older version than their hosts have now.

    Args:
        procs, changed, folders: as for ``refresh``.
        timeout: for all ranks together (seconds); ranks that do not answer are not named.

    Returns:
        One entry for each module and state. The state is "stale", or why it cannot be reloaded.
    """
    return stale_in(_all(procs, "stale", timeout, _pairs(procs, folders), _listed(changed)))


def stale_in(found: Refreshed) -> list[StaleModule]:
    """Group the modules that ranks have reported: one entry for each module and state, as for ``stale_modules``."""
    return [
        StaleModule(name, format_ranks(ranks), state if state == STALE else reason)
        for (name, state, reason), ranks in sorted(found.modules().items())
    ]


def refresh(
    procs: ProcMesh,
    how: How = "reload",
    changed: Collection[str] | None = None,
    *,
    folders: Iterable[tuple[str, str]] | None = None,
    selection: ModuleSelection = EVERY,
    when: When = "idle",
    wait: float = 5.0,
    timeout: float = 60.0,
) -> Refreshed:
    """Make ranks run the sources that their hosts have now.

    * "reload": in place. Existing functions and classes follow the new source, and with them live actors. Modules that
      cannot be changed in place are named, and left unchanged as a whole.
    * "respawn": the changed modules, and all that import them, are imported again in the same processes. Then the
      actors that this process has spawned are created again with their original arguments. If they have ``checkpoint``
      and ``__restore__``, their state is saved first and restored.
    * "restart": the same, in new processes that replace the old ones.

    Args:
        procs: a proc mesh, or a slice of one.
        changed: the changed paths at the client. None: check every file.
        folders: the folders of the workspace, each with its folder on the hosts. None: the folders that were placed on
            the hosts (``monarch_kernel.workers.placement_of``), else the working directory, in place.
        selection: which modules to reload ("reload" only).
        when: "idle": between two messages of all actors of a process; "now": at once, while endpoints run; these
            continue in the old code, and call into the new code.
        wait: the longest wait for idle ranks (seconds); ranks that stay busy are named and left unchanged.
        timeout: the time limit of all other steps (seconds).

    Raises:
        ValueError: ``how`` is invalid.
        HealError: for "restart", if this process did not spawn the procs.
    """
    if how not in ("reload", "respawn", "restart"):
        raise ValueError(f"{how!r} is no way to refresh ranks: use reload, respawn or restart")
    began = time.monotonic()
    pairs, paths = _pairs(procs, folders), _listed(changed)
    if how == "reload":
        result = _all(procs, "reload", timeout + wait, pairs, paths, selection, when, wait)
    elif how == "respawn":
        result = _respawn(procs, pairs, paths, when, wait, timeout)
    else:
        result = _restart(procs, pairs, paths, timeout)
    done = {module.file for rank in result.ranks for module in rank.modules if module.state == RELOADED}
    if done:
        sources_changed(done)
    result.how = how
    result.seconds = time.monotonic() - began
    return result


def refresh_here(
    changed: Collection[str] | None = None,
    *,
    folders: Iterable[tuple[str, str]] = (),
    selection: ModuleSelection = EVERY,
    wait: float = 5.0,
) -> list[ModuleReport]:
    """Reload stale modules of this process in place, so that calls are checked against the endpoints that ranks have.

    Args:
        changed, selection, wait: as for ``refresh``.
        folders: of the workspace, in addition to those of earlier calls.

    Raises:
        StillBusy: an actor of this process was busy throughout the wait.
    """
    loaded_modules.watch(folders)
    enter_new_tree(loaded_modules.folders)
    return between_messages(lambda: reload_here(_listed(changed), selection.wants), wait)


def _respawn(
    procs: ProcMesh, pairs: Pairs, paths: Collection[str] | None, when: When, wait: float, timeout: float
) -> Refreshed:
    deadline = time.monotonic() + timeout
    _checkpoint(procs, timeout)
    result = _all(procs, "replace", wait + timeout, pairs, paths, when, wait)
    failed = [rank for rank in result.ranks if rank.error or any(each.state == FAILED for each in rank.modules)]
    if failed:
        _all(procs, "put_back", timeout)
        for rank in result.ranks:
            if rank not in failed:
                rank.error = "it is left as it was, as other ranks could not import the new source"
        return result
    healed = respawn_actors(procs, timeout).get(max(0.1, deadline - time.monotonic()))
    result.respawned, result.restored = list(healed.respawned), list(healed.restored)
    return result


def _restart(procs: ProcMesh, pairs: Pairs, paths: Collection[str] | None, timeout: float) -> Refreshed:
    stale = _all(procs, "stale", timeout, pairs, paths)
    _checkpoint(procs, timeout)
    procs.kill("it is restarted with new sources").get(timeout)
    healed = procs.heal(timeout=timeout).get(timeout)
    for rank in stale.ranks:
        rank.error = ""
        for module in rank.modules:
            module.state, module.reason = RELOADED, ""
    own = {mesh._name for mesh in actor_meshes_on(procs)}  # tools are created again, too, but not reported
    stale.respawned = [name for name in healed.respawned if name in own]
    stale.restored = [name for name in healed.restored if name in own]
    return stale


def _checkpoint(procs: ProcMesh, timeout: float) -> None:
    """Make actors that can be restored save their state."""
    for mesh in actor_meshes_on(procs):
        if hasattr(mesh, "checkpoint") and hasattr(mesh._cls, "__restore__"):
            mesh.checkpoint.call().get(timeout)


def folders_of(procs: ProcMesh) -> list[tuple[str, str]]:
    """Return the folders of this process that were placed on the hosts of a mesh, or else the working directory."""
    placed = {pair for placement in placement_of(procs) if placement for pair in placement.folders.items()}
    placed = {(here, there) for here, there in placed if not there.endswith("/current/env")}  # installed, not edited
    return sorted(placed) or [(os.getcwd(), os.getcwd())]


def _pairs(procs: ProcMesh, folders: Iterable[tuple[str, str]] | None) -> list[tuple[str, str]]:
    return folders_of(procs) if folders is None else sorted(folders)


def _listed(changed: Collection[str] | None) -> Collection[str] | None:
    return None if changed is None else frozenset(map(os.path.abspath, changed))


# -- calls to all ranks ------------------------------------------------------------------------------


def _agents_of(whole: Whole, pairs: Pairs) -> Any:
    with _lock:
        live = {whole_of(procs).uid for procs in list_proc_meshes()}
        for uid in [uid for uid in _agents if uid not in live and uid != whole.uid]:
            del _agents[uid]
        if whole.uid not in _agents:
            _agents[whole.uid] = whole.procs.spawn("reloader", Reloader, pairs).flatten("ranks")
        return _agents[whole.uid]


def _all(procs: ProcMesh, method: str, timeout: float, *args: object) -> Refreshed:
    """Call an endpoint of the reloader on all ranks; ranks that fail or do not answer are in the report."""
    deadline = time.monotonic() + timeout
    return _asked(procs, method, *args)(deadline, timeout)


def ask_all(
    request: Literal["watch", "enter"], meshes: Iterable[tuple[ProcMesh, Iterable[tuple[str, str]]]]
) -> Callable[[float], list[Refreshed]]:
    """Send ``contact`` ("watch") or ``enter`` to the ranks of several meshes at once.

    Args:
        meshes: the meshes, each with its folders.

    Returns:
        A function that waits for all meshes together, up to a time limit (seconds), and returns their answers.
    """
    asked = [_asked(procs, request, sorted(folders)) for procs, folders in meshes]

    def wait(timeout: float) -> list[Refreshed]:
        deadline = time.monotonic() + timeout
        return [answers(deadline, timeout) for answers in asked]

    return wait


def _asked(procs: ProcMesh, method: str, *args: Any) -> Callable[[float, float], Refreshed]:
    """Call an endpoint of the reloader on all ranks.

    Return a function that waits for the answers, given a timeout since the call (seconds) and the deadline that it
    implies (monotonic).
    """
    whole = whole_of(procs)
    agents = _agents_of(whole, args[0] if args else ())
    dead = whole.procs.dead()
    back = {rank: own for own, rank in enumerate(whole.ranks)}
    reports = {rank: RankReport(own, error=f"it is dead: {dead[rank]}") for rank, own in back.items() if rank in dead}
    waiting = sorted(back.keys() - reports.keys())
    parts = [(run, agents.slice(ranks=slice(run.start, run.stop))) for run in _runs(waiting)]
    calls = [(run, getattr(part, method).stream(*args)) for run, part in parts]

    def silent() -> bool:
        """Return whether all ranks that have not answered are known to be unresponsive, so that waiting is useless."""
        known = whole.procs.unresponsive()
        return all(rank in known for rank in waiting if rank not in reports)

    def answers(deadline: float, timeout: float) -> Refreshed:
        for run, call in calls:
            for slot in call:
                try:
                    rank, report = _soon(slot, deadline, silent)
                    reports[rank] = report
                    report.rank = back[rank]
                except (ActorError, SupervisionError) as error:
                    for failure in error.failures:
                        rank = run[failure.rank]
                        why = failure.death.cause if failure.death is not None else failure.fault or error
                        reports[rank] = RankReport(back[rank], error=str(getattr(why, "summary", why)))
                except TimeoutError:
                    break  # answers arrive in the order in which ranks send them
        known = whole.procs.unresponsive()
        for rank in waiting:
            if rank not in reports:
                why = f"it does not respond ({known[rank]})" if rank in known else ""
                reports[rank] = RankReport(back[rank], error=why or f"it did not answer within {timeout:g} s")
        return Refreshed(whole.procs.name, method, [reports[rank] for rank in sorted(reports)])

    return answers


def _soon(slot: Any, deadline: float, given_up: Callable[[], bool]) -> Any:
    """Wait for the value of a future.

    Raises:
        TimeoutError: the deadline (monotonic) has passed, or ``given_up`` returns true.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return slot.get(max(0.0, min(left, _LOOK)))
        except TimeoutError:
            if left <= _LOOK or given_up():
                raise


def _runs(ranks: Sequence[int]) -> list[range]:
    """Convert sorted ranks to ranges."""
    found: list[range] = []
    for rank in ranks:
        if found and found[-1].stop == rank:
            found[-1] = range(found[-1].start, rank + 1)
        else:
            found.append(range(rank, rank + 1))
    return found
