"""Translate a click into a `%mesh` line, which is executed, or inserted into a cell on request. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.meshes import format_ranks

#: The default number of requested log lines.
LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class Click:
    """An action requested in a view.

    Attributes:
        what: the word of the message, such as "heal".
        mesh: the name of the mesh; "" if no mesh is involved.
        size: the number of ranks of the mesh.
        ranks: the selected ranks, sorted; empty: all ranks.
        options: the other fields of the message.
    """

    what: str
    mesh: str = ""
    size: int = 0
    ranks: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Return the selected ranks."""
        return self.ranks or tuple(range(self.size))


def line_of(click: Click) -> str:
    """Return the arguments of the equivalent `%mesh` line.

    Raises:
        LookupError: there is no such action.
        ValueError: a required field, such as the rank, is missing.
    """
    if click.what not in _LINES:
        raise LookupError(f"there is nothing called {click.what!r} that a view can do")
    return _LINES[click.what](click)


def _named(word: str) -> Callable[[Click], str]:
    return lambda click: f"{word} {shlex.quote(click.mesh)}"


def _down(click: Click) -> str:
    return f"{_named('down')(click)}{' --force' if click.options.get('force') else ''}"


def _with_ranks(word: str) -> Callable[[Click], str]:
    return lambda click: f"{word} {shlex.quote(click.mesh)}{_ranks(click)}"


def _debug(command: str) -> Callable[[Click], str]:
    return lambda click: f"debug --on {shlex.quote(click.mesh)}{_ranks(click)} {command}"


def _ranks(click: Click) -> str:
    some = 0 < len(click.ranks) < click.size
    return f" -r {format_ranks(click.ranks)}" if some else ""


def _kill(click: Click) -> str:
    return f"kill {shlex.quote(click.mesh)} -r {format_ranks(click.all_ranks)}"


def _focus(click: Click) -> str:
    if len(click.ranks) != 1:
        raise ValueError("the debugger shows one rank: choose one")
    return f"focus {click.ranks[0]} --on {shlex.quote(click.mesh)}"


def _log(click: Click) -> str:
    return f"{_with_ranks('logs')(click)} -n {lines_wanted(click)}"


def lines_wanted(click: Click) -> int:
    """Return how many log lines per rank are requested."""
    lines = click.options.get("lines")
    return lines if isinstance(lines, int) and lines > 0 else LOG_LINES


def _kept(word: str) -> Callable[[Click], str]:
    def line(click: Click) -> str:
        name = click.options.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("this needs the name of a kept mesh")
        return f"{word} {shlex.quote(name)}{' --force' if click.options.get('force') else ''}"

    return line


def _kill_job(click: Click) -> str:
    job = click.options.get("job")
    if not isinstance(job, str) or not job:
        raise ValueError("this needs the id of a job")
    return f"jobs kill {shlex.quote(job)}"


def _sync(click: Click) -> str:
    options = _options(click)
    words = ["sync", *map(shlex.quote, _texts(options.get("dirs")))]
    words += [f"--{name}" for name in ("env", "verify", "reload", "respawn", "restart") if options.get(name)]
    return " ".join([*words, "--on", shlex.quote(click.mesh)])


def _up(click: Click) -> str:
    """Return `%mesh up` with the fields of a form: name, procs or dims, dist, env, preload, keep, idle, sync."""
    options = _options(click)
    words = ["up"]
    if options.get("name"):
        words.append(shlex.quote(str(options["name"])))
    dims = options.get("dims")
    if isinstance(dims, Mapping):
        words += [shlex.quote(f"{label}={size}") for label, size in dims.items()]
    for name in ("procs", "dist", "idle"):
        if options.get(name):
            words += [f"--{name}", shlex.quote(str(options[name]))]
    env = options.get("env")
    pairs = [f"{key}={value}" for key, value in env.items()] if isinstance(env, Mapping) else _texts(env)
    for name, values in (("env", pairs), ("preload", _texts(options.get("preload")))):
        for value in values:
            words += [f"--{name}", shlex.quote(value)]
    words += [f"--{name}" for name in ("keep", "sync", "reuse", "replace") if options.get(name)]
    return " ".join(words)


def _options(click: Click) -> Mapping[str, Any]:
    options = click.options.get("options")
    return options if isinstance(options, Mapping) else {}


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value] if value else []
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def _plot(click: Click) -> str:
    return f"plot {click.options.get('expression') or ''} --on {shlex.quote(click.mesh)}"


_LINES: dict[str, Callable[[Click], str]] = {
    "interrupt": _with_ranks("interrupt"),
    "kill": _kill,
    "heal": _with_ranks("heal"),
    "debug": _debug("pause"),
    "undebug": _debug("unpause"),
    "resume": _debug("continue"),
    "focus": _focus,
    "use": _named("use"),
    "sync": _sync,
    "down": _down,
    "restart": _named("restart"),
    "up": _up,
    "attach": _kept("attach"),
    "stop_kept": _kept("down"),
    "kill_job": _kill_job,
    "stack": _with_ranks("stacks"),
    "log": _log,
    "variables": _debug("locals"),
    "breakpoints": lambda _click: "break",
    "hang": _with_ranks("hang"),
    "plot": _plot,
}
#: Actions that change state. `ask` rejects them.
ACTIONS = frozenset(_LINES) - {"stack", "log", "variables", "breakpoints", "hang", "plot"}
#: Actions that need no mesh of this notebook.
OF_NO_MESH = frozenset(("up", "attach", "stop_kept", "kill_job", "breakpoints", "jobs"))
