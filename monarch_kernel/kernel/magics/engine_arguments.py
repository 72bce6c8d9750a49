"""Checks the arguments of `%mesh up --on`: what an engine is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from monarch_kernel.errors import LaunchError
from monarch_kernel.job import EngineJob
from monarch_kernel.kernel.engine_up import AskedJob
from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.magics.up_arguments import env_arguments
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.asking import AskedHosts, add_engine_options, ask, given_options, job_ids
from monarch_kernel.launchers.listing import id_of

#: What makes sense with `--on` only.
_AMOUNTS = ("hosts", "gpus", "cpus", "memory", "walltime", "python", "key_file", "timeout")
_FLAGS = ("all_devices", "trust", "no_wait")


def engine_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the options of the engine or profile that the words of a line name."""
    for at, word in enumerate(words):
        on = word.removeprefix("--on=") if word.startswith("--on=") else ""
        on = words[at + 1] if word == "--on" and at + 1 < len(words) else on
        if on:
            add_engine_options(parser, on)
            return


def check_no_engine(found: Arguments) -> None:
    """Raise UsageError if a line without an engine says what hosts it wants."""
    given = [name for name in _AMOUNTS if getattr(found, name) is not None]
    given += [name for name in _FLAGS if getattr(found, name)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise usage_error(found.magic, f"{option} is for hosts of an engine; add --on ENGINE, such as --on ssh")


def asked_hosts(found: Arguments) -> AskedHosts | AskedJob:
    """What a line with `--on` asks for.

    Raises:
        UsageError: there is no such engine, profile or job, or it does not take these options.
    """
    if found.keep:
        raise usage_error(
            found.magic, "--keep is for meshes of this host; hosts of an engine stay for their idle time (--idle)"
        )
    if found.idle is not None and not found.idle > 0:
        raise usage_error(found.magic, f"--idle takes a number of hours above 0, not {found.idle:g}")
    variables, _environment = env_arguments(found.magic, found.env)
    given = {name: getattr(found, name) for name in (*_AMOUNTS, "procs")}
    given |= {"env": variables, "idle": None if found.idle is None else found.idle * 3600}
    try:
        if (job := id_of(found.on, job_ids())) is not None:
            said = [name for name in _AMOUNTS if given[name] is not None]
            if said:
                raise usage_error(found.magic, f"job {job} exists, so --{said[0]} cannot be chosen any more")
            return AskedJob(EngineJob.find(job))
        return ask(found.on, given, given_options(found), trust=found.trust, how="--trust")
    except LaunchError as error:
        raise usage_error(found.magic, str(error)) from None
