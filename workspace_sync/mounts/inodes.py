"""The inodes that the kernel knows of a mount, each for as long as the kernel counts lookups of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from workspace_sync.mounts.protocol import ROOT


class Inode(Protocol):
    """What a table counts.

    Attributes:
        number: by which the kernel names it.
        lookups: how often the kernel got it and has not yet forgotten it.
    """

    number: int
    lookups: int


N = TypeVar("N", bound=Inode)
K = TypeVar("K")


class InodeTable(Generic[K, N]):
    """Inodes by number, and by what each stands for. Its owner locks it.

    Args:
        key_of: what an inode stands for.
        root: the one with the number ``ROOT``, which is never forgotten; None: the owner answers for it without one.

    Source: ``FUSE_LOOKUP`` and ``FUSE_FORGET`` in ``linux/fuse.h``.
    """

    def __init__(self, key_of: Callable[[N], K], root: N | None) -> None:
        self._key_of = key_of
        self._numbers = itertools.count(ROOT + 1)
        self.by_number: dict[int, N] = {}
        self.by_key: dict[K, N] = {}
        if root is not None:
            self.by_number[ROOT] = self.by_key[key_of(root)] = root

    def enter(self, key: K, make: Callable[[int], N]) -> N:
        """The inode of a key, made with the next number if there is none; counts a lookup."""
        node = self.by_key.get(key)
        if node is None:
            node = make(next(self._numbers))
            self.by_number[node.number] = self.by_key[key] = node
        node.lookups += 1
        return node

    def forget(self, number: int, count: int) -> None:
        """The kernel has forgotten so many lookups; an inode without any is dropped."""
        node = self.by_number.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= count
        if node.lookups <= 0:
            del self.by_number[number]
            del self.by_key[self._key_of(node)]
