"""Environments as archives."""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.sync.environment.channel import Channel
from tests.sync.environment.trees import assert_equal_trees, installed
from tests.sync.environment.wheels import venv, wheel
from workspace_sync.environment.facts import Needs, facts
from workspace_sync.environment.manifests import environment_manifest
from workspace_sync.environment.packing import _Header, pack, unpack
from workspace_sync.model.errors import IncompatibleError, StoreError, TamperedError
from workspace_sync.model.manifest import FileEntry, Folder, ManifestDelta, Rewrite, folder_digest
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


@pytest.mark.usefixtures("movable_python")
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


def crafted(path: Path, header: _Header | bytes, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """An archive of a stranger's."""
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        data = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
        first = tarfile.TarInfo(".monarch-environment")
        first.size = len(data)
        archive.addfile(first, io.BytesIO(data))
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return path


def header_of(folders: dict[bytes, Folder], needs: Needs | None = None) -> _Header:
    """A header whose digests hold."""
    for path in sorted(folders, reverse=True):
        folder = folders[path]
        for name in folder.folders:
            folder.folders[name] = folders[path + b"/" + name if path else name].digest
        folder.digest = folder_digest(folder)
    change = ManifestDelta(b"", folders[b""].digest, folders, [])
    return _Header(b"/envs/a", facts(), needs or Needs("/envs/a", native=False), change)


def test_nothing_that_an_archive_names_is_executed(tmp_path: Path) -> None:
    base, taken = tmp_path / "base", tmp_path / "taken"
    (base / "bin").mkdir(parents=True)
    for name in ("python3", "python3.11"):
        (base / "bin" / name).write_text(f"#!/bin/sh\ntouch {taken}\n")
        (base / "bin" / name).chmod(0o755)
    needs = Needs("/envs/a", native=False, base=str(base), base_id="3.11.7 cpython-311 00")
    archive = crafted(tmp_path / "e.tar.gz", header_of({b"": Folder(0o755, {}, {}, {})}, needs))
    with pytest.raises(IncompatibleError, match="it is a venv of the Python at"):
        unpack(archive, tmp_path / "b")
    assert not taken.exists() and not (tmp_path / "b").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_python_of_another_user_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "bin").mkdir(parents=True)
    (base / "bin" / "python3").symlink_to(sys.executable)
    needs = Needs("/envs/a", native=False, base=str(base), base_id=facts([str(base)]).bases[str(base)])
    archive = crafted(tmp_path / "e.tar.gz", header_of({b"": Folder(0o755, {}, {}, {})}, needs))
    os.chown(base / "bin", 12345, 12345)
    with pytest.raises(IncompatibleError, match="belongs to user 12345: pack it with its Python"):
        unpack(archive, tmp_path / "b")
    os.chown(base / "bin", 0, 0)
    assert unpack(archive, tmp_path / "b").base == str(base)


def test_nothing_is_written_outside_of_the_prefix(tmp_path: Path) -> None:
    outside = Path(f"/outside-{secrets.token_hex(4)}")
    name = os.fsencode(outside.name)
    folders = {path: Folder(0o755, {}, {}, {}) for path in (b"", name, b"/" + name)}
    folders[b""].folders[name] = b""
    archive = crafted(tmp_path / "e.tar.gz", header_of(folders))
    try:
        with pytest.raises(TamperedError, match="has no path inside a tree"):
            unpack(archive, tmp_path / "b")
        assert not outside.exists() and not (tmp_path / "b").exists()
    finally:
        if outside.exists():
            outside.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_link_that_another_user_puts_beside_an_archive_is_not_followed(channel: Channel, tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.write_text("precious")
    (shared / "e.tar.part").symlink_to(mine)
    (shared / "e.tar").symlink_to(mine)
    os.chmod(shared, 0o777)
    pack(channel.install(tmp_path / "a", "texts"), shared / "e.tar")
    assert mine.read_text() == "precious"
    assert not (shared / "e.tar").is_symlink() and tarfile.is_tarfile(shared / "e.tar")
    assert sorted(os.listdir(shared)) == ["e.tar", "e.tar.part"]


def bomb_of_a_manifest(path: Path) -> None:
    crafted(path, bytes(64 << 20))


def bomb_of_entries(path: Path) -> None:
    files = {b"%06x" % number: FileEntry(0, 0o644, bytes(32)) for number in range(1 << 18)}
    crafted(path, header_of({b"": Folder(0o755, files, {}, {})}))


def bomb_of_a_text(path: Path) -> None:
    size = 64 << 20
    entry = FileEntry(size, 0o644, bytes(32), rewrite=Rewrite("text", b"/envs/a"))
    member = tarfile.TarInfo("a")
    member.size = size
    crafted(path, header_of({b"": Folder(0o755, {b"a": entry}, {}, {})}), (member, bytes(size)))


def bomb_of_a_member_header(path: Path) -> None:
    member = tarfile.TarInfo("a")
    member.pax_headers = {"comment": "x" * (64 << 20)}
    crafted(path, header_of({b"": Folder(0o755, {}, {}, {})}), (member, b""))


def bomb_of_a_sparse_map(path: Path) -> None:
    numbers = b"99999999\n" + b"0\n" * (32 << 20)
    member = tarfile.TarInfo("a")
    member.size = len(numbers)
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "0"}
    crafted(path, header_of({b"": Folder(0o755, {}, {}, {})}), (member, numbers))


@pytest.mark.parametrize(
    "bomb",
    [bomb_of_a_manifest, bomb_of_entries, bomb_of_a_text, bomb_of_a_member_header, bomb_of_a_sparse_map],
)
def test_a_small_archive_takes_little_memory(tmp_path: Path, bomb: Callable[[Path], None]) -> None:
    archive = tmp_path / "e.tar.gz"
    bomb(archive)
    code = (
        "import sys\n"
        "from workspace_sync.environment.packing import unpack\n"
        "from workspace_sync.model.errors import TamperedError\n"
        "def peak():\n"
        "    return int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])\n"
        "before = peak()\n"
        "try:\n    unpack(sys.argv[1], sys.argv[2])\n"
        "except TamperedError as e:\n"
        "    print(peak() - before, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, archive, tmp_path / "b"], capture_output=True, text=True)
    taken, said = done.stdout.split(" ", 1)
    assert int(taken) < 48 << 10, said  # KiB
    assert not (tmp_path / "b").exists()
