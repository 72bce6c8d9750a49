"""Lend a tensor of one stream to another (`Borrow`), and drop a tensor that is no longer used (`drop`).

Both affect the memory of a tensor, and therefore all its views. Owners of values that share memory have a common
`Storage` and a separate class. Uses of a tensor without views and loans are therefore not checked.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_kernel.runtime.actor.extensions import TensorArgument
from monarch_kernel.runtime.mesh.shape import Region
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import BorrowError, MixedTensorsError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_on
from monarch_kernel.runtime.tensor.rank.calls import lent_value
from monarch_kernel.runtime.tensor.wire import LEND

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


# Collect the handles and meshes among the pickled arguments of an endpoint: `TensorLoan`.
#
# In their place, a rank receives its own value of a handle, and torch's device mesh for a `Mesh`. Handles may be
# anywhere in the arguments: in containers, modules, optimizers and objects of the program.


class _Lent:
    """The handles of one mesh, in pickling order."""

    def __init__(self, token: int, ranks: tuple[int, ...]) -> None:
        self.token = token
        self.ranks = ranks
        self.handles: list[Tensor] = []


class TensorLoan:
    """The values that a message lends.

    Pickle the message in ``with loan:``. Then `send` tells the ranks which values to store.

    Args:
        procs: references to the processes that receive the message.
    """

    def __init__(self, procs: Sequence[object]) -> None:
        self._procs = procs
        self._lent: dict[TensorMesh, _Lent] = {}
        self._outer: TensorLoan | None = None

    def __enter__(self) -> TensorLoan:
        self._outer, _current.loan = _current.loan, self
        return self

    def __exit__(self, *exc: object) -> None:
        _current.loan = self._outer

    def take(self, handle: Tensor) -> object:
        """Return the pickled form of a handle.

        Raises:
            MixedTensorsError: a receiver of the message is not a rank of the handle's mesh.
        """
        mesh = handle._spec.mesh
        lent = self._lent.get(mesh)
        if lent is None:
            ranks = self.ranks_of(mesh, handle)
            mesh.prepare_loan()
            lent = self._lent[mesh] = _Lent(mesh.engine.new_number(), ranks)
        index = next((k for k, known in enumerate(lent.handles) if known is handle), len(lent.handles))
        if index == len(lent.handles):
            lent.handles.append(handle)
        grad = handle.requires_grad if getattr(handle, "_is_param", False) else None
        return lent_value, (mesh.engine.key, lent.token, index, grad)

    def ranks_of(self, mesh: TensorMesh, what: object) -> tuple[int, ...]:
        """Return the ranks of the message's receivers in the engine's world.

        Raises:
            MixedTensorsError: a receiver is not a rank of this mesh.
        """
        ranks = ranks_in(mesh.engine, self._procs)
        if not set(ranks) <= set(mesh.ranks):
            raise MixedTensorsError(
                f"{what!r} is an argument of a call of actors that are not all on its ranks: call those on its mesh, "
                "bring it there first (to_mesh), or send "
                + ("the number (t.item())" if getattr(what, "ndim", None) == 0 else "one rank's value (inspect(t))")
            )
        return ranks

    def send(self) -> list[tuple[TensorMesh, tuple[int, ...], int]]:
        """Send the loans to the ranks, in order with the handles' streams. Return meshes, called ranks, and tokens."""
        for mesh, lent in self._lent.items():
            mesh.engine.shares = True
            ids = [handle._owner.id for handle in lent.handles]
            mesh.engine.control(mesh, LEND, len(ids), *ids, len(lent.ranks), *lent.ranks, token=lent.token)
        return [(mesh, lent.ranks, lent.token) for mesh, lent in self._lent.items()]


class _Current(threading.local):
    loan: TensorLoan | None = None


_current = _Current()


def current_loan(what: object) -> TensorLoan:
    """Return the loan of the current pickling.

    Raises:
        TensorArgument: there is none: the tensor is pickled for another purpose, or by an endpoint that has not
            detected the handles in its arguments yet.
    """
    loan = _current.loan
    if loan is None:
        raise TensorArgument(
            f"{what!r} cannot be pickled: save or send its value (fetch_shard(t).result(), t.full_tensor(), or "
            "save_checkpoint() of a module), or pass it to an endpoint of actors on its mesh"
        )
    return loan


def ranks_by_proc(engine: TensorEngine) -> dict[str, int]:
    """Return the rank of each process of an engine's world, by process id."""
    return {ref.id: rank for rank, ref in enumerate(engine.world._target().procs)}


def ranks_in(engine: TensorEngine, procs: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of processes in the engine's world; -1 for processes outside of it."""
    places = ranks_by_proc(engine)
    return tuple(places.get(ref.id, -1) for ref in procs)


def region_of(labels: Sequence[str], sizes: Sequence[int], ranks: tuple[int, ...]) -> Region | None:
    """Return the region that selects these ranks in row-major order; None if their spacing is uneven."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, ranks[step] - ranks[0] if size > 1 else 1)
        step *= size
    region = Region(labels, sizes, strides, ranks[0])
    return region if list(region.ranks()) == list(ranks) else None


_number: Any = ValueOwner.id  # pyright: ignore[reportUnknownMemberType]  # the slot, under the property of a subclass


class StorageLoan(NamedTuple):
    """The description of a borrow in errors."""

    mutable: bool
    text: str
    place: frames.Frames

    @property
    def traceback(self) -> str:
        """The traceback of its creation."""
        return f"Traceback of borrow (most recent call last):\n{frames.text(self.place)}"


class Storage:
    """The shared state of values of one stream that are views of one another.

    Attributes:
        owned: the numbers of the values that the stream owns, with the list that each is appended to for deletion.
        borrow: the borrow through which the stream has the values; None if the stream owns them.
        loans: the loans to other streams that are not dropped yet. These are not the borrows, which would keep the
            owners alive.
        unusable: the reason why the values cannot be used now; otherwise empty.
    """

    __slots__ = ("__weakref__", "borrow", "dropped", "loans", "owned", "unusable")

    def __init__(self, borrow: Borrow | None = None) -> None:
        self.owned: dict[int, list[int]] = {}
        self.borrow = borrow
        self.loans: list[StorageLoan] = []
        self.unusable = ""
        self.dropped = False

    def drop(self, why: str) -> None:
        """Make the values unusable. They are deleted when no stream borrows them any longer."""
        if not self.dropped:
            self.dropped, self.unusable = True, why
            self.delete_unlent()

    def delete_unlent(self) -> None:
        """Delete dropped values, unless they are lent."""
        while self.dropped and self.owned and not self.loans:
            number, dead = self.owned.popitem()
            dead.append(number)

    def add(self, loan: StorageLoan) -> None:
        """Record a loan to another stream."""
        self.loans.append(loan)
        if loan.mutable:
            self.unusable = f"a tensor is used while it is lent: {loan.text}: drop() it first.\n{loan.traceback}"

    def remove(self, loan: StorageLoan) -> None:
        """Remove a loan that has ended."""
        self.loans.remove(loan)
        if loan.mutable and not self.dropped:
            self.unusable = ""
        self.delete_unlent()


class _SharingOwner(ValueOwner):
    """Owns a value that has views, or that is lent or borrowed."""

    __slots__ = ()

    @property
    def id(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # in place of the slot, so as to refuse
        if self.storage.unusable:
            raise BorrowError(self.storage.unusable)
        return _number.__get__(self)

    def __del__(self) -> None:
        number = _number.__get__(self)
        if self.storage.owned.pop(number, None) is not None:
            self._dead.append(number)


def storage_of(owner: ValueOwner) -> Storage:
    """Return the storage that a value shares with its views."""
    if type(owner) is ValueOwner:
        owner.storage = Storage()
        owner.storage.owned[owner.id] = owner._dead
        owner.__class__ = _SharingOwner
    return owner.storage


def share(base: ValueOwner, view: ValueOwner) -> None:
    """Record that a new value shares the memory of another value."""
    storage = view.storage = storage_of(base)
    storage.owned[view.id] = view._dead
    view.__class__ = _SharingOwner


def number_of(owner: ValueOwner) -> int:
    """Return the number of a value that may be lent."""
    return _number.__get__(owner)


class Borrow:
    """The use of a tensor in another stream, until `drop()` or the end of ``with borrow:``.

    Attributes:
        mutable: whether the borrowing stream may write the tensor.
        dropped: whether the borrow has ended.
    """

    def __init__(self, source: Tensor, target: TensorMesh, mutable: bool) -> None:
        self.mutable = mutable
        self.dropped = False
        self._owner: ValueOwner | None = source._owner  # keeps the value until the drop
        self._from = source._spec.mesh
        self._to = target
        file, line, _ = frames.here()
        how = "to be written" if mutable else "to be read"
        text = f"borrow from stream {self._from.stream.name} into {target.stream.name}, {how}, made at {file}:{line}"
        self._loan = StorageLoan(mutable, text, frames.take(2, 16))
        self._lent: weakref.ref[Storage] | None = None

    @property
    def traceback_string(self) -> str:
        """The traceback of the creation of this borrow."""
        return frames.text(self._loan.place)

    def lend(self) -> ValueOwner:
        """Return the owner of the value in the borrowing stream."""
        assert self._owner is not None
        storage_of(self._owner).add(self._loan)
        lent = ValueOwner(number_of(self._owner), self._to.dead, self._owner.place)
        lent.storage = Storage(self)
        lent.__class__ = _SharingOwner
        self._lent = weakref.ref(lent.storage)
        return lent

    def drop(self) -> None:
        """End the borrow. The tensor's own stream uses it again when the operations issued here so far have run.

        The borrowed tensor and its views become unusable. A second call does nothing.

        Raises:
            BorrowError: the borrowed tensor is lent to another stream.
        """
        if self.dropped:
            return
        lent = self._lent() if self._lent is not None else None
        if lent is not None and lent.loans:
            raise BorrowError(f"drop(): what was borrowed is lent itself: {lent.loans[0].text}: drop() that first")
        assert self._owner is not None
        self.dropped = True
        self._from.engine.order(self._to, self._from)
        if lent is not None:
            lent.drop(
                f"a borrowed tensor is used after drop(): {self}. Borrow it again.\nIt is dropped at (most recent call "
                f"last):\n{frames.text(frames.take(1, 16))}"
            )
        self._owner.storage.remove(self._loan)
        self._owner = None

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<{self._loan.text}>"

    def __del__(self) -> None:
        if not self.dropped and not self._from.engine._closed:
            warnings.warn(
                f"{self._loan.text} was never dropped, so the tensor stays lent: call drop(), or use `with borrow:`",
                RuntimeWarning,
                stacklevel=1,
            )


def lend(tensor: Tensor, target: TensorMesh, mutable: bool) -> tuple[Tensor, Borrow]:
    """Implement `Stream.borrow`."""
    source = tensor._spec.mesh
    if target.stream is source.stream:
        raise BorrowError(f"stream {source.stream.name} borrows a tensor that is its own: use it as it is")
    storage = storage_of(tensor._owner)
    if storage.unusable:
        raise BorrowError(f"borrow: {storage.unusable}")
    if mutable and storage.loans:
        raise BorrowError(
            f"a tensor that is lent cannot be borrowed to be written: {storage.loans[0].text}: drop() it first"
        )
    if mutable and storage.borrow is not None and not storage.borrow.mutable:
        raise BorrowError(f"a tensor that was borrowed to be read is borrowed to be written: {storage.borrow}")
    source.engine.order(source, target)
    borrow = Borrow(tensor, target, mutable)
    return make_handle(spec_on(target, tensor._spec), borrow.lend()), borrow


def drop(owner: ValueOwner) -> None:
    """Implement `Tensor.drop`."""
    storage_of(owner).drop(
        "a tensor is used that was dropped: it, or a view of it, was explicitly deleted with drop() and is no longer "
        f"usable.\nIt is dropped at (most recent call last):\n{frames.text(frames.take(2, 16))}"
    )


def check_write(owner: ValueOwner) -> None:
    """Raise if a value cannot be written now."""
    storage: Storage = owner.storage
    if storage.borrow is not None and not storage.borrow.mutable:
        raise BorrowError(f"a tensor is written that was borrowed to be read: {storage.borrow}. Use mutable=True")
    if storage.loans:
        loan = storage.loans[0]
        raise BorrowError(
            f"a tensor is written while it is lent: {loan.text}. Call drop() on that borrow first.\n{loan.traceback}"
        )
