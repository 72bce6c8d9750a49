"""Reload in place: what exists follows the new source, or the module says why it does not."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import pickle
import shutil
import sys
import traceback
from typing import Any

import pytest

from tests.sync.reload.sources import Sources
from tests.waiting import patience
from workspace_sync.reload.in_place import stale_here

# -- functions ---------------------------------------------------------------------------------------


def test_a_function_follows_wherever_it_is_held(sources: Sources) -> None:
    m = sources.load("m", "def f(a, b=1):\n    return a + b\n")
    held, table = m.f, {"f": m.f}
    report = sources.edit(m, "def f(a, b=10, *, c=100):\n    'Adds.'\n    return a + b + c\n")
    assert (report.state, report.reason, report.notes) == ("reloaded", "", [])
    assert held is m.f is table["f"]
    assert held(1) == 111
    assert held.__doc__ == "Adds."
    assert pickle.loads(pickle.dumps(held)) is held


def test_a_name_imported_by_from_follows(sources: Sources) -> None:
    m = sources.load("m", "RATE = 1\nTABLE = {}\ndef f(): return 'old'\n")
    user = sources.load("user", "from m import f, RATE as rate, TABLE\ndef use(): return f(), rate\n")
    other = sources.load("other", "from user import rate\n")
    sources.edit(m, "RATE = 2\nTABLE = {}\ndef f(): return 'new'\n")
    assert user.use() == ("new", 2)
    assert other.rate == 2
    assert user.TABLE is m.TABLE


def test_an_equal_value_of_another_origin_does_not_follow(sources: Sources) -> None:
    m = sources.load("m", "RATE = 1\n")
    user = sources.load("user", "import m\nrate = 1\n")
    sources.edit(m, "RATE = 2\n")
    assert user.rate == 1


def test_closures_that_exist_get_new_code_if_they_close_over_the_same(sources: Sources) -> None:
    m = sources.load("m", "def make(n):\n    def add(x):\n        return x + n\n    return add\n")
    add = m.make(5)
    sources.edit(m, "def make(n):\n    def add(x):\n        return x * n\n    return add\n")
    assert add(3) == 15
    report = sources.edit(m, "def make(n, k=2):\n    def add(x):\n        return x * n * k\n    return add\n")
    assert add(3) == 15  # it has no `k`
    assert report.notes == [
        "make.<locals>.add: it closes over k, n now, and over n before, so functions that exist keep their code"
    ]
    assert m.make(5)(3) == 30


DECORATED = """
import functools
seen = []
def twice(f):
    @functools.wraps(f)
    def run(*args):
        seen.append(f.__name__)
        return f(*args) * {times}
    return run
@twice
def f(x):
    return x + {add}
"""


def test_decorated_functions_follow(sources: Sources) -> None:
    m = sources.load("m", DECORATED.format(times=2, add=1))
    held = m.f
    sources.edit(m, DECORATED.format(times=3, add=5))
    assert held(1) == 18
    assert m.f(1) == 18


def test_a_cache_of_the_old_code_is_emptied(sources: Sources) -> None:
    text = "import functools\n@functools.cache\ndef f(x):\n    return x + {}\n"
    m = sources.load("m", text.format(1))
    held = m.f
    assert held(1) == 2
    sources.edit(m, text.format(10))
    assert held(1) == m.f(1) == 11


def test_functions_in_registries_and_defaults_follow(sources: Sources) -> None:
    text = """
    HANDLERS = {{}}
    def register(f):
        HANDLERS[f.__name__] = f
        return f
    @register
    def on_start():
        return {0}
    pair = [on_start, lambda: {0}]
    """
    m = sources.load("m", text.format(1))
    held, lambda_ = m.HANDLERS["on_start"], m.pair[1]
    sources.edit(m, text.format(2))
    assert held() == m.HANDLERS["on_start"]() == lambda_() == 2
    assert m.HANDLERS["on_start"] is m.on_start is m.pair[0] is held


def test_several_lambdas_of_a_line_keep_their_places(sources: Sources) -> None:
    m = sources.load("m", "fs = [lambda: 1, lambda: 2]\n")
    first, second = m.fs
    sources.edit(m, "fs = [lambda: 10, lambda: 20]\n")
    assert (first(), second()) == (10, 20)
    report = sources.edit(m, "fs = [lambda: 10, lambda: 15, lambda: 30]\n")
    assert (first(), second()) == (10, 20)
    assert "there are several of that name" in report.notes[0]


def test_deleted_and_renamed_functions(sources: Sources) -> None:
    m = sources.load("m", "def f(): return 1\ndef g(): return f()\nSTATE = 1\n")
    m.patched = "by a program"
    f, g = m.f, m.g
    sources.edit(m, "def renamed(): return 1\ndef g(): return renamed()\n")
    assert not hasattr(m, "f")
    assert not hasattr(m, "STATE")
    assert m.patched == "by a program"
    assert f() == 1  # a reference that is held goes on
    assert g() == 1


def test_a_generator_in_flight_ends_as_it_began(sources: Sources) -> None:
    m = sources.load("m", "def gen():\n    yield 1\n    yield 2\n")
    running = m.gen()
    assert next(running) == 1
    sources.edit(m, "def gen():\n    yield 10\n    yield 20\n")
    assert list(running) == [2]
    assert list(m.gen()) == [10, 20]


def test_a_function_may_become_a_generator_or_a_coroutine(sources: Sources) -> None:
    m = sources.load("m", "def f():\n    return 1\n")
    held = m.f
    sources.edit(m, "def f():\n    yield 5\n")
    assert list(held()) == [5]


def test_tracebacks_show_the_new_lines(sources: Sources) -> None:
    m = sources.load("m", "def f():\n    return 1\n")
    held = m.f
    sources.edit(m, "\n\n\ndef f():\n    raise ValueError('here')  # a new line\n")
    with pytest.raises(ValueError, match="here") as caught:
        held()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.lineno, last.line) == (5, "raise ValueError('here')  # a new line")


# -- classes -----------------------------------------------------------------------------------------

CLASS = """
class Base:
    limit = {0}
    def __init__(self):
        self.made = {0}
    def plain(self):
        return {0}
    @property
    def prop(self):
        return {0}
    @staticmethod
    def static():
        return {0}
    @classmethod
    def of_class(cls):
        return cls.__name__, {0}
    class Inner:
        def deep(self):
            return {0}
    def __repr__(self):
        return "Base({0})"
"""


def test_objects_follow_their_class(sources: Sources) -> None:
    m = sources.load("m", CLASS.format(1))
    cls, inner, thing = m.Base, m.Base.Inner, m.Base()
    deep, bound = m.Base.Inner(), thing.plain
    sources.edit(m, CLASS.format(2))
    assert m.Base is cls
    assert m.Base.Inner is inner
    assert (thing.plain(), thing.prop, thing.static(), thing.of_class(), thing.limit) == (2, 2, 2, ("Base", 2), 2)
    assert (deep.deep(), bound(), repr(thing), thing.made) == (2, 2, "Base(2)", 1)
    assert isinstance(thing, m.Base)
    assert type(pickle.loads(pickle.dumps(thing))) is cls


def test_inheritance_across_modules(sources: Sources) -> None:
    base = sources.load("base", "class A:\n    def f(self):\n        return 1\n")
    sub = sources.load("sub", "from base import A\nclass B(A):\n    def f(self):\n        return super().f() + 10\n")
    thing = sub.B()
    sources.edit(base, "class A:\n    def f(self):\n        return 2\n    def g(self):\n        return 'new'\n")
    assert (thing.f(), thing.g()) == (12, "new")
    sources.edit(sub, "from base import A\nclass B(A):\n    def f(self):\n        return super().f() + 100\n")
    assert thing.f() == 102
    assert isinstance(thing, base.A)


def test_super_can_be_added_and_removed(sources: Sources) -> None:
    m = sources.load("m", "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return 5\n")
    thing = m.B()
    sources.edit(m, "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return super().f() + 1\n")
    assert thing.f() == 2
    sources.edit(m, "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return 7\n")
    assert thing.f() == 7


def test_members_that_the_source_drops_are_gone_and_those_of_programs_stay(sources: Sources) -> None:
    m = sources.load("m", "class A:\n    x = 1\n    def f(self): pass\n    def g(self): pass\n")
    m.A.by_program = "stays"
    sources.edit(m, "class A:\n    def g(self): pass\n")
    assert not hasattr(m.A, "f")
    assert not hasattr(m.A, "x")
    assert m.A.by_program == "stays"


def test_bases_change_where_python_can_change_them(sources: Sources) -> None:
    text = "class A:\n    def f(self): return 'A'\nclass B:\n    def f(self): return 'B'\nclass C({}):\n    pass\n"
    m = sources.load("m", text.format("A"))
    thing = m.C()
    sources.edit(m, text.format("B"))
    assert thing.f() == "B"
    report = sources.edit(m, text.format("dict"))
    assert report.state == "kept"
    assert "class C: its bases are dict now" in report.reason
    assert thing.f() == "B"


def test_slots(sources: Sources) -> None:
    text = "class P:\n    __slots__ = {}\n    def f(self): return {}\n"
    m = sources.load("m", text.format("('x', 'y')", 1))
    thing = m.P()
    thing.x = 5
    sources.edit(m, text.format("('y', 'x')", 2))
    assert (thing.f(), thing.x) == (2, 5)
    report = sources.edit(m, text.format("('x', 'y', 'z')", 3))
    assert report.state == "kept"
    assert report.reason.startswith("class P: its __slots__ are ('x', 'y', 'z') now, and were")
    assert (thing.f(), m.P().f()) == (2, 2)


def test_dataclasses(sources: Sources) -> None:
    text = "from dataclasses import dataclass, field\n@dataclass\nclass D:\n    x: int\n{}"
    m = sources.load("m", text.format("    def f(self): return self.x\n"))
    thing, cls = m.D(1), m.D
    report = sources.edit(
        m, text.format("    y: int = 7\n    z: list = field(default_factory=list)\n    def f(self): return self.y\n")
    )
    assert m.D is cls
    assert thing.f() == 7
    assert m.D(1, 2, [3]) == cls(1, 2, [3])
    assert repr(m.D(1)) == "D(x=1, y=7, z=[])"
    assert report.notes == ["class D: objects that exist lack the new z"]


def test_dataclasses_with_slots(sources: Sources) -> None:
    text = "from dataclasses import dataclass\n@dataclass(slots=True)\nclass D:\n    x: int\n{}"
    m = sources.load("m", text.format("    def f(self): return 1\nONE = D(1)\n"))
    thing, cls = m.D(1), m.D
    sources.edit(m, text.format("    def f(self): return 2\n    def g(self): return 3\nONE = D(1)\n"))
    assert m.D is cls
    assert (thing.f(), thing.g()) == (2, 3)
    assert type(m.ONE) is cls
    report = sources.edit(m, text.format("    y: int = 0\n"))
    assert report.state == "kept"
    assert "__slots__" in report.reason
    assert thing.f() == 2


def test_enums(sources: Sources) -> None:
    text = "import enum\nclass E(enum.Enum):\n    A = {}\n    def f(self): return {}\ndef g(): return E.A\n"
    m = sources.load("m", text.format(1, "'old'"))
    a, cls = m.E.A, m.E
    sources.edit(m, text.format(1, "'new'"))
    assert m.E is cls
    assert a.f() == "new"
    assert m.g() is a
    report = sources.edit(m, text.format(2, "'newer'"))
    assert report.state == "kept"
    assert "class E: its members are {'A': 2} now, and were {'A': 1}" in report.reason
    assert (a.f(), a.value) == ("new", 1)


def test_named_tuples(sources: Sources) -> None:
    text = "from typing import NamedTuple\nclass P(NamedTuple):\n    {}: int\n    def f(self): return {}\n"
    m = sources.load("m", text.format("x", 1))
    thing, cls = m.P(5), m.P
    sources.edit(m, text.format("x", 2))
    assert m.P is cls
    assert thing.f() == 2
    assert sources.edit(m, text.format("y", 3)).state == "kept"
    assert thing.f() == 2


METACLASS = """
class Meta(type):
    def __new__(meta, name, bases, members):
        return super().__new__(meta, name, bases, members)
class A(metaclass=Meta):
    def f(self): return {}
def g(): return {}
"""


def test_a_class_with_a_metaclass_is_left_alone_unless_it_is_unchanged(sources: Sources) -> None:
    m = sources.load("m", METACLASS.format(1, 1))
    thing, cls, g = m.A(), m.A, m.g
    assert sources.edit(m, METACLASS.format(1, 2)).state == "reloaded"
    assert m.A is cls
    assert g() == 2
    report = sources.edit(m, METACLASS.format(2, 3))
    assert report.state == "kept"
    assert "class A: its metaclass m.Meta makes of it what cannot be changed in place" in report.reason
    assert (thing.f(), g()) == (1, 2)


def test_abstract_classes(sources: Sources) -> None:
    text = "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n{}"
    m = sources.load("m", text.format("class B(A):\n    def f(self): return 1\n"))
    thing = m.B()
    sources.edit(
        m, text.format("    @abc.abstractmethod\n    def g(self): ...\nclass B(A):\n    def f(self): return 2\n")
    )
    assert thing.f() == 2
    assert isinstance(thing, m.A)
    with pytest.raises(TypeError, match="abstract"):
        m.B()


def test_registries_of_init_subclass_have_one_class_of_a_name(sources: Sources) -> None:
    base = sources.load(
        "base",
        "class Plugin:\n    known = {}\n    def __init_subclass__(cls, key, **_):\n        Plugin.known[key] = cls\n",
    )
    m = sources.load("m", "from base import Plugin\nclass P(Plugin, key='p'):\n    def f(self): return 1\n")
    thing = base.Plugin.known["p"]()
    sources.edit(m, "from base import Plugin\nclass P(Plugin, key='p'):\n    def f(self): return 2\n")
    assert base.Plugin.known == {"p": m.P}
    assert type(thing) is m.P
    assert thing.f() == 2


def test_descriptors_learn_their_names(sources: Sources) -> None:
    text = """
    class Named:
        def __set_name__(self, owner, name): self.at = (owner.__name__, name)
        def __get__(self, thing, owner): return self.at
    class A:
        {} = Named()
    """
    m = sources.load("m", text.format("x"))
    thing = m.A()
    sources.edit(m, text.format("y"))
    assert thing.y == ("A", "y")
    assert not hasattr(thing, "x")


def test_objects_made_at_import_are_of_the_class_that_there_is(sources: Sources) -> None:
    m = sources.load("m", "class A:\n    pass\nONE = A()\n")
    user = sources.load("user", "from m import ONE\n")
    old, cls = m.ONE, m.A
    sources.edit(m, "class A:\n    x = 1\nONE = A()\n")
    assert type(m.ONE) is cls
    assert m.ONE is not old  # it is made again, as importlib.reload does it
    assert user.ONE is m.ONE


def test_a_class_of_several_statements_keeps_its_identity(sources: Sources) -> None:
    text = """
    try:
        import nothing_of_this_name
        class A: pass
    except ImportError:
        class A:
            def f(self): return {}
    """
    m = sources.load("m", text.format(1))
    thing, cls = m.A(), m.A
    sources.edit(m, text.format(2))
    assert m.A is cls
    assert thing.f() == 2


def test_generic_classes(sources: Sources) -> None:
    text = "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Box(Generic[T]):\n    def f(self): return {}\n"
    m = sources.load("m", text.format(1))
    thing = m.Box[int]()
    sources.edit(m, text.format(2))
    assert thing.f() == 2
    assert m.Box[str]().f() == 2


# -- modules -----------------------------------------------------------------------------------------


def test_a_syntax_error_leaves_the_module_intact(sources: Sources) -> None:
    m = sources.load("m", "def f(): return 1\n")
    report = sources.edit(m, "def f(): return 2\n\ndef g(:\n    pass\n")
    assert report.state == "failed"
    assert report.reason == f"{sources.folder}/m.py:3: SyntaxError: invalid syntax"
    assert m.f() == 1
    assert sources.edit(m, "def f(): return 3\n").state == "reloaded"
    assert m.f() == 3


def test_an_error_at_import_leaves_the_module_intact(sources: Sources) -> None:
    m = sources.load("m", CLASS.format(1) + "STATE = {'a': 1}\ndef f(): return 1\n")
    user = sources.load("user", "from m import f, STATE\n")
    thing, state, held = m.Base(), m.STATE, m.f
    before = dict(vars(m))
    report = sources.edit(
        m,
        CLASS.format(2) + "STATE = {}\ndef f(): return 2\nNEW = 1\nclass Base2(Base): pass\nraise ValueError('bad')\n",
    )
    assert report.state == "failed"
    assert report.reason.endswith("ValueError: bad")
    assert f"{sources.folder}/m.py:" in report.reason
    assert (thing.plain(), thing.prop, thing.static(), thing.limit, held()) == (1, 1, 1, 1, 1)
    assert {k: v for k, v in vars(m).items() if k != "__builtins__"} == {
        k: v for k, v in before.items() if k != "__builtins__"
    }
    assert user.STATE is state


def test_one_faulty_module_does_not_hold_up_others(sources: Sources) -> None:
    a = sources.load("a", "def f(): return 1\n")
    b = sources.load("b", "import a\ndef g(): return 1\n")
    reports = sources.reload(a="def f(: return 2\n", b="import a\ndef g(): return 2\n")
    assert {name: report.state for name, report in reports.items()} == {"a": "failed", "b": "reloaded"}
    assert (a.f(), b.g()) == (1, 2)


def test_modules_are_reloaded_after_what_they_import(sources: Sources) -> None:
    zero = sources.load("zero", "X = 1\n")
    between = sources.load("between", "from zero import X\n")
    a = sources.load("a", "from between import X\nDOUBLE = X * 2\n")
    sources.reload(zero="X = 5\n", a="from between import X\nDOUBLE = X * 2  # again\n")
    assert (zero.X, between.X, a.DOUBLE) == (5, 5, 10)


def test_circular_imports(sources: Sources) -> None:
    sources.write(b="import a\ndef g(): return a.f()\n")
    a = sources.load("a", "import b\ndef f(): return 1\ndef h(): return b.g()\n")
    b: Any = sys.modules["b"]
    reports = sources.reload(
        a="from b import new\nimport b\ndef f(): return 2\ndef h(): return b.g() + new()\n",
        b="import a\ndef g(): return a.f()\ndef new(): return 100\n",
    )
    assert {name: report.state for name, report in reports.items()} == {"a": "reloaded", "b": "reloaded"}
    assert (a.h(), b.g()) == (102, 2)


def test_packages_and_namespace_packages(sources: Sources) -> None:
    sources.write(pkg__sub="from . import LEVEL\ndef f(): return LEVEL\n", space__part="def f(): return 1\n")
    sources.write(pkg__init="LEVEL = 1\n")
    pkg = importlib.import_module("pkg")
    sub = importlib.import_module("pkg.sub")
    part = importlib.import_module("space.part")
    reports = sources.reload(pkg__init="LEVEL = 2\n", space__part="def f(): return 2\n")
    assert reports["pkg"].state == reports["space.part"].state == "reloaded"
    assert (pkg.LEVEL, sub.f(), part.f()) == (2, 2, 2)
    assert pkg.sub is sub
    assert "space" not in reports


def test_state_is_executed_again_unless_the_module_keeps_it(sources: Sources) -> None:
    text = "COUNT = 0\nif 'CACHE' not in globals():\n    CACHE = {{}}\ndef f(): return {}\n"
    m = sources.load("m", text.format(1))
    m.COUNT, m.CACHE["a"] = 5, 1
    sources.edit(m, text.format(2))
    assert m.COUNT == 0
    assert m.CACHE == {"a": 1}


def test_a_thread_of_a_module_follows_and_a_second_one_starts(sources: Sources) -> None:
    text = """
    import queue, threading
    if "inbox" not in globals():
        inbox, outbox = queue.Queue(), queue.Queue()
        starts = []
    def handle(item):
        return item + {0}
    def work():
        while (item := inbox.get()) is not None:
            outbox.put(handle(item))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    starts.append(thread)
    """
    m = sources.load("m", text.format(1))
    m.inbox.put(1)
    assert m.outbox.get(timeout=20) == 2
    sources.edit(m, text.format(10))
    m.inbox.put(1)
    assert m.outbox.get(timeout=20) == 11
    assert len(m.starts) == 2  # as with importlib.reload
    for _ in m.starts:
        m.inbox.put(None)
    for thread in m.starts:
        thread.join(patience(20))
        assert not thread.is_alive()


def test_a_deleted_module_is_named(sources: Sources) -> None:
    m = sources.load("m", "def f(): return 1\n")
    (sources.folder / "m.py").unlink()
    report = sources.reload()["m"]
    assert report.state == "kept"
    assert "is deleted" in report.reason
    assert m.f() == 1


def test_a_module_that_became_a_package_is_named(sources: Sources) -> None:
    sources.load("m", "def f(): return 1\n")
    (sources.folder / "m.py").unlink()
    report = sources.reload(m__init="def f(): return 2\n")["m"]
    assert report.state == "kept"
    assert f"its source is {sources.folder}/m/__init__.py now" in report.reason


def test_an_edit_of_equal_size_and_time_is_seen(sources: Sources) -> None:
    m = sources.load("m", "def f(): return 1\n")
    path = sources.folder / "m.py"
    before = path.stat()
    path.write_text("def f(): return 2\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [each.name for each in stale_here()] == ["m"]
    assert sources.reload()["m"].state == "reloaded"
    assert m.f() == 2


def test_what_has_not_changed_is_left_alone(sources: Sources) -> None:
    m = sources.load("m", "x = []\n")
    before = m.x
    assert sources.reload(m="x = []\n") == {}
    assert m.x is before
    assert stale_here() == []


def test_extension_modules_and_data_files(sources: Sources, tmp_path: Any) -> None:
    import msgspec._core as extension

    path = sources.folder / f"ext{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    shutil.copy(str(extension.__file__), path)
    spec = importlib.util.spec_from_file_location("ext", path)
    assert spec is not None
    module = type(sys)("ext")
    module.__spec__, module.__file__ = spec, str(path)
    sys.modules["ext"] = module
    assert sources.reload(data="") == {}
    (sources.folder / "data.json").write_text("{}")
    with path.open("ab") as file:
        file.write(b"\0")
    report = sources.reload()["ext"]
    assert report.state == "kept"
    assert "extension module" in report.reason


def test_instances_of_torch_modules(sources: Sources) -> None:
    torch = pytest.importorskip("torch")
    text = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
        def forward(self, x):
            return {}
    """
    m = sources.load("m", text.format("self.layer(x)"))
    net = m.Net()
    kept = net.layer.weight
    sources.edit(m, text.format("self.layer(x) * 0 + 7"))
    assert net(torch.ones(2)).tolist() == [7.0, 7.0]
    assert net.layer.weight is kept
    assert isinstance(net, m.Net)
