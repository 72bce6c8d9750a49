"""Inspect and end kept meshes from outside, without starting a runtime."""

from __future__ import annotations

import os
from collections.abc import Collection

import msgspec

from monarch_kernel._version import __version__
from monarch_kernel.protocol.kept_mesh import SOCKET, EndKept, KeptInfo, KeptRank, LookAtKept, ReadKeptLogs
from monarch_kernel.protocol.messages import OK, OLDEST_WIRE, WIRE_VERSION, LogText
from monarch_kernel.protocol.output_records import plain_text
from monarch_kernel.protocol.private_files import NotOursError, NotPrivateError
from monarch_kernel.runtime.actor.kept import folders
from monarch_kernel.runtime.node.link import request

#: The time limit for a keeper to answer, and to end its mesh (seconds).
TIMEOUT = 5.0
END_TIMEOUT = 30.0


class KeptError(RuntimeError):
    """A kept mesh is not available: it does not exist, or another controller holds it.

    Attributes:
        held: whether another controller holds it, so that it can be taken over by force.
    """

    def __init__(self, message: str, held: bool = False) -> None:
        super().__init__(message)
        self.held = held


def kept() -> list[KeptInfo]:
    """Return the kept meshes of this user on this machine by name, held or not. Does not start the runtime.

    Raises:
        KeptError: their parent folder belongs to another user; the message names the owner and the remedy.
    """
    try:
        return folders.kept()
    except NotPrivateError as e:
        raise KeptError(f"no kept mesh can be found: {e}") from None


def kept_place() -> str:
    """Return the parent of the folders of all kept meshes of this user, created if missing. It changes with them.

    Raises:
        KeptError: it belongs to another user, or cannot be created.
    """
    try:
        with folders.open_base() as base:
            return base.path
    except OSError as e:
        raise KeptError(f"no kept mesh can be found: {e}") from None


def folder_of(name: str) -> str:
    """Return the folder of a kept mesh, given by its name or path, whose keeper is alive.

    Raises:
        KeptError: there is no such mesh.
        ValueError: the name is invalid.
    """
    folder = os.path.abspath(name) if os.sep in name else folders.kept_folder(name)
    try:
        gone = folders.remove_if_dead(folder)
    except (FileNotFoundError, NotADirectoryError):
        gone = True
    except (NotPrivateError, NotOursError) as e:
        if isinstance(e, NotPrivateError) and os.sep not in name:
            e = folders.elsewhere(e)
        raise KeptError(f"the kept mesh {name!r} is not available: {e}; nothing was changed") from None
    if gone:
        others = ", ".join(info.name for info in kept()) or "none"
        raise KeptError(f"there is no kept mesh {name!r} (there are: {others})")
    return folder


def kept_ranks(name: str) -> list[KeptRank]:
    """Return the ranks of a kept mesh as they are now, held or not, by mesh and rank. Does not take it over.

    Args:
        name: its name, or the path of its folder.

    Raises:
        KeptError: there is no such mesh, or it does not answer.
        ValueError: the name is invalid.
    """
    body = _ask(name, LookAtKept(1, WIRE_VERSION, __version__, OLDEST_WIRE))
    return sorted(msgspec.msgpack.decode(body, type=list[KeptRank]), key=lambda one: (one.mesh, one.rank))


def kept_logs(name: str, mesh: str = "", ranks: Collection[int] = (), tail: int = 0) -> dict[tuple[str, int], str]:
    """Return the output of a kept mesh's ranks that its host agent has stored, by mesh and rank.

    Args:
        name: its name, or the path of its folder.
        mesh: the name of a mesh; empty: all meshes.
        ranks: some ranks; empty: all ranks.
        tail: the maximum number of lines from the end of each; 0: everything.

    Raises:
        KeptError: there is no such mesh, or it does not answer.
        ValueError: the name is invalid.
    """
    asked = {
        one.proc: (one.mesh, one.rank)
        for one in kept_ranks(name)
        if mesh in ("", one.mesh) and (not ranks or one.rank in ranks)
    }
    body = _ask(name, ReadKeptLogs(1, WIRE_VERSION, __version__, list(asked), tail, OLDEST_WIRE))
    texts: dict[tuple[str, int], str] = {}
    for entry in msgspec.msgpack.decode(body, type=list[LogText]):
        text = plain_text([(1, entry.stdout), (2, entry.stderr)])
        texts[asked[entry.proc]] = "".join(text.splitlines(keepends=True)[-tail:]) if tail else text
    return texts


def end_from_outside(name: str, force: bool) -> KeptInfo:
    """End a kept mesh that this process does not hold; returns its last description.

    Raises:
        KeptError: there is no such mesh, another controller holds it, or it does not end.
    """
    folder = folder_of(name)
    info = folders.read_description(folder)
    label = os.path.basename(folder)
    refused, _ = _request(folder, EndKept(1, WIRE_VERSION, __version__, os.getpid(), force, OLDEST_WIRE), END_TIMEOUT)
    if refused:
        raise KeptError(f"mesh {label!r} was not ended: {refused}", held="holds it" in refused)
    return info or KeptInfo(label, 0, "", "", 0.0)


def _ask(name: str, message: LookAtKept | ReadKeptLogs) -> bytes:
    folder = folder_of(name)
    refused, body = _request(folder, message, TIMEOUT)
    if refused:
        raise KeptError(f"mesh {os.path.basename(folder)!r} does not report its meshes: {refused}")
    return body


def _request(folder: str, message: LookAtKept | ReadKeptLogs | EndKept, timeout: float) -> tuple[str, bytes]:
    """Send a request to the keeper in this folder. Return why it refuses ("" if it does not), and its answer."""
    label = os.path.basename(folder)
    try:
        reply, body = request(f"{folder}/{SOCKET}", message, timeout)
    except TimeoutError:
        raise KeptError(f"mesh {label!r} does not answer within {timeout:g} s: its host agent is stopped") from None
    except OSError as e:
        raise KeptError(f"mesh {label!r} cannot be reached: {e.strerror or e}") from e
    return ("", body) if reply.status == OK else (body.decode(), b"")
