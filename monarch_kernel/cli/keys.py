"""``monarch-kernel keys``: create keys, show their public part, and maintain allow-lists."""

from __future__ import annotations

import argparse
import sys

from monarch_kernel import environment
from monarch_kernel.protocol.keys.allow_list import add_key, read_list, revoke_keys
from monarch_kernel.protocol.keys.guarded_files import LARGEST, KeyFileError, expanded
from monarch_kernel.protocol.keys.identity import Public, check_name, make_key_file, parse_line, read_key_file
from monarch_kernel.protocol.keys.trust import key_file_named

#: The minimum and maximum number of arguments of each verb. A public line counts as one argument or three.
_VERBS = {"new": (1, 1), "show": (0, 1), "add": (2, 4), "list": (1, 1), "revoke": (2, 2)}


def add_keys_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel keys FILE``, and of ``monarch-kernel keys new|show|add|list|revoke``."""
    parser.usage = (
        "monarch-kernel keys FILE [--name NAME]\n"
        "       monarch-kernel keys new FILE [--name NAME]\n"
        "       monarch-kernel keys show [FILE]\n"
        "       monarch-kernel keys add LIST KEY [--name NAME]\n"
        "       monarch-kernel keys list LIST\n"
        "       monarch-kernel keys revoke LIST NAME|FINGERPRINT"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Make keys, and maintain lists of keys that may connect.\n\n"
        "  new      make a key in a new file, which stays secret ('keys FILE' does the same)\n"
        "  show     print the public line of a key (default: this user's key), to add to other lists\n"
        "  add      add keys to a list: a public line, a file of public lines, a key file, or - for standard input\n"
        "  list     print the keys on a list\n"
        "  revoke   remove a key from a list; its connections end within about a second"
    )
    parser.add_argument("words", nargs="+", metavar="ARGUMENT", help=argparse.SUPPRESS)
    parser.add_argument(
        "--name", help="name of the key in lists and logs (default: user@host; add: the name in its line)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    words: list[str] = options.words
    verb, arguments = (words[0], words[1:]) if words[0] in _VERBS else ("new", words)
    least, most = _VERBS[verb]
    try:
        if not least <= len(arguments) <= most:
            raise KeyFileError("wrong number of arguments; see 'monarch-kernel keys --help'")
        path = expanded(arguments[0]) if arguments else ""
        if verb == "new":
            _new(path, options.name)
        elif verb == "show":
            print(_own(path or key_file_named()).line)
        elif verb == "list":
            for key in read_list(path):
                print(f"{key.fingerprint[:16]}  {key.name}")
        elif verb == "add":
            _add(path, arguments[1:], options.name)
        else:
            for key in revoke_keys(path, arguments[1]):
                print(f"Revoked {key.name} ({key.fingerprint[:16]}).")
    except KeyFileError as error:
        print(f"monarch-kernel: {error}", file=sys.stderr)
        return 1
    return 0


def _new(path: str, name: str | None) -> None:
    made = make_key_file(path, name).public
    print(
        f"Made {path}, the key of {made.name} ({made.fingerprint[:16]}).\n"
        f"As a team's key: copy it to every host (over ssh, say), readable by you alone, and name it there with\n"
        f"--key-file or {environment.KEY_FILE.name}. Anyone with this file can run code on your workers.\n"
        f"As one of many: 'monarch-kernel keys show {path}' prints the line for others' lists."
    )


def _own(path: str) -> Public:
    try:
        return read_key_file(path).public
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}") from None


def _add(path: str, words: list[str], name: str | None) -> None:
    keys = _keys_from(words)
    if name is not None:
        if len(keys) > 1:
            raise KeyFileError(f"--name applies to one key, but there are {len(keys)}")
        keys = [Public(check_name(name), keys[0].certificate)]
    for key in keys:
        said = "Added" if add_key(path, key) else "Already there:"
        print(f"{said} {key.name} ({key.fingerprint[:16]}).")


def _keys_from(words: list[str]) -> list[Public]:
    """Return the keys in the arguments: a public line (one argument or several), a file, or - for standard input."""
    if len(words) > 1 or words[0].split()[1:]:
        text = " ".join(words)
    elif words[0] == "-":
        text = sys.stdin.read()
    else:
        file = expanded(words[0])
        try:
            with open(file, encoding="utf-8") as opened:
                text = opened.read(LARGEST)
        except OSError as e:
            raise KeyFileError(f"cannot read {file}: {e.strerror}") from None
        except UnicodeError:
            raise KeyFileError(f"{file} contains no keys") from None
        if text.lstrip().startswith("{"):
            return [_own(file)]
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        if not lines:
            raise ValueError("it contains no key")
        return [parse_line(line) for line in lines]
    except ValueError as e:
        raise KeyFileError(str(e)) from None
