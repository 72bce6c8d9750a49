"""Decide whether an environment of the client can run on a host."""

from __future__ import annotations

import functools
import glob
import os
import platform
import re
import stat

import msgspec

from workspace_sync.model.errors import IncompatibleError
from workspace_sync.model.manifest import digest_of

#: The maximum size of a Python executable (bytes).
_LARGEST = 1 << 28


class MachineFacts(msgspec.Struct, array_like=True):
    """Facts about a machine that decide whether an environment runs there, collected at the client and on each host.

    Attributes:
        host: the machine's name, for messages.
        system: "Linux" …
        machine: "x86_64", "aarch64" …
        libc: "glibc" or "musl".
        libc_version: such as (2, 36); empty if unknown.
        python: the version of the interpreter of this process.
        driver: the version of NVIDIA's driver; empty if there is none.
        bases: the identity (``python_id``) of the Python at each requested prefix; "" if there is none.
    """

    host: str
    system: str
    machine: str
    libc: str
    libc_version: tuple[int, ...] = ()
    python: str = ""
    driver: str = ""
    bases: dict[str, str] = {}


class Needs(msgspec.Struct, array_like=True):
    """Requirements of an environment on a host.

    Attributes:
        prefix: of the environment at the client, for messages.
        native: whether it has compiled code; without any, the platform does not matter.
        glibc: the newest version of glibc that its files require; empty if unknown.
        base: the prefix of the Python that it was created from, if the host must have it; otherwise empty.
        base_id: the identity of that Python.
        version: of its Python.
    """

    prefix: str
    native: bool = True
    glibc: tuple[int, ...] = ()
    base: str = ""
    base_id: str = ""
    version: str = ""


def facts(bases: list[str] | None = None) -> MachineFacts:
    """Collect the facts about this machine.

    Args:
        bases: prefixes of Pythons that venvs need.
    """
    kind, version = _libc()
    return MachineFacts(
        platform.node(),
        platform.system(),
        platform.machine(),
        kind,
        version,
        platform.python_version(),
        _driver(),
        {base: python_id(base) for base in bases or ()},
    )


def check_compatible(client: MachineFacts, host: MachineFacts, needs: Needs) -> list[str]:
    """Check that an environment of the client can run on a host, before anything is sent.

    Returns:
        Notes on differences that are no reason to refuse.

    Raises:
        IncompatibleError: it cannot run; the message names the host and both sides.
    """
    where = f"the environment {needs.prefix} cannot run on host {host.host}"
    keep = "it keeps its present environment; give that host a separate environment, or leave it out of the sync"
    if needs.native and (client.system, client.machine) != (host.system, host.machine):
        raise IncompatibleError(
            f"{where}: it is for {client.system} on {client.machine}, and the host has {host.system} on "
            f"{host.machine}; {keep}"
        )
    if needs.native and client.libc != host.libc:
        raise IncompatibleError(f"{where}: it is for {_libc_name(client)}, and the host has {_libc_name(host)}; {keep}")
    floor = needs.glibc
    if needs.native and floor and host.libc_version and host.libc_version < floor:
        raise IncompatibleError(
            f"{where}: its files need glibc {_dotted(floor)} (the client has {_dotted(client.libc_version)}), and the "
            f"host has {_dotted(host.libc_version)}; {keep}"
        )
    if needs.base and host.bases.get(needs.base, "") != needs.base_id:
        there = host.bases.get(needs.base, "")
        has = f"the host has another Python there ({there})" if there else "the host has none there"
        raise IncompatibleError(
            f"{where}: it is a venv of the Python at {needs.base} ({needs.base_id}), and {has}; install it there, or "
            "have it sent along: CondaEnvironment(..., with_python=True), or --env with --with-python"
        )
    notes: list[str] = []
    if client.driver != host.driver and (client.driver or host.driver):
        notes.append(
            f"NVIDIA's driver is {client.driver or 'absent'} at the client and {host.driver or 'absent'} on {host.host}"
        )
    if needs.native and not floor and host.libc_version and host.libc_version < client.libc_version:
        notes.append(
            f"{host.host} has glibc {_dotted(host.libc_version)}, older than the client's "
            f"{_dotted(client.libc_version)}: code that was compiled at the client may not load there"
        )
    return notes


def python_id(base: str) -> str:
    """Identify the Python at a prefix, as "3.11.7 cpython-311-x86_64-linux-gnu 9f86d081"; "" if there is none.

    Version and digest are those of its executable, and the ABI comes from its build's data: two Pythons with the same
    identity are the same build. Another process has chosen the prefix, so nothing there is executed.
    """
    for name in ("python3", "python"):
        path = os.path.realpath(os.path.join(base, "bin", name))
        try:
            about = os.stat(path)
            if stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST:
                return _python_id(base, path, about.st_mtime_ns, about.st_size)
        except OSError:
            continue
    return ""


@functools.lru_cache(maxsize=32)
def _python_id(base: str, path: str, mtime: int, size: int) -> str:
    del mtime  # part of the key: an upgrade in place creates another Python
    with open(path, "rb") as file:
        data = file.read(size)
    digest = digest_of(data).hex()[:12]
    named = re.match(r"python(3\.\d+)", os.path.basename(path))
    if named is None:  # as for PyPy
        return digest
    minor = named[1]
    # ``Py_GetVersion`` returns a constant of the executable, even where the rest is in a library.
    version = re.search(rb"\b(%s\.\d{1,3}(?:(?:a|b|rc)\d{1,2})?\+?)\0" % re.escape(minor).encode(), data)
    found = version[1].decode() if version is not None else minor
    return " ".join(filter(None, (found, _abi(base, minor), digest)))


def _abi(base: str, minor: str) -> str:
    """Return the suffix of its compiled modules, such as "cpython-311-x86_64-linux-gnu"; "" if unknown."""
    folder = glob.escape(base)
    for path in sorted(glob.glob(f"{folder}/lib*/python{minor}*/_sysconfigdata_*.py")):
        about = os.stat(path)
        if stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST:
            with open(path, encoding="utf-8", errors="replace") as file:
                said = re.search(r"'SOABI': '([\w.-]{1,99})'", file.read())
            if said is not None:
                return said[1]
    return ""


@functools.cache
def _libc() -> tuple[str, tuple[int, ...]]:
    name, version = platform.libc_ver()
    if not name and glob.glob("/lib/ld-musl-*"):
        name = "musl"
    try:
        # confstr() queries the running C library; libc_ver() reads the one that the executable was linked with.
        said = os.confstr("CS_GNU_LIBC_VERSION") or ""
        if said:
            name, _, version = said.partition(" ")
    except (ValueError, OSError):
        pass
    return name, parse_version(version)


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the leading numeric parts of a version."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdecimal() or len(part) > 9:
            break
        numbers.append(int(part))
    return tuple(numbers)


def _driver() -> str:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


def _libc_name(side: MachineFacts) -> str:
    return f"{side.libc or 'an unknown C library'} {_dotted(side.libc_version)}"
