"""Manifests: digests cover content, differences lead from one to the other, and tampered ones are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workspace_sync.model.manifest import (
    FileEntry,
    Folder,
    Manifest,
    ManifestDelta,
    ManifestError,
    Rewrite,
    changes,
    decode_delta,
    delta,
    digest_of,
    encode_delta,
    patched,
    seal,
)

# A tree as a nested mapping: content of files as bytes, targets of links as text, folders as mappings.
Tree = dict[bytes, "bytes | str | Tree"]

names = st.sampled_from([b"a", b"b", b"c", b"\xff", b"a b", b"\n", b"..."])
trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(names, st.one_of(st.binary(max_size=2), st.sampled_from(["x", "y"])), max_size=4),
    lambda below: st.dictionaries(names, st.one_of(st.binary(max_size=2), st.just("x"), below), max_size=4),
    max_leaves=12,
)


def manifest(tree: Tree, mode: int = 0o755) -> Manifest:
    folders: dict[bytes, Folder] = {}

    def enter(path: bytes, content: Tree) -> None:
        folder = folders[path] = Folder(mode, {}, {}, {})
        for name, each in content.items():
            if isinstance(each, bytes):
                folder.files[name] = FileEntry(len(each), 0o644, digest_of(each))
            elif isinstance(each, str):
                folder.links[name] = each.encode()
            else:
                folder.folders[name] = b""
                enter(path + b"/" + name if path else name, each)

    enter(b"", tree)
    return seal(folders)


def contents(found: Manifest) -> dict[bytes, object]:
    return {path: msgspec.to_builtins(folder, builtin_types=(bytes,)) for path, folder in found.folders.items()}


@settings(max_examples=150, deadline=None)
@given(trees, trees)
def test_a_delta_leads_from_one_tree_to_the_other(old: Tree, new: Tree) -> None:
    before, after = manifest(old), manifest(new)
    kept = copy.deepcopy(before)
    change = decode_delta(encode_delta(delta(before, after)))
    result = patched(before, change)
    assert contents(result) == contents(after)
    assert contents(before) == contents(kept)  # hosts keep the old tree
    assert contents(patched(None, decode_delta(encode_delta(delta(None, after))))) == contents(after)


@settings(max_examples=150, deadline=None)
@given(trees, trees)
def test_equal_digests_mean_equal_trees(old: Tree, new: Tree) -> None:
    before, after = manifest(old), manifest(new)
    assert (before.digest == after.digest) == (old == new)
    assert (list(changes(before, after)) == []) == (old == new)


@settings(max_examples=150, deadline=None)
@given(trees, trees)
def test_changes_name_each_path_that_differs(old: Tree, new: Tree) -> None:
    before, after = flat(old), flat(new)
    found = {change.path: change for change in changes(manifest(old), manifest(new))}
    for path in before.keys() | after.keys():
        was, now = before.get(path), after.get(path)
        if was == now:
            assert path not in found
        elif now is not None:
            assert found[path].new is not None
        else:
            above = path
            while above not in found:  # a folder that is gone is named once
                above = above.rpartition(b"/")[0]
                assert above
            assert found[above].new is None or not isinstance(found[above].new, int)


def flat(tree: Tree, prefix: bytes = b"") -> dict[bytes, object]:
    found: dict[bytes, object] = {}
    for name, each in tree.items():
        if isinstance(each, dict):
            found[prefix + name] = "folder"
            found |= flat(each, prefix + name + b"/")
        else:
            found[prefix + name] = each
    return found


BASE: Tree = {b"a": {b"x": b"1", b"deep": {b"y": b"2"}}, b"b": {b"z": b"3"}, b"f": b"4"}
CHANGED: Tree = {b"a": {b"x": b"9", b"deep": {b"y": b"2"}}, b"f": b"4"}


def _content(change: ManifestDelta) -> None:
    change.folders[b"a"].files[b"x"] = FileEntry(1, 0o644, digest_of(b"8"))


def _mode(change: ManifestDelta) -> None:
    change.folders[b"a"].mode = 0o777


def _digest(change: ManifestDelta) -> None:
    change.folders[b"a"].digest = bytes(32)


def _root(change: ManifestDelta) -> None:
    change.digest = bytes(32)


def _kept(change: ManifestDelta) -> None:
    change.gone.clear()


def _taken(change: ManifestDelta) -> None:
    change.gone.append(b"a/deep")


def _extra(change: ManifestDelta) -> None:
    change.folders[b"../outside"] = manifest({b"x": b"1"}).folders[b""]


def _missing(change: ManifestDelta) -> None:
    del change.folders[b"a"]


def _no_root(change: ManifestDelta) -> None:
    del change.folders[b""]


@pytest.mark.parametrize("tamper", [_content, _mode, _digest, _root, _kept, _taken, _extra, _missing, _no_root])
def test_a_tampered_delta_is_refused(tamper: Callable[[ManifestDelta], None]) -> None:
    before = manifest(BASE)
    change = decode_delta(encode_delta(delta(before, manifest(CHANGED))))
    assert patched(before, change).digest == manifest(CHANGED).digest
    tamper(change)
    with pytest.raises(ManifestError):
        patched(before, change)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc", b"x\0y"])
@pytest.mark.parametrize("kind", ["files", "links", "folders"])
def test_a_name_that_could_leave_the_tree_is_refused(name: bytes, kind: str) -> None:
    folder = Folder(0o755, {}, {}, {})
    if kind == "files":
        folder.files[name] = FileEntry(1, 0o644, digest_of(b"1"))
    elif kind == "links":
        folder.links[name] = b"x"
    else:
        folder.folders[name] = manifest({}).digest
    forged = seal({b"": folder}, [b""])
    with pytest.raises(ManifestError, match="is no name of a file"):
        patched(None, delta(None, forged))


@pytest.mark.parametrize(
    "entry",
    [
        FileEntry(-1, 0o644, bytes(32)),
        FileEntry(1, 0o4755, bytes(32)),
        FileEntry(1, 0o644, b"short"),
        FileEntry(3, 0o644, bytes(32), 0, (bytes(32), bytes(32)), (1, 1)),
        FileEntry(3, 0o644, bytes(32), 0, (bytes(32), bytes(32)), (3,)),
        FileEntry(3, 0o644, bytes(32), 0, (bytes(32), bytes(32)), (4, -1)),
        FileEntry(3, 0o644, bytes(32), 0, (bytes(32), b""), (1, 2)),
    ],
)
def test_an_invalid_entry_is_refused(entry: FileEntry) -> None:
    forged = seal({b"": Folder(0o755, {b"x": entry}, {}, {})})
    with pytest.raises(ManifestError):
        patched(None, delta(None, forged))


def test_one_name_for_two_entries_is_refused() -> None:
    forged = seal({b"": Folder(0o755, {b"x": FileEntry(1, 0o644, bytes(32))}, {b"x": b"/etc"}, {})})
    with pytest.raises(ManifestError, match="stands for two entries"):
        patched(None, delta(None, forged))


def test_a_delta_for_another_tree_is_refused() -> None:
    change = delta(manifest(BASE), manifest(CHANGED))
    for other in (None, manifest({b"f": b"4"})):
        with pytest.raises(ManifestError, match="the changes are for tree"):
            patched(other, change)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93", encode_delta(delta(None, manifest(BASE)))[:-3]])
def test_bytes_that_are_no_delta_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="not a manifest"):
        decode_delta(data)


def test_times_are_no_content_and_rewrites_are() -> None:
    entry = FileEntry(1, 0o644, digest_of(b"1"), mtime=1)
    plain = seal({b"": Folder(0o755, {b"x": entry}, {}, {})})
    later = seal({b"": Folder(0o755, {b"x": msgspec.structs.replace(entry, mtime=2)}, {}, {})})
    patched_there = msgspec.structs.replace(entry, rewrite=Rewrite("text", b"/prefix"))
    rewritten = seal({b"": Folder(0o755, {b"x": patched_there}, {}, {})})
    assert plain.digest == later.digest != rewritten.digest


def test_many_deletions_take_no_square_of_time() -> None:
    # 20,000 folders, each deleted by name: with a search through all folders for each, this takes minutes.
    old = manifest({b"%d" % i: {b"below": {b"x": b"1"}} for i in range(10_000)})
    new = manifest({b"new": b"1"})
    assert contents(patched(old, delta(old, new))) == contents(new)
