"""Build a module on the ranks with torch's own ``fully_shard`` or ``parallelize_module``: `RemoteModule`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_of
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.controller.mesh import mesh_from
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld
from monarch_kernel.runtime.tensor.training.controller.training_state import TrainingState
from monarch_kernel.runtime.tensor.training.rank import modules


class RemoteModule(torch.nn.Module):
    """A module that is built and sharded on the ranks. Forward and backward are one record each.

    ```python
    def build(device_mesh):
        torch.manual_seed(0)
        model = Transformer(...)
        for layer in model.layers:
            fully_shard(layer, mesh=device_mesh)
        return fully_shard(model, mesh=device_mesh)

    model = RemoteModule(mesh, build, like=lambda x: x.new_empty(x.shape[0], 10))
    optimizer = optim.AdamW(model.parameters())     # handles of the sharded parameters
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    optimizer.step()
    ```

    Args:
        mesh: a `Mesh`, a proc mesh or a torch ``DeviceMesh``.
        build: called on every rank with the torch ``DeviceMesh``; returns the module. It is called again after the
            process group was formed again, and should build the same module on all ranks (seed first).
        like: a function of the inputs that returns a tensor of the shape and dtype of the result. It is called here
            with fake tensors. Dimension 0 is the batch dimension.
        data: the dimension of the mesh (or several, or none: ``()``) along which inputs are sharded; by default the
            first.

    Raises:
        ActorError: `build` failed.
    """

    def __init__(
        self,
        mesh: Any,
        build: Callable[[Any], Any],
        like: Callable[..., Any],
        *,
        data: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh_from(mesh)
        labels = mesh.mesh_dim_names
        dims = labels[:1] if data is None else (data,) if isinstance(data, str) else tuple(data)
        for dim in dims:
            if dim not in labels:
                raise ValueError(f"data={dim!r}: mesh {mesh.name} has {', '.join(labels)}")
        target = mesh._target
        engine = target.engine
        self._mesh, self._dims, self._like = mesh, dims, like
        with engine.lock:
            self._key = engine.next_value
            engine.next_value += 1
        function = cloudpickle.dumps(build)
        with _disable_current_modes():
            count = len(list(torch.nn.Module.named_parameters(self)))
            first = engine.next_value
            arguments = (self._key, target.key, function, tuple(labels.index(dim) for dim in dims), first)
            with engine.lock:
                found = engine.ask(target, functools.partial(modules.build, *arguments))[0]
                engine.next_value = first + len(found)
        assert count == 0
        for i, (name, learns, (size, stride, dtype)) in enumerate(found):
            spec = spec_of(target, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
            handle = make_handle(spec, ValueOwner(first + i, target.dead))
            self.register_parameter(name.replace(".", "__"), torch.nn.Parameter(handle, requires_grad=learns))
        self._learns = [learns for _, learns, _ in found]
        world = ShardedWorld.of(engine)
        world.after_forming.append(_rebuilding(self, arguments))
        TrainingState.of(mesh).add_module(self)
        weakref.finalize(self, _drop, weakref.ref(engine), weakref.ref(target), self._key).atexit = False

    def forward(self, *inputs: Any) -> Any:
        """Run the module. Local inputs are distributed; the result is sharded along dimension 0, like the inputs."""
        placed: list[Any] = []
        for x in inputs:
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"inputs of a RemoteModule are tensors, not {type(x).__name__}")
            placed.append(x if type(x) is Tensor else self._mesh.distribute(x, [self._dims] if self._dims else None))
        learned = [p for p in self.parameters() if p.requires_grad]
        return _Call.apply(self, len(placed), *placed, *learned)

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(module, *args)`` on every rank, in order with the operations.

        Return the results in rank order.

        With this, an optimizer can also live on the ranks, as an attribute of the module.
        """
        target = self._mesh._target
        return target.engine.ask(target, functools.partial(modules.call, self._key, function, *args))

    def extra_repr(self) -> str:
        """Return the text for `repr`."""
        return f"on {self._mesh!r}"


class _Call(torch.autograd.Function):
    """One forward pass and its backward pass."""

    @staticmethod
    def forward(ctx: Any, module: RemoteModule, count: int, *tensors: Any) -> Any:  # type: ignore[override]
        inputs = [x.detach() for x in tensors[:count]]
        target = module._mesh._target
        size = int(inputs[0].shape[0])
        like = module._like

        def shapes(key: int, size: int, *fakes: Any) -> Any:
            return like(*fakes), torch.zeros(())

        result, ran = target.call(modules.forward, shapes, module._key, size, *inputs, key=("forward", module._key))
        ctx.module, ctx.inputs, ctx.ran = module, inputs, ran
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        module = ctx.module
        learned = [p for p in module.parameters() if p.requires_grad]
        shapes = [(p.size(), p.stride(), p.dtype) for p in learned]

        def alike(key: int, ran: Any, gradient: Any, *inputs: Any) -> Any:
            given = [torch.empty(x.shape, dtype=x.dtype) for x in inputs if x.is_floating_point()]
            return given + [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

        found = iter(
            module._mesh._target.call(
                modules.backward,
                alike,
                module._key,
                ctx.ran,
                gradient.detach(),
                *ctx.inputs,
                key=("backward", module._key),
            )
        )
        given = [next(found) if x.is_floating_point() else None for x in ctx.inputs]
        return None, None, *given, *found


def _rebuilding(module: RemoteModule, arguments: tuple[Any, ...]) -> Callable[[], None]:
    weak = weakref.ref(module)

    def again() -> None:
        living = weak()
        if living is not None:
            engine = living._mesh._target.engine
            ranks = set(living._mesh._target.ranks)
            everywhere(engine, _on_some, ranks, functools.partial(modules.rebuild, *arguments))

    return again


def _on_some(ranks: set[int], function: Callable[[], None]) -> None:
    from monarch_kernel.runtime.tensor.rank.current_executor import here

    if here().rank in ranks:
        function()


def _drop(engine: Any, target: Any, key: int) -> None:
    """Release the module on the ranks after its deletion here."""
    living, mesh = engine(), target()
    if living is None or mesh is None or mesh.error is not None or mesh.procs._stopped:
        return
    try:
        living.ask_later(mesh, functools.partial(modules.drop, key))
    except Exception:  # its processes have ended
        pass
