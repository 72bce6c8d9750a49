"""Parse a request for hosts: a provider, a profile or a job by its name, with options of the provider.

``%mesh up --on`` and ``monarch-kernel up`` parse their lines into an ``AskedHosts``. Both describe the options of a
provider as its launcher does.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch_kernel import environment
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import (
    JobStatus,
    LauncherOption,
    LaunchError,
    Resources,
    launcher_class,
    launcher_names,
    own_launchers,
)
from monarch_kernel.launchers.engine_job import IDLE, TIMEOUT, EngineJob
from monarch_kernel.private_files import NotPrivateError, read_own_file, write_own_file

# Read profiles: named requests for hosts, in TOML files of the user and of a project.
#
# ``~/.config/monarch_kernel/config.toml`` is the user's file. The project's file is ``.monarch/config.toml`` in the
# working folder, or in the nearest parent folder that has one; it takes precedence. Profiles have no effect until they
# are named.
#
# A project's file may come from an untrusted source. Some settings could cause code to run, or data to be sent
# elsewhere: the interpreter, environment variables, the ssh command, the hosts, and options that a launcher does not
# declare plain. These are used only once the user has declared that this file, with its current contents, is trusted,
# together with the files that it names, such as a hostfile. No profile may have the name of a provider.

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

    def risks(self) -> dict[str, object]:
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
    return os.path.join(environment.user_folder("config"), "config.toml")


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


def checked_options(engine: str, options: Mapping[str, Any], where: str) -> dict[str, object]:
    """Check the options of a provider, and return them with their types.

    Raises:
        LaunchError: an option is unknown or invalid; ``where`` begins the message.
    """
    known = {option.name: option for option in launcher_class(engine).OPTIONS}
    for key, value in options.items():
        option = known.get(key)
        if option is None:
            raise LaunchError(f"{where}: {engine} has no option {key!r}{nearest(key, known)}{_list(known)}")
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


def _digest(path: str, data: bytes, sections: dict[str, object]) -> str:
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


def _words(value: object) -> Iterator[str]:
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


def _profile(name: str, section: object, path: str, digest: str) -> Profile:
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


def _fits(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool) and bool not in types:
        return False
    return isinstance(value, types)


def _check_printable(value: object, where: str) -> None:
    """Raise LaunchError for text that has more than one line, or could control a terminal."""
    if isinstance(value, str) and not value.isprintable():
        raise LaunchError(f"{where} takes text without control characters, not {value!r}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)`, or an empty string if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _list(known: Iterable[str]) -> str:
    return f"; it has {', '.join(known)}" if known else "; it has none"


def _trust_file() -> str:
    return os.path.join(environment.user_folder("state"), "trusted_profiles")


def _trusted() -> list[str]:
    try:
        return read_own_file(_trust_file()).decode(errors="replace").split()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise LaunchError(f"which projects are trusted cannot be read: {e}") from None


Value = TypeVar("Value")
#: The prefix of the names under which a parser stores options of providers.
_DEST = "engine_option_"
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class AskedHosts:
    """A request for hosts of a provider. None and "": not set.

    Attributes:
        engine: the name of a launcher.
        hosts: the number of hosts.
        gpus, cpus, memory, walltime: the requirements of each host (bytes, seconds).
        procs: the number of ranks on each host.
        idle: the time without a controller after which workers end (seconds).
        timeout: the time limit for their start (seconds).
        name: the name for the job at the provider.
        python: the interpreter on the hosts.
        key_file: the key of the workers.
        env: environment variables of the workers and their ranks.
        options: the options of the launcher.
        profile: the profile that completes the request.
    """

    engine: str
    hosts: int | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None
    walltime: float | None = None
    procs: int | None = None
    idle: float | None = None
    timeout: float | None = None
    name: str = ""
    python: str = ""
    key_file: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profile: Profile | None = None

    def job(self, on_progress: Callable[[JobStatus], None] | None = None) -> EngineJob:
        """Create the job for this request. It is not applied yet.

        Raises:
            LaunchError: the launcher does not accept these options.
        """
        kind = launcher_class(self.engine)
        wishes = {option.name for option in kind.OPTIONS if option.wish}
        try:
            launcher = kind.configured({key: value for key, value in self.options.items() if key not in wishes})
        except (TypeError, ValueError) as e:
            raise LaunchError(f"{self.engine}: {e}") from None
        resources = Resources(
            gpus=self.gpus or 0,
            cpus=self.cpus or 0,
            memory=self.memory or 0,
            walltime=self.walltime or 0.0,
            options={key: value for key, value in self.options.items() if key in wishes},
        )
        try:
            return EngineJob(
                launcher,
                {"hosts": self.hosts or launcher.usual_hosts()},
                resources=resources,
                env=self.env,
                python=self.python,
                idle=IDLE if self.idle is None else self.idle,
                timeout=TIMEOUT if self.timeout is None else self.timeout,
                name=self.name or "monarch",
                key_file=self.key_file or None,
                on_progress=on_progress,
            )
        except ValueError as e:
            raise LaunchError(f"{self.engine}: {e}") from None

    def describe(self) -> str:
        """Describe the request in one line, such as ``slurm, 4 hosts, gpus=8, partition=debug``."""
        parts = [self.engine]
        if self.hosts:
            parts.append(f"{self.hosts} host{'s' * (self.hosts != 1)}")
        parts += [
            f"{key}={getattr(self, key):g}" for key in ("gpus", "cpus", "memory", "walltime") if getattr(self, key)
        ]
        parts += [f"{key}={value}" for key in ("python", "key_file") if (value := getattr(self, key))]
        parts += [f"{key}={_shown(value)}" for key, value in self.options.items()]
        parts += [f"env {', '.join(self.env)}"] if self.env else []  # values may be secret
        return ", ".join(parts)


def ask(on: str, given: Mapping[str, Any], options: Mapping[str, object], *, trust: bool, how: str) -> AskedHosts:
    """Build the request of a command line: its own options, completed by those of the profile.

    Args:
        on: a provider or a profile.
        given: attributes of ``AskedHosts`` that the line contains; None: not set.
        options: the options of the provider.
        trust: whether the user declares the file of the profile as trusted.
        how: the words for that in such a line, for the message.

    Raises:
        LaunchError: the provider or profile does not exist, has an error, or is not trusted.
    """
    profile = None
    found: dict[str, Any] = {}
    engine = on
    chosen: dict[str, object] = {}
    if on not in launcher_names():
        known = profiles()
        profile = known.get(on)
        if profile is None:
            listed = ", ".join([LOCAL, *launcher_names()])
            named = f"; profiles: {', '.join(sorted(known))}" if known else "; no profile is defined"
            raise LaunchError(f"there is no engine, profile or job {on!r} (engines: {listed}{named})")
        if trust:
            profile.trust()
        profile.check_trusted(how)
        engine, where = profile.engine, f"{profile.file}: profile {profile.name}"
        chosen = checked_options(engine, profile.settings["options"], where)
        found = {key: value for key, value in profile.settings.items() if key not in ("on", "options")}
        for key, read in (("memory", memory_size), ("walltime", seconds), ("idle", seconds), ("timeout", seconds)):
            if key in found:
                try:
                    found[key] = read(found[key])
                except ValueError as e:
                    raise LaunchError(f"{where}: {key}: {e}") from None
    env = {**found.pop("env", {}), **(given.get("env") or {})}
    found |= {key: value for key, value in given.items() if value not in (None, "") and key != "env"}
    chosen |= checked_options(engine, options, "options")
    for key in ("hosts", "gpus", "cpus", "procs"):
        if found.get(key) is not None and found[key] < (1 if key in ("hosts", "procs") else 0):
            raise LaunchError(f"{key} must be at least {1 if key in ('hosts', 'procs') else 0}, not {found[key]}")
    return AskedHosts(engine=engine, env=env, options=chosen, profile=profile, **found)


def options_of(on: str) -> tuple[LauncherOption, ...]:
    """Return the options for a line with this provider or profile; none if it is unknown, or not trusted yet.

    No code that a project's file names is loaded, unless it comes with this package.
    """
    try:
        if on in launcher_names():
            return launcher_class(on).OPTIONS
        profile = profiles()[on]
        if profile.digest and profile.engine not in own_launchers() and not profile.is_trusted:
            return ()
        return launcher_class(profile.engine).OPTIONS
    except (LaunchError, KeyError):
        return ()


def source_names() -> list[str]:
    """Return the names that a line may contain: providers, profiles and jobs."""
    return [LOCAL, *launcher_names(), *profile_names(), *job_ids()]


def job_ids() -> list[str]:
    """Return the ids of all jobs in the list."""
    return [record.job for record in registry.records()]


# -- parsers ------------------------------------------------------------------------------------------


def argument_of(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return the type of an argument that this function parses. Its error message is shown to the user."""

    def value(text: str) -> Value:
        try:
            return read(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return value


def provider_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return the provider or profile that the words of a line name. The parser does not have its options yet."""
    valued = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    plain = [word for before, word in zip(("", *words), words) if not word.startswith("-") and before not in valued]
    known = {*launcher_names(), *profile_names()}
    # The value of a provider's option may come first.
    return next((word for word in plain if word in known), next(iter(plain), ""))


def add_provider_options(parser: argparse.ArgumentParser, on: str) -> None:
    """Add the options of a provider or profile to a parser, as its launcher describes them.

    An option that the parser already has gets the name of the provider as prefix: ``--slurm-name``.
    """
    options = options_of(on)
    group = parser.add_argument_group(f"options of {on}") if options else parser
    taken = {name for action in parser._actions for name in action.option_strings}
    for option in options:
        flag = f"--{option.name.replace('_', '-')}"
        flag = f"--{on}{flag[1:]}" if flag in taken else flag
        text = (option.help + f" ({', '.join(option.choices)})" * bool(option.choices)).replace("%", "%%")
        how: dict[str, Any] = {"dest": _DEST + option.name, "default": None, "help": text}
        if option.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
        elif option.type is list:
            group.add_argument(flag, action="append", metavar=option.metavar or "WORD,...", **how)
        else:
            metavar = option.metavar or option.type.__name__.upper()
            group.add_argument(flag, type=option.type, metavar=metavar, **how)


def given_options(found: argparse.Namespace) -> dict[str, object]:
    """Return the options of the provider in a parsed line."""
    given = {key.removeprefix(_DEST): value for key, value in vars(found).items() if key.startswith(_DEST)}
    return {
        key: [word for item in value for word in item.split(",") if word] if isinstance(value, list) else value
        for key, value in given.items()
        if value is not None
    }


def memory_size(text: str | float) -> int:
    """Parse a size in bytes: ``64GB``, ``512MiB``, ``1.5T``, or a number.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 64GB or 512MiB")
    return int(float(match[1]) * _SIZES[match[2] or ""])


def seconds(text: str | float) -> float:
    """Parse a time in seconds: ``90``, ``30m``, ``2h``, ``1.5d``, ``2h30m`` or ``HH:MM:SS``.

    Raises:
        ValueError: the text is not a time.
    """
    said = str(text).strip().lower()
    if re.fullmatch(r"\d+(:\d{1,2}){1,2}", said):
        parts = [int(part) for part in said.split(":")]
        return float(sum(part * unit for part, unit in zip(reversed(parts), (1, 60, 3600))))
    pairs = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?", said)
    if not pairs or re.sub(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?|\s", "", said):
        raise ValueError(f"{text!r} is no time: write 90, 30m, 2h or 1d")
    return sum(float(number) * _TIMES[unit] for number, unit in pairs)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
