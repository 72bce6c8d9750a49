"""What real engines of this machine share."""

from __future__ import annotations


class CannotRunError(Exception):
    """This machine, or this user, cannot run the engine; the message says why."""
