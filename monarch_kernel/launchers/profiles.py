"""Read profiles: named requests for hosts, in TOML files of the user and of a project.

``~/.config/monarch_kernel/config.toml`` is the user's file. The project's file is ``.monarch/config.toml`` in the
working folder, or in the nearest parent folder that has one; it takes precedence. Profiles have no effect until they
are named.

A project's file may come from an untrusted source. Some settings could cause code to run, or data to be sent elsewhere:
the interpreter, environment variables, the ssh command, the hosts, and options that a launcher does not declare plain.
These are used only once the user has declared that this file, with its current contents, is trusted, together with the
files that it names, such as a hostfile. No profile may have the name of a provider.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monarch_kernel.launchers.base import LaunchError, launcher_class, launcher_names, own_launchers
from monarch_kernel.private_files import NotPrivateError, read_own_file, write_own_file

PROJECT_FILE = os.path.join(".monarch", "config.toml")
#: A name instead of a provider: this host itself. Not for profiles.
LOCAL = "local"
#: The keys of a profile, and the types of their values. ``options`` contains options of the provider, as do all other
#: keys.
KEYS: dict[str, tuple[type, ...]] = {
    "on": (str,),
    "hosts": (int,),
    "gpus": (int,),
    "cpus": (int,),
    "memory": (str, int),
    "walltime": (str, int, float),
    "procs": (int,),
    "idle": (str, int, float),
    "timeout": (str, int, float),
    "name": (str,),
    "python": (str,),
    "key_file": (str,),
    "env": (dict,),
    "options": (dict,),
}
#: Names are used in shell commands, where they are completed, and in messages.
_NAME = re.compile(r"\w[\w.-]*")
_NOT_PLAIN = ("python", "key_file", "env")
_TYPES = {str: "text", int: "a whole number", float: "a number", dict: "a table", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Profile:
    """A profile as defined in its file.

    Attributes:
        name: its name.
        file: the path of its file.
        digest: a digest of the contents of a project's file, and of the files that it names; "": it is in the user's
            file.
        settings: its settings by the names in ``KEYS``, including ``options``.
    """

    name: str
    file: str
    digest: str
    settings: Mapping[str, Any]

    @property
    def engine(self) -> str:
        """The name of its launcher."""
        return str(self.settings["on"])

    def risks(self) -> dict[str, Any]:
        """Return the settings that could cause code to run, or data to be sent elsewhere."""
        found = {key: self.settings[key] for key in _NOT_PLAIN if self.settings.get(key)}
        if self.engine not in own_launchers():  # its code may come with the project, so it is not even loaded
            return {"on": self.engine} | found | dict(self.settings["options"])
        plain = {option.name for option in launcher_class(self.engine).OPTIONS if option.plain}
        return found | {key: value for key, value in self.settings["options"].items() if key not in plain}

    def check_trusted(self, how: str) -> None:
        """Raise LaunchError if it has such settings, and is in a project's file that the user does not trust.

        Args:
            how: the words to add to the command line to trust it.
        """
        if not self.digest or not (risks := self.risks()) or self.is_trusted:
            return
        listed = "\n".join(f"  {key} = {value!r}" for key, value in risks.items())
        raise LaunchError(
            f"profile {self.name} of {self.file} decides what runs, and where, and you have not said that you trust "
            "that file as it is now, with the files that it names. It sets:\n"
            f"{listed}\nIf that is what you want, add {how} once"
        )

    @property
    def is_trusted(self) -> bool:
        """Whether it is in the user's file, or in a file whose current contents the user trusts."""
        return not self.digest or self.digest in _trusted()

    def trust(self) -> None:
        """Trust its file with its current contents.

        Raises:
            OSError: this cannot be recorded.
        """
        if self.digest and self.digest not in (known := _trusted()):
            os.makedirs(os.path.dirname(_trust_file()), 0o700, exist_ok=True)
            write_own_file(_trust_file(), "".join(f"{each}\n" for each in [*known, self.digest]).encode())


def user_file() -> str:
    """Return the path of the user's file, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification requires ignoring such a setting
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "monarch_kernel", "config.toml")


def project_file() -> str | None:
    """Return the path of the file of the project that contains the working folder; None: there is none."""
    folder = os.getcwd()
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            return path
        if (above := os.path.dirname(folder)) == folder:
            return None
        folder = above


def profiles() -> dict[str, Profile]:
    """Return all profiles by name. Those of the project take precedence.

    Raises:
        LaunchError: a file is unreadable, belongs to or is writable for other users, or has an error.
    """
    found = _read(user_file(), False)
    if (project := project_file()) is not None:
        found |= _read(project, True)
    return found


def profile_names() -> list[str]:
    """Return the names of all profiles, for completion; none if a file has an error."""
    try:
        return sorted(profiles())
    except LaunchError:
        return []


def checked_options(engine: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the options of a provider, and return them with their types.

    Raises:
        LaunchError: an option is unknown or invalid; ``where`` begins the message.
    """
    known = {option.name: option for option in launcher_class(engine).OPTIONS}
    for key, value in options.items():
        option = known.get(key)
        if option is None:
            raise LaunchError(f"{where}: {engine} has no option {key!r}{_near(key, known)}{_list(known)}")
        types = (int, float) if option.type is float else (option.type,)
        if not _fits(value, types):
            raise LaunchError(f"{where}: {key} takes {_TYPES.get(option.type, option.type.__name__)}, not {value!r}")
        if option.choices and value not in option.choices:
            raise LaunchError(f"{where}: {key} is one of {', '.join(option.choices)}, not {value!r}")
        if option.pattern and value and not re.fullmatch(option.pattern, value):
            raise LaunchError(f"{where}: {key} takes {option.metavar} of the form {option.pattern}, not {value!r}")
        for text in value if isinstance(value, list) else [value]:
            _check_printable(text, f"{where}: {key}")
    return dict(options)


def _read(path: str, project: bool) -> dict[str, Profile]:
    try:
        data = read_own_file(path)
    except FileNotFoundError:
        return {}
    except NotPrivateError as e:
        raise LaunchError(f"profiles: {e}") from None
    except OSError as e:
        raise LaunchError(f"profiles: {path} cannot be read: {e.strerror}") from None
    try:
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise LaunchError(f"profiles: {path} is not TOML: {e}") from None
    if strange := sorted(content.keys() - {"profiles"}):
        raise LaunchError(f"{path}: there is no section {strange[0]!r}; profiles are [profiles.NAME]")
    sections = content.get("profiles", {})
    if not isinstance(sections, dict):
        raise LaunchError(f"{path}: profiles are written as [profiles.NAME]")
    digest = _digest(path, data, sections) if project else ""
    return {name: _profile(name, section, path, digest) for name, section in sections.items()}


def _digest(path: str, data: bytes, sections: dict[str, Any]) -> str:
    """Compute the digest of a project's file, and of all files that its profiles name."""
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + data)
    for name in sorted({name for name in _words(sections) if os.path.isfile(name)}):
        try:
            with open(name, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError:  # a launcher cannot read it either
            continue
        digest.update(os.fsencode(name) + b"\0" + content)
    return digest.hexdigest()


def _words(value: Any) -> Iterator[str]:
    """Yield possible file names in a setting: the setting, and each word of a command or value of an option."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _words(each)
    elif isinstance(value, str) and "\0" not in value:
        for word in {value, *value.split()}:
            for part in (word, word.rpartition("=")[2], word[2:] if word.startswith("-") else ""):
                yield os.path.expanduser(part.strip("'\""))


def _profile(name: str, section: Any, path: str, digest: str) -> Profile:
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{path}: a profile has the name {name!r}: write letters, digits, '_', '-' and '.'")
    where = f"{path}: profile {name}"
    if not isinstance(section, dict) or not isinstance(section.get("on"), str):
        raise LaunchError(f'{where} says no engine: write on = "ssh", or one of {", ".join(_engines())}')
    if name in _engines():
        raise LaunchError(f"{where} has the name of an engine: give it another")
    settings: dict[str, Any] = {"options": {}}
    for key, value in section.items():
        if key not in KEYS:
            settings["options"][key] = value
        elif not _fits(value, KEYS[key]):
            raise LaunchError(f"{where}: {key} takes {_TYPES[KEYS[key][0]]}, not {value!r}")
        elif key == "options":
            settings["options"] |= value
        else:
            _check_printable(value, f"{where}: {key}")
            settings[key] = value
    if not all(isinstance(value, str) for value in settings.get("env", {}).values()):
        raise LaunchError(f"{where}: the values in env are text")
    return Profile(name, path, digest, settings)


def _engines() -> list[str]:
    return sorted({LOCAL, *launcher_names()})


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool) and bool not in types:
        return False
    return isinstance(value, types)


def _check_printable(value: Any, where: str) -> None:
    """Raise LaunchError for text that has more than one line, or could control a terminal."""
    if isinstance(value, str) and not value.isprintable():
        raise LaunchError(f"{where} takes text without control characters, not {value!r}")


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _list(known: Iterable[str]) -> str:
    return f"; it has {', '.join(known)}" if known else "; it has none"


def _trust_file() -> str:
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    return os.path.join(base, "monarch_kernel", "trusted_profiles")


def _trusted() -> list[str]:
    try:
        return read_own_file(_trust_file()).decode(errors="replace").split()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise LaunchError(f"which projects are trusted cannot be read: {e}") from None
