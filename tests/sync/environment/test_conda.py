"""A conda environment at another prefix has the bytes of one that was installed there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.environment.channel import Channel
from tests.sync.environment.trees import assert_equal_trees, installed, moved, stored
from workspace_sync.environment.manifests import environment_manifest
from workspace_sync.model.errors import IncompatibleError
from workspace_sync.scanning import Index

WITHOUT_PYTHON = ("texts", "codes")
ALL = (*WITHOUT_PYTHON, "pure", "python")


@pytest.fixture(scope="module")
def installs(channel: Channel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The packages without Python, at prefixes of very different lengths."""
    root = tmp_path_factory.mktemp("a")
    return [channel.install(root / name, *WITHOUT_PYTHON) for name in ("s", "m" * 40, "l" * 150)]


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_moved_environment_is_a_fresh_one(installs: list[Path], source: int, target: int, tmp_path: Path) -> None:
    scanned = environment_manifest(installs[source], Index("e", str(tmp_path)))
    assert scanned.environment.kind == "conda" and scanned.needs.native and not scanned.needs.base
    tree = moved(scanned, installs[target])
    assert_equal_trees(tree, installs[target])
    long = b"l" * 150 in bytes(installs[target])
    head = tree["bin/of-perl"]
    assert isinstance(head, bytes) and head.startswith(b"#!/usr/bin/env perl -w\n") == long


def test_with_a_python(channel: Channel, short_folder: Path, tmp_path: Path) -> None:
    source, target = (channel.install(short_folder / name, *ALL) for name in ("a", "bb"))
    scanned = environment_manifest(source, Index("e", str(tmp_path)))
    made = stored(scanned, tmp_path / "store", str(target))
    assert_equal_trees(installed(made), target)
    for path, what in installed(made).items():
        assert not isinstance(what, bytes) or bytes(source) + b"/" not in what, path
    # It runs at the path that its files name, with nothing of the environments that were installed.
    for each in (source, target):
        each.rename(f"{each}-away")
    shutil.copytree(made, target, symlinks=True)
    code = (
        "import sys, pure, math; pure.main(); print(sys.prefix);"
        "print([line.split()[-1] for line in open('/proc/self/maps') if 'python' in line.split()[-1]])"
    )
    done = subprocess.run([target / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    hello, prefix, maps = done.stdout.splitlines()
    assert (hello, prefix) == ("pure", str(target))
    assert eval(maps) and all(path.startswith(f"{target}/") for path in eval(maps))
    for script, said in (
        ("pure", "pure\n"),
        ("of-python", f"{target}/lib\n"),
        ("where", f"{target}/share:{target}/lib\n"),
    ):
        assert subprocess.run([target / "bin" / script], capture_output=True, text=True, check=True).stdout == said


def test_a_prefix_that_does_not_fit_is_refused(channel: Channel, short_folder: Path, tmp_path: Path) -> None:
    source = channel.install(short_folder / "c", *ALL)
    scanned = environment_manifest(source, Index("e", str(tmp_path)))
    space = len(sys.base_prefix)
    long = "/" + "x" * space
    with pytest.raises(IncompatibleError, match=rf"space for {space} bytes; .* {long}, has {space + 1}: set MONARCH"):
        stored(scanned, tmp_path / "store", long)


def test_what_was_changed_after_it_was_installed(channel: Channel, tmp_path: Path) -> None:
    source, target = (channel.install(tmp_path / name, *WITHOUT_PYTHON) for name in ("a", "bbbb"))
    for prefix in (source, target):
        edited = prefix / "lib" / "pkgconfig" / "texts.pc"
        edited.unlink()  # the package cache has the file, too
        edited.write_text(f"prefix={prefix}\nmore={prefix}/more\nother={prefix}2\n".replace(f"{target}2", f"{source}2"))
        (prefix / "lib" / "absolute").symlink_to(prefix / "lib" / "pkgconfig")
        (prefix / "pkgs").mkdir()
        (prefix / "pkgs" / "x").write_bytes(b"x")
    scanned = environment_manifest(source, Index("e", str(tmp_path / "sync")))
    tree = moved(scanned, target)
    assert tree["lib/pkgconfig/texts.pc"] == (target / "lib/pkgconfig/texts.pc").read_bytes()
    assert tree["lib/absolute"] == "pkgconfig"
    assert "pkgs" not in tree
    assert_equal_trees(
        {**tree, "pkgs": 0o755, "pkgs/x": b"x"},
        target,
        # Its record holds at neither prefix any more, and the link that was made is absolute.
        without=("conda-meta/texts-1.0-0.json", "lib/absolute", "pkgs"),
    )


def test_an_unchanged_environment_is_not_read_again(channel: Channel, tmp_path: Path) -> None:
    source = channel.install(tmp_path / "a", *WITHOUT_PYTHON)
    first = environment_manifest(source, Index("e", str(tmp_path / "sync")))
    again = environment_manifest(source, Index("e", str(tmp_path / "sync")))
    assert first.manifest.digest == again.manifest.digest and again.needs == first.needs
    (source / "etc" / "new.conf").write_text(f"{source}\n")
    changed = environment_manifest(source, Index("e", str(tmp_path / "sync")))
    entry = changed.manifest.file(b"etc/new.conf")
    assert entry is not None and entry.rewrite is not None and entry.rewrite.kind == "text"
    assert changed.manifest.digest != first.manifest.digest
