"""Several viewers watch, one has control."""

from __future__ import annotations

import pytest

from monarch_kernel.debugger.controller.viewers import DriverError, Viewers


def test_the_first_to_act_takes_control() -> None:
    viewers = Viewers()
    one, two = viewers.open("cell 3"), viewers.open("a terminal")
    assert not one.is_driver
    viewers.check(two)
    assert two.is_driver
    with pytest.raises(DriverError, match="a terminal controls"):
        viewers.check(one)
    viewers.check(None)  # the program itself always may


def test_a_lost_viewer_gives_up_control() -> None:
    viewers = Viewers()
    with viewers.open("a browser") as lost:
        lost.drive()
    other = viewers.open("the next")
    other.drive()
    assert other.is_driver
    assert viewers.names() == ["the next"]


def test_one_may_take_over() -> None:
    viewers = Viewers()
    one, two = viewers.open("one"), viewers.open("two")
    one.drive()
    two.drive(force=True)
    assert two.is_driver
    assert not one.is_driver
