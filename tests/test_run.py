"""What runs the suite: lanes, batches, what a change can reach, and what is left of a batch."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import run
from tests.conftest import alive, wait_until
from tests.reach import reached
from tests.run import LIMIT, ROOT, TESTS, Record, Took, divide, files_of, is_engines
from tests.waiting import patience
from tests.warm import Ended

PRODUCT = ["monarch_kernel/kernel/kernel.py", "workspace_sync/__init__.py"]


def names(paths: list[Path]) -> set[str]:
    return {str(path.relative_to(TESTS)) for path in paths}


# -- lanes -----------------------------------------------------------------------------------------


def test_each_file_is_in_one_lane() -> None:
    plain, engines = files_of("test"), files_of("engines")
    assert not set(plain) & set(engines)
    assert {*plain, *engines} == set(TESTS.rglob("test_*.py"))
    for entry in run.ENGINES:
        assert (TESTS / entry).exists(), f"ENGINES of tests/run.py names {entry}, which is not there"


#: Files that may compute longer: the program for GPUs loads torch in seven programs, a kernel and torchrun among them.
LONGER = {"test_gpu.py": 45.0}


def test_no_file_computes_for_long_outside_the_lane_of_engines() -> None:
    record = Record.read()
    long = {name: took.computed for name, took in record.files.items() if took.computed > LONGER.get(name, LIMIT)}
    wrong = {
        name: seconds for name, seconds in long.items() if (TESTS / name).exists() and not is_engines(TESTS / name)
    }
    assert not wrong, f"over {LIMIT:.0f} s of processor time; CONTRIBUTING.md says what to do: {wrong}"


def test_files_share_a_batch_with_neighbours_until_it_is_full() -> None:
    files = files_of("test")
    half = run.BATCH / 2
    for batch in divide(files, Record(files={name: Took(1, half) for name in names(files)})):
        assert len(batch.files) <= 2
        assert len({path.parent for path in batch.files}) == 1
    alone = divide(files, Record())
    assert len(alone) == len(files), "a file of which nothing is known runs alone"


def test_files_that_share_an_engine_are_one_batch_however_long() -> None:
    files = files_of("engines")
    for record in (Record(), Record(files={name: Took(1, 2 * run.BATCH) for name in names(files)})):
        batches = [names(batch.files) for batch in divide(files, record)]
        for start in run.TOGETHER:
            wanted = {name for name in names(files) if name.startswith(start)}
            assert len(wanted) > 1 and wanted in batches


def test_no_batch_of_several_files_takes_too_long() -> None:
    files = files_of("engines")
    third = run.LONGEST / 3
    batches = divide(files, Record(files={name: Took(third, 0.1) for name in names(files)}))
    assert max(len(batch.files) for batch in batches) == 3
    assert sum(len(batch.files) for batch in batches) == len(files)


def test_what_was_recorded_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "DURATIONS", tmp_path / "durations.json")
    assert Record.read() == Record()
    kept = Record({"test": "c0ffee"}, {"test_run.py": Took(1.5, 0.5)})
    Record(kept.passed, {**kept.files, "test_gone.py": Took(1, 1)}).write()
    assert Record.read() == kept


def test_what_is_recorded_is_that_of_a_usual_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one that computes twice as slowly, half of the processor time is recorded."""
    monkeypatch.setattr(run, "DURATIONS", tmp_path / "durations.json")
    for slower, recorded in ((1, 9.0), (2, 4.5)):
        monkeypatch.setattr(run, "_computation", lambda slower=slower: slower * run.COMPUTATION)
        folder = tmp_path / f"{slower}" / "0"
        folder.mkdir(parents=True)
        (folder / "output").write_text("")
        (folder / "computed").write_text(f"{TESTS / 'test_run.py'} 9.0\n")
        batch = run.Batch([TESTS / "test_run.py"], False)
        suite = run.Suite([batch], folder.parent, [], Record())
        suite._finish(batch, Ended(0, 0, 9.0, 9.0, []))
        assert Record.read().files["test_run.py"].computed == recorded


# -- what a change can reach -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        *PRODUCT,
        "Makefile",
        "pyproject.toml",
        "constraints/py3.11.txt",
        "tests/conftest.py",
        "tests/kernel/conftest.py",
        "tests/parity/names.txt",
        "tests/run.py",
        "tests/a_helper_that_was_removed.py",
        "labextension/src/index.ts",
        "notebooks/01_quickstart.ipynb",
    ],
)
def test_these_reach_everything(changed: str) -> None:
    for lane in ("test", "engines"):
        files = files_of(lane)
        assert reached(files, {changed, "docs/ray.md"}) == files


def test_a_page_reaches_what_reads_pages() -> None:
    found = names(reached(files_of("test"), {"docs/configuration.md"}))
    assert {"test_environment.py", "test_project.py", "kernel/test_readme.py"} <= found
    assert "actor/test_ports.py" not in found
    assert names(reached(files_of("engines"), {"docs/engines.md", "CHANGELOG.md"})) == {
        "notebooks/test_marimo_notebook.py",
        "parity/test_parity.py",
    }


def test_a_test_reaches_itself_and_what_uses_it() -> None:
    found = names(reached([*files_of("test"), *files_of("engines")], {"tests/notebooks/test_notebooks.py"}))
    assert {"notebooks/test_notebooks.py", "notebooks/test_rdma_notebook.py", "test_names.py"} <= found
    assert "mesh/test_shape.py" not in found
    assert "mesh/test_shape.py" in names(reached(files_of("test"), {"tests/mesh/test_shape.py"}))


@pytest.mark.parametrize(
    "helper, test",
    [
        ("tests/join/train.py", "join/test_leash.py"),  # by its file name, and for all tests of its folder
        ("tests/workers.py", "host/test_workers.py"),  # imported
        ("tests/kernel/harness.py", "debugger/console/test_in_cells.py"),  # imported by a conftest
        ("tests/transfer/test_conformance.py", "transfer/test_verbs.py"),  # by what runs in the guest
        ("tests/rdma_guest/verbs_in_guest.py", "transfer/test_verbs.py"),
        ("tests/chaos/engine.py", "test_chaos.py"),
        ("bench/tasks.py", "test_bench.py"),
    ],
)
def test_a_helper_reaches_what_names_it(helper: str, test: str) -> None:
    assert test in names(reached([*files_of("test"), *files_of("engines")], {helper}))


def test_nothing_changed_reaches_nothing() -> None:
    assert not reached(files_of("test"), set())
    assert names(reached(files_of("test"), {"tests/durations.json"})) >= {"test_run.py"}
    assert not reached(files_of("engines"), {"tests/durations.json"})


def test_what_was_skipped_when_it_was_recorded_runs_whatever_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [TESTS / "mesh/test_shape.py", TESTS / "mesh/test_rankset.py", TESTS / "mesh/test_ndslice.py"]
    record = Record({"test": "c0ffee"}, {"mesh/test_shape.py": Took(1, 1), "mesh/test_rankset.py": Took(1, 1, 2)})
    monkeypatch.setattr(run, "changed_since", lambda commit: {"docs/ray.md"} if commit == "c0ffee" else None)
    assert run.only_reached("test", files, record) == files[1:]
    assert "skipped: tests/mesh/test_shape.py" in capsys.readouterr().out
    assert run.only_reached("test", files, Record(files=record.files)) == files
    monkeypatch.setattr(run, "changed_since", lambda _commit: set(PRODUCT))
    assert run.only_reached("test", files, record) == files


def test_a_commit_that_is_unknown_is_no_base() -> None:
    assert run.changed_since("0" * 40) is None


# -- batches that are forked -------------------------------------------------------------------------


#: Runs one batch, and prints what became of it.
RUNNER = """
import os, select, sys
from dataclasses import asdict
from pathlib import Path
from tests.warm import Warm
folder = Path(sys.argv[1])
warm = Warm(torch=False, grace=0.1)
alone = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
warm.start(7, [*alone, str(folder / "test_it.py")], folder)
select.select([warm], [], [])
print(*(asdict(each) for each in warm.ended()))
warm.close()
"""


def start(folder: Path, test: str) -> subprocess.Popen[str]:
    """A runner with a batch of one file."""
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    command = [sys.executable, "-c", RUNNER, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_batch_says_how_it_ended_and_what_it_has_left(tmp_path: Path) -> None:
    runner = start(
        tmp_path,
        """
        import atexit, pathlib, subprocess

        def test_one():
            left = subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True)
            left.returncode = 0
            atexit.register(pathlib.Path(__file__).with_name("exits").touch)

        def test_two():
            assert __name__ == "test_it" and 1 == 2
        """,
    )
    said, _ = runner.communicate(timeout=patience(60))
    found = Ended(**ast.literal_eval(said))
    assert (found.number, found.code) == (7, 1)
    assert len(found.left) == 1 and found.left[0].endswith("sleep 600")
    assert not alive(int(found.left[0].partition(":")[0]))
    assert found.computed > 0 and found.took > 0
    assert (tmp_path / "exits").exists(), "its exit handlers have run"
    assert "1 failed, 1 passed" in (tmp_path / "output").read_text()


def test_a_runner_that_is_killed_takes_its_batches_with_it(tmp_path: Path) -> None:
    runner = start(
        tmp_path,
        f"""
        import os, subprocess

        def test_one():
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open("{tmp_path}/new", "w") as file:
                print(os.getpid(), child.pid, file=file)
            os.rename("{tmp_path}/new", "{tmp_path}/pids")
            child.wait()
        """,
    )
    wait_until((tmp_path / "pids").exists, "the test runs")
    runner.kill()
    runner.communicate(timeout=patience(60))
    wait_until(
        lambda: not any(map(alive, map(int, (tmp_path / "pids").read_text().split()))), "its processes have ended"
    )
