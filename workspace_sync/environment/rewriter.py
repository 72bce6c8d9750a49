"""Rewrite files of an environment as its installer would have written them at the prefix of a host."""

from __future__ import annotations

import os
from collections.abc import Callable

from workspace_sync.environment.rewriting import CompiledError, PrefixTooLongError, rewritten
from workspace_sync.model.errors import IncompatibleError
from workspace_sync.model.manifest import FileEntry, printable

_WHAT_TO_DO = (
    "set MONARCH_KERNEL_SYNC_FOLDER on that host to a shorter path, or reinstall the package that has the file into an "
    "environment with a longer path"
)


class Rewriter:
    """Rewriter that replaces the client's prefix in files by the prefix of a host. The store and ``unpack`` use it.

    It does no I/O: it takes content and returns content as bytes. The digest of a file at the client, which is in the
    manifest, differs from the digest of the file on the host, which follows from the result.

    Args:
        target: the prefix on this host, absolute.
    """

    def __init__(self, target: str | bytes) -> None:
        self.target = os.fsencode(target)
        #: The folder of the workspace's tree on this host, for editable installs.
        self.tree = os.path.join(os.path.dirname(self.target), b"tree")
        if not self.target.startswith(b"/") or b"\0" in self.target or b"\n" in self.target:
            raise ValueError(
                f"{printable(self.target)!r} is no absolute path that an environment can have as its prefix"
            )

    def __call__(
        self,
        entry: FileEntry,
        data: bytes,
        *,
        path: bytes = b"",
        read: Callable[[bytes], bytes] | None = None,
    ) -> bytes:
        """Return the content of a file on this host.

        Args:
            entry: of the file. Without a ``rewrite``, the content is returned unchanged.
            data: its content at the client.
            path: in the tree; paths in a RECORD are relative to it.
            read: returns the content on this host of another file of the tree by its path. It is called only for
                ``entry.rewrite.files``, so rewrite these files first. Without it, an index keeps its hashes.

        Raises:
            IncompatibleError: a binary has no space for the prefix of this host.
        """
        how = entry.rewrite
        if how is None or (how.prefix == self.target and not how.places):
            return data
        try:
            return rewritten(
                (how.kind, how.prefix, how.space, how.files, how.places), data, self.target, self.tree, path, read
            )
        except PrefixTooLongError as e:
            raise IncompatibleError(
                f"{printable(path)} has the environment's prefix {printable(how.prefix)} compiled into it, with space "
                f"for {e.space} bytes; the prefix on this host, {printable(self.target)}, has {len(self.target)}: "
                f"{_WHAT_TO_DO}"
            ) from None
        except CompiledError as e:
            raise IncompatibleError(
                f"{printable(path)} cannot be moved to another prefix: {e}; remove it, and sync again"
            ) from None
