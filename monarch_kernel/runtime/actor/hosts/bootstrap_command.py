"""The command and environment that start a proc, as specified by users."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from monarch_kernel.protocol.messages import Launch

#: Modules that a command for Monarch runs in a proc.
_MONARCHS_MODULES = ("monarch._src.actor.bootstrap_main", "monarch.bootstrap_main")


class BootstrapCommand(msgspec.Struct):
    """How to start a proc in a separate interpreter instead of forking it.

    Procs that such a proc starts with ``this_host().spawn_procs()`` start in the same way.

    Attributes:
        program: path of the interpreter; ``-m monarch_kernel.runtime.rank`` is added.
        arg0: accepted for compatibility with Monarch; processes always have the program's own name.
        args: interpreter options that come before ``-m``.
        env: environment variables to set; None removes one.
        inherit_env: whether the rest of the environment is kept: that of the host, as its worker was started.
    """

    program: str
    arg0: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return the same command with more environment variables; None removes one.

        Raises:
            TypeError: a value is neither a string nor None.
            ValueError: a name or value is invalid in an environment.
        """
        env = {**self.env, **checked_env(env, "with_env")}
        return BootstrapCommand(self.program, self.arg0, list(self.args), env, self.inherit_env)


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the interpreter of this process."""
    return BootstrapCommand(sys.executable, None, [])


def launch_of(command: object) -> Launch:
    """Return a command in the form that host agents receive.

    Raises:
        TypeError: it is not a ``BootstrapCommand``, or a part of it has the wrong type.
        ValueError: the name or value of an environment variable is invalid.
    """
    if not isinstance(command, BootstrapCommand):
        raise TypeError(
            f"bootstrap_command: {command!r} is not a BootstrapCommand: use default_bootstrap_cmd().with_env({{...}}) "
            "or BootstrapCommand(program)"
        )
    if isinstance(command.args, str):
        raise TypeError(f"bootstrap_command: args={command.args!r} must be a sequence of strings")
    arguments = list(command.args)
    if arguments[-2:] in (["-m", module] for module in _MONARCHS_MODULES):
        arguments = arguments[:-2]  # the module of our ranks is added
    argv = [command.program, *arguments]
    for part in argv:
        if not isinstance(part, str | os.PathLike):
            raise TypeError(f"bootstrap_command: {part!r} in its command line must be a string")
    env = checked_env(command.env, "bootstrap_command: env")
    return Launch([os.fsdecode(part) for part in argv], env, bool(command.inherit_env))


def command_of(launch: Launch | None) -> BootstrapCommand | None:
    """Return the command that started a proc; None for a proc that was forked."""
    if launch is None or launch.argv is None:
        return None
    program, *args = launch.argv
    return BootstrapCommand(program, None, args, dict(launch.env), launch.inherit_env)


def checked_env(env: Mapping[str, str | None] | None, what: str = "env") -> dict[str, str | None]:
    """Return an environment in the form that host agents receive; ``what`` names it in errors.

    Raises:
        TypeError: a value is neither a string nor None.
        ValueError: a name or value is invalid in an environment.
    """
    checked: dict[str, str | None] = {}
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ValueError(f"{what}: {key!r} cannot name an environment variable")
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{what}: {key}={value!r} must be a string, or None to remove it")
        if value is not None and "\0" in value:
            raise ValueError(f"{what}: {key}={value!r} contains a NUL character, which environment variables cannot")
        checked[key] = value
    return checked
