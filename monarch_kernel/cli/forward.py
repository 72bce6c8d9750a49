"""``monarch-kernel forward``: forward a local port to a TCP port on a host of a job. Ctrl-C exits with code 0."""

from __future__ import annotations

import argparse
import json

from monarch_kernel.cli.lines import (
    LineError,
    add_json,
    add_mesh,
    add_per_host,
    check_host,
    guarded,
    hosts_of_line,
    sizes,
)

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
