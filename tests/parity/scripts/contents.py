"""Values over meshes, and the errors of shapes."""

import pickle

from monarch import NDSlice, Shape
from monarch.actor import Actor, ValueMesh, context, current_rank, endpoint, this_host
from report import check, show


class Worker(Actor):
    @endpoint
    def rank(self):
        return current_rank().rank

    @endpoint
    def nothing(self): ...


class Takes(Actor):
    def __init__(self, values):
        self.value = values.item(**context().actor_instance.rank)

    @endpoint
    def get(self):
        return self.value


procs = this_host().spawn_procs({"a": 2, "b": 3})
workers = procs.spawn("workers", Worker)
values = workers.rank.call().get()
check("sizes", lambda: (values.sizes, len(values), values.size(), values.size("a"), repr(values.extent)))
check("items", lambda: [(dict(point), point.rank, value) for point, value in values.items()])
check("iterated", lambda: [(point, value) for point, value in values] == list(values.items()))
check("values", lambda: (type(values.values()), values.values()))
check("item", lambda: values.item(a=1, b=2))
check("item of too few", lambda: values.item(a=1), KeyError)
check("item of too many", lambda: values.item(a=1, b=1, z=3), KeyError)
check("item beyond", lambda: values.item(a=1, b=7), IndexError)
check("get", lambda: (values.get(0), values.get(5)))
check("slice", lambda: (values.slice(a=1).values(), values.slice(a=1).sizes, values.slice(b=slice(1, 3)).values()))
check("slice of one", lambda: (values.slice(a=1, b=1).values(), values.slice(a=1, b=1).item()))
check("get of a slice", lambda: (values.slice(b=1).get(1), values.slice(b=1).item(a=1)))
check("items of a slice", lambda: [(dict(point), point.rank, value) for point, value in values.slice(b=1).items()])
check("split", lambda: values.split(b=("c", "d"), d=3).sizes)
check("flat", lambda: (values.flatten("z").sizes, values.flatten("z").item(z=4)))
check("renamed", lambda: values.rename(a="q").item(q=1, b=0))
check("pickled", lambda: (pickle.loads(pickle.dumps(values)).values(), pickle.loads(pickle.dumps(values)).sizes))
check("a pickled slice", lambda: pickle.loads(pickle.dumps(values.slice(b=1))).values())
check("nothing", lambda: workers.nothing.call().get().values())
check("its text", lambda: repr(values).startswith("ValueMesh({a: 2, b: 3}):"))
of_one = workers.slice(a=0, b=0).rank.call().get()
check("of one actor", lambda: (of_one.values(), of_one.item()))
check("as an argument", lambda: procs.spawn("takes", Takes, values).get.call().get().values())
shape = Shape(["x", "y"], NDSlice.new_row_major([2, 2]))
gaps = Shape(["x", "y"], NDSlice(offset=4, sizes=[2, 2], strides=[8, 1]))
check("made", lambda: (ValueMesh(shape, [1, 2, 3, 4]).values(), ValueMesh(shape, [1, 2, 3, 4]).item(x=1, y=0)))
with_gaps = ValueMesh(gaps, [1, 2, 3, 4])
check("with gaps", lambda: (with_gaps.get(2), [dict(point) for point, _ in with_gaps]))
for given in ([], [1, 2, 3], [1, 2, 3, 4, 5]):
    check(f"made of {len(given)}", lambda given=given: ValueMesh(shape, given), ValueError)
pairs = [(3, "d"), (0, "a"), (2, "c"), (1, "b")]
check("indexed", lambda: ValueMesh.from_indexed(shape, pairs).values())
check("the last one counts", lambda: ValueMesh.from_indexed(shape, [*pairs, (1, "z"), (0, "y")]).values())
check("indexed with gaps", lambda: ValueMesh.from_indexed(gaps, pairs).values())
check("none", lambda: ValueMesh.from_indexed(shape, []), ValueError)
check("too few", lambda: ValueMesh.from_indexed(shape, pairs[1:]), ValueError)
check("one beyond", lambda: ValueMesh.from_indexed(shape, [*pairs, (9, "z")]), ValueError)
check("a negative one", lambda: ValueMesh.from_indexed(shape, [*pairs, (-1, "z")]), OverflowError)
check("no pairs", lambda: ValueMesh.from_indexed(shape, [1, 2]), TypeError)
for what, kind, attempt in (
    ("negative offset", OverflowError, lambda: NDSlice(offset=-1, sizes=[2], strides=[1])),
    ("negative size", OverflowError, lambda: NDSlice(offset=0, sizes=[-2], strides=[1])),
    ("negative rows", OverflowError, lambda: NDSlice.new_row_major([-1, 2])),
    ("by position", TypeError, lambda: NDSlice(0, [2], [1])),
    ("of nothing", TypeError, lambda: NDSlice()),
    ("a letter", TypeError, lambda: gaps.ndslice["a"]),
    ("too many coordinates", IndexError, lambda: gaps.ndslice.nditem([1, 1, 1])),
    ("an empty selection", ValueError, lambda: shape.select("x", slice(2, 2))),
    ("of an unknown label", ValueError, lambda: shape.select("q", slice(0, 1))),
    ("coordinates of none", ValueError, lambda: shape.coordinates(99)),
):
    check(what, attempt, kind)
for part in (slice(-1, None), slice(0, 9)):
    show("selected", part, shape.select("x", part).ranks())
check("sliced", lambda: (gaps.ndslice[1:3], gaps.ndslice[-2:], gaps.ndslice[2:99]))
check("empty", lambda: (len(NDSlice(offset=0, sizes=[0], strides=[1])), repr(NDSlice.new_row_major([0, 2]))))
check("pickled shapes", lambda: repr(pickle.loads(pickle.dumps(gaps))) == repr(gaps))
