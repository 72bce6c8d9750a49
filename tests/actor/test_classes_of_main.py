"""Classes of a script's ``__main__``, which ranks do not run: they go by value, and stay what they are."""

from __future__ import annotations

import builtins
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.protocol.by_value import by_value
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


def test_an_equal_definition_is_the_same_class(script: Start) -> None:
    """As when a cell is run again: what has changed is another class, and what uses something else, with a warning."""
    code, out, err = script(
        HEAD
        + """
import dataclasses, enum, functools, typing, warnings
warnings.simplefilter("always")

CELL = '''
# {0}
class Phase(enum.Enum):
    TRAIN = "train"

class Parts(enum.Flag):
    HEAD = enum.auto()
    TAIL = enum.auto()

T = typing.TypeVar("T", bound=Phase)

class Box(typing.Generic[T]):
    def __init__(self, held: list[T]):
        self.held = held

class Chooses:
    @functools.singledispatchmethod
    def of(self, value):
        return "any"

    @of.register
    def _(self, value: int):
        return "int"

class Told(Exception):
    pass

@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    phase: Phase = Phase.TRAIN
    tags: list = dataclasses.field(default_factory=list, compare=False)

    def label(self):
        return prefix() + self.name
'''
HELPER = "def prefix(): return {0!r}"

class Keeper(Actor):
    @endpoint
    def keep(self, phase, job):
        self.phase, self.job = phase, job

    @endpoint
    def same(self, phase, job):
        return phase is self.phase, phase is Phase.TRAIN, job == self.job, isinstance(job, Job), job.label()

    @endpoint
    def known(self, parts):
        known, self.parts = getattr(self, "parts", parts), parts
        return known is parts

    @endpoint
    def alike(self, *values):
        known, self.values = getattr(self, "values", values), values
        return [type(one) is type(two) for one, two in zip(known, values)]

    @endpoint
    def give(self, fail):
        if fail:
            raise Told("as it was")
        return self.job

exec(CELL.format(1))
exec(HELPER.format("a "))
keeper = this_host().spawn_procs(per_host={"gpus": 1}).spawn("keeper", Keeper)
keeper.keep.call_one(Phase.TRAIN, Job("a")).get(30)
keeper.known.call_one(Parts.HEAD | Parts.TAIL).get(30)
keeper.alike.call_one(Box([]), Chooses()).get(30)
exec(CELL.format(2))  # before anything of it is sent, the old one comes back
print(keeper.known.call_one(Parts.TAIL | Parts.HEAD).get(30), keeper.known.call_one(~Parts.HEAD).get(30))
print(keeper.alike.call_one(Box([]), Chooses()).get(30))
print(isinstance(keeper.give.call_one(False).get(30), Job))
try:
    keeper.give.call_one(True).get(30)
except ActorError as error:
    print(isinstance(error.exception, Told))
print(keeper.same.call_one(Phase.TRAIN, Job("a")).get(30))
exec(HELPER.format("b "))
exec(CELL.format(3))
print(keeper.same.call_one(Phase.TRAIN, Job("a")).get(30))
exec(CELL.replace('"train"', '"learn"'))
print(keeper.same.call_one(Phase.TRAIN, Job("a")).get(30))
"""
    ).finish()
    assert code == 0, err
    assert out.splitlines() == [
        "True False",
        "[True, True]",
        "True",
        "True",
        "(True, True, True, True, 'a a')",
        "(True, True, False, False, 'b a')",
        "(False, False, False, False, 'b a')",
    ]
    warned = [line for line in err.splitlines() if "RuntimeWarning" in line]
    assert len(warned) == 1 and "Job was defined again with the same code" in warned[0]


def test_caches_locks_and_sentinels_go_with_classes(script: Start) -> None:
    code, out, err = script(
        HEAD
        + """
import contextvars, dataclasses, functools, threading, weakref

@functools.lru_cache(maxsize=3)
def cached(n):
    return n + 1

cached(1)
NONE = object()
level = contextvars.ContextVar("level", default=7)
lock = threading.RLock()

@functools.singledispatch
def shown(x):
    return "other"

@shown.register
def _(x: int):
    return "int"

@shown.register
def _(x: list):
    return [shown(each) for each in x]

class Thing:
    lock = threading.Lock()
    ready = threading.Event()
    known = weakref.WeakValueDictionary()
    local = threading.local()
    changed = threading.Condition(lock)

    @functools.cached_property
    def twice(self):
        with self.lock, lock:
            return 2

    @functools.lru_cache
    def thrice(self):
        return 3

    @functools.singledispatchmethod
    def kind(self, x):
        return "other"

    @kind.register
    def _(self, x: int):
        return "int"

    def given(self, x=NONE):
        return x is NONE

@dataclasses.dataclass
class Config:
    path: str
    size: int = 5

class Runs(Actor):
    @endpoint
    def run(self, function, *args):
        return function(*args)

    @endpoint
    def none(self, value, variable):
        return value is NONE, variable is level, level.get()

def check():
    thing = Thing()
    known = cached.cache_info().currsize, cached.cache_parameters()["maxsize"], cached(1)
    return (*known, thing.twice, thing.thrice(), thing.kind(1), thing.kind(""), thing.given(), thing.ready.is_set())

def missing():
    return [each.default is dataclasses.MISSING for each in dataclasses.fields(Config)]

def adapted():
    import pydantic
    return pydantic.TypeAdapter(Config).validate_python({"path": "a"}).size

class Held:
    inner = (each for each in ())

class Reads:
    def __init__(self):
        self.path, self.source, self.thread = "a", {"of": [(each for each in ())]}, threading.Thread(target=print)

class Busy:
    lock = threading.Lock()

Busy.lock.acquire()

def uses():
    return source

source = (each for each in ())

if __name__ == "__main__":
    runs = this_host().spawn_procs(per_host={"gpus": 1}).spawn("runs", Runs)
    for each in (check, missing, adapted, lambda: shown([1, "", [2]])):
        print(runs.run.call_one(each).get(60))
    print(runs.none.call_one(NONE, level).get(30), runs.run.call_one(lambda x: x, NONE).get(30) is NONE)
    for each in (Held, [Reads()], Busy, uses):
        try:
            runs.run.call_one(each)
        except TypeError as error:
            print(error)
"""
    ).finish()
    assert code == 0, err
    assert out.splitlines() == [
        "(0, 3, 2, 2, 3, 'int', 'other', True, False)",
        "[True, False]",
        "5",
        "['int', 'other', ['int']]",
        "(True, True, 7) True",
        "an argument of runs.run cannot be pickled: cannot pickle 'generator' object (inner, an attribute of Held)",
        "an argument of runs.run cannot be pickled: cannot pickle 'generator' object (source, an attribute of a Reads)",
        "an argument of runs.run cannot be pickled: cannot pickle a lock that is held (lock, an attribute of Busy)",
        "an argument of runs.run cannot be pickled: cannot pickle 'generator' object (source, a global of uses)",
    ]


def test_only_what_has_no_state_is_found_at_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("settings_of_a_test")
    exec("class Config: pass\nMISSING, CONFIG = Config(), Config()", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert pickle.loads(by_value(module.MISSING)) is module.MISSING
    module.CONFIG.rate = 3  # as long as a program runs, after others were sent
    sent = pickle.loads(by_value(module.CONFIG))
    assert sent is not module.CONFIG and sent.rate == 3
    generator = (n for n in range(3))
    monkeypatch.setattr(builtins, "_", generator, raising=False)  # as an interactive session has its last value
    with pytest.raises(TypeError, match="generator"):
        by_value(generator)
