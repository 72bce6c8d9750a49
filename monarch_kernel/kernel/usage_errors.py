"""Usage errors of the magics: one sentence each, which says what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from IPython.core.error import UsageError


def usage_error(command: str, message: str) -> UsageError:
    """A usage error of a command."""
    return UsageError(f"{command}: {message}")


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or an empty string if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
