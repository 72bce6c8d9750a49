"""Bodies of messages with arrays: what arrives is what was sent, and a large array is not copied on the way."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.protocol.serialize import OUT_OF_BAND, dumps, loads

Array = np.ndarray[Any, Any]


def there(value: Any) -> Any:
    """A value as it arrives in another process."""
    body, buffers = dumps(value)
    return loads(bytearray(b"".join(body)) if isinstance(body, list) else body, buffers)


def same(sent: Array, got: Array) -> None:
    assert type(got) is type(sent)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.flags.f_contiguous == sent.flags.f_contiguous
    assert got.tobytes() == sent.tobytes()


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    kind = draw(st.sampled_from(["u1", "<i4", ">i4", "f2", "f8", "c16", "?"]))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    made = np.arange(int(np.prod(shape))).astype(kind).reshape(shape)
    return np.asfortranarray(made) if draw(st.booleans()) else made


@given(values=st.lists(st.one_of(SCALARS, arrays()), max_size=5))
def test_arguments_arrive_as_they_are(values: list[Any]) -> None:
    got, options = there((tuple(values), {}))
    assert options == {}
    assert len(got) == len(values)
    for sent, came in zip(values, got, strict=True):
        if isinstance(sent, np.ndarray):
            same(sent, came)
            came[...] = 0  # a receiver may write to it
        else:
            assert came == sent
            assert type(came) is type(sent)


@pytest.mark.parametrize("size", [8, OUT_OF_BAND])
def test_a_result_of_one_array_arrives_as_it_is(size: int) -> None:
    sent = np.arange(size, dtype="u1")
    for _ in range(2):  # the second one is made of the parts of the first
        same(sent, there(sent))


def test_arrays_of_one_shape_keep_their_own_types() -> None:
    marked = np.dtype("u1", metadata={"unit": "m"})
    for dtype in ("u1", "i1", "?", ">i4", "<i4", marked, "u1"):
        got = there(((np.ones(4, dtype),), {}))[0][0]
        assert got.dtype == np.dtype(dtype)
        assert got.dtype.metadata == np.dtype(dtype).metadata


def test_one_array_twice_stays_one_array() -> None:
    sent = np.ones(4)
    first, second = there(((sent, sent), {}))[0]
    assert first is second


def test_what_cannot_be_written_arrives_so() -> None:
    sent = np.ones(4)
    sent.flags.writeable = False
    for _ in range(2):
        assert not there(sent).flags.writeable


def test_arrays_with_gaps_of_objects_and_of_records_arrive_as_well() -> None:
    gaps, objects, records = np.arange(10)[::2], np.array([print, "a"], object), np.zeros(2, [("a", "i4"), ("b", "f8")])
    got = there(((gaps, objects, records), {}))[0]
    assert got[0].tolist() == gaps.tolist()
    assert got[1].tolist() == [print, "a"]
    assert got[2].dtype == records.dtype


def test_a_kind_of_array_of_the_users_own_is_kept() -> None:
    there(np.ones(3))
    assert type(there(np.ma.masked_array([1, 2], [True, False]))) is np.ma.MaskedArray


def test_a_large_array_is_sent_from_where_it_lies() -> None:
    sent = np.arange(OUT_OF_BAND, dtype="u1")
    body, buffers = dumps((("a", sent, 1), {}))
    assert buffers == (OUT_OF_BAND,)
    assert np.shares_memory(np.frombuffer(body[0], "u1"), sent)
    assert loads(b"".join(body), buffers)[0][0] == "a"


def test_the_body_is_a_pickle_like_any_other() -> None:
    got = pickle.loads(dumps((("a", np.arange(3)), {}))[0])
    assert got[0][1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("reference", "error", "missing"),
    [
        (b"cmonarch_kernel.protocol.of_a_newer_one\nThing\n.", ModuleNotFoundError, "protocol.of_a_newer_one"),
        (b"cmonarch_kernel.actor\nOfANewerOne\n.", AttributeError, "actor.OfANewerOne"),
    ],
)
@pytest.mark.parametrize("buffers", [(), (0,)])
def test_code_of_another_version_is_named(
    reference: bytes, error: type[Exception], missing: str, buffers: tuple[int, ...]
) -> None:
    said = rf"monarch_kernel \S+ has no monarch_kernel\.{missing}, .* another version: install the same version on all"
    with pytest.raises(error, match=said):
        loads(reference, buffers)


def test_code_of_the_user_that_is_missing_is_left_to_its_own_words() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'of_the_user'$"):
        loads(b"cof_the_user\nThing\n.")
