"""Blocks that are no longer in memory are built again from the slot that is being made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sync.store.trees import Content
from workspace_sync import StoreError
from workspace_sync.store.staging import SlotReader
from workspace_sync.store.store import Store
from workspace_sync.transfer.blocks import block_bytes, fill, pieces_in


def test_a_block_is_read_back_and_checked(tmp_path: Path) -> None:
    content = Content({b"small": b"s" * 10, b"a/large": bytes(range(250)) * 4}, chunk=300)
    with Store(str(tmp_path / "store")) as store:
        folder = store.workspace("w")
        with folder.lock("the test", 5):
            staging = folder.stage({"tree": content.manifest})
            missing = staging.missing
            reader = SlotReader(staging)
            last, size = missing[-1]
            for digest, _ in missing[:-1]:
                staging.put(digest, memoryview(content.pieces[digest]))
            with pytest.raises((StoreError, FileNotFoundError)):
                reader.read(last, memoryview(bytearray(size)))
            staging.put(last, memoryview(content.pieces[last]))

            block = memoryview(bytearray(block_bytes(missing)))
            fill(block, missing, reader.read)
            got = {digest: bytes(data) for digest, data in pieces_in(block)}
            assert got == {digest: content.pieces[digest] for digest, _ in missing}
            with pytest.raises(StoreError, match="cannot be read back"):
                reader.read(b"x" * 32, memoryview(bytearray(1)))
            staging.abort()
