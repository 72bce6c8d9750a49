"""``monarch-kernel exec|shell|forward``: run commands and shells on hosts of a job, and forward their ports."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import (
    LineError,
    add_environment,
    add_job,
    add_json,
    add_mesh,
    add_per_host,
    check_host,
    guarded,
    hosts_of_line,
    sizes,
    variables,
)
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.launchers.remote_command import CommandCoordinates

# ``monarch-kernel exec``: run a command on the hosts of a job, and exit with its first nonzero code, or 0.

#: The maximum length of a line (characters). Longer lines are split.
_LONGEST_LINE = 2**20


def add_exec_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel exec``."""
    parser.usage = "monarch-kernel exec [options] -- COMMAND ..., exec -m MODULE [-- ARGUMENT ...] or --script FILE"
    parser.add_argument("--job", metavar="JOB", help="job id or its beginning (default: the only job)")
    add_mesh(parser)
    parser.add_argument("--all", action="store_true", help="on all hosts (the default)")
    parser.add_argument("--one", action="store_true", help="on the first host only")
    parser.add_argument("--host", type=int, action="append", metavar="N", help="on this host of the mesh; repeatable")
    parser.add_argument(
        "--point", action="append", default=[], metavar="DIM=N,...", help="only at these coordinates: hosts=1"
    )
    add_per_host(parser, "so many processes on each host, along this dimension; repeatable")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--script", metavar="FILE", help="run this bash script (-: standard input) on the hosts")
    what.add_argument("-m", dest="module", metavar="MODULE", help="run this module with the Python of the hosts")
    add_environment(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")
    parser.add_argument("--fold", action="store_true", help="print at the end, with equal output only once")
    add_json(parser)
    parser.set_defaults(run=guarded(run_exec))


def run_exec(options: argparse.Namespace) -> int:
    """Run the command on the hosts. Return its first nonzero exit code, or 0."""
    from monarch_kernel.launchers.remote_command import HostCommand, run_command

    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words and options.script is None and options.module is None:
        raise LineError("exec needs a command: exec -- nvidia-smi, exec -m MODULE or exec --script FILE")
    per_host, at = sizes("--per-host", options.per_host), sizes("--point", options.point)
    if "hosts" in per_host or 0 in per_host.values():
        raise LineError("--per-host takes a dimension of the processes on a host and a size of at least 1: gpus=4")
    for name, position in at.items():
        if name != "hosts" and position >= per_host.get(name, 0):
            known = ", ".join(f"{each}={size}" for each, size in per_host.items())
            raise LineError(f"there is no {name}={position}: processes have hosts" + (known and f", {known}"))
    if "hosts" in at and (options.one or options.host):
        raise LineError("--point already selects a host: leave out --one and --host")
    if options.fold and options.json:
        raise LineError("--json prints each line of output as it arrives: leave out --fold")
    script = None
    if options.script is not None:
        try:
            with open(0 if options.script == "-" else options.script, "rb") as file:
                script = file.read()
        except OSError as e:
            raise LineError(f"the script {options.script} cannot be read: {e.strerror}") from None
    command = HostCommand(
        [options.module, *words] if options.module else words,
        variables(options.env),
        options.workdir,
        script,
        options.module is not None,
    )
    with hosts_of_line(options) as hosts:
        numbers = [0] if options.one else options.host or list(range(len(hosts)))
        numbers = [check_host(number, hosts) for number in ([at.pop("hosts")] if "hosts" in at else numbers)]
        places = len(set(numbers))
        for name, size in per_host.items():
            places *= 1 if name in at else size
        output = _output(options, places)
        try:
            ends = run_command(hosts, numbers, command, per_host, at, output.wrote)
        except BaseException:
            output.end(())
            raise
    output.end(ends)
    return next((code for _, code in ends if code), 0) % 256


def _output(options: argparse.Namespace, places: int) -> _Whole | _Folded | _Lines:
    if options.json:
        return _Lines(_json_line, _json_end)
    if places == 1:
        return _Whole()
    return _Folded() if options.fold else _Lines(lambda place, line: f"[{place.rank}] {line}", None)


class _Whole:
    """Prints the output of a single rank unchanged."""

    def wrote(self, place: CommandCoordinates, data: bytes) -> None:
        """Print the data."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def end(self, ends: Iterable[tuple[CommandCoordinates, int]]) -> None:
        """Do nothing: all output has been printed."""


class _Lines:
    """Prints output line by line as it arrives.

    Args:
        line: formats a line of a rank.
        end: formats the exit code of a rank; None: report only nonzero codes, on standard error.
    """

    def __init__(
        self, line: Callable[[CommandCoordinates, str], str], end: Callable[[CommandCoordinates, int], str] | None
    ) -> None:
        self._line = line
        self._end = end
        self._texts: dict[int, _Text] = {}

    def wrote(self, place: CommandCoordinates, data: bytes) -> None:
        """Print the lines that this data completes."""
        text = self._texts.setdefault(place.rank, _Text(place))
        text.add(data)
        *lines, rest = text.text.split("\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], ""
        text.text = rest
        if lines:
            sys.stdout.write("".join(self._line(place, f"{line}\n") for line in lines))
            sys.stdout.flush()

    def end(self, ends: Iterable[tuple[CommandCoordinates, int]]) -> None:
        """Print unterminated lines and the exit codes."""
        for text in self._texts.values():
            if text.text:
                sys.stdout.write(self._line(text.place, f"{text.text}\n"))
        failed: dict[int, list[int]] = {}
        for place, code in ends:
            if self._end is not None:
                sys.stdout.write(self._end(place, code))
            elif code:
                failed.setdefault(code, []).append(place.rank)
        sys.stdout.flush()
        for code, ranks in failed.items():
            print(f"monarch-kernel: [{format_ranks(ranks)}] exit code {code}", file=sys.stderr)


class _Folded:
    """Prints all output at the end, and equal output only once, under the ranks that wrote it."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def wrote(self, place: CommandCoordinates, data: bytes) -> None:
        """Store the data."""
        self._texts.setdefault(place.rank, _Text(place)).add(data)

    def end(self, ends: Iterable[tuple[CommandCoordinates, int]]) -> None:
        """Print all output. Exit codes are missing if the command was interrupted."""
        codes = {place.rank: code for place, code in ends}
        groups: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(codes.keys() | self._texts.keys()):
            text = self._texts[rank].text if rank in self._texts else ""
            groups.setdefault((text, codes.get(rank, 0)), []).append(rank)
        for (output, code), ranks in groups.items():
            body = output if not output or output.endswith("\n") else f"{output}\n"
            heading = f"== {format_ranks(ranks)}" + (f", exit code {code}" if code else "") + " =="
            sys.stdout.write(f"{heading}\n{body}")
        sys.stdout.flush()


class _Text:
    """Decoded output of a rank that is not printed yet."""

    def __init__(self, place: CommandCoordinates) -> None:
        self.place = place
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        """Decode the data; a character may be split over two calls."""
        self.text += self._decoder.decode(data)


def _json_line(place: CommandCoordinates, line: str) -> str:
    return json.dumps({**place.plain(), "output": line}) + "\n"


def _json_end(place: CommandCoordinates, code: int) -> str:
    return json.dumps({**place.plain(), "code": code}) + "\n"


# ``monarch-kernel shell``: open a shell on a host of a job in this terminal. The exit code is that of the shell.


def add_shell_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel shell``."""
    parser.description = (
        "Opens a shell on a host of a job. It ends with this command, and its child processes end with it. Use setsid "
        "to start a process that outlives it."
    )
    add_job(parser)
    parser.add_argument(
        "host", nargs="?", type=int, default=0, metavar="HOST", help="the number of the host in the mesh (0)"
    )
    add_mesh(parser)
    add_environment(parser)
    parser.set_defaults(run=guarded(run_shell_line))


def run_shell_line(options: argparse.Namespace) -> int:
    """Open the shell and return its exit code."""
    from monarch_kernel.launchers.remote_shell import run_shell

    env = variables(options.env)
    with hosts_of_line(options) as hosts:
        return run_shell(hosts, check_host(options.host, hosts), env, options.workdir)


# ``monarch-kernel forward``: forward a local port to a TCP port on a host of a job. Ctrl-C exits with code 0.

_PORTS = range(2**16)


def add_forward_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel forward``."""
    parser.description = (
        "Forwards a port of 127.0.0.1, for this user only, to a TCP port of a host, until Ctrl-C. The server needs to "
        "listen only on the loopback interface of its host."
    )
    parser.add_argument("job", metavar="JOB", help="job id or its beginning")
    parser.add_argument(
        "port", metavar="PORT[:LOCAL]", help="the port on the host, and the local port (default: the same; 0: any)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", type=int, default=0, metavar="N", help="the host, by its number in the mesh (0)")
    where.add_argument("--rank", type=int, metavar="R", help="the host of this rank; see --per-host")
    add_mesh(parser)
    add_per_host(parser, "with --rank: so many ranks are on each host (1)")
    add_json(parser)
    parser.set_defaults(run=guarded(_forward), kill=False)


def _forward(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.port_forward import LOOPBACK, PortForward

    there, _, here = options.port.partition(":")
    ports = [int(text) if text.isdecimal() else -1 for text in (there, here or there)]
    if any(port not in _PORTS for port in ports) or not ports[0]:
        raise LineError(f"a port must be a number below 65536, as in 6006 or 6006:8080, not {options.port!r}")
    host = options.host
    if options.rank is not None:
        ranks = 1
        for size in sizes("--per-host", options.per_host).values():
            ranks *= size
        host = options.rank // ranks
    with hosts_of_line(options) as hosts:

        def listening(port: int) -> None:
            if options.json:
                print(json.dumps({"listen": LOOPBACK, "local": port, "host": host, "port": ports[0]}), flush=True)
            else:
                print(f"{LOOPBACK}:{port} forwards to port {ports[0]} of host {host}, until Ctrl-C", flush=True)

        PortForward(hosts, check_host(host, hosts), *ports).run(listening)
    return 0
