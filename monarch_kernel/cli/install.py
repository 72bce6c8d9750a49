"""``monarch-kernel install`` and ``uninstall``: register this environment's kernel with Jupyter, or remove it."""

from __future__ import annotations

import argparse
import sys

from monarch_kernel.kernel.install import DISPLAY_NAME, KERNEL_NAME, InstallError, install, uninstall


def add_install_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``install``."""
    _add_place(parser)
    parser.add_argument("--display-name", help=f"name shown in Jupyter's launcher (default: {DISPLAY_NAME})")
    parser.set_defaults(run=_run_install)


def add_uninstall_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``uninstall``."""
    _add_place(parser)
    parser.set_defaults(run=_run_uninstall)


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the current user only")
    place.add_argument(
        "--sys-prefix", action="store_const", const=sys.prefix, dest="prefix", help="in this environment"
    )
    place.add_argument("--prefix", help="in PREFIX/share/jupyter")
    parser.add_argument("--name", default=KERNEL_NAME, help="the kernelspec's name (default: %(default)s)")


def _run_install(options: argparse.Namespace) -> int:
    try:
        place = install(options.user, options.prefix, options.name, options.display_name)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Installed the kernelspec '{options.name}' in {place}")
    return 0


def _run_uninstall(options: argparse.Namespace) -> int:
    try:
        place = uninstall(options.user, options.prefix, options.name)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Removed {place}")
    return 0
