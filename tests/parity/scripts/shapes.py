"""Slices, splits and points, of meshes and of value meshes."""

from monarch.actor import Actor, Extent, Point, context, current_rank, endpoint, this_host
from report import raises, show


class Worker(Actor):
    @endpoint
    def where(self):
        return current_rank().rank, context().actor_instance.rank.rank


procs = this_host().spawn_procs(per_host={"gpus": 4})
mesh = procs.spawn("worker", Worker)
show("sizes", procs.sizes, mesh.sizes, len(mesh), mesh.size(), mesh.size("gpus"))
show("extent", mesh.extent.labels, mesh.extent.sizes, mesh.extent.nelements)
show("whole", list(mesh.where.call().get().values()))
show("tail", list(mesh.slice(gpus=slice(1, 3)).where.call().get().values()))
show("step", list(mesh.slice(gpus=slice(0, 4, 2)).where.call().get().values()))
grid = mesh.split(gpus=("dp", "pp"), pp=2)
show("split", grid.sizes)
show("split slice", list(grid.slice(pp=1).where.call().get().values()))
show("flatten", grid.flatten("all").sizes)
show("rename", grid.rename(dp="data").sizes)
show("single", mesh.slice(gpus=3).where.call_one().get(), mesh.slice(gpus=3).sizes)
for what, kind, attempt in (
    ("negative", IndexError, lambda: mesh.slice(gpus=-1)),
    ("out of range", IndexError, lambda: mesh.slice(gpus=4)),
    ("unknown", TypeError, lambda: mesh.slice(hosts=0)),
    ("bad split", ValueError, lambda: mesh.split(gpus=("a", "b"), b=3)),
):
    raises(what, kind, attempt)
values = grid.where.call().get()
show("value item", values.item(dp=1, pp=0), values.get(3))
show("value slice", list(values.slice(dp=1).values()))
show("value flatten", values.flatten("x").sizes)
show("value iter", [(p.rank, v) for p, v in values])
for what, kind, attempt in (
    ("missing label", KeyError, lambda: values.item(dp=1)),
    ("extra label", KeyError, lambda: values.item(dp=1, pp=0, x=1)),
    ("bad coordinate", IndexError, lambda: values.item(dp=2, pp=0)),
):
    raises(what, kind, attempt)
point = Point(5, Extent(["a", "b"], [2, 3]))
show("point", dict(point), point.rank, point.size("b"), list(point.keys()))
