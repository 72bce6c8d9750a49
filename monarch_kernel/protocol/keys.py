"""The team's key: who has it may talk to this project's TCP endpoints, others may not.

One CURVE key pair is shared by the controllers and the workers of a team, in a file that only its owner can read.
``monarch-kernel keys FILE`` makes it; ``--key-file`` or ``MONARCH_KERNEL_KEY_FILE`` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from typing import NamedTuple

KEY_FILE_VARIABLE = "MONARCH_KERNEL_KEY_FILE"

_ABOUT = "The key of a team's monarch_kernel workers. Whoever has this file runs code on them; keep it secret."
#: More than any key file has; so that a wrong file is not read whole.
_LARGEST = 10_000
_KEY_LENGTH = 40


class KeyFileError(ValueError):
    """No usable key file; the message says which, why, and what to do."""


class Keys(NamedTuple):
    """A CURVE key pair, as Z85 text."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # a secret must not get into logs
        return f"<Keys {self.public.decode('ascii', 'replace')}>"


def make_key_file(path: str | os.PathLike[str]) -> None:
    """Make a new key pair and write it to a new file that only this user can read.

    Raises:
        KeyFileError: there is such a file already, or it cannot be written.
    """
    import zmq

    public, secret = zmq.curve_keypair()
    text = json.dumps({"about": _ABOUT, "public": public.decode(), "secret": secret.decode()}, indent=1)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileError(
            f"{os.fspath(path)} exists already, and a key in use must not get lost: name another file, or remove it"
        ) from None
    except OSError as e:
        raise KeyFileError(f"cannot write the key file {os.fspath(path)}: {e.strerror}") from e
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # a umask may have taken the owner's own rights
        file.write(text + "\n")


def load_keys(path: str | os.PathLike[str] | None = None) -> Keys:
    """Read a key file.

    Args:
        path: the file; by default the one that ``MONARCH_KERNEL_KEY_FILE`` names.

    Raises:
        KeyFileError: no file is named, it is missing, others may read it, or it holds no key pair.
    """
    named = os.fspath(path) if path is not None else os.environ.get(KEY_FILE_VARIABLE, "")
    if not named:
        raise KeyFileError(
            "no key file is named, and there is no TCP without one: make one with 'monarch-kernel keys FILE', "
            f"give it to every host, and name it by --key-file FILE or {KEY_FILE_VARIABLE}"
        )
    try:
        # Opened first and looked at afterwards: it is the same file then. A pipe must not block us.
        fd = os.open(named, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no key file {named}: make it with 'monarch-kernel keys {named}', or copy the team's there"
        ) from None
    except OSError as e:
        raise KeyFileError(f"cannot read the key file {named}: {e.strerror}") from e
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise KeyFileError(f"the key file {named} is not a regular file")
        if mode & 0o077:
            raise KeyFileError(f"others than its owner may use the key file {named}: run 'chmod 600 {named}'")
        data = os.read(fd, _LARGEST)
    finally:
        os.close(fd)
    return _parse(named, data)


def _parse(named: str, data: bytes) -> Keys:
    try:
        fields = json.loads(data)
        keys = Keys(fields["public"].encode("ascii"), fields["secret"].encode("ascii"))
    except (ValueError, TypeError, KeyError, AttributeError):
        keys = None
    if keys is None or not _is_pair(keys):
        raise KeyFileError(f"{named} is not a key file: make one with 'monarch-kernel keys FILE'")
    return keys


def _is_pair(keys: Keys) -> bool:
    import zmq

    if len(keys.public) != _KEY_LENGTH or len(keys.secret) != _KEY_LENGTH:
        return False
    try:
        return zmq.curve_public(keys.secret) == keys.public
    except zmq.ZMQError:  # not Z85
        return False


def add_keys_command(parser: argparse.ArgumentParser) -> None:
    """``monarch-kernel keys FILE``."""
    parser.add_argument("file", metavar="FILE", help="the file to make; it must not exist yet")
    parser.set_defaults(run=_run_keys)


def _run_keys(options: argparse.Namespace) -> int:
    try:
        make_key_file(options.file)
    except KeyFileError as error:
        print(f"monarch-kernel: {error}", file=sys.stderr)
        return 1
    print(
        f"Made {options.file}. Copy it to every host of the team (over ssh, say), readable by you alone,\n"
        f"and name it there with --key-file or {KEY_FILE_VARIABLE}. Whoever has it can run code on your workers."
    )
    return 0
