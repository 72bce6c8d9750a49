"""Whose code a file has, and what a place is called."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import msgspec
import pytest

import monarch_kernel
from monarch_kernel.debugger import source_locations as places
from monarch_kernel.debugger.source_locations import LIBRARY, RUNTIME, USER, Place, kind_of


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
        (places.__file__, RUNTIME),
        ("/opt/venv/lib/python3.12/site-packages/monarch_kernel/runtime/actor/execution/instance.py", RUNTIME),
        ("/data/ada/monarch_kernel_examples/train.py", USER),
        ("/data/ada/lib/python_tricks/train.py", USER),
    ],
)
def test_kinds(file: str, kind: str) -> None:
    assert kind_of(file) == kind


def test_a_place_as_text() -> None:
    place = Place("/w/train.py", 12, "Model.forward.<locals>.inner")
    assert place.user
    assert place.text() == "train.py:12 in Model.forward.inner"
    assert Place("/w/train.py", 12, "<module>").text() == "train.py:12"
    assert Place("/x/7.py", 2, "f").text(lambda file: "Cell In[3]") == "Cell In[3]:2 in f"


def test_a_front_end_names_files() -> None:
    places.label_files(lambda file: "Cell In[9]" if file == "/x/7.py" else None)
    try:
        assert Place("/x/7.py", 2, "<module>").text() == "Cell In[9]:2"
        assert Place("/x/8.py", 2, "<module>").text() == "8.py:2"
        assert Place("/x/7.py", 2, "<module>").text(lambda _file: "mine") == "mine:2"
    finally:
        places.label_files(None)
    assert Place("/x/7.py", 2, "<module>").text() == "7.py:2"


def test_the_same_file_by_other_paths(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    link = tmp_path / "link.py"
    link.symlink_to(file)
    other = tmp_path / "sub" / "train.py"
    other.parent.mkdir()
    other.write_text("")
    assert places.same_file(str(file), str(link))
    assert not places.same_file(str(file), str(other))  # both are there, and differ
    assert places.same_file("/elsewhere/train.py", str(file))
    assert not places.same_file("/elsewhere/test.py", str(file))
    assert places.matching_parts("/elsewhere/sub/train.py", str(other)) > places.matching_parts(
        "/elsewhere/sub/train.py", str(file)
    )
    assert places.same_file("/tmp/ipykernel_1/7.py", "/tmp/ipykernel_1/7.py")
    assert not places.same_file("<string>", "/x/<string>")


def test_the_user_s_innermost_frame_of_a_thread() -> None:
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        ready.set()
        done.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(20) and thread.ident is not None
        place = places.user_place(thread.ident)
        assert place is not None
        assert (place.file, place.name.rpartition(".")[2]) == (__file__, "work")
        assert places.source_of(place.file, place.line) in ("ready.set()", "done.wait(20)")
    finally:
        done.set()
        thread.join()
    assert places.user_place(0) is None
    assert places.user_frame(sys._getframe()) is sys._getframe()
