"""Run generators, such as data loaders, in processes beside the ranks: ``Pipe``, ``create_pipe``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.api.activation import active_target, tensor_mesh
from monarch_kernel.runtime.tensor.api.placement import rank_tensors
from monarch_kernel.runtime.tensor.api.remote_function import RemoteFunction, remote
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.signature import quiet
from monarch_kernel.runtime.tensor.rank import pipes
from monarch_kernel.runtime.tensor.wire import PipeMesh, PipeYield, TensorSlot

#: Messages are padded to a multiple of this size (bytes), because ranks learn a new operation for each size.
_UNIT = 512


class FakePipe:
    """The pipe of a shape function: it receives the program's values as fake tensors.

    Attributes:
        ranks, sizes: as in a rank's pipe: coordinates (here 0) and sizes by dimension of the mesh.
    """

    def __init__(self, labels: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.ranks = dict.fromkeys(labels, 0)
        self.sizes = dict(zip(labels, sizes))
        self._sent: list[Any] = []

    def send(self, obj: object) -> None:
        """Record a value that the program sends."""
        self._sent.append(obj)

    def recv(self) -> Any:
        """Return the next value that the program has sent, or None if there is none."""
        return self._sent.pop(0) if self._sent else None


class Pipe:
    """A generator in a process beside each rank of the active mesh. `recv` returns handles of its values.

    ```python
    @remote_generator("loader.main")          # on the ranks: main(pipe, size) calls pipe.send(...), or yields
    def batches(pipe, size):                  # here: what the values look like
        while True:
            yield {"x": torch.zeros(size, 28), "y": torch.zeros(size, dtype=torch.int64)}

    with mesh.activate():
        pipe = batches(32)
        batch = pipe.recv()
    ```

    Its operations are in order with the stream that was active at its creation. The processes end when the pipe is
    closed or deleted, or when their ranks end.

    Args:
        fn: the function of the processes, ``remote(function, propagate=shape function)``.
        max_messages: how many values each process produces in advance.
        args, kwargs: arguments of the function after the pipe. It receives tensors in place of handles.

    Raises:
        ValueError: no mesh is active.
        TypeError: `fn` is not a remote function, or has no shape function.
    """

    def __init__(
        self, fn: RemoteFunction, max_messages: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if not isinstance(fn, RemoteFunction):
            raise TypeError(f"expected fn to be a monarch.remote function, and not {type(fn).__name__}")
        if active_target()[0] is None:
            raise ValueError("remote generators require an active mesh: write `with mesh.activate():`")
        shapes = fn.shapes
        if shapes is None:
            raise TypeError(
                f"{fn!r} has no shape function, which a pipe needs: remote(function, propagate=...), or "
                "@remote_generator(function)"
            )
        if max_messages < 1:
            raise ValueError(f"max_messages={max_messages}: at least 1")
        self._mesh = mesh = tensor_mesh()
        self._name = fn.name
        place = PipeMesh(tuple(mesh.ranks), mesh.labels, mesh.sizes, fn.name, max_messages)
        function = fn.path if fn.path is not None else cloudpickle.dumps(fn.function)
        template, handles = _template((args, kwargs))
        self._fake = FakePipe(mesh.labels, mesh.sizes)
        with self._shapes_only():
            fakes = tree_map(_fake_of, (args, kwargs))
            self._shapes: Iterator[Any] = iter(shapes(self._fake, *fakes[0], **fakes[1]))
        payload = self._payload((place, function, template))
        self._end: Tensor | None = mesh.call(
            pipes.opened, lambda *_: torch.empty(0), payload, *handles, key="pipe opened"
        )
        mesh.engine.flush()  # the processes start to load

    # -- values -------------------------------------------------------------------------------------

    def send(self, obj: object) -> None:
        """Send a value to the generators, for their ``pipe.recv()``. They receive tensors in place of handles."""
        end = self._open()
        template, handles = _template(obj)
        with self._shapes_only():
            self._fake.send(tree_map(_fake_of, obj))
        self._mesh.call(pipes.sent, lambda *_: None, end, self._payload(template), *handles, key="pipe sent")

    def recv(self) -> Any:
        """Return handles of the next value of each generator. Parts that are not tensors come from the shape function.

        This does not block. If a generator has ended, raised or died, these handles fail.

        Raises:
            StopIteration: the shape function has ended.
        """
        end = self._open()
        with self._shapes_only():
            value = next(self._shapes)
        leaves, tree = tree_flatten(value)
        fakes = [x for x in leaves if isinstance(x, torch.Tensor)]
        kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in leaves)
        made = self._mesh.call(
            pipes.received,
            lambda *_: [torch.empty(x.shape, dtype=x.dtype) for x in fakes] or None,
            end,
            PipeYield(repr(tree), kinds),
            key=("pipe received", kinds, repr(tree)),
        )
        handles = iter(made or ())
        return tree_unflatten([next(handles) if isinstance(x, torch.Tensor) else x for x in leaves], tree)

    def __iter__(self) -> Pipe:
        return self

    def __next__(self) -> Any:
        return self.recv()

    # -- shape --------------------------------------------------------------------------------------

    @property
    def ranks(self) -> dict[str, Tensor]:
        """The coordinates of the ranks, as handles. In a generator, ``pipe.ranks`` has the coordinates of its rank."""
        return rank_tensors(self._mesh.procs)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's dimensions."""
        return dict(zip(self._mesh.labels, self._mesh.sizes))

    # -- end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes when all earlier operations have run. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            self._mesh.call(pipes.closed, lambda _: None, end, key="pipe closed")
            self._mesh.engine.flush()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        return f"<Pipe {self._name} on {self._mesh.name} ({shape}){', closed' if self._end is None else ''}>"

    def _open(self) -> Tensor:
        if self._mesh.engine.recording is not None:
            self._mesh.engine.recording.stop("it uses a pipe")
        if self._end is None:
            raise RuntimeError(f"{self!r} is used after close(): make a new one")
        return self._end

    def _payload(self, obj: object) -> Tensor:
        data = cloudpickle.dumps(obj)
        with _disable_current_modes():
            raw = torch.frombuffer(bytearray(data + bytes(-len(data) % _UNIT)), dtype=torch.uint8)
        return self._mesh.put(raw)

    def _shapes_only(self) -> Any:
        return _ShapesOnly(self._mesh.engine.fake)


class _ShapesOnly:
    """A block in which tensors have shapes but no values. Parts of a generator can run in it."""

    def __init__(self, fake: Any) -> None:
        self._all = (_disable_current_modes(), torch.no_grad(), quiet(), fake)

    def __enter__(self) -> None:
        for each in self._all:
            each.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for each in reversed(self._all):
            each.__exit__(*exc)


def create_pipe(fn: RemoteFunction, *args: object, max_messages: int = 50, **kwargs: object) -> Pipe:
    """Run ``fn(pipe, *args, **kwargs)`` in a process beside each rank of the active mesh; see `Pipe`."""
    return Pipe(fn, max_messages, args, kwargs)


def remote_generator(
    path: str | Callable[..., object], max_messages: int = 50
) -> Callable[[Callable[..., Any]], Callable[..., Pipe]]:
    """Turn a generator of shapes into a function that runs another generator beside each rank; see `Pipe`.

    Args:
        path: the function of the processes: ``"module.function"``, or the function itself. Its first argument is a
            pipe. It calls ``pipe.send(...)`` for each value, or it is a generator and yields them.
        max_messages: how many values each process produces in advance.
    """

    def decorated(shapes: Callable[..., object]) -> Callable[..., Pipe]:
        function = remote(path, propagate=shapes)

        @functools.wraps(shapes)
        def create(*args: object, **kwargs: object) -> Pipe:
            return Pipe(function, max_messages, args, kwargs)

        return create

    return decorated


def _template(obj: object) -> tuple[object, list[Tensor]]:
    flat, tree = tree_flatten(obj)
    handles = [x for x in flat if type(x) is Tensor]
    numbers = iter(range(len(handles)))
    return tree_unflatten([TensorSlot(next(numbers)) if type(x) is Tensor else x for x in flat], tree), handles


def _fake_of(x: object) -> object:
    if type(x) is Tensor:
        return x._spec.fake()
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    return x
