"""The audit log: JSON lines that record which code ran where and when. ``MONARCH_KERNEL_AUDIT_LOG`` enables it.

Each action writes two lines with the same ``id``. The first is written before the action begins, so it exists even
if the action kills the kernel. The second has the outcome::

    {"time": "2026-11-22T14:00:00.123Z", "id": "4f1c-7", "user": "alice", "host": "node1", "pid": 4711, "notebook":
     "train.ipynb", "did": "mesh cell", "sha256": "…", "lines": 12, "mesh": "m", "ranks": "0-7", "hosts": ["node1"]}
    {"time": "2026-11-22T14:00:09.456Z", "id": "4f1c-7", "outcome": "ok", "seconds": 9.333}

The log is a record for this user, not a security boundary: code in the kernel can act without being logged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pwd
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from monarch_kernel import environment
from monarch_kernel.private_files import AppendOnlyFile

#: The maximum length of a logged text (characters).
LONGEST = 65_536

End = Callable[[str], None]


class AuditLog:
    """Writes the actions of a kernel to a file. It is thread-safe, and its methods never raise.

    Args:
        path: the file, created with mode 0600; empty: write nothing.
        texts: whether to write the text of cells in addition to their digests.
    """

    def __init__(self, path: str, texts: bool) -> None:
        self._path = os.path.abspath(os.path.expanduser(path)) if path else ""
        self._texts = texts
        self._file: AppendOnlyFile | None = None
        self._lock = threading.Lock()
        self._run = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    @classmethod
    def of_environment(cls) -> AuditLog:
        """Return the log configured by environment variables."""
        return cls(environment.AUDIT_LOG.get(), bool(environment.AUDIT_TEXT.get()))

    @property
    def is_on(self) -> bool:
        """Whether the log is enabled."""
        return bool(self._path)

    def begin(self, did: str, text: str = "", *, line: str = "", **where: Any) -> End:
        """Write that an action begins.

        Args:
            did: the kind of action: "cell", "mesh cell", "command".
            text: the code of a cell; its digest is written.
            line: a command line, written verbatim.
            where: mesh, ranks, hosts and similar fields; empty fields are omitted.

        Returns:
            A function that writes the outcome.
        """
        if not self._path:
            return _nothing
        number = f"{self._run}-{next(self._numbers)}"
        entry: dict[str, Any] = {
            "id": number,
            "user": _user(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "notebook": os.environ.get("JPY_SESSION_NAME", ""),
            "did": did,
            "line": line[:LONGEST],
        }
        if text:
            entry["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            entry["lines"] = text.count("\n") + 1
            if self._texts:
                entry["text"] = text[:LONGEST]
                entry["cut"] = len(text) > LONGEST
        self._write({name: value for name, value in {**entry, **where}.items() if value not in ("", (), None, False)})
        began = time.monotonic()
        return lambda outcome: self._write(
            {"id": number, "outcome": outcome[:LONGEST], "seconds": round(time.monotonic() - began, 3)}
        )

    @contextmanager
    def during(self, did: str, text: str = "", *, line: str = "", **where: Any) -> Generator[None]:
        """Log a ``with`` block as an action. The outcome is "ok", or the exception that leaves the block."""
        end = self.begin(did, text, line=line, **where)
        try:
            yield
        except BaseException as error:
            end(outcome_of(error))
            raise
        end("ok")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        try:
            with self._lock:
                if self._file is None:
                    self._file = AppendOnlyFile(self._path)
                self._file.append(json.dumps({"time": stamp, **entry}))
        except OSError as error:
            why = str(error) if error.strerror is None else error.strerror
            print(f"This is not in the audit log: {self._path} cannot be written: {why}", file=sys.stderr)


def outcome_of(error: BaseException) -> str:
    """Format an exception as a one-line outcome."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _nothing(_outcome: str) -> None:
    """Do nothing: the log is disabled."""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
