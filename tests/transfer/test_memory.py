"""Layouts: where an array's bytes are, in which order, and in how few pieces."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.runtime.transfer import memory as memory_copy
from monarch_kernel.runtime.transfer.memory import IOV_MAX, Layout, layout_of, memory_of
from monarch_kernel.runtime.transfer.service import collapse_pages, worth_collapsing
from tests.transfer.arrays import SHAPES, contents


@st.composite
def views(draw: Any) -> tuple[Any, Any]:
    """A base array and a view of it, by slices, steps and permutations."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["u1", "u2", "f4", "i8", "c16", "V3"]))
    base = np.frombuffer(bytes(i % 251 for i in range(int(np.prod(shape)) * np.dtype(dtype).itemsize)), dtype)
    base = base.reshape(shape).copy()
    slices = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        stop = draw(st.integers(start + 1, n))
        step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        slices.append(slice(start, stop, step) if step > 0 else slice(stop - 1, start - 1 if start else None, step))
    view = base[tuple(slices)]
    return base, view.transpose(draw(st.permutations(range(view.ndim))))


@settings(max_examples=150, deadline=None)
@given(views(), st.data())
def test_runs_are_the_bytes_of_a_copy(view: tuple[Any, Any], data: Any) -> None:
    base, array = view
    layout = memory_of(array).layout
    wanted = contents(array)
    assert layout.nbytes == len(wanted)
    start = base.__array_interface__["data"][0]
    raw = base.tobytes()

    def gather(lo: int, hi: int) -> bytes:
        return b"".join(raw[a - start : a - start + n] for a, n in layout.runs(lo, hi))

    assert gather(0, len(wanted)) == wanted
    lo = data.draw(st.integers(0, len(wanted)))
    hi = data.draw(st.integers(lo, len(wanted)))
    assert gather(lo, hi) == wanted[lo:hi]
    part = layout.part(lo, hi) if lo < hi else None
    if part is not None:
        assert b"".join(raw[a - start : a - start + n] for a, n in part.runs()) == wanted[lo:hi]
    low, high = layout.span()
    assert start <= low < high <= start + len(raw)
    assert not layout.overlaps_itself()


@settings(max_examples=60, deadline=None)
@given(views(), views(), st.data())
def test_copies_between_any_two_layouts(a: tuple[Any, Any], b: tuple[Any, Any], data: Any) -> None:
    (_, source), (_, target) = a, b
    of, to = memory_of(source).layout, memory_of(target).layout
    size = data.draw(st.integers(1, min(of.nbytes, to.nbytes)))
    of_at = data.draw(st.integers(0, of.nbytes - size))
    to_at = data.draw(st.integers(0, to.nbytes - size))
    wanted = bytearray(contents(target))
    wanted[to_at : to_at + size] = contents(source)[of_at : of_at + size]
    memory_copy.copy(to, to_at, of, of_at, size)
    assert contents(target) == wanted


def test_copies_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copy, "_copy_arrays", lambda target, source: False)
    for make in SHAPES.values():
        view = make()[1]
        back = bytearray(240)
        memory_copy.copy(memory_of(back).layout, 0, memory_of(view).layout, 0, 240)
        assert back == contents(view)


@pytest.mark.parametrize(
    "view, dims, run",
    [
        (np.zeros((4, 6, 8), "f4"), (), 768),
        (np.zeros((4, 6, 8), "f4")[:, :, 2:], ((24, 32),), 24),
        (np.zeros((4, 6, 8), "f4")[1:3], (), 384),
        (np.zeros((4, 6), "f4").T, ((6, 4), (4, 24)), 4),
        (np.zeros((4, 1, 6), "u1")[:, :, ::-1], ((4, 6), (6, -1)), 1),
        (np.zeros((), "f8"), (), 8),
    ],
)
def test_layouts_have_few_and_long_runs(view: Any, dims: Any, run: int) -> None:
    layout = memory_of(view).layout
    assert (layout.dims, layout.run) == (dims, run)


def test_a_block_is_what_one_system_call_takes() -> None:
    layout = layout_of(0, (5000, 2), (16, 4), 4)
    vector, size = layout.block(0, layout.nbytes)
    assert (len(vector), size) == (2 * IOV_MAX, 8 * IOV_MAX)
    assert layout.block(3, layout.nbytes) == (layout.block(3, 8)[0], 5)
    huge = Layout(0, (), 1 << 40)
    assert huge.block(0, 1 << 40)[1] < 1 << 31


@pytest.mark.parametrize(
    "shape, strides, overlaps",
    [
        ((4, 4), (0, 1), True),
        ((5, 4), (1, 1), True),
        ((4, 4), (4, 1), False),
        ((4, 4), (1, 4), False),
        ((4,), (-1,), False),
    ],
)
def test_self_overlap(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert layout_of(1000, shape, strides, 1).overlaps_itself() is overlaps


def test_every_kind_of_buffer() -> None:
    import array
    import ctypes
    import mmap

    with mmap.mmap(-1, 4096) as mapped:
        for obj, nbytes in [
            (bytearray(5), 5),
            (b"abc", 3),
            (memoryview(bytearray(12)).cast("I"), 12),
            (memoryview(bytearray(12))[::3], 4),
            (array.array("d", [1, 2]), 16),
            ((ctypes.c_int * 4)(), 16),
            (mapped, 4096),
            (np.float64(1), 8),
        ]:
            memory = memory_of(obj)
            assert memory.nbytes == nbytes
            assert memory_of(memoryview(obj)).layout == memory.layout
            del memory, obj


def test_moving_memory_to_huge_pages_changes_nothing() -> None:
    import mmap

    with mmap.mmap(-1, 24 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        array = np.frombuffer(memory, "u8")
        array[:] = np.arange(len(array))
        layout = memory_of(array).layout
        assert worth_collapsing(layout)
        collapse_pages(layout, lambda: False)
        collapse_pages(layout, lambda: True)
        assert np.array_equal(array, np.arange(len(array), dtype="u8"))
        assert not worth_collapsing(memory_of(array[::4]).layout), "mostly gaps"
        del array
    assert not worth_collapsing(memory_of(bytearray(1 << 20)).layout)
    collapse_pages(layout, lambda: True)  # gone, and no crash


@pytest.mark.torch
def test_a_tensor_of_a_file_that_is_mapped_for_reading_may_not_be_written(tmp_path: Path) -> None:
    """torch knows nothing of it, and a write would end the process."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of arrays that are not writable
        fixed = torch.from_numpy(np.memmap(path, np.uint8, "r"))
    assert memory_of(fixed[100:200]).why_readonly == "its memory is mapped for reading only"
    for writable in (torch.from_numpy(np.memmap(path, np.uint8, "r+")), torch.zeros(8), torch.from_numpy(np.zeros(8))):
        assert not memory_of(writable).why_readonly
