"""Checks the arguments of `%mesh up`: the name, the dimensions, and the options of the processes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from monarch_kernel.kernel.magics.arguments import check_name
from monarch_kernel.kernel.usage_errors import usage_error

#: More processes than this on one host are rejected as a mistake.
MOST_PROCS = 1024
#: The dimension of `--procs N`.
DEFAULT_DIM = "gpus"
DEFAULT_NAME = "m"
#: How long a kept mesh lives without a kernel (hours).
DEFAULT_IDLE = 12


def up_arguments(
    command: str, words: Sequence[str], procs: int | None, usual: int | None = None
) -> tuple[str, dict[str, int]]:
    """The name and the dimensions of `up [NAME] --procs N | dim=size ...`; without any, `usual` processes."""
    names = [word for word in words if "=" not in word]
    dims = dict(_dimension(command, word) for word in words if "=" in word)
    if len(names) > 1:
        hint = f"; did you mean --procs {names[-1]}?" if names[-1].isdigit() else ""
        raise usage_error(command, f"give one name, not {' and '.join(map(repr, names))}{hint}")
    if names and names[0].isdigit():
        raise usage_error(command, f"{names[0]!r} is no name; for that many processes write --procs {names[0]}")
    name = check_name(command, names[0]) if names else DEFAULT_NAME
    if len(dims) != sum("=" in word for word in words):
        raise usage_error(command, f"a dimension is given twice in {' '.join(words)!r}")
    if procs is not None and dims:
        raise usage_error(command, "give either --procs or dimensions, not both")
    if procs is not None:
        dims = {DEFAULT_DIM: _size(command, "--procs", procs)}
    if not dims and usual is not None:
        dims = {DEFAULT_DIM: usual}
    if not dims:
        raise usage_error(command, f"say how many processes: --procs 4, or dimensions such as {DEFAULT_DIM}=4")
    total = 1
    for size in dims.values():
        total *= size
    if total > MOST_PROCS:
        raise usage_error(command, f"{total} processes are too many for one host; at most {MOST_PROCS} are started")
    return name, dims


def _dimension(command: str, word: str) -> tuple[str, int]:
    label, _, size = word.partition("=")
    if not label.isidentifier():
        raise usage_error(command, f"{label!r} cannot name a dimension; write for example {DEFAULT_DIM}=4")
    try:
        return label, _size(command, label, int(size))
    except ValueError:
        raise usage_error(command, f"{label} must be a whole number of at least 1, not {size!r}") from None


def _size(command: str, what: str, size: int) -> int:
    if size < 1:
        raise usage_error(command, f"{what} must be at least 1, not {size}")
    return size


def idle_argument(command: str, hours: float | None, keep: bool) -> float:
    """The seconds of `--idle HOURS`."""
    if hours is not None and not keep:
        raise usage_error(command, "--idle applies to kept meshes only; add --keep")
    if hours is None:
        return DEFAULT_IDLE * 3600
    if not hours > 0:
        raise usage_error(command, f"--idle takes a number of hours above 0, not {hours:g}")
    return hours * 3600


def env_arguments(command: str, items: Sequence[str]) -> tuple[dict[str, str], str]:
    """The variables of repeated `--env K=V`, and the environment of `--env NAME`."""
    env: dict[str, str] = {}
    names: list[str] = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals and item:
            names.append(item)
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            env[key] = value
        else:
            raise usage_error(command, f"--env takes VARIABLE=VALUE, or the name of an environment, not {item!r}")
    if len(names) > 1:
        raise usage_error(command, f"ranks run in one environment, not in {' and '.join(names)}")
    return env, "".join(names)
