"""Build all command lines of the system's ssh."""

from __future__ import annotations

from collections.abc import Sequence

#: No user can answer a prompt, and the remote command has no terminal.
_OPTIONS = ("-T", "-o", "BatchMode=yes")
#: Characters that no name of a host or user contains, but that shells or the user's ssh configuration could interpret.
_ODD = frozenset("\"'`$\\;&|<>(){}*?!#")


def checked_host(word: str) -> str:
    """Check a host for ssh: ``HOST``, ``USER@HOST`` or ``ssh://USER@HOST:PORT``. Return it.

    Raises:
        ValueError: it is not such a host. A file that lists hosts may come from an untrusted source.
    """
    is_text = isinstance(word, str) and bool(word)  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass any
    if not is_text or word.startswith("-") or "@-" in word or any(not _is_plain(each) for each in word):
        raise ValueError(f"{word!r} is not a host for ssh: write HOST or USER@HOST")
    return word


def _is_plain(character: str) -> bool:
    return character.isprintable() and not character.isspace() and character not in _ODD


def ssh_command(ssh: Sequence[str], host: str, *remote: str, options: Sequence[str] = ()) -> list[str]:
    """Build the command line of a connection.

    Args:
        ssh: the command, with further options for all hosts.
        host: the host; see ``checked_host``.
        remote: the remote command, as one word; none if ``options`` make it unnecessary.
        options: options of this connection.

    Raises:
        ValueError: the host is invalid.
    """
    return [*ssh, *_OPTIONS, *options, "--", checked_host(host), *remote]
