"""Messages by which host agents relay casts and combine their replies (tags 60 to 69)."""

from __future__ import annotations

import msgspec


class CastGroup(msgspec.Struct, array_like=True, tag=60):
    """Whom casts of a group go to."""

    group: int
    source: str


class Cast(msgspec.Struct, array_like=True, tag=61):
    """One message to all members of a group."""

    group: int
    source: str


class CastReplies(msgspec.Struct, array_like=True, tag=62):
    """Answers of several ranks to one cast."""

    call: int
