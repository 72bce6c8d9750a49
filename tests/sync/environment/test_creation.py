"""Environments from lock files, and what an installer has changed in one."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import rattler

from tests.sync.environment.channel import Channel
from tests.sync.environment.trees import installed
from tests.sync.environment.wheels import pip, venv, wheel
from workspace_sync.environment import locked
from workspace_sync.environment.kinds import changed_distributions, distributions, environment
from workspace_sync.environment.locked import create
from workspace_sync.model.errors import IncompatibleError, StoreError


def package(channel: Channel, name: str) -> tuple[str, str]:
    """The (address, SHA-256) of a package of the channel."""
    (path,) = channel.folder.glob(f"*/{name}-*.tar.bz2")
    return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()


def test_conda_lock(channel: Channel, tmp_path: Path) -> None:
    platform = str(rattler.Subdir.current())
    text = (
        f"version: 1\nmetadata:\n  content_hash:\n    {platform}: aa\n  channels:\n  - url: {channel.folder.as_uri()}\n"
    )
    text += f"    used_env_vars: []\n  platforms:\n  - {platform}\n  sources:\n  - e.yml\npackage:\n"
    for name in ("texts", "codes"):
        url, sha256 = package(channel, name)
        text += f"- name: {name}\n  version: '1.0'\n  manager: conda\n  platform: {platform}\n  dependencies: {{}}\n"
        text += f"  url: {url}\n  hash:\n    sha256: {sha256}\n  category: main\n  optional: false\n"
    lock = tmp_path / "conda-lock.yml"
    lock.write_text(text)
    assert create(lock, tmp_path / "a", cache=str(channel.cache)).kind == "conda"
    fresh = channel.install(tmp_path / "b", "texts", "codes")
    for path in ("bin/of-perl", "bin/where", "lib/pkgconfig/texts.pc"):
        made = (tmp_path / "a" / path).read_bytes()
        assert made.replace(bytes(tmp_path / "a"), bytes(tmp_path / "b")) == (fresh / path).read_bytes()
    lock.write_text(text.replace(platform, "osx-arm64"))
    with pytest.raises(IncompatibleError, match=f"is for osx-arm64, and this host is {platform}"):
        create(lock, tmp_path / "c")


def test_an_explicit_list(channel: Channel, short_folder: Path, tmp_path: Path) -> None:
    lock = tmp_path / "explicit.txt"
    lines = ["#".join(package(channel, name)) for name in ("texts", "codes", "pure", "python")]
    lock.write_text("# platform: linux\n@EXPLICIT\n" + "\n".join(lines) + "\n")
    prefix = short_folder / "x"
    create(lock, prefix, cache=str(channel.cache))
    assert subprocess.run([prefix / "bin" / "pure"], capture_output=True, text=True, check=True).stdout == "pure\n"
    fresh = short_folder / "y"
    prefix.rename(short_folder / "x-away")
    channel.install(prefix, "texts", "codes", "pure", "python").rename(fresh)
    made, expected = (installed(each) for each in (short_folder / "x-away", fresh))
    different = {path for path in expected if made.get(path) != expected[path] and "__pycache__" not in path}
    assert all(path.startswith("conda-meta/") for path in different)  # a list says less than the channel


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    return [
        wheel(tmp_path, "one", {"one.py": "X = 1\n"}, scripts={"one": "one:main"}),
        wheel(tmp_path, "two", {"two.py": "X = 2\n"}),
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_wheels(prefix: Path) -> None:
    code = "import one, two; print(one.X + two.X)"
    done = subprocess.run([prefix / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_pylock(wheels: list[Path], tmp_path: Path) -> None:
    lock = tmp_path / "pylock.toml"
    text = 'lock-version = "1.0"\ncreated-by = "test"\n'
    for path in wheels:
        name = path.name.partition("-")[0]
        text += f'[[packages]]\nname = "{name}"\nversion = "1.0"\n'
        text += f'[[packages.wheels]]\npath = "{path.name}"\nhashes = {{sha256 = "{sha256(path)}"}}\n'
    text += '[[packages]]\nname = "elsewhere"\nversion = "1"\nmarker = "sys_platform == \'win32\'"\n'
    text += (
        '[[packages.wheels]]\nurl = "https://nowhere.invalid/elsewhere-1-py3-none-any.whl"\nhashes = {sha256 = "00"}\n'
    )
    lock.write_text(text)
    made = create(lock, tmp_path / "env")
    assert made.kind == "venv" and distributions(made).keys() == {"one", "two"}
    check_wheels(tmp_path / "env")
    fresh = venv(tmp_path / "fresh" / "env", *wheels)
    assert distributions(environment(fresh)).keys() == {"one", "two"}
    lock.write_text(text.replace(sha256(wheels[0]), "0" * 64))
    with pytest.raises(StoreError, match=r"(?si)env2, which is incomplete now: .*hash"):
        create(lock, tmp_path / "env2")
    with pytest.raises(StoreError, match="exists: name a path that does not"):
        create(lock, tmp_path / "env")


UV = """
version = 1
requires-python = ">=3.11"
[[package]]
name = "project"
version = "0.1"
source = {{ virtual = "." }}
dependencies = [{{ name = "one" }}, {{ name = "windows", marker = "sys_platform == 'win32'" }}]
[[package]]
name = "one"
version = "1.0"
source = {{ registry = "." }}
dependencies = [{{ name = "two" }}]
wheels = [{{ path = "{one}", hash = "sha256:{one_hash}" }}]
[[package]]
name = "two"
version = "1.0"
source = {{ registry = "." }}
{two}
[[package]]
name = "windows"
version = "1.0"
source = {{ registry = "https://nowhere.invalid" }}
"""


def test_uv_lock(wheels: list[Path], tmp_path: Path) -> None:
    one, two = wheels
    lock = tmp_path / "uv.lock"
    both = f'wheels = [{{ path = "{two.name}", hash = "sha256:{sha256(two)}" }}]'
    lock.write_text(UV.format(one=one.name, one_hash=sha256(one), two=both))
    create(lock, tmp_path / "env")
    check_wheels(tmp_path / "env")
    lock.write_text(UV.format(one=one.name, one_hash=sha256(one), two='sdist = { path = "two-1.0.tar.gz" }'))
    with pytest.raises(IncompatibleError, match="has no wheel of two 1.0 for this host, and nothing is built here"):
        create(lock, tmp_path / "b")
    lock.write_text(lock.read_text().replace(">=3.11", ">=4"))
    with pytest.raises(IncompatibleError, match=r"is for Python >=4, and this is Python 3\."):
        create(lock, tmp_path / "c")
    assert not (tmp_path / "b").exists()


def test_what_pip_has_changed(wheels: list[Path], tmp_path: Path) -> None:
    prefix = venv(tmp_path / "env", wheels[0])
    about = environment(prefix)
    before = distributions(about)
    assert not changed_distributions(before, distributions(about))
    newer = wheel(tmp_path, "one", {"one.py": "X = 11\n"}, version="1.1")
    pip(prefix, str(newer), str(wheels[1]))
    now = distributions(about)
    changed = changed_distributions(before, now)
    assert (changed.added, changed.changed, changed.removed) == ({"two": "1.0"}, {"one": ("1.0", "1.1")}, {})
    assert changed_distributions(now, before).removed == {"two": "1.0"}


def test_conda_packages_count(channel: Channel, tmp_path: Path) -> None:
    about = environment(channel.install(tmp_path / "a", "texts"))
    assert {name: found[0] for name, found in distributions(about).items()} == {"texts": "1.0"}


def source_that_runs(folder: Path, taken: Path) -> Path:
    """A source distribution whose build makes a file; it needs nothing but Python."""
    content = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'
        '[project]\nname = "evil"\nversion = "1.0"\n',
        "b.py": f"open({str(taken)!r}, 'w')\ndef build_wheel(*_, **__):\n    raise SystemExit(1)\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    }
    path = folder / "evil-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in content.items():
            member = tarfile.TarInfo(f"evil-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("way", ["a line more", "a source", "a source for a wheel", "another name"])
def test_nothing_is_built_and_nothing_else_installed(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str, way: str
) -> None:
    if installer == "pip":
        monkeypatch.setattr(locked, "_uv", lambda: None)
    taken = tmp_path / "taken"
    evil = source_that_runs(tmp_path, taken)
    one = wheels[0].as_uri()
    name, url, digest = {
        "a line more": ("one", f"{one} --hash=sha256:{sha256(wheels[0])}\nevil @ {evil.as_uri()}", sha256(evil)),
        "a source": ("evil", evil.as_uri(), sha256(evil)),
        "a source for a wheel": ("evil", f"{evil.as_uri()}#/evil-1.0-py3-none-any.whl", sha256(evil)),
        "another name": ("two", one, sha256(wheels[0])),
    }[way]
    lock = tmp_path / "pylock.toml"
    lock.write_text(
        f'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "{name}"\nversion = "1.0"\n'
        f'[[packages.wheels]]\nname = "{name}-1.0-py3-none-any.whl"\nurl = {json.dumps(url)}\n'
        f'hashes = {{sha256 = "{digest}"}}\n'
    )
    with pytest.raises(IncompatibleError, match="the lock file has "):
        create(lock, tmp_path / "env")
    assert not taken.exists() and not (tmp_path / "env").exists()
