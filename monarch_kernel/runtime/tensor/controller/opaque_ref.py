"""References to objects on the ranks, for functions of the ranks and as handles of the controller: `OpaqueRef`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.handle import Tensor


class OpaqueRef:
    """A reference to an object of any kind that lives on the ranks.

    A function of the ranks (``remote``) returns a reference, and its ``propagate`` returns ``OpaqueRef()`` to declare
    this. The controller receives a reference without a value, and passes it on as an argument. Functions that receive
    it find the object in ``value``. When the controller's last copy is deleted, the ranks release the object.

    ```python
    @remote(propagate=lambda: OpaqueRef())
    def build():
        return OpaqueRef(torch.nn.Linear(3, 4))


    @remote(propagate=lambda model, x: x.new_empty(x.shape[0], 4))
    def run(model, x):
        return model.value(x)
    ```

    Args:
        value: the object, on a rank.
    """

    _key: Tensor | None = None

    def __init__(self, value: object = None) -> None:
        self._value = value

    @classmethod
    def of(cls, key: Tensor) -> OpaqueRef:
        """Create the controller's reference to a value on the ranks."""
        made = OpaqueRef()
        made._key = key
        return made

    @property
    def key(self) -> Tensor:
        """The controller's handle of the object. It is a tensor only formally.

        Raises:
            RuntimeError: the object is in this process, not on ranks.
        """
        if self._key is None:
            raise RuntimeError(
                "an OpaqueRef that was made by the controller refers to nothing on the ranks: have a function of the "
                "ranks make it (remote), or construct an OpaqueObject"
            )
        return self._key

    @property
    def value(self) -> Any:
        """The object.

        Raises:
            RuntimeError: this is the controller, which has only a reference.
        """
        if self._key is not None:
            raise RuntimeError(
                "the object of an OpaqueRef is on the ranks: read value in a function of the ranks (remote)"
            )
        return self._value

    def __reduce__(self) -> Any:
        if self._key is not None:
            return self._key.__reduce_ex__(4)  # refused, except for arguments of endpoints
        raise TypeError("the object of an OpaqueRef stays on its rank: return what you need of it")

    def __repr__(self) -> str:
        if self._key is None:
            return f"{type(self).__name__}({self._value!r})"
        return f"<{type(self).__name__} on {self._key._spec.mesh!r}>"
