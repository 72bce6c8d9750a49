"""Lend a tensor of one stream to another (`Borrow`), and drop a tensor that is no longer used (`drop`).

Both affect the memory of a tensor, and therefore all its views. Owners of values that share memory have a common
`Storage` and a separate class. Uses of a tensor without views and loans are therefore not checked.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import BorrowError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_on

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

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


def check_write(owner: Any) -> None:
    """Raise if a value cannot be written now."""
    storage: Storage = owner.storage
    if storage.borrow is not None and not storage.borrow.mutable:
        raise BorrowError(f"a tensor is written that was borrowed to be read: {storage.borrow}. Use mutable=True")
    if storage.loans:
        loan = storage.loans[0]
        raise BorrowError(
            f"a tensor is written while it is lent: {loan.text}. Call drop() on that borrow first.\n{loan.traceback}"
        )
