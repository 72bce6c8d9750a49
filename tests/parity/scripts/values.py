"""The values of shapes: slices, shapes and selections."""

from monarch import Extent, NDSlice, Selection, Shape
from report import raises, show


def numbers(s):
    return s.offset, s.sizes, s.strides, s.ndim, len(s), list(s)


dense = NDSlice.new_row_major([2, 3])
gaps = NDSlice(offset=4, sizes=[2, 2], strides=[8, 1])
columns = NDSlice(offset=0, sizes=[2, 2], strides=[1, 2])
for name, s in (("dense", dense), ("gaps", gaps), ("columns", columns), ("point", NDSlice.new_row_major([]))):
    show(name, *numbers(s), [(s.coordinates(n), s.index(n), s.nditem(s.coordinates(n))) for n in s])
show("items", gaps[3], gaps.get(2), gaps[0:2], 12 in gaps, 6 in gaps)
show("equal", gaps == NDSlice(offset=4, sizes=[2, 2], strides=[8, 1]), gaps == dense, len({gaps, gaps[0:1], dense}))
for given in ([], [3], [0, 2, 4, 6], [5, 3, 1], [3, 3], [0, 5, 7, 9], [0, 1, 8, 9, 16, 17, 100, 108, 116]):
    show("from_list", given, [numbers(s) for s in NDSlice.from_list(given)])
for what, kind, attempt in (
    ("beyond", IndexError, lambda: gaps[4]),
    ("get beyond", ValueError, lambda: gaps.get(4)),
    ("coordinates of another", ValueError, lambda: gaps.coordinates(6)),
    ("index of another", ValueError, lambda: gaps.index(99)),
    ("too few coordinates", IndexError, lambda: gaps.nditem((1,))),
    ("too few sizes", ValueError, lambda: NDSlice(offset=0, sizes=[2], strides=[1, 2])),
    ("strides that overlap", ValueError, lambda: NDSlice(offset=0, sizes=[2, 2], strides=[1, 1])),
    ("stride 0", ValueError, lambda: NDSlice(offset=0, sizes=[2], strides=[0])),
):
    raises(what, kind, attempt)

shape = Shape(["a", "b"], gaps)
show("shape", shape, shape.labels, numbers(shape.ndslice), len(shape), shape.ranks(), shape.coordinates(13))
show("extent", dict(shape.extent), shape.extent == Extent(["a", "b"], [2, 2]))
for what, part in (
    ("at", shape.at("a", 1)),
    ("index", shape.index(b=1)),
    ("index both", shape.index(a=1, b=0)),
    ("index none", shape.index()),
    ("select", shape.select("b", slice(1, None))),
    ("select step", shape.select("b", slice(0, 2, 2))),
    ("unity", Shape.unity()),
):
    show(what, part.labels, numbers(part.ndslice), part.ranks())
for what, kind, attempt in (
    ("unknown label", ValueError, lambda: shape.index(z=1)),
    ("at beyond", ValueError, lambda: shape.at("a", 2)),
    ("select nothing", ValueError, lambda: shape.select("a", slice(1, 1))),
    ("select an index", TypeError, lambda: shape.select("a", 1)),
    ("labels missing", ValueError, lambda: Shape(["a"], gaps)),
    ("coordinates of another rank", ValueError, lambda: shape.coordinates(6)),
):
    raises(what, kind, attempt)

show("selections", Selection.all(), Selection.any())
for text in (
    *("*", "?", "3", ":", "0:2", "1::2", "0:4:2", " 0 : 2 ", "*,?", "0:2,*", "0,1,2", "0|2", "0&1|2", "0|1&2", "0|1|2"),
    *("?,0|1", "0,1|2,3", "(0|1),2", "((0))", "(*,0)"),
):
    show("selection", text, Selection.from_string(text))
for text in ("", "!!", "**", "*,", "0;1", "-1", "((*)", "::"):
    raises(f"no selection {text}", ValueError, lambda text=text: Selection.from_string(text))
