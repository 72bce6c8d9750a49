"""Selections: the grammar, and what is selected."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from monarch_kernel import Extent, Selection

EXTENT = Extent(["zones", "hosts", "gpus"], [2, 3, 4])
ALL = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("*", ALL),
        ("0", ALL[0]),
        ("*,1:", ALL[:, 1:]),
        ("*, *, 0::2", ALL[:, :, ::2]),
        (":,0:9,3", ALL[:, :, 3]),
        ("(0|1),2", ALL[:, 2]),
        ("0,1|1,2", np.concatenate([ALL[0, 1], ALL[1, 2]])),
        ("*,0:2 & *,1:3", ALL[:, 1]),
        ("0&1|1", ALL[1]),
        ("1|0&1", ALL[1]),
        ("3:1", ALL[:0]),
    ],
)
def test_what_is_selected(text: str, ranks: np.ndarray[Any, Any]) -> None:
    assert Selection.from_string(text).ranks(EXTENT) == sorted(ranks.ravel().tolist())


def test_any_selects_one() -> None:
    for _ in range(20):
        assert Selection.from_string("1,?,2").ranks(EXTENT) in ([14], [18], [22])
    assert Selection.any().ranks(EXTENT) in (ALL[0].ravel().tolist(), ALL[1].ravel().tolist())
    assert Selection.all().ranks(EXTENT) == list(range(24))


def test_values() -> None:
    one = Selection.from_string("0:2,(*|1)")
    assert one == Selection.from_string(" (0:2) , (*|1)") == pickle.loads(pickle.dumps(one)) != Selection.all()
    assert len({one, Selection.from_string("0:2,(*|1)")}) == 1
    assert repr(Selection.all()) == "All(True)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected '\\*', .* and it ends there"),
        ("!!", "found '!' at position 0"),
        ("0;1", "found ';' at position 1"),
        ("**", "found '\\*' at position 1"),
        ("*,", "it ends there"),
        ("((*)", "expected '\\)', and it ends there"),
        ("0 | -1", "found '-' at position 4"),
        ("0:2:0", "the range '0:2:0' in '0:2:0' has the step 0"),
    ],
)
def test_what_is_no_selection(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"parse error: .*{message}"):
        Selection.from_string(text)


def test_too_many_dimensions() -> None:
    with pytest.raises(ValueError, match="more dimensions than there are"):
        Selection.from_string("*,*").ranks(Extent(["gpus"], [4]))
