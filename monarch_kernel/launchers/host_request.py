"""Parse a request for hosts: a provider, a profile or a job by its name, with options of the provider.

``%mesh up --on`` and ``monarch-kernel up`` parse their lines into an ``AskedHosts``. Both describe the options of a
provider as its launcher does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from monarch_kernel.launchers.profiles import LOCAL, Profile, checked_options, profile_names, profiles

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


def ask(on: str, given: Mapping[str, Any], options: Mapping[str, Any], *, trust: bool, how: str) -> AskedHosts:
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
    chosen: dict[str, Any] = {}
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


def given_options(found: argparse.Namespace) -> dict[str, Any]:
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


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
