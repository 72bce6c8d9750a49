"""Members and errors of shapes, values over meshes and jobs."""

from monarch import Shape
from monarch._rust_bindings.monarch_hyperactor.shape import Slice
from monarch.actor import Actor, ChannelTransport, Extent, HostMesh, Point, ProcMesh, ValueMesh, endpoint, this_host
from monarch.job import SlurmJob
from report import raises, show

gaps = Slice(offset=4, sizes=[2, 2], strides=[8, 1])
shape = Shape(["a", "b"], Slice.new_row_major([2, 3]))
show("texts", repr(gaps), str(gaps), repr(shape), str(shape))
for what, kind, attempt in (
    ("negative item", TypeError, lambda: gaps[-1]),
    ("negative get", OverflowError, lambda: gaps.get(-1)),
    ("negative coordinates", OverflowError, lambda: gaps.nditem([1, -1])),
    ("negative value", OverflowError, lambda: gaps.index(-1)),
    ("negative at", OverflowError, lambda: shape.at("a", -1)),
    ("negative index", OverflowError, lambda: shape.index(a=-1)),
    ("at beyond", ValueError, lambda: shape.at("a", 5)),
    ("another label", ValueError, lambda: shape.at("z", 0)),
):
    raises(what, kind, attempt)
for value in (9, 99):
    try:
        gaps.get(value)
    except ValueError as e:
        show(e)
extent = b"\2\0\0\0\0\0\0\0" + b"".join(b"\1\0\0\0\0\0\0\0" + label for label in (b"a", b"b"))
sizes = b"".join(number.to_bytes(8, "little") for number in (2, 2, 3))
show("from bytes", Extent.from_bytes(extent + sizes) == Extent(["a", "b"], [2, 3]))
strides = b"".join(number.to_bytes(8, "little") for number in (2, 3, 1))
show(Shape.from_bytes(extent + (0).to_bytes(8, "little") + sizes + strides) == shape)
raises("from other bytes", ValueError, lambda: Extent.from_bytes(b"abc"))
show("members", hasattr(Point, "from_bytes"), hasattr(ProcMesh, "from_host_mesh"), hasattr(HostMesh, "region"))
show("transport", ChannelTransport.TcpWithHostname.get() == ChannelTransport.TcpWithHostname)
show("from indexed", ValueMesh.from_indexed(shape, [(i, i * i) for i in (3, 1, 0, 2, 5, 4)]).values())


class One(Actor):
    @endpoint
    def f(self):
        return 1


values = this_host().spawn_procs({"n": 3}).spawn("one", One).f.call().get()
show("values", values.values(), values.get(2))
try:
    values.get(3)
except (ValueError, IndexError) as e:
    show(e)
show("host", this_host().stream_logs, this_host().is_fake_in_process)
job = SlurmJob({"a": 1})
job.add_mesh("b", 2)
show("job", job.apply_id)
