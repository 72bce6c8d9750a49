"""Environments as archives."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.sync.environment.channel import Channel
from tests.sync.environment.trees import assert_equal_trees, installed
from tests.sync.environment.wheels import venv, wheel
from workspace_sync.environment import environment_manifest, pack, unpack
from workspace_sync.model.errors import IncompatibleError, StoreError, TamperedError
from workspace_sync.scanning import Index


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "sync"))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_conda_there_and_back(channel: Channel, tmp_path: Path, suffix: str) -> None:
    source, fresh = (channel.install(tmp_path / name, "texts", "codes") for name in ("a", "fresh"))
    archive = tmp_path / f"e.{suffix}"
    seen: list[tuple[int, int]] = []
    pack(source, archive, progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] > 0 and not list(tmp_path.glob("*.part"))
    fresh.rename(tmp_path / "away")
    unpack(archive, fresh)
    assert_equal_trees(installed(fresh), tmp_path / "away")
    assert sorted(os.listdir(tmp_path)) == sorted({"a", "away", archive.name, "fresh", "sync"})


def test_without_this_package(channel: Channel, short_folder: Path, tmp_path: Path) -> None:
    source, fresh = (channel.install(short_folder / name, "texts", "codes", "pure", "python") for name in ("u", "uu"))
    archive = tmp_path / "e.tar.gz"
    pack(source, archive)
    fresh.rename(short_folder / "uu-away")
    fresh.mkdir()
    subprocess.run(["tar", "xf", archive, "-C", fresh], check=True)
    done = subprocess.run(
        [fresh / "bin" / "python", "-IB", fresh / "bin" / "conda-unpack"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"files name {fresh} now" in done.stdout
    (fresh / ".monarch-environment").unlink()
    assert_equal_trees(installed(fresh), short_folder / "uu-away")


def test_a_venv_with_its_python(tmp_path: Path) -> None:
    prefix = venv(
        tmp_path / "env",
        wheel(
            tmp_path,
            "tool",
            {"tool.py": "import sys\ndef main():\n    print(sys.base_prefix)\n"},
            scripts={"tool": "tool:main"},
        ),
    )
    archive = tmp_path / "e.tar"
    pack(prefix, archive)
    target = tmp_path / "elsewhere" / "env"
    assert not unpack(archive, target).base
    done = subprocess.run([target / "bin" / "tool"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}/.python\n"


def test_a_venv_without_its_python_needs_it(tmp_path: Path) -> None:
    prefix = venv(tmp_path / "env")
    archive = tmp_path / "e.tar"
    pack(environment_manifest(prefix, Index("e")), archive)
    assert unpack(archive, tmp_path / "b").base == sys.base_prefix
    assert subprocess.run([tmp_path / "b" / "bin" / "python", "-c", ""], check=False).returncode == 0


@pytest.fixture
def packed(channel: Channel, tmp_path: Path) -> Path:
    archive = tmp_path / "e.tar"
    pack(channel.install(tmp_path / "a", "texts"), archive)
    return archive


def changed(archive: Path, change: str) -> Path:
    """A copy of an archive with one thing in it that is not right."""
    path = archive.with_name(f"{change}.tar")
    with tarfile.open(archive) as old, tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            content = old.extractfile(member) if member.isreg() else None
            data = content.read() if content is not None else b""
            if change == "content" and member.name == "etc/plain.conf":
                data = data.replace(b"nothing", b"NOTHING")
            if change == "missing" and member.name == "etc/plain.conf":
                continue
            if change == "manifest" and member.name == ".monarch-environment":
                data = data.replace(b"etc", b"etd")
            new.addfile(member, io.BytesIO(data) if content is not None else None)
        names = {"outside": "../outside", "absolute": str(archive.parent / "outside"), "extra": "etc/extra"}
        if change in names:
            member = tarfile.TarInfo(names[change])
            member.size = 1
            new.addfile(member, io.BytesIO(b"x"))
        if change == "through a link":
            member = tarfile.TarInfo("etc/link")
            member.type, member.linkname = tarfile.SYMTYPE, str(archive.parent)
            new.addfile(member)
            member = tarfile.TarInfo("etc/link/outside")
            member.size = 1
            new.addfile(member, io.BytesIO(b"x"))
    return path


@pytest.mark.parametrize(
    "change, said",
    [
        ("content", "etc/plain.conf in .* is not what its digest says"),
        ("missing", "lacks etc/plain.conf"),
        ("manifest", "the manifest of .* is damaged"),
        ("outside", "has ../outside, which is not as its manifest lists it"),
        ("absolute", "outside, which is not as its manifest lists it"),
        ("extra", "has etc/extra"),
        ("through a link", "has etc/link/outside"),
    ],
)
def test_archives_that_are_not_right(packed: Path, tmp_path: Path, change: str, said: str) -> None:
    before = sorted(os.listdir(tmp_path))
    archive = changed(packed, change)
    with pytest.raises(TamperedError, match=said):
        unpack(archive, tmp_path / "b")
    archive.unlink()
    assert sorted(os.listdir(tmp_path)) == before  # nothing is left, and nothing was written outside


def test_half_an_archive(packed: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.tar"
    half.write_bytes(packed.read_bytes()[: packed.stat().st_size // 2])
    with pytest.raises(TamperedError, match="copy it again"):
        unpack(half, tmp_path / "b")
    half.write_bytes(b"no archive")
    with pytest.raises(TamperedError):
        unpack(half, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_cannot_be(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="exists: name a path"):
        unpack(packed, tmp_path / "a")
    with pytest.raises(StoreError, match="no known suffix"):
        pack(tmp_path / "a", tmp_path / "e.zip")
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        pack(tmp_path / "a", tmp_path / "none" / "e.tar")


def test_another_machine_is_refused(channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "e.tar"
    pack(channel.install(tmp_path / "a", "codes"), archive)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(IncompatibleError, match="the host has Linux on riscv64"):
        unpack(archive, tmp_path / "b")
