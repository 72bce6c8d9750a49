"""`Borrow`: a tensor of one stream, in use in another.

The owner of a lent value changes its class, so that each use of a handle is checked only while something is lent.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import BorrowError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_on

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

_number: Any = ValueOwner.id  # pyright: ignore[reportUnknownMemberType]  # the slot, under the property of a subclass
#: What errors say of what is lent, by the identity of its owner. Not the borrows: they keep the owners.
_loans: dict[int, list[str]] = {}


class _SharedOwner(ValueOwner):
    """Owns a value that other streams read."""

    __slots__ = ()

    def __del__(self) -> None:
        _loans.pop(id(self), None)
        super().__del__()


class _LentOwner(ValueOwner):
    """Owns a value that another stream may write."""

    __slots__ = ()

    @property
    def id(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # in place of the slot, so as to refuse
        raise BorrowError(f"a tensor is used while it is lent: {_loans[id(self)][0]}: drop() it first")

    def __del__(self) -> None:
        _loans.pop(id(self), None)
        self._dead.append(_number.__get__(self))


class _BorrowedOwner:
    """Stands for a value in the stream that has borrowed it."""

    __slots__ = ("_borrow", "_source")

    def __init__(self, source: ValueOwner, borrow: Borrow) -> None:
        self._source = source
        self._borrow = borrow

    @property
    def id(self) -> int:
        if self._borrow.dropped:
            raise BorrowError(f"a borrowed tensor is used after drop(): {self._borrow}. Borrow it again")
        return _number.__get__(self._source)


class Borrow:
    """The use of a tensor in another stream, until `drop()`, or the end of ``with borrow:``.

    Attributes:
        mutable: whether it may be written.
        dropped: whether its use has ended.
    """

    def __init__(self, source: Tensor, target: TensorMesh, mutable: bool) -> None:
        self.mutable = mutable
        self.dropped = False
        self._owner = source._owner
        self._from = source._spec.mesh
        self._to = target
        file, line, _ = frames.here()
        how = "to be written" if mutable else "to be read"
        self._text = (
            f"borrow from stream {self._from.stream.name} into {target.stream.name}, {how}, made at {file}:{line}"
        )

    def drop(self) -> None:
        """End the use: the tensor's own stream goes on with it when the operations here so far have run.

        A second call does nothing.
        """
        if self.dropped:
            return
        self.dropped = True
        self._give_back()
        self._from.engine.order(self._to, self._from)

    def _give_back(self) -> None:
        left = _loans[id(self._owner)]
        left.remove(self._text)
        if not left:
            del _loans[id(self._owner)]
            self._owner.__class__ = ValueOwner

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __del__(self) -> None:
        if not self.dropped and not self._from.engine._closed:
            warnings.warn(
                f"{self._text} was never dropped, so the tensor stays lent: call drop(), or use `with borrow:`",
                RuntimeWarning,
                stacklevel=1,
            )


def lend(tensor: Tensor, target: TensorMesh, mutable: bool) -> tuple[Tensor, Borrow]:
    """See `Stream.borrow`."""
    source = tensor._spec.mesh
    if target.stream is source.stream:
        raise BorrowError(f"stream {source.stream.name} borrows a tensor that is its own: use it as it is")
    owner = tensor._owner
    if type(owner) not in (ValueOwner, _SharedOwner):
        raise BorrowError("a tensor that is lent, or is itself borrowed, cannot be borrowed: drop() first")
    if mutable and type(owner) is _SharedOwner:
        raise BorrowError(
            f"a tensor that is lent cannot be borrowed to be written: {_loans[id(owner)][0]}: drop() it first"
        )
    source.engine.order(source, target)
    borrow = Borrow(tensor, target, mutable)
    _loans.setdefault(id(owner), []).append(borrow._text)
    owner.__class__ = _LentOwner if mutable else _SharedOwner
    made = make_handle(spec_on(target, tensor._spec), _BorrowedOwner(owner, borrow))  # pyright: ignore[reportArgumentType]  # it owns nothing, and has the same use
    return made, borrow


def check_write(owner: Any) -> None:
    """Raise if a value must not be written now."""
    if isinstance(owner, _BorrowedOwner):
        if not owner._borrow.mutable:
            raise BorrowError(f"a tensor is written that was borrowed to be read: {owner._borrow}. Use mutable=True")
    elif isinstance(owner, _SharedOwner):
        raise BorrowError(
            f"a tensor is written while it is lent: {_loans[id(owner)][0]}. Call drop() on that borrow first"
        )
