"""A watcher syncs and reloads at every save, once for what belongs together, and survives what goes wrong."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh
from tests.sync.reload.sources import Sources
from tests.waiting import patience
from workspace_sync.model.sync_report import HostReport, SyncReport
from workspace_sync.model.workspace import Workspace
from workspace_sync.reload.file_events import Ignored, SyncEvent, Watcher, watch
from workspace_sync.reload.live import LiveReport, sync_live
from workspace_sync.reload.refresh_report import ModuleSelection, selection_of

PATIENCE = patience(60.0)


@contextmanager
def watcher(folder: Path, act: Callable[[], LiveReport]) -> Generator[tuple[Watcher, queue.Queue[SyncEvent]]]:
    events: queue.Queue[SyncEvent] = queue.Queue()
    with Watcher([str(folder)], act, events.put) as made:
        assert made.wait_ready(PATIENCE)
        yield made, events
    assert not made.running


def switched() -> LiveReport:
    """A receipt of one host that has switched."""
    return LiveReport(SyncReport("w", hosts=[HostReport("h", switched=True, files=1)]))


class Acts:
    """Syncs that a test counts, and can hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: queue.Queue[dict[str, str]] = queue.Queue()
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self) -> LiveReport:
        found = {each.name: each.read_text() for each in self.folder.iterdir() if each.is_file()}
        self.seen.put(found)
        assert self.go.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return switched()


def test_a_save_is_synced_and_told_in_a_line(tmp_path: Path) -> None:
    acts = Acts(tmp_path)
    with watcher(tmp_path, acts) as (_, events):
        assert acts.seen.get(timeout=PATIENCE) == {}
        events.get(timeout=PATIENCE)
        (tmp_path / "a.py").write_text("1")
        assert acts.seen.get(timeout=PATIENCE) == {"a.py": "1"}
        event = events.get(timeout=PATIENCE)
        assert (event.kind, event.text) == ("synced", "synced 1 file to 1 host (0.00 s)")


def test_edits_during_a_sync_are_not_lost(tmp_path: Path) -> None:
    acts = Acts(tmp_path)
    with watcher(tmp_path, acts) as (_, events):
        acts.seen.get(timeout=PATIENCE)
        events.get(timeout=PATIENCE)
        acts.go.clear()
        (tmp_path / "a.py").write_text("1")
        assert acts.seen.get(timeout=PATIENCE) == {"a.py": "1"}
        (tmp_path / "a.py").write_text("2")
        acts.go.set()
        assert acts.seen.get(timeout=PATIENCE) == {"a.py": "2"}


def test_an_editor_that_renames_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    acts = Acts(tmp_path)
    with watcher(tmp_path, acts):
        acts.seen.get(timeout=PATIENCE)
        (tmp_path / ".a.py.swp").write_text("2")
        os.replace(tmp_path / ".a.py.swp", tmp_path / "a.py")
        found = acts.seen.get(timeout=PATIENCE)
        while found != {"a.py": "2"}:  # the temporary file may be seen on its own
            found = acts.seen.get(timeout=PATIENCE)


def test_an_error_is_told_once_and_cleared_by_the_next_success(tmp_path: Path) -> None:
    acts = Acts(tmp_path)
    with watcher(tmp_path, acts) as (_, events):
        events.get(timeout=PATIENCE)
        acts.error = ValueError("host b is full")
        for number in range(3):
            (tmp_path / "a.py").write_text(str(number))
            while acts.seen.get(timeout=PATIENCE).get("a.py") != str(number):
                continue
        acts.error = None
        (tmp_path / "a.py").write_text("good")
        kinds = [(event.kind, event.text) for event in (events.get(timeout=PATIENCE), events.get(timeout=PATIENCE))]
        assert kinds == [("failed", "host b is full"), ("synced", "synced 1 file to 1 host (0.00 s)")]


def test_a_checkout_is_one_sync(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )

    git("init", "-q", "-b", "main")
    for number in range(300):
        (tmp_path / f"f{number}.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "two")
    for number in range(300):
        (tmp_path / f"f{number}.py").write_text("2")
    git("commit", "-qam", "two")
    acts = Acts(tmp_path)
    with watcher(tmp_path, acts):
        acts.seen.get(timeout=PATIENCE)
        git("checkout", "-q", "main")
        assert set(acts.seen.get(timeout=PATIENCE).values()) == {"1"}
    assert acts.seen.empty()


def test_ignored_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\nout/\n!keep.log\n")
    (tmp_path / ".meshignore").write_text("data/\n")
    for name in ("out", "data", "src"):
        (tmp_path / name).mkdir()
    ignored = Ignored([str(tmp_path)])

    def counts(name: str) -> bool:
        return ignored.any_counts({str(tmp_path / name)})

    for name in ("a.py", "src/b.py", "keep.log", ".gitignore"):
        assert counts(name), name
    for name in ("a.log", "src/deep.log", "out/x.py", "data/y.py", ".git/index", "src/__pycache__/b.pyc"):
        assert not counts(name), name


def test_a_stop_completes_the_sync_in_progress(tmp_path: Path) -> None:
    acts = Acts(tmp_path)
    acts.go.clear()
    events: queue.Queue[SyncEvent] = queue.Queue()
    made = Watcher([str(tmp_path)], acts, events.put)
    acts.seen.get(timeout=PATIENCE)
    made.stop(timeout=0.0)
    acts.go.set()
    made.wait(PATIENCE)
    assert [events.get(timeout=PATIENCE).kind for _ in range(2)] == ["synced", "stopped"]
    with pytest.raises(ValueError, match="no folders"):
        watch(None, Workspace(), on_event=events.put)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("0", []),
        ("off", []),
        ("1", ["a"]),
        ("explicit", ["a"]),
        ("2", ["a", "c"]),
        ("all", ["a", "c"]),
        (3, ["a", "c"]),
        ("complete", ["a", "c"]),
        ("now", ["a", "c"]),
        ("", ["a", "c"]),
    ],
)
def test_the_modes_of_autoreload(mode: str | int, wanted: list[str]) -> None:
    selection = selection_of(mode, {"a"}, {"b"})
    assert [name for name in ("a", "b", "c") if selection.wants(name)] == wanted


def test_an_unknown_mode_of_autoreload() -> None:
    with pytest.raises(ValueError, match="has no mode 'often'"):
        selection_of("often")


def test_ranks_follow_a_save(sources: Sources, procs: ProcMesh) -> None:
    """A real sync to this host; the actors' modules were imported from the folder itself."""
    sources.write(lib="def name():\n    return 'one'\n")
    module = sources.load(
        "act",
        """
        from monarch_kernel.actor import Actor, endpoint
        import lib
        class Named(Actor):
            @endpoint
            def name(self):
                return lib.name()
        """,
    )
    named = procs.spawn("named", module.Named)
    assert named.name.call().get(PATIENCE).item(ranks=0) == "one"
    events: queue.Queue[SyncEvent] = queue.Queue()
    mode = ModuleSelection("all")
    workspace = Workspace(dirs=[sources.folder])
    with watch(procs, workspace, on_event=events.put, selection=lambda: mode) as made:
        assert made.wait_ready(PATIENCE)
        events.get(timeout=PATIENCE)
        sources.write(lib="def name():\n    return 'two'\n")
        assert "reloaded lib" in _next(events, "synced").text
        assert list(named.name.call().get(PATIENCE).values()) == ["two", "two"]
        sources.write(lib="def name(:\n    return 'three'\n")
        assert f"{sources.folder}/lib.py:1: SyntaxError" in _next(events, "failed").text
        assert list(named.name.call().get(PATIENCE).values()) == ["two", "two"]
        sources.write(lib="def name():\n    return 'four'\n")
        _next(events, "synced")
        assert list(named.name.call().get(PATIENCE).values()) == ["four", "four"]
        mode = ModuleSelection("off")
        sources.write(lib="def name():\n    return 'five'\n")
        _next(events, "synced")
        assert list(named.name.call().get(PATIENCE).values()) == ["four", "four"]


def test_actors_that_have_nothing_to_follow_are_not_created_again(sources: Sources, procs: ProcMesh) -> None:
    text = """
    from monarch_kernel.actor import Actor, endpoint
    class Count(Actor):
        def __init__(self):
            self.n = 0
        @endpoint
        def up(self):
            self.n += {}
            return self.n
    """
    counts = procs.spawn("counts", sources.load("count", text.format(1)).Count)
    assert list(counts.up.call().get(PATIENCE).values()) == [1, 1]
    workspace = Workspace(dirs=[sources.folder])
    assert sync_live(procs, workspace, how="respawn").refreshed == []
    assert list(counts.up.call().get(PATIENCE).values()) == [2, 2]
    sources.write(count=text.format(10))
    (stale,) = sync_live(procs, workspace, how=None).sync.stale
    assert (stale.name, stale.ranks, stale.state) == ("count", "0-1", "stale")
    live = sync_live(procs, workspace, how="respawn")
    assert [each.respawned for each in live.refreshed] == [["counts"]]
    assert list(counts.up.call().get(PATIENCE).values()) == [10, 10]


def _next(events: queue.Queue[SyncEvent], kind: str) -> Any:
    event = events.get(timeout=PATIENCE)
    assert event.kind == kind, event
    return event
