"""Move a module of the program to the ranks (`module_to_mesh`), and sum its gradients."""

from __future__ import annotations

import fnmatch
import functools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import torch
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_of
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, mesh_from
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld
from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh
from monarch_kernel.runtime.tensor.sharded.controller.values import placements_of
from monarch_kernel.runtime.tensor.training import rank as on_ranks
from monarch_kernel.runtime.tensor.training.mesh_methods import TrainingState

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


# Save and load modules and optimizers of a sharded mesh in a folder: ``save_checkpoint`` and ``load_checkpoint``.


def save_checkpoint(
    path: str | os.PathLike[str],
    mesh: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a module and its optimizer to a folder, in order with the operations. Returns when it is complete.

    Each rank writes its parts (``torch.distributed.checkpoint``), so the folder must be on a file system that all hosts
    share. torch can read it without this package. Only this user can read it. It is written beside `path` and renamed
    when it is complete: a crash leaves the old or the new checkpoint.

    Args:
        path: the path of the folder, on the ranks and here.
        overwrite: replace an existing checkpoint.

    Raises:
        FileExistsError: the folder exists and `overwrite` is false, or it has other files besides a checkpoint.
        NotPrivateError: another user could change the folder.
        ValueError: the mesh does not have all processes that were spawned together.
        DeviceMeshError: a rank has died. The folder is unchanged.
    """
    mesh, path = mesh_from(mesh), os.path.abspath(os.fspath(path))
    engine = _whole_world(mesh)
    if os.path.lexists(path):
        if not overwrite:
            raise FileExistsError(f"checkpoint {path} is there already: pass overwrite=True to replace it")
        on_ranks.check_replaceable(path)
    folder = f"{path}.{secrets.token_hex(4)}.new"
    names, local = _named(model, optimizer)
    with engine.lock, _disable_current_modes():
        try:
            everywhere(engine, on_ranks.save, names, folder, 0)
            local_file = os.path.join(folder, on_ranks.LOCAL)
            with open(os.open(local_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                torch.save(local, file)
            on_ranks.publish(folder, path, overwrite)
        except BaseException:
            on_ranks.discard(folder)
            raise


def load_checkpoint(
    path: str | os.PathLike[str],
    mesh: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read a module and its optimizer in place, from a folder written by `save_checkpoint`.

    The shape of the mesh and the layouts of the parameters may differ from those at the time of saving. Values that
    were lost with their ranks are restored.

    Raises:
        FileNotFoundError: there is no such folder.
        NotPrivateError: another user could have changed the folder; checkpoints are partly pickled.
        KeyError, RuntimeError: the module or the optimizer does not match.
        DeviceMeshError: a rank has died.
    """
    mesh, path = mesh_from(mesh), os.path.abspath(os.fspath(path))
    engine = _whole_world(mesh)
    on_ranks.check(path)
    local = torch.load(os.path.join(path, on_ranks.LOCAL), weights_only=True)
    if optimizer is not None:
        _make_state(optimizer, local)
    names, now = _named(model, optimizer)
    missing = (
        sorted(set(local["names"]) ^ set(now["names"]))
        if optimizer is not None
        else sorted(set(now["names"]) - set(local["names"]))
    )
    if missing:
        raise KeyError(f"checkpoint {path} is of another model or optimizer: they differ in {', '.join(missing[:5])}")
    with engine.lock, _disable_current_modes():
        everywhere(engine, on_ranks.load, names, path, mesh._target.key)
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, local["groups"]):
            group.update(saved)
        for parameter, saved in zip(_parameters(optimizer), local["state"]):
            for name, value in saved.items():
                optimizer.state[parameter][name] = value
    TrainingState.of(mesh).add_module(model)


def _whole_world(mesh: Mesh) -> TensorEngine:
    engine = mesh._target.engine
    if len(mesh._target.ranks) != len(engine.world):
        raise ValueError(
            f"mesh {mesh.name} has {len(mesh._target.ranks)} of the {len(engine.world)} processes that were spawned "
            "together: a checkpoint is written by all of them"
        )
    return engine


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[on_ranks.Names, dict[str, Any]]:
    """Return the values that the ranks write, and the state that this process writes."""
    layouts = TrainingState.layouts
    names: on_ranks.Names = {}

    def add(name: str, handle: Tensor, layout: Sequence[Placement] | None) -> None:
        spec = handle._spec
        known = None if layout is None else (layout, tuple(spec.size), spec.stride, spec.dtype)
        names[name] = handle._owner.id, known

    for name, handle in [*model.named_parameters(), *model.named_buffers()]:
        if type(handle) is Tensor:
            add(f"model.{name}", handle, layouts.get(handle))
    local: dict[str, Any] = {"groups": [], "state": []}
    if optimizer is not None:
        local["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for i, parameter in enumerate(_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            local["state"].append({k: v for k, v in state.items() if type(v) is not Tensor})
            for key, handle in state.items():
                if type(handle) is Tensor:
                    alike = handle.shape == parameter.shape
                    add(f"optimizer.{i}.{key}", handle, layouts.get(parameter) if alike else None)
    local["names"] = sorted(names)
    return names, local


def _make_state(optimizer: torch.optim.Optimizer, local: dict[str, Any]) -> None:
    """Create the state tensors of the checkpoint for an optimizer without steps."""
    for i, parameter in enumerate(_parameters(optimizer)):
        prefix = f"optimizer.{i}."
        state = optimizer.state[parameter]
        for name in local["names"]:
            if name.startswith(prefix) and name.removeprefix(prefix) not in state:
                with torch.no_grad():
                    state[name.removeprefix(prefix)] = torch.zeros_like(parameter)


# Build a module on the ranks with torch's own ``fully_shard`` or ``parallelize_module``: `RemoteModule`.


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
        build: Callable[..., object],
        like: Callable[..., object],
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
                found = engine.ask(target, functools.partial(on_ranks.build, *arguments))[0]
                engine.next_value = first + len(found)
        assert count == 0
        for i, (name, learns, (size, stride, dtype)) in enumerate(found):
            spec = spec_of(target, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
            handle = make_handle(spec, ValueOwner(first + i, target.dead))
            self.register_parameter(name.replace(".", "__"), torch.nn.Parameter(handle, requires_grad=learns))
        world = ShardedWorld.of(engine)
        world.after_forming.append(_rebuilding(self, arguments))
        TrainingState.of(mesh).add_module(self)
        weakref.finalize(self, _drop, weakref.ref(engine), weakref.ref(target), self._key).atexit = False

    def forward(self, *inputs: object) -> Any:
        """Run the module. Local inputs are distributed; the result is sharded along dimension 0, like the inputs."""
        placed: list[object] = []
        for x in inputs:
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"inputs of a RemoteModule are tensors, not {type(x).__name__}")
            placed.append(x if type(x) is Tensor else self._mesh.distribute(x, [self._dims] if self._dims else None))
        learned = [p for p in self.parameters() if p.requires_grad]
        return _Call.apply(self, len(placed), *placed, *learned)

    def on_ranks(self, function: Callable[..., object], *args: object) -> list[Any]:
        """Call ``function(module, *args)`` on every rank, in order with the operations.

        Return the results in rank order.

        With this, an optimizer can also live on the ranks, as an attribute of the module.
        """
        target = self._mesh._target
        return target.engine.ask(target, functools.partial(on_ranks.call, self._key, function, *args))

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

        def shapes(key: int, size: int, *fakes: object) -> object:
            return like(*fakes), torch.zeros(())

        result, ran = target.call(on_ranks.forward, shapes, module._key, size, *inputs, key=("forward", module._key))
        ctx.module, ctx.inputs, ctx.ran = module, inputs, ran
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> object:  # type: ignore[override]
        module = ctx.module
        learned = [p for p in module.parameters() if p.requires_grad]
        shapes = [(p.size(), p.stride(), p.dtype) for p in learned]

        def alike(key: int, ran: object, gradient: object, *inputs: torch.Tensor) -> object:
            given = [torch.empty(x.shape, dtype=x.dtype) for x in inputs if x.is_floating_point()]
            return given + [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

        found = iter(
            module._mesh._target.call(
                on_ranks.backward,
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


def _rebuilding(module: RemoteModule, arguments: tuple[object, ...]) -> Callable[[], None]:
    weak = weakref.ref(module)

    def again() -> None:
        living = weak()
        if living is not None:
            engine = living._mesh._target.engine
            ranks = set(living._mesh._target.ranks)
            everywhere(engine, _on_some, ranks, functools.partial(on_ranks.rebuild, *arguments))

    return again


def _on_some(ranks: set[int], function: Callable[[], None]) -> None:
    from monarch_kernel.runtime.tensor.rank.current_executor import here

    if here().rank in ranks:
        function()


def _drop(engine: weakref.ref[TensorEngine], target: weakref.ref[ShardedMesh], key: int) -> None:
    """Release the module on the ranks after its deletion here."""
    living, mesh = engine(), target()
    if living is None or mesh is None or mesh.error is not None or mesh.procs._stopped:
        return
    try:
        living.ask_later(mesh, functools.partial(on_ranks.drop, key))
    except Exception:  # its processes have ended
        pass


#: The plan that shards parameters along the data dimension.
SHARD = "shard"


def module_to_mesh(
    module: torch.nn.Module,
    mesh: object,
    plan: Mapping[str, object] | str | None = None,
    *,
    data: str | Sequence[str] | None = None,
) -> torch.nn.Module:
    """Move the parameters and buffers of a module to a mesh, in place.

    ```python
    model = module_to_mesh(nn.Sequential(...), mesh)
    optimizer = optim.AdamW(model.parameters())
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    optimizer.step()
    ```

    Local tensor arguments of the module are sharded along their dimension 0 over the data dimension of the mesh.
    Gradients have the layouts of their parameters when backward returns. The results equal those of one device.

    Args:
        module: the module, which is changed and returned. Create optimizers afterwards.
        mesh: a `Mesh`, a proc mesh or a torch ``DeviceMesh``.
        plan: the layout of parameters. None: replicate on every rank (data parallel). ``"shard"``: shard each along its
            dimension 0 over the data dimension, and gather it for operations that need it (like FSDP). Or sharding
            specs (see `distribute`) by pattern of parameter names, such as ``{"*.up.weight": ["model", None]}`` (tensor
            parallel). The first matching pattern applies; parameters without a match are replicated.
        data: the dimension of the mesh (or several) along which the inputs are sharded; by default the first.

    Raises:
        ValueError: a pattern matches no parameter, or the mesh lacks a dimension.
        TypeError: an argument is not a module or a plan.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module_to_mesh({type(module).__name__}, ...): give a torch.nn.Module")
    mesh = mesh_from(mesh)
    dims = _data_dims(mesh, data)
    layouts = _layouts(module, plan, dims)
    # a parameter or buffer in several places stays one object
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is None or type(parameter) is Tensor:
                continue
            if id(parameter) not in moved:
                spec = layouts[f"{prefix}.{name}" if prefix else name]
                moved[id(parameter)] = parameter, _parameter(parameter, mesh, spec)
            part._parameters[name] = moved[id(parameter)][1]
        for name, buffer in part._buffers.items():
            if buffer is None or type(buffer) is Tensor:
                continue
            if id(buffer) not in moved:
                made = mesh.distribute(buffer.detach())
                TrainingState.layouts[made] = placements_of(None, mesh.mesh_dim_names, buffer, mesh.name)
                moved[id(buffer)] = buffer, made
            part._buffers[name] = moved[id(buffer)][1]

    def enter(_: object, args: object, kwargs: object) -> Any:
        return tree_map(lambda x: _input(x, mesh, dims), (args, kwargs))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    TrainingState.of(mesh).add_module(module)
    return module


def _data_dims(mesh: Mesh, data: str | Sequence[str] | None) -> tuple[str, ...]:
    dims = mesh.mesh_dim_names[:1] if data is None else (data,) if isinstance(data, str) else tuple(data)
    for dim in dims:
        if dim not in mesh.mesh_dim_names:
            raise ValueError(f"data={dim!r}: mesh {mesh.name} has {', '.join(mesh.mesh_dim_names)}")
    return dims


def _layouts(module: torch.nn.Module, plan: object, dims: tuple[str, ...]) -> Mapping[str, object]:
    """Return the sharding spec of each parameter, by each of its names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    if plan is None:
        return dict.fromkeys(named)
    if isinstance(plan, str):
        if plan != SHARD:
            raise ValueError(f"plan={plan!r}: give {SHARD!r}, or sharding specs by pattern of parameter names")
        return {name: [dims] if p.dim() else None for name, p in named.items()}
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan={plan!r}: give None, {SHARD!r}, or sharding specs by pattern of parameter names")
    for pattern in plan:
        if not fnmatch.filter(named, pattern):
            raise ValueError(f"plan: no parameter is called {pattern!r}: there are {', '.join(named) or 'none'}")
    return {
        name: next((spec for pattern, spec in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        for name in named
    }


def _parameter(parameter: torch.nn.Parameter, mesh: Mesh, spec: object) -> torch.nn.Parameter:
    made = torch.nn.Parameter(mesh.distribute(parameter.detach(), spec), requires_grad=parameter.requires_grad)
    TrainingState.layouts[made] = placements_of(spec, mesh.mesh_dim_names, parameter, mesh.name)
    if made.requires_grad:
        GradientSums.follow(made)  # type: ignore[arg-type]  # a Parameter of a handle is a handle
    return made


def _copied(tensor: Tensor, copy: Tensor) -> None:
    """Register the deep copy of a parameter or buffer of a mesh."""
    if tensor in TrainingState.layouts:
        TrainingState.layouts[copy] = TrainingState.layouts[tensor]
        if copy.requires_grad:
            GradientSums.follow(copy)


ShardedMesh.on_copied.append(_copied)


def _input(x: object, mesh: Mesh | DeviceMesh, dims: tuple[str, ...]) -> object:
    if not isinstance(x, torch.Tensor) or isinstance(x, (Tensor, DTensor)):
        return x
    if isinstance(mesh, DeviceMesh):  # the module was passed to an actor of a rank
        names = mesh.mesh_dim_names or ()
        placements = placements_of([dims] if x.dim() else None, names, x, "here")
        return distribute_tensor(x, mesh, placements, src_data_rank=None)
    return mesh.distribute(x, [dims] if x.dim() else None)


#: Gradients are sent together once they reach this size (bytes), so that few wait until the end of the pass.
BUCKET = 25 * 1024 * 1024


class GradientSums:
    """The accumulated gradients of one mesh that do not have the layouts of their parameters yet.

    A gradient of a sharded loss is a sum with a term on each rank. If an optimizer used it directly, it would be summed
    again at every use.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[TensorMesh, GradientSums]] = weakref.WeakKeyDictionary()

    def __init__(self, target: TensorMesh) -> None:
        self._target = weakref.ref(target)
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0
        self._pass = -1

    @classmethod
    def follow(cls, parameter: Tensor) -> None:
        """Convert all later gradients that backward accumulates for this parameter to the parameter's layout."""
        target = parameter._spec.mesh
        sums = cls._all.get(target)
        if sums is None:
            sums = cls._all[target] = cls(target)
        parameter.register_post_accumulate_grad_hook(sums._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        running = torch._C._current_graph_task_id()
        if running != self._pass:  # the rest of a failed pass is not in use
            self._waiting, self._bytes, self._pass = [], 0, running
            Variable._execution_engine.queue_callback(self._sum)
        self._waiting.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes >= BUCKET:
            self._sum()

    def _sum(self) -> None:
        parameters = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._bytes = [], 0
        target = self._target()
        if not parameters or target is None:
            return
        with torch.no_grad():
            results = target.call(
                on_ranks.reduced,
                _alike,
                [p.grad for p in parameters],
                [p.detach() for p in parameters],
                key="gradients",
            )
        for parameter, gradient in zip(parameters, results):
            parameter.grad = gradient


def _alike(gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(g.size(), g.stride(), dtype=g.dtype) for g in gradients]
