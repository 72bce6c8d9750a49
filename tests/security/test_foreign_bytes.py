"""Each parser of bytes that others have written takes anything: it gives a value, or the error that it names."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import resource
import socket
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_kernel.debugger.dap.messages import Frames, content, frame
from monarch_kernel.debugger.reports.job_report import ReportError, load
from monarch_kernel.engines.join.announcements import announcement_of
from monarch_kernel.errors import LaunchError
from monarch_kernel.kernel.output.render import ansi_to_html, strip_ansi
from monarch_kernel.launchers import host_request
from monarch_kernel.launchers.ssh import SSHLauncher
from monarch_kernel.protocol.announcement import WorkerAnnouncement, find_announcement
from monarch_kernel.protocol.keys.allow_list import parse_list
from monarch_kernel.protocol.keys.guarded_files import KeyFileError
from monarch_kernel.protocol.messages import PREFIX, ProcStarted, encode
from monarch_kernel.runtime.node.link import Link
from monarch_kernel.runtime.node.poller import Poller
from tests.debugger.test_report_files import plain
from workspace_sync.environment.locked import _locked_wheels
from workspace_sync.environment.packing import pack, unpack
from workspace_sync.model.errors import SyncError
from workspace_sync.model.manifest import (
    FileEntry,
    Folder,
    ManifestDelta,
    ManifestError,
    decode_delta,
    encode_delta,
    folder_digest,
    patched,
)
from workspace_sync.scanning.rules import RuleFile

#: How much memory all of it takes at most (bytes), beyond what is loaded.
MEMORY = 256 << 20

fuzzed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: What values may be in place of others in plain data.
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../../x", "\x1b]0;x\x07", "-oProxyCommand=x", "x\ny"]),
    st.lists(st.integers(-9, 9), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-9, 9), max_size=2),
)
chunks = st.lists(st.binary(max_size=40), max_size=4)


@pytest.fixture(scope="module", autouse=True)
def bounded() -> Iterator[None]:
    """This process may not take much more memory meanwhile."""
    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (have + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes with some of them changed, cut out or repeated."""
    found = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(found)))
        end = draw(st.integers(at, min(len(found), at + 40)))
        found[at:end] = draw(st.binary(max_size=12)) if draw(st.booleans()) else found[at:end] * 2
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Plain data with some of its parts replaced, removed or doubled."""
    whole = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        at, key = None, None
        inner = whole
        while isinstance(inner, dict | list) and inner and (at is None or draw(st.integers(0, 5))):
            at, key = inner, draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
            inner = at[key]
        if at is None:
            break
        if draw(st.integers(0, 3)):
            at[key] = draw(values)
        else:
            del at[key]
    return whole


# -- between processes ----------------------------------------------------------------------------------


MESSAGE = encode(ProcStarted("p", 1))
FRAMED = PREFIX.pack(len(MESSAGE), 5) + MESSAGE + b"hello"


@fuzzed
@given(
    st.one_of(
        mutated(FRAMED * 3),
        st.binary(max_size=200),
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**63)).map(lambda sizes: PREFIX.pack(*sizes) + b"x" * 50),
    )
)
def test_frames(data: bytes) -> None:
    poller = Poller(background=False)
    ours, theirs = socket.socketpair()
    got: list[Any] = []
    link = Link(poller, "peer", lambda _link, header, body: got.append((header, bytes(body))), lambda _link: None)
    try:
        link.attach(ours)
        theirs.sendall(data)
        theirs.close()
        while link.receive():
            pass
        assert link.closed and len(got) <= len(data) // PREFIX.size
    finally:
        link.close()
        theirs.close()
        poller.close()


@fuzzed
@given(
    mutated(frame({"seq": 1, "type": "request", "command": "attach", "arguments": {"token": "x"}}) * 2),
    st.integers(1, 50),
)
def test_debug_adapter_protocol(data: bytes, cut: int) -> None:
    frames = Frames()
    try:
        for at in range(0, len(data), cut):
            for message in frames.feed(data[at : at + cut]):
                assert isinstance(content(message), dict)
    except (ValueError, TypeError, RecursionError):  # what the gateway ends a client for
        pass
    assert len(frames.rest) <= len(data)


@fuzzed
@given(
    st.one_of(
        mutated(WorkerAnnouncement(monarch_kernel="1", url="tcp://h:1", devices=("0",)).line()), chunks.map(b"\n".join)
    )
)
def test_announcements_of_workers(data: bytes) -> None:
    found = find_announcement(b"motd\n" + data + b"\n")
    assert found is None or isinstance(found.url, str)


RANK = {"name": "n", "pid": 1, "began": 1, "since": 1.0, "host": "h", "program": "p", "folder": "/", "python": "3"}


@fuzzed
@given(
    changed({**RANK, "identity": {"rank": 0, "world": 1}, "space": 1, "socket": "", "meet": "", "later": 1}) | values
)
def test_announcements_of_ranks(data: Any) -> None:
    try:
        found = announcement_of(data)
    except ValueError:
        return
    assert isinstance(found.name, str) and isinstance(found.pid, int) and isinstance(found.identity.rank, int)


# -- files ----------------------------------------------------------------------------------------------


def delta() -> bytes:
    entry = FileEntry(3, 0o644, bytes(32))
    below = Folder(0o755, {b"b": entry}, {b"l": b"b"}, {})
    below.digest = folder_digest(below)
    top = Folder(0o755, {b"a": entry}, {}, {b"d": below.digest})
    top.digest = folder_digest(top)
    return encode_delta(ManifestDelta(b"", top.digest, {b"": top, b"d": below}, []))


@fuzzed
@given(st.one_of(mutated(delta()), changed(msgspec.msgpack.decode(delta())).map(msgspec.msgpack.encode)))
def test_manifests(data: bytes) -> None:
    try:
        found = patched(None, decode_delta(data))
    except ManifestError:
        return
    for path in found.folders:
        assert all(part not in (b"", b".", b"..") for part in path.split(b"/")) or path == b""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small one."""
    root = tmp_path_factory.mktemp("archive")
    (root / "env" / "conda-meta").mkdir(parents=True)
    (root / "env" / "conda-meta" / "history").write_text("")
    (root / "env" / "text").write_text("some text")
    pack(root / "env", root / "e.tar")
    with tarfile.open(root / "e.tar") as whole:  # without the program, which is large
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as small:
            for member in whole:
                if not member.name.startswith("bin/"):
                    small.addfile(member, whole.extractfile(member) if member.isreg() else None)
    return data.getvalue().rstrip(b"\0") + bytes(1024)


@fuzzed
@given(data=st.data())
def test_archives(archive: bytes, tmp_path: Path, data: st.DataObject) -> None:
    path, target = tmp_path / "e.tar", tmp_path / "made" / "env"
    path.write_bytes(data.draw(mutated(archive)))
    try:
        unpack(path, target)
    except SyncError:
        assert not target.exists()
        return
    assert {each.name for each in target.iterdir()} >= {"conda-meta", "text"}
    for each in [*target.rglob("*")][::-1]:
        each.rmdir() if each.is_dir() else each.unlink()
    target.rmdir()


@fuzzed
@given(changed(plain()) | mutated(json.dumps(plain()).encode()))
def test_reports(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "report.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    try:
        report = load(path)
    except ReportError:
        return
    assert report.text() and report.page() and report.asdict()


UV = """
version = 1
requires-python = ">=3.11"
[[package]]
name = "project"
version = "0.1"
source = { virtual = "." }
dependencies = [{ name = "one", extra = ["x"] }, { name = "two", marker = "sys_platform == 'win32'" }]
[[package]]
name = "one"
version = "1.0"
source = { registry = "https://host.invalid/simple" }
wheels = [{ url = "https://host.invalid/one-1.0-py3-none-any.whl", hash = "sha256:00" }]
"""
PYLOCK = """
lock-version = "1.0"
created-by = "x"
[[packages]]
name = "one"
version = "1.0"
marker = "python_version > '3'"
[[packages.wheels]]
name = "one-1.0-py3-none-any.whl"
url = "https://host.invalid/one-1.0-py3-none-any.whl"
hashes = { sha256 = "00" }
"""


def toml(whole: Any) -> str:
    """Plain data as inline TOML."""
    if isinstance(whole, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(value)}" for key, value in whole.items()) + "}"
    if isinstance(whole, list):
        return "[" + ", ".join(map(toml, whole)) + "]"
    return json.dumps(whole) if isinstance(whole, str | bool | int) else repr(whole or 0.0)


@fuzzed
@given(data=st.data(), text=st.sampled_from([UV, PYLOCK]))
def test_lock_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, text: str) -> None:
    path = str(tmp_path_factory.getbasetemp() / "uv.lock")
    if data.draw(st.booleans()):
        new = data.draw(mutated(text.encode()))
    else:
        whole = data.draw(changed(tomllib.loads(text)))
        new = "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in whole.items()).encode("utf-8", "replace")
    Path(path).write_bytes(new)
    try:
        found = _locked_wheels(path, path, None)
    except SyncError:
        return
    for wheel in found:
        line = f"{wheel.name} @ {wheel.url} {' '.join(wheel.hashes)}"
        assert re.fullmatch(r"[!-~]+ @ [!-~]+ [!-~]+", line) and not line.startswith("-")


@fuzzed
@given(st.one_of(st.binary(max_size=60), mutated(b"node1 slots=8 # first\nuser@node2\n\n# -x\n")))
def test_hostfiles(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "hosts"
    path.write_bytes(data)
    try:
        launcher = SSHLauncher.configured({"hostfile": str(path)})
    except ValueError:
        return
    hosts = launcher.options()["hosts"]
    assert hosts and not any(host.startswith("-") or host.split() != [host] for host in hosts)


@fuzzed
@given(
    mutated(
        b'[profiles.a]\non = "slurm"\ninterface = "ib0"\nhosts = 2\nenv = { A = "b" }\n[profiles."b"]\non = "ssh"\n'
    )
)
def test_profiles(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        found = host_request._read(str(path), True)
        for each in found.values():
            each.risks()
            host_request.checked_options(each.engine, each.settings["options"], "here")
    except LaunchError:
        return
    assert all(re.fullmatch(r"\w[\w.-]*", name) for name in found)


@fuzzed
@given(st.one_of(mutated(b"monarch-key alice MIIBlDCCAUag\n# comment\n"), chunks.map(b"\n".join)))
def test_lists_of_keys(data: bytes) -> None:
    try:
        list(parse_list("list", data.decode("utf-8", "replace")))
    except KeyFileError:
        pass


parts = st.sampled_from(
    [b"*", b"**", b"?", b"/", b"a", b"[", b"]", b"!", b"\\", b"[a-b]", b"[[:alpha:]]", b"\n", b" ", b"#"]
)


@fuzzed
@given(
    st.lists(parts, max_size=40).map(b"".join) | st.binary(max_size=60),
    st.lists(st.sampled_from([b"a", b"b", b"/", b"aa", b"]", b"\\", b"\xff"]), min_size=1, max_size=40).map(b"".join),
)
def test_files_of_rules(text: bytes, path: bytes) -> None:
    path = re.sub(rb"/+", b"/", path).strip(b"/") or b"a"
    rules = RuleFile(text, b"/tree", "x")
    line = rules.match(os.path.basename(path), b"/tree/" + path, False)
    assert line is None or line.source.startswith("x:")


@fuzzed
@given(
    st.lists(
        st.sampled_from(
            ["\x1b[", "\x1b]", "\x1b\\", "\x07", ";", "38;5;", "48;2;", "9" * 5000, "1", "m", "<", "K", "\x9b"]
        )
        | st.text(max_size=4),
        max_size=12,
    ).map("".join)
)
def test_terminal_codes(text: str) -> None:
    html = ansi_to_html(text)
    assert "\x1b" not in html and re.sub(r"</?span[^<>]*>", "", html).count("<") == 0
    assert strip_ansi(strip_ansi(text)) == strip_ansi(text) and "\x1b" not in strip_ansi(text)
