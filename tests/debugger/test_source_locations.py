"""Whose code a file has, and what a place is called."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import monarch_kernel
from monarch_kernel.debugger import source_locations
from monarch_kernel.debugger.frontend import Frontend, use_frontend
from monarch_kernel.debugger.source_locations import LIBRARY, RUNTIME, USER, SourceLocation, kind_of, kind_of_code
from monarch_kernel.display.quantities import source_line
from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "file, kind",
    [
        (__file__, USER),
        ("/data/ada/project/train.py", USER),
        ("/tmp/ipykernel_4711/1234567.py", USER),
        ("<ipython-input-3-abc>", USER),
        ("<string>", USER),
        (asyncio.__file__, LIBRARY),
        (msgspec.__file__, LIBRARY),
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", LIBRARY),
        ("/usr/lib/python3/dist-packages/numpy/core.py", LIBRARY),
        ("/usr/lib64/python3.13/threading.py", LIBRARY),
        ("<frozen importlib._bootstrap>", LIBRARY),
        (monarch_kernel.__file__, RUNTIME),
        (source_locations.__file__, RUNTIME),
        ("/opt/venv/lib/python3.12/site-packages/monarch_kernel/runtime/actor/execution/instance.py", RUNTIME),
        ("/opt/venv/lib/python3.12/site-packages/monarch_kernel/not_there_yet/thing.py", RUNTIME),
        ("/opt/venv/lib/python3.12/site-packages/workspace_sync/planner.py", RUNTIME),
        ("/data/ada/src/monarch_kernel/monarch_kernel/launchers/job.py", RUNTIME),
        ("/data/ada/monarch_kernel/train.py", USER),
        ("/data/ada/monarch_kernel/bench/train.py", USER),
        ("/data/ada/monarch_kernel_examples/train.py", USER),
        ("/data/ada/lib/python_tricks/train.py", USER),
    ],
)
def test_kinds(file: str, kind: str) -> None:
    assert kind_of(file) == kind


def packages() -> list[str]:
    """The packages that the project ships."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


@pytest.mark.parametrize(
    "root",
    [str(ROOT), "/opt/venv/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages", "/data/ada/checkout"],
    ids=["here", "installed", "distribution", "checkout"],
)
def test_no_file_of_ours_is_user_code(root: str) -> None:
    """Wherever it lies, and in whichever of our packages and folders."""
    files = [path.relative_to(ROOT) for package in packages() for path in (ROOT / package).rglob("*.py")]
    assert {file.parts[0] for file in files} == set(packages())
    assert [str(file) for file in files if kind_of(f"{root}/{file}") != RUNTIME] == []


def test_a_new_folder_of_ours_is_known_on_other_hosts(tmp_path: Path) -> None:
    """The folders are those that the package has, and not a list that is kept by hand."""
    for package in ("monarch_kernel", "workspace_sync"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / package / "brand_new").mkdir()
    code = (
        "from monarch_kernel.debugger.source_locations import kind_of\n"
        "for package in ('monarch_kernel', 'workspace_sync'):\n"
        "    print(kind_of(f'/data/ada/checkout/{package}/brand_new/thing.py'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [RUNTIME, RUNTIME]


@pytest.mark.parametrize("file", [*source_locations.ENDPOINT_RUNNERS, source_locations.CELL_RUNNER])
def test_what_runs_user_code_is_where_it_is_looked_for(file: str) -> None:
    assert (ROOT / file).is_file()


def test_a_place_as_text() -> None:
    place = SourceLocation("/w/train.py", 12, "Model.forward.<locals>.inner")
    assert place.user
    assert place.text() == "train.py:12 in Model.forward.inner"
    assert SourceLocation("/w/train.py", 12, "<module>").text() == "train.py:12"
    assert SourceLocation("/x/7.py", 2, "f").text(lambda file: "Cell In[3]") == "Cell In[3]:2 in f"


def test_a_front_end_names_files() -> None:
    class Notebook(Frontend):
        def label(self, file: str) -> str | None:
            return "Cell In[9]" if file == "/x/7.py" else None

    use_frontend(Notebook())
    try:
        assert SourceLocation("/x/7.py", 2, "<module>").text() == "Cell In[9]:2"
        assert SourceLocation("/x/8.py", 2, "<module>").text() == "8.py:2"
        assert SourceLocation("/x/7.py", 2, "<module>").text(lambda _file: "mine") == "mine:2"
    finally:
        use_frontend(None)
    assert SourceLocation("/x/7.py", 2, "<module>").text() == "7.py:2"


def test_the_same_file_by_other_paths(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    link = tmp_path / "link.py"
    link.symlink_to(file)
    other = tmp_path / "sub" / "train.py"
    other.parent.mkdir()
    other.write_text("")
    assert source_locations.matching_parts(str(file), str(link))
    assert not source_locations.matching_parts(str(file), str(other))  # both are there, and differ
    assert source_locations.matching_parts("/elsewhere/train.py", str(file))
    assert not source_locations.matching_parts("/elsewhere/test.py", str(file))
    assert source_locations.matching_parts("/elsewhere/sub/train.py", str(other)) > source_locations.matching_parts(
        "/elsewhere/sub/train.py", str(file)
    )
    assert source_locations.matching_parts("/tmp/ipykernel_1/7.py", "/tmp/ipykernel_1/7.py")
    assert not source_locations.matching_parts("<string>", "/x/<string>")


def test_the_methods_of_dataclasses_and_named_tuples_are_no_user_code() -> None:
    @dataclasses.dataclass(order=True)
    class Point:
        x: int

    class Made(NamedTuple):
        x: int

    for function in (Point.__init__, Point.__eq__, Point.__lt__, Made.__new__):
        code = function.__code__  # type: ignore[attr-defined]
        assert (code.co_filename, kind_of_code(code)) == ("<string>", LIBRARY)
    scope: dict[str, Any] = {}
    exec("def of_the_user_s():\n    return (lambda: 1)", scope)
    assert kind_of_code(scope["of_the_user_s"].__code__) == kind_of_code(scope["of_the_user_s"]().__code__) == USER


def test_the_user_s_innermost_frame_of_a_thread() -> None:
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        ready.set()
        done.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(patience(20)) and thread.ident is not None
        place = source_locations.user_location(thread.ident)
        assert place is not None
        assert (place.file, place.name.rpartition(".")[2]) == (__file__, "work")
        assert source_line(place.file, place.line) in ("ready.set()", "done.wait(20)")
    finally:
        done.set()
        thread.join()
    assert source_locations.user_location(0) is None
    assert source_locations.user_frame(sys._getframe()) is sys._getframe()
