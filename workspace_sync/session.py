"""Run one operation of a client on the hosts of a mesh: sync, verify, status, forget, collect."""

from __future__ import annotations

import getpass
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from monarch_kernel.display.quantities import text_size
from monarch_kernel.introspection import ToolHost, each_host
from monarch_kernel.workers import Placement, place_ranks, unplace_ranks
from workspace_sync.environment.facts import check_compatible, facts
from workspace_sync.environment.locked import LockFile, read_lock
from workspace_sync.model import errors
from workspace_sync.model.errors import IncompatibleError, ScanError, SyncError, WorkspaceBusyError
from workspace_sync.model.sync_report import Forgotten, HostReport, Phases, SyncProgress, SyncReport
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.scanning import Announcement, ContentTaker
from workspace_sync.sources import ENVIRONMENT, TREE, ScannedWorkspace, WorkspaceSource, source_of
from workspace_sync.transfer.blocks import Changes, Part
from workspace_sync.transfer.calls import PATIENCE, Answer, Calls
from workspace_sync.transfer.host_work import agents_of
from workspace_sync.transfer.messages import Collected, Failed, HostState, Remains
from workspace_sync.transfer.staging_run import StagingRun, Step
from workspace_sync.transfer.supply import EarlyPipe

if TYPE_CHECKING:
    from monarch_kernel.actor import HostMesh, ProcMesh


#: The longest wait for a workspace that another client syncs (seconds).
BUSY_WAIT = 5.0
#: A larger first sync is sent while it is scanned (bytes).
_EARLY = 4 << 20
#: The number of times that a sync restarts because files changed while they were read.
_SCANS = 3

Folders = Workspace | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Show = Callable[[SyncProgress], None]


def verify(hosts: HostMesh | ProcMesh, workspace: Folders = ".", *, progress: Show | None = None) -> SyncReport:
    """Hash all files of the workspace on the hosts; change nothing.

    ``problems`` of each host's report lists the damage, which the next sync repairs.
    """
    return SyncClient(hosts, workspace_of(workspace), progress).verify()


def status(hosts: HostMesh | ProcMesh, workspace: Folders = ".") -> list[HostState]:
    """Return the content of a workspace on the hosts, one entry for each host that answers. Read only records."""
    return SyncClient(hosts, workspace_of(workspace), None).status()


def forget(
    hosts: HostMesh | ProcMesh, workspace: Folders = ".", *, kept: bool = False, dry_run: bool = False
) -> list[Forgotten]:
    """Remove a workspace from hosts: its trees, their records, and the earlier trees for a rollback.

    The content of the trees becomes old content of the store, so that a sync shortly afterwards sends little. Files
    created by ranks, in trees or in conflict with one, are not removed: they stay in the folder ``kept`` of the
    workspace. Ranks spawned afterwards start in the hosts' own folders.

    Args:
        hosts: a mesh.
        workspace: the workspace to remove.
        kept: also remove the files of ranks. There are no other copies.
        dry_run: only list the content.

    Returns:
        One entry for each host.

    Raises:
        WorkspaceBusyError: processes use the trees, or another client syncs; nothing was removed anywhere.
        SyncError: hosts are lost or cannot remove something; the message names them.
    """
    return SyncClient(hosts, workspace_of(workspace), None).forget(kept=kept, dry_run=dry_run)


def collect(hosts: HostMesh | ProcMesh, *, limit: int | None = None, kept: bool = False) -> list[Collected]:
    """Remove content that no kept tree needs from the stores of hosts, the oldest first.

    Args:
        hosts: a mesh.
        limit: the amount that may stay (bytes); by default ``MONARCH_KERNEL_SYNC_KEEP`` of each host.
        kept: also remove the files of ranks that were in conflict with a tree, in all workspaces. There are no other
            copies.
    """
    found = each_host(hosts)
    calls = Calls(agents_of([host for host in found if not host.gone]), PATIENCE)
    answers = calls.gather("collect", limit, kept)
    names = {host.key: host for host in found}
    collected = [
        Collected(names[key].name, error=answer.value.text) if isinstance(answer.value, Failed) else answer.value
        for key, answer in answers.items()
    ]
    return collected + [Collected(host.name, error=f"it is gone: {host.gone}") for host in found if host.gone]


def workspace_of(what: Folders, env: CondaEnvironment | None = None) -> Workspace:
    """Convert the arguments of a sync to a workspace.

    Args:
        what: a workspace, or one or several folders.
        env: an environment that replaces the workspace's own.
    """
    if isinstance(what, Workspace):
        return what if env is None else Workspace(what.dirs, env, links=what.links)
    if isinstance(what, str | os.PathLike):
        return Workspace(dirs=[what], env=env)
    return Workspace(dirs=what, env=env)


class SyncClient:
    """One operation on the hosts of a mesh.

    Args:
        hosts: a mesh.
        workspace: the workspace of the operation.
        progress: see ``sync``.
        before_switch: called when all hosts have staged, before any of them switches.
    """

    def __init__(
        self,
        hosts: HostMesh | ProcMesh,
        workspace: Workspace,
        progress: Show | None,
        before_switch: Callable[[], object] = lambda: None,
    ) -> None:
        self._began = time.monotonic()
        self._workspace = workspace
        self._folder = f"{workspace.name}-{workspace.id}"
        self._progress = progress
        self._sends = False
        self._before_switch = before_switch
        self._hosts = each_host(hosts)
        self._failures: dict[str, Failed] = {}
        for host in self._hosts:
            if host.gone:
                self._failures[host.key] = Failed("HostLostError", f"it is gone: {host.gone}")
        self._calls = Calls(agents_of([host for host in self._hosts if not host.gone]), PATIENCE)
        self._states: dict[str, HostState] = {}
        self._verified: dict[str, list[str]] = {}
        self._phases = Phases()
        self._lock: LockFile | None = None

    # -- operations -----------------------------------------------------------------------------------------

    def sync(self, *, dry_run: bool, verify: bool) -> SyncReport:
        """See ``sync``."""
        if verify:
            self._verify()
        self._ask_for_states()
        with source_of(self._workspace) as source:
            for left in reversed(range(_SCANS)):
                early = None
                if not dry_run and self._workspace.env is None and source.knows_nothing(self._workspace):
                    found, early = self._find_and_send(source)
                else:
                    found = self._find(source)
                    self._take_states()
                try:
                    with nullcontext() if early is None else self._ending(early):
                        return self._to_hosts(found, source, dry_run, early)
                except ScanError:  # a file has changed since the scan
                    if not left:
                        raise
                    self._ask_for_states()
        raise AssertionError("unreachable")

    def rollback(self, steps: int, tree: str) -> SyncReport:
        """See ``rollback``. Hosts that already have the tree are unchanged."""
        self._ask_for_states()
        self._take_states()
        report = SyncReport(self._workspace.id)
        makers = self._makers()
        digests = [state.parts[TREE].digest.hex() for state in makers.values() if TREE in state.parts]
        if tree and makers and len(digests) == len(makers) and all(digest.startswith(tree) for digest in digests):
            self._finished(report, None)
        else:
            run = self._run(makers, False)
            with self._ending(run):
                run.stage_earlier(steps, tree)
                self._switch(run)
            self._finished(report, run)
        report.back = next((host.digest for host in report.hosts if host.digest), "")
        return report

    def is_condemned(self, digest: str) -> bool:
        """Return whether hosts had recorded that ranks cannot import modules of a tree."""
        wanted = bytes.fromhex(digest)
        return any(
            generation.broken and wanted in generation.digests.values()
            for state in self._states.values()
            for generation in state.generations
        )

    def condemn(self, digest: str, why: str) -> None:
        """Record on the hosts why ranks cannot import a tree ("": they can); a host that fails still offers it."""
        self._calls.gather("condemn", self._folder, bytes.fromhex(digest), why, _owner(), BUSY_WAIT)

    def verify(self) -> SyncReport:
        """See ``verify``."""
        self._verify()
        self._ask_for_states()
        self._take_states()
        return self._finished(SyncReport(self._workspace.id), None)

    def status(self) -> list[HostState]:
        """See ``status``."""
        self._ask_for_states(kept=True)
        self._take_states()
        return [self._states[host.key] for host in self._hosts if host.key in self._states]

    def forget(self, *, kept: bool, dry_run: bool) -> list[Forgotten]:
        """See ``forget``."""
        found = self._ask_to_forget(self._calls.hosts, kept, dry=True)
        users = {host: those for host in self._hosts if (those := found[host.key].footprint.users)}
        if users and not dry_run:
            lines = "".join(f"\n  {host.name}: {each}" for host, those in users.items() for each in those)
            raise WorkspaceBusyError(
                f"nothing was removed, as processes use the workspace:{lines}\nEnd them, and forget it again."
            )
        makers: dict[str, str] = {}
        for host in self._hosts:
            makers.setdefault(found[host.key].store, host.key)
        had = set[str]()
        if not dry_run:
            for host in self._hosts:
                unplace_ranks(host.mesh, found[host.key].path).get()
            before, found = found, found | self._ask_to_forget(makers.values(), kept, dry=False)
            about = {host: each.footprint for host, each in before.items()}
            had = {host for host, each in about.items() if each.generations or each.files or each.kept_files}
        name_of = {host.key: host.name for host in self._hosts}
        entries: list[Forgotten] = []
        for host in self._hosts:
            maker = makers[found[host.key].store]
            path, each = found[maker].path, found[maker].footprint
            counts = each.generations, each.files, each.size, each.kept_files, each.kept_size
            shares = "" if maker == host.key else name_of[maker]
            entries.append(Forgotten(host.name, path, *counts, maker in had, shares))
        return entries

    def _ask_to_forget(self, hosts: Iterable[str], kept: bool, *, dry: bool) -> dict[str, Remains]:
        answers = self._calls.gather("forget", self._folder, _owner(), kept, dry, hosts=list(hosts))
        found = self._succeeded(answers)
        if self._failures:
            names = {host.key: host.name for host in self._hosts}
            lines = "".join(f"\n  {names[key]}: {failed.text}" for key, failed in self._failures.items())
            what = "nothing was removed" if dry else "these hosts still have something of the workspace"
            raise _error_class(failed.kind for failed in self._failures.values())(
                f"{what}:{lines}\nForget it again when this is mended, or name the other hosts only."
            )
        return found

    # -- steps ------------------------------------------------------------------------------------------------

    def _ask_for_states(self, *, kept: bool = False) -> None:
        self._calls.forget()
        for host in self._calls.hosts:
            self._calls.ask(host, "describe", "describe", self._folder, kept)

    def _take_states(self) -> None:
        began = time.monotonic()
        self._states.clear()
        answers = self._calls.answers("describe", self._calls.hosts)
        ended = [host for host in self._hosts if host.key in answers and answers[host.key].lost]
        for link in agents_of(ended):  # agents that have ended since the last sync are replaced
            self._calls.renew(link)
        answers |= self._calls.gather("describe", self._folder, hosts=[host.key for host in ended])
        self._failures = {host: failed for host, failed in self._failures.items() if host not in answers}
        self._states |= self._succeeded(answers)
        self._phases.plan += time.monotonic() - began

    def _by_store(self) -> dict[str, str]:
        """Return the host that creates the trees of each store: hosts with a common home folder share one."""
        found: dict[str, str] = {}
        for host in self._hosts:
            state = self._states.get(host.key)
            if state is not None and host.key not in self._failures:
                found.setdefault(state.store, host.key)
        return found

    def _makers(self) -> dict[str, HostState]:
        """Return the hosts that create trees."""
        return {key: self._states[key] for key in self._by_store().values()}

    def _maker_of(self, host: ToolHost, by_store: Mapping[str, str]) -> str:
        """Return the host that creates the trees which a host sees."""
        state = self._states.get(host.key)
        return host.key if state is None or host.key in self._failures else by_store[state.store]

    def _verify(self) -> None:
        self._verified |= self._succeeded(self._calls.gather("verify", self._folder))

    def _succeeded(self, answers: Mapping[str, Answer]) -> dict[str, Any]:
        """Return the values that hosts have answered; record the failures of the others."""
        self._failures |= {host: each.value for host, each in answers.items() if isinstance(each.value, Failed)}
        return {host: each.value for host, each in answers.items() if not isinstance(each.value, Failed)}

    def _find(
        self, source: WorkspaceSource, taker: ContentTaker | None = None, cancelled: Callable[[], bool] | None = None
    ) -> ScannedWorkspace:
        began = time.monotonic()
        found = source.find(self._workspace, None if self._progress is None else self._scanned, taker, cancelled)
        self._phases.scan += time.monotonic() - began
        return found

    def _scanned(self, done: int, total: int) -> None:
        if self._progress is not None and not self._sends:  # the amount received by hosts is then the better measure
            self._progress(SyncProgress("scan", done, total))

    def _find_and_send(self, source: WorkspaceSource) -> tuple[ScannedWorkspace, StagingRun | None]:
        """Scan a workspace that is not in the cache, and meanwhile send its content to hosts that have none of it.

        Returns:
            The scan result, and the started run if hosts have accepted content.
        """
        pipe = EarlyPipe()
        cancelled = threading.Event()
        run: StagingRun | None = None
        with ThreadPoolExecutor(1, "sync scan") as pool:
            scanning = pool.submit(self._find, source, pipe, cancelled.is_set)
            scanning.add_done_callback(lambda _: pipe.ended())
            try:
                self._take_states()
                plan = pipe.plan()
                makers = self._makers()
                new = makers and not any(state.parts or state.left or state.repair for state in makers.values())
                if new and plan is not None and plan.bytes >= _EARLY:
                    self._announce([plan.announcement])
                    run = self._run(makers, False)
                    self._sends = True
                    try:
                        run.send_early(pipe, plan.bytes)
                    except ScanError:  # a file to be sent again has changed: the scan is complete without it
                        self._drop(run)
                        run = None
                pipe.close()
                self._sends = False
                return scanning.result(), run
            except BaseException:
                cancelled.set()
                pipe.close()
                if run is not None:
                    self._drop(run)
                raise

    def _drop(self, run: StagingRun) -> None:
        try:
            run.abort()
        finally:
            run.close()

    def _to_hosts(
        self, found: ScannedWorkspace, source: WorkspaceSource, dry_run: bool, early: StagingRun | None
    ) -> SyncReport:
        changes = Changes(found.parts)
        report = SyncReport(self._workspace.id, found.digest(TREE), hashed=found.hashed, dry_run=dry_run)
        report.environment = found.digest(ENVIRONMENT)
        for part in found.parts:
            files, size = part.manifest.count()
            report.files += files
            report.bytes += size
        report.notes += found.notes
        if early is None:
            self._announce(self._announcements(found))
        self._check_environment(found, report)
        deadline = time.monotonic() + BUSY_WAIT
        while True:
            behind = {key: state for key, state in self._makers().items() if _is_behind(state, changes)}
            if not behind:
                return self._finished(report, None)
            began = time.monotonic()
            run, early = early or self._run(behind, dry_run), None
            with self._ending(run):
                run.stage(changes)
                over = time.monotonic()
                self._phases.send = max(0.0, run.last_arrival - began)
                self._phases.stage = over - max(began, run.last_arrival)
                again = {each.kind for each in run.hosts.values()} & {"WorkspaceBusyError", "BaseGoneError"}
                if not again or dry_run or time.monotonic() > deadline:
                    if not dry_run:
                        self._switch(run)
                    break
                run.abort()
            time.sleep(random.uniform(0.05, 0.3))  # so that two clients do not collide again and again
            self._ask_for_states()
            self._take_states()
        report.sent = run.sent
        if self._lock is not None:
            report.notes += self._of_lock(run, self._lock.name)
        if any(each.step is Step.SWITCHED for each in run.hosts.values()):
            source.remember(found)
        return self._finished(report, run)

    def _of_lock(self, run: StagingRun, lock: str) -> Generator[str]:
        """Describe the content that hosts created from a lock file."""
        for host in self._hosts:
            each = run.hosts.get(host.key)
            staged = each.staged if each is not None else None
            if staged is not None and staged.made:
                yield f"{host.name} made {text_size(staged.made)} of the environment itself, from {lock}"
            if staged is not None and staged.unmade:
                yield f"{host.name} could not make the environment from {lock}, so it was sent: {staged.unmade}"

    def _run(self, states: dict[str, HostState], dry_run: bool) -> StagingRun:
        session = uuid.uuid4().hex
        return StagingRun(
            self._calls,
            session,
            self._folder,
            _owner(),
            states,
            dry=dry_run,
            lock=self._lock,
            progress=self._progress,
        )

    @contextmanager
    def _ending(self, run: StagingRun) -> Generator[None]:
        """Abort a run on an early exit, so that nothing stays staged."""
        try:
            yield
        except BaseException:
            run.abort()
            raise
        finally:
            run.close()

    def _switch(self, run: StagingRun) -> None:
        """Run the second phase. If a host is busy with another client, no host switches."""
        if any(each.step is Step.STAGED for each in run.hosts.values()):
            self._before_switch()
        began = time.monotonic()
        if not any(each.kind == "WorkspaceBusyError" for each in run.hosts.values()):
            run.commit()
        if any(each.step is not Step.SWITCHED for each in run.hosts.values()):
            run.abort()
        self._phases.switch = time.monotonic() - began

    def _announcements(self, found: ScannedWorkspace) -> Iterator[Announcement | None]:
        """Describe the first syncs of hosts."""
        parts = {name for state in self._states.values() for name in state.parts}
        if found.tree is not None and not parts:
            yield found.tree.announcement()
        if found.environment is not None and ENVIRONMENT not in parts:
            yield from (each.announcement() for each in found.environment.scans)

    def _announce(self, announcements: Iterable[Announcement | None]) -> None:
        """Show the content that a large first sync will send."""
        for about in filter(None, announcements):
            if self._progress is not None:
                self._progress(SyncProgress("plan", note=str(about)))
            else:
                print(about, file=sys.stderr)

    def _check_environment(self, found: ScannedWorkspace, report: SyncReport) -> None:
        """Refuse hosts on which the environment cannot run, before anything is sent to them."""
        env = found.environment
        if env is None:
            return
        report.notes += env.notes
        if self._workspace.env is not None and self._workspace.env.lock is not None:
            self._lock = read_lock(self._workspace.env.lock, env.environment)
        bases = [env.needs.base] if env.needs.base else []
        part = next(part for part in found.parts if part.name == ENVIRONMENT)
        behind = [key for key, state in self._states.items() if _differs(state, part)]
        here = facts(bases)
        for host, there in self._succeeded(self._calls.gather("facts", bases, hosts=behind)).items():
            try:
                report.notes += check_compatible(here, there, env.needs)
            except IncompatibleError as e:
                self._failures[host] = Failed("IncompatibleError", str(e))

    # -- the receipt ------------------------------------------------------------------------------------------

    def _finished(self, report: SyncReport, run: StagingRun | None) -> SyncReport:
        by_store = self._by_store()
        makers = {host.key: self._maker_of(host, by_store) for host in self._hosts}
        report.hosts = [self._host_report(host, makers[host.key], report, run) for host in self._hosts]
        if not report.dry_run and (report.digest or run is not None):
            apply_placements(self._workspace, self._placed(makers, run))
        report.phases = self._phases
        report.seconds = time.monotonic() - self._began
        if report.failed:
            raise self._error(report, run)
        return report

    def _placed(self, makers: Mapping[str, str], run: StagingRun | None) -> Generator[tuple[ToolHost, str, bool]]:
        """Iterate over the hosts that have trees, with the workspace folder, and whether the environment is there."""
        for host in self._hosts:
            state = self._states.get(host.key)
            each = run.hosts.get(makers[host.key]) if run is not None else None
            switched = each.switched if each is not None else None
            parts = switched.digests if switched is not None else state.parts if state is not None else {}
            if state is not None and parts:
                yield host, state.path, "env" in parts

    def _host_report(self, host: ToolHost, maker: str, report: SyncReport, run: StagingRun | None) -> HostReport:
        state = self._states.get(host.key)
        entry = HostReport(host.name, seconds=time.monotonic() - self._began)
        entry.problems += self._verified.get(host.key, [])
        if state is not None:
            entry.path, entry.generation = state.path, state.generation
            entry.digest = state.parts[TREE].digest.hex() if TREE in state.parts else ""
            entry.environment = state.parts[ENVIRONMENT].digest.hex() if ENVIRONMENT in state.parts else ""
            entry.reused = report.bytes
            entry.notes += [state.left] if state.left else []
        failed = self._failures.get(host.key)
        if failed is not None:
            entry.error = failed.text
        if maker != host.key:
            entry.shares = next(each.name for each in self._hosts if each.key == maker)
        each = run.hosts.get(maker) if run is not None else None
        if each is None:
            return entry
        entry.error = entry.error or each.error
        switched = each.switched
        if switched is not None:
            entry.switched = state is None or switched.generation != state.generation
            entry.digest = switched.digests.get(TREE, b"").hex()
            entry.environment = switched.digests.get(ENVIRONMENT, b"").hex()
            entry.generation = switched.generation
        if entry.shares:  # the other host does the work
            return entry
        staged = each.staged
        entry.files, entry.received, entry.reused = staged.files, each.received, staged.reused
        entry.notes = staged.notes or entry.notes
        entry.made = staged.made
        entry.deleted, entry.lacks = staged.deleted, sum(size for _, size in each.missing)
        entry.problems += staged.problems
        if switched is not None:
            entry.moved, entry.kept, entry.files = switched.moved, switched.kept, switched.files
        return entry

    def _error(self, report: SyncReport, run: StagingRun | None) -> SyncError:
        """Build the error that names the hosts that keep their old trees."""
        failed = report.failed
        kinds = [failure.kind for failure in self._failures.values()]
        kinds += [each.kind for each in run.hosts.values() if each.error] if run is not None else []
        switched = sum(not host.error for host in report.hosts)
        one = len(report.hosts) == 1
        stay = "the host stays" if one else f"{len(failed)} of {len(report.hosts)} hosts stay"
        what = f"{stay} on the tree that {'it has' if one else 'they have'}"
        rest = f", the other {switched} have the new one" if switched else ""
        lines = "\n".join(f"  {host.host}: {host.error}" for host in failed)
        # Another rollback does not help if content is missing, and each reason names the remedy.
        advice = "Sync again when this is mended: what is there is not sent twice." if report.digest else ""
        error = _error_class(kinds)("\n".join(filter(None, [f"{what}{rest}:", lines, advice])))
        error.report, error.headline = report, f"{what}{rest}. {advice}".rstrip()
        return error


def _error_class(kinds: Iterable[str]) -> type[SyncError]:
    """Return the class of an error for several hosts: that of their errors, if all have the same."""
    different = set(kinds)
    return getattr(errors, different.pop(), SyncError) if len(different) == 1 else SyncError


def _is_behind(state: HostState, changes: Changes) -> bool:
    """Return whether a host has other trees, damaged trees, or remains of an interrupted sync."""
    return bool(state.repair or state.left) or any(_differs(state, part) for part in changes.parts)


def _differs(state: HostState, part: Part) -> bool:
    about = state.parts.get(part.name)
    return about is None or about.digest != part.manifest.digest


def _owner() -> str:
    """Describe this client, for other clients that find a workspace busy."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{getpass.getuser()} on {socket.gethostname()} (process {os.getpid()}, since {since})"


def placement(workspace: Workspace, folder: str, env: CondaEnvironment | None = None) -> Placement:
    """Return the placement of ranks on a host that has switched.

    All paths contain the link ``current``, so that they remain valid after every later switch.

    Args:
        workspace: the synced workspace.
        folder: of the workspace on the host.
        env: the environment, if it was also synced.
    """
    tree = os.path.join(folder, "current", "tree")
    folders = {here: os.path.join(tree, place) if place else tree for here, place in workspace.roots().items()}
    variables: dict[str, str | None] = {"WORKSPACE_DIR": tree}
    if env is None:
        return Placement(folders, variables)
    prefix = os.path.join(folder, "current", "env")
    folders[env.conda_prefix] = prefix
    conda = os.path.isdir(os.path.join(env.conda_prefix, "conda-meta"))
    variables["CONDA_PREFIX" if conda else "VIRTUAL_ENV"] = prefix
    return Placement(folders, variables, os.path.join(prefix, "bin", "python"))


def apply_placements(workspace: Workspace, hosts: Iterable[tuple[ToolHost, str, bool]]) -> None:
    """Start new ranks in the trees of some hosts.

    Args:
        workspace: the synced workspace.
        hosts: hosts that have it, each with the workspace's folder, and whether it has the environment.
    """
    asked = [
        place_ranks(host.mesh, placement(workspace, folder, workspace.env if has_env else None))
        for host, folder, has_env in hosts
    ]
    for each in asked:
        each.get()
