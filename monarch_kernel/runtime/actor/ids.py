"""Monarch's identifiers as values: ``Uid`` and ``ProcId``.

This package identifies procs by plain strings (``context().actor_instance.proc_id``); these classes are for programs
that make and compare identifiers themselves.
"""

from __future__ import annotations

import os
import re
from typing import Any

# Create unique, readable names.


def unique(name: str) -> str:
    """Return ``name``, made safe for file names and log lines, with a random suffix."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:24]}-{os.urandom(3).hex()}"


_DIGITS = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
_LABEL = r"[a-z](?:[a-zA-Z0-9_-]*[a-z0-9])?"
_LONGEST = 63
_UID = r"(?P<label>[^<>]*)(?:<(?P<value>[^<>]*)>)?"


class Uid:
    """A singleton, which is a name (``name``), or an instance, which is a 64-bit number with an optional label
    (``name<4HkNzq7CqKE>``).

    ``from_string``, ``instance``, ``instance_from_value`` and ``anonymous`` make one. Two instances are equal if their
    numbers are equal. Immutable and hashable.
    """

    __slots__ = ("_label", "_value")

    def __init__(self) -> None:
        raise TypeError("a Uid is made by from_string(), instance(), instance_from_value() or anonymous()")

    @staticmethod
    def _make(label: str | None, value: int | None) -> Uid:
        if label is not None:
            _check_label(label)
        uid = object.__new__(Uid)
        uid._label = label
        uid._value = value
        return uid

    @staticmethod
    def from_string(uid: str) -> Uid:
        """Parse the text that ``str()`` of a ``Uid`` returns.

        Raises:
            ValueError: the text is not a uid.
        """
        found = re.fullmatch(_UID, uid)
        if found is None or not uid:
            raise ValueError(f"invalid uid: {uid!r} is neither a label nor LABEL<NUMBER>")
        label, digits = found["label"] or None, found["value"]
        try:
            return Uid._make(label, None if digits is None else _number(digits))
        except ValueError as e:
            raise ValueError(f"invalid uid: {uid!r}: {e}") from None

    @staticmethod
    def instance(label: str | None = None) -> Uid:
        """Return a new instance, with a random number."""
        return Uid._make(label, int.from_bytes(os.urandom(8), "little"))

    @staticmethod
    def anonymous() -> Uid:
        """Return a new instance without a label."""
        return Uid.instance()

    @staticmethod
    def instance_from_value(value: int, label: str | None = None) -> Uid:
        """Return the instance with this number.

        Raises:
            OverflowError: the number does not fit into 64 bits.
        """
        if not 0 <= value < 1 << 64:
            raise OverflowError(f"the number of an instance has 64 bits, got {value}")
        return Uid._make(label, value)

    @property
    def label(self) -> str | None:
        """The label; None if there is none."""
        return self._label

    @property
    def instance_value(self) -> int | None:
        """The number of an instance; None for a singleton."""
        return self._value

    @property
    def is_instance(self) -> bool:
        """Whether this is an instance, which has a number."""
        return self._value is not None

    @property
    def is_singleton(self) -> bool:
        """Whether this is a singleton, which has only a name."""
        return self._value is None

    def _key(self) -> str | int | None:
        return self._label if self._value is None else self._value

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Uid) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return (self._label or "") + ("" if self._value is None else f"<{_digits(self._value)}>")

    def __repr__(self) -> str:
        return f"Uid.from_string({str(self)!r})"

    def __reduce__(self) -> Any:
        return Uid._make, (self._label, self._value)


class ActorId(str):
    """The unique name of an actor, and its parts.

    Attributes:
        actor_name: the name it was spawned under; "client" for code outside any actor.
        uid: the unique name of its mesh; also called ``pid``, as in Monarch.
        proc_id: the unique name of its proc.
        world_name: the unique name of the proc's mesh; also called ``proc_name``.
        rank: its position in its mesh as spawned.
    """

    __slots__ = ("actor_name", "proc_id", "rank", "uid")

    actor_name: str
    proc_id: str
    rank: int
    uid: str

    @classmethod
    def of(cls, text: str, actor_name: str, uid: str, proc_id: str, rank: int) -> ActorId:
        """Return the id with this text and these parts."""
        actor_id = cls(text)
        actor_id.actor_name, actor_id.uid, actor_id.proc_id, actor_id.rank = actor_name, uid, proc_id, rank
        return actor_id

    @property
    def label(self) -> str:
        """The name it was spawned under."""
        return self.actor_name

    @property
    def pid(self) -> str:
        """The unique name of its mesh."""
        return self.uid

    @property
    def world_name(self) -> str:
        """The unique name of the mesh of its proc."""
        return self.proc_id.rpartition(".")[0] or self.proc_id

    proc_name = world_name

    def __reduce__(self) -> Any:
        return ActorId.of, (str(self), self.actor_name, self.uid, self.proc_id, self.rank)


class ProcId:
    """The identifier of a proc: a ``Uid`` as a distinct type. Immutable and hashable."""

    __slots__ = ("_uid",)

    def __init__(self, uid: Uid) -> None:
        if not isinstance(uid, Uid):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a ProcId is made of a Uid, got {uid!r}: use ProcId.from_string() for a string")
        self._uid = uid

    @staticmethod
    def from_string(proc_id: str) -> ProcId:
        """Parse the text that ``str()`` of a ``ProcId`` returns.

        Raises:
            ValueError: the text is not a proc id.
        """
        try:
            return ProcId(Uid.from_string(proc_id))
        except ValueError as e:
            raise ValueError(f"invalid proc id: {e}") from None

    @property
    def uid(self) -> Uid:
        """The ``Uid`` of this identifier."""
        return self._uid

    @property
    def label(self) -> str | None:
        """The label of the ``Uid``; None if there is none."""
        return self._uid.label

    def __eq__(self, other: object) -> bool:
        return self._uid == other._uid if isinstance(other, ProcId) else NotImplemented

    def __hash__(self) -> int:
        return hash((ProcId, self._uid))

    def __str__(self) -> str:
        return str(self._uid)

    def __repr__(self) -> str:
        return f"ProcId.from_string({str(self)!r})"

    def __reduce__(self) -> Any:
        return ProcId, (self._uid,)


def _check_label(label: str) -> None:
    if len(label) > _LONGEST:
        raise ValueError(f"invalid uid label: {label!r} exceeds {_LONGEST} characters")
    if not re.fullmatch(_LABEL, label):
        raise ValueError(
            f"invalid uid label: {label!r} is not letters, digits, '_' and '-' that start with a lowercase letter and "
            "end with a lowercase letter or digit"
        )


def _digits(value: int) -> str:
    text = ""
    while value or not text:
        value, digit = divmod(value, len(_DIGITS))
        text = _DIGITS[digit] + text
    return text


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        at = _DIGITS.find(digit)
        if at < 0:
            raise ValueError(f"invalid base58 uid: {digits}")
        value = value * len(_DIGITS) + at
    if not digits or value >= 1 << 64:
        raise ValueError(f"invalid base58 uid: {digits!r} is not a 64-bit number")
    return value
