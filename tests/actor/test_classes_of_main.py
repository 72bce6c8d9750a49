"""Classes of a script's ``__main__``, which ranks do not run: they go by value, and stay what they are."""

from __future__ import annotations

from collections.abc import Callable

from tests.actor.conftest import Script
from tests.actor.test_scripts import HEAD

Start = Callable[[str], Script]


def test_classes_of_main_go_by_value(script: Start) -> None:
    run = script(
        """
from monarch_kernel.actor import *

FACTOR = 3

class Thing:
    def __init__(self, x):
        self.x = x
    def times(self):
        return self.x * FACTOR

def helper(x):
    return Thing(x).times()

class Uses(Actor):
    def __init__(self, thing):
        self.thing = thing
    @endpoint
    def go(self, other, function):
        return self.thing.times(), other.times(), function(5), isinstance(other, Thing), Thing(self.thing.x)

# No "if __name__" guard is needed: ranks do not run the script again.
mesh = this_host().spawn_procs(per_host={"gpus": 2}).spawn("uses", Uses, Thing(2))
for a, b, c, d, thing in mesh.go.call(Thing(4), helper).get().values():
    print(a, b, c, d, type(thing) is Thing, thing.times())

def helper(x):
    return "redefined"
print(mesh.go.call(Thing(4), helper).get()[0][2])
"""
    )
    assert run.finish() == (0, "6 12 15 True True 6\n" * 2 + "redefined\n", "")


def test_a_class_of_main_stays_what_it_is_where_it_is_known(script: Start) -> None:
    """Neither a result nor an argument sets the attributes of a class anew that its receiver has."""
    code, out, err = script(
        HEAD
        + """
import enum
SCALE = 1

class Color(enum.Enum):
    RED = 1

class Reading:
    made = 0
    def __init__(self):
        Reading.made += 1

    def scaled(self):
        return 3 * SCALE

class Sensor(Actor):
    @endpoint
    def read(self, n):
        return [Reading() for _ in range(n)], Color.RED

    @endpoint
    def count(self, reading):
        return Reading.made, isinstance(reading, Reading), reading is None or reading.scaled()

if __name__ == "__main__":
    sensor = this_host().spawn_procs(per_host={"gpus": 1}).spawn("s", Sensor)
    mine = Reading()
    readings, color = sensor.read.call_one(5).get(30)
    SCALE = 10  # the next cell
    print(mine.scaled(), Reading.made, [type(each) is Reading for each in readings], color is Color.RED)
    Reading.made = 100
    print(sensor.count.call_one(mine).get(30), Reading.made)
    old = Reading
    class Reading(old):  # another class of that name
        made = 7
    print(sensor.count.call_one(Reading()).get(30))
"""
    ).finish()
    assert code == 0, err
    assert out.split("\n")[:3] == ["30 1 [True, True, True, True, True] True", "(5, True, 3) 100", "(5, True, 3)"]
