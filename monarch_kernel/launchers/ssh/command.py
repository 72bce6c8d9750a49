"""Command lines of the system's ssh. Every one is made here."""

from __future__ import annotations

from collections.abc import Sequence

#: Nobody is there to answer a prompt, and what runs there has no terminal.
_OPTIONS = ("-T", "-o", "BatchMode=yes")
#: What no name of a host or user has, but what shells and the user's configuration of ssh may take for more.
_ODD = frozenset("\"'`$\\;&|<>(){}*?!#")


def checked_host(word: str) -> str:
    """A host as ssh takes it: ``HOST``, ``USER@HOST`` or ``ssh://USER@HOST:PORT``.

    Raises:
        ValueError: it is none; a file that lists hosts may be a stranger's.
    """
    is_text = isinstance(word, str) and bool(word)  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass any
    if not is_text or word.startswith("-") or "@-" in word or any(not _is_plain(each) for each in word):
        raise ValueError(f"{word!r} is not a host for ssh: write HOST or USER@HOST")
    return word


def _is_plain(character: str) -> bool:
    return character.isprintable() and not character.isspace() and character not in _ODD


def ssh_command(ssh: Sequence[str], host: str, *remote: str, options: Sequence[str] = ()) -> list[str]:
    """The command line of a connection.

    Args:
        ssh: the command, with further options for all hosts.
        host: where to; see ``checked_host``.
        remote: what runs there, as one word; none if ``options`` say so.
        options: of this connection.

    Raises:
        ValueError: the host is none.
    """
    return [*ssh, *_OPTIONS, *options, "--", checked_host(host), *remote]
