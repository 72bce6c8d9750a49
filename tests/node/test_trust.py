"""Whom a process trusts: TLS between keys, lists that change, and the key that a user has without asking for one."""

from __future__ import annotations

import os
import pwd
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.protocol.keys import KeyFileError, Keys, allow_list, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import Identity, Public
from tests.conftest import wait_until
from tests.waiting import patience

Make = Callable[..., Keys]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make("alice", bob)``: a key that trusts itself and ``bob``'s."""

    def made(name: str, *trusted: Keys) -> Keys:
        path = tmp_path / name
        make_key_file(path, name)
        for keys in trusted:
            add_key(f"{path}.allow", public(keys))
        return load_keys(path)

    return made


def public(keys: Keys) -> Public:
    return keys._identity.public


def trust(keys: Keys, *others: Keys) -> None:
    for other in others:
        add_key(keys.allow, public(other))


def shake_hands(client: Keys | ssl.SSLContext, server: Keys) -> tuple[str | None, str | None]:
    """What each side learns of the other's name; raises what the server's side says if it refuses."""
    near, far = socket.socketpair()
    far.settimeout(30)
    near.settimeout(30)
    answer: list[str | BaseException | None] = []

    def serve() -> None:
        try:
            with server.server_context().wrap_socket(far, server_side=True) as sock:
                assert sock.version() == "TLSv1.3" and not sock.session_reused
                answer.append(server.name_of(sock.getpeercert(True) or b""))
                sock.sendall(b"welcome")
        except OSError as e:
            answer.append(e)
        finally:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    context = client if isinstance(client, ssl.SSLContext) else client.client_context()
    name = None
    try:
        with context.wrap_socket(near) as sock:
            name = sock.getpeercert(True)
            sock.recv(patience(16))  # until the server has looked at the certificate, too
    except OSError:
        pass
    finally:
        near.close()
        thread.join(patience(30))
    (found,) = answer
    if isinstance(found, BaseException):
        raise found
    return (None if isinstance(client, ssl.SSLContext) else client.name_of(name or b"")), found


# -- who gets in ----------------------------------------------------------------------------------------


def test_a_team_shares_one_key(make: Make, tmp_path: Path) -> None:
    team = make("team")
    assert shake_hands(team, load_keys(tmp_path / "team")) == ("team", "team")


def test_two_keys_that_trust_each_other(make: Make) -> None:
    alice = make("alice")
    worker = make("worker", alice)
    trust(alice, worker)
    assert shake_hands(alice, worker) == ("worker", "alice")


def test_it_takes_both(make: Make) -> None:
    worker = make("worker")
    alice = make("alice", worker)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(alice, worker)
    with pytest.raises(OSError, match="alert"):
        shake_hands(worker, alice)


def test_a_client_without_a_key(make: Make) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="(?i)peer.did.not.return.a.certificate"):
        shake_hands(context, make("worker"))


def test_older_versions_of_tls(make: Make) -> None:
    alice = make("alice")
    context = alice.client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="(?i)unsupported.protocol|version"):
        shake_hands(context, alice)


def test_a_name_is_what_the_own_list_says(make: Make, tmp_path: Path) -> None:
    alice, worker = make("alice"), make("worker")
    add_key(worker.allow, Public("alice-of-lab-3", public(alice).certificate))
    trust(alice, worker)
    assert shake_hands(alice, worker) == ("worker", "alice-of-lab-3")


def test_a_certificate_does_not_name_its_owner(make: Make) -> None:
    assert b"alice" not in public(make("alice")).certificate


def test_a_trusted_key_cannot_vouch_for_others(make: Make) -> None:
    """Neither a certificate that it has signed, nor another of the same key, is let in."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    alice = make("alice")
    worker = make("worker", alice)
    trust(alice, worker)
    issuer = x509.load_der_x509_certificate(public(alice).certificate)
    signer = serialization.load_der_private_key(alice._identity.private, None)
    assert isinstance(signer, Ed25519PrivateKey)
    stranger = Ed25519PrivateKey.generate()
    for key, subject in ((stranger, "CN=mallory"), (signer, issuer.subject.rfc4514_string())):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name.from_rfc4514_string(subject))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(issuer.not_valid_before_utc)
            .not_valid_after(issuer.not_valid_after_utc)
            .sign(signer, None)
        )
        private = key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        forged = Identity(Public("forged", certificate.public_bytes(serialization.Encoding.DER)), private)
        mallory = Keys(alice.path, forged, allow_list.AllowList(alice.allow, required=True))
        try:
            assert shake_hands(mallory, worker)[1] is None  # TLS may find the chain good; then it is not on the list
        except ssl.SSLCertVerificationError:
            pass
    assert shake_hands(alice, worker) == ("worker", "alice")


# -- lists that change ------------------------------------------------------------------------------------


def test_a_revoked_key_is_known_no_more_and_others_are(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = make("alice"), make("bob")
    worker = make("worker", alice, bob)
    trust(alice, worker)
    trust(bob, worker)
    assert shake_hands(alice, worker) == ("worker", "alice")
    generation = worker.refresh()
    monkeypatch.setattr(allow_list, "SETTLE", 0.0)
    revoke_keys(worker.allow, "alice")
    assert worker.refresh() == worker.generation > generation
    assert worker.name_of(public(alice).certificate) is None
    assert shake_hands(bob, worker) == ("worker", "bob")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(alice, worker)
    trust(worker, alice)
    assert shake_hands(alice, worker) == ("worker", "alice")


def test_a_list_that_is_made_later(make: Make) -> None:
    alice, worker = make("alice"), make("worker")
    assert not os.path.exists(worker.allow)
    trust(worker, alice)
    trust(alice, worker)
    assert shake_hands(alice, worker) == ("worker", "alice")


def test_a_list_of_another_name(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = make("alice")
    team = tmp_path / "team.allow"
    add_key(str(team), public(alice))
    worker = make("worker")
    for keys in (load_keys(worker.path, team), load_keys(worker.path, str(team))):
        assert keys.name_of(public(alice).certificate) == "alice"
        assert not keys.same_as(worker)
    monkeypatch.setenv("MONARCH_KERNEL_ALLOW", str(team))
    assert load_keys(worker.path).allow == str(team)
    monkeypatch.setenv("MONARCH_KERNEL_ALLOW", str(tmp_path / "none"))
    with pytest.raises(KeyFileError, match="there is no allow-list"):
        load_keys(worker.path)


def test_a_file_system_that_does_not_answer_holds_up_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, worker = make("alice"), make("worker")
    trust(alice, worker)
    answers, asked = threading.Event(), threading.Event()
    real = allow_list.AllowList.refresh

    def refresh(listed: allow_list.AllowList) -> bool:
        asked.set()
        answers.wait(60)
        return real(listed)

    assert alice.refresh() == 1
    monkeypatch.setattr(allow_list.AllowList, "refresh", refresh)
    add_key(worker.allow, public(alice))
    assert worker.refresh() == 0 and asked.is_set()
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(alice, worker)
    answers.set()
    wait_until(lambda: worker.generation == 1, "the list is read")
    assert shake_hands(alice, worker) == ("worker", "alice")


# -- the user's own key -------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    return tmp_path


def test_the_first_use_makes_a_key(home: Path) -> None:
    keys = load_keys()
    path = home / ".config" / "monarch_kernel" / "key"
    assert keys.path == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert keys.same_as(load_keys())
    assert re.fullmatch(rf"{pwd.getpwuid(os.getuid()).pw_name}@[\w.-]+", keys.name)


def test_the_folder_for_settings_is_where_the_user_wants_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "settings"))
    assert load_keys().path == str(home / "settings" / "monarch_kernel" / "key")
    monkeypatch.setenv("XDG_CONFIG_HOME", "settings")  # not absolute: to be ignored
    assert load_keys().path == str(home / ".config" / "monarch_kernel" / "key")


def test_all_who_make_it_at_once_have_the_same(home: Path) -> None:
    load = "from monarch_kernel.protocol.keys import load_keys; print(load_keys().fingerprint)"
    program = f"import sys; sys.stdin.read(); {load}"
    makers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.close()
        maker.stdin = None
    assert {maker.communicate(timeout=patience(60))[0] for maker in makers} == {f"{load_keys().fingerprint}\n"}
    assert os.listdir(home / ".config" / "monarch_kernel") == ["key"]


def test_a_home_that_cannot_hold_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(KeyFileError, match=r"this user's own cannot be made.*monarch-kernel keys FILE.*--key-file"):
        load_keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_home_of_another_user(home: Path) -> None:
    """As sudo may leave it in the environment: a key of root in there would keep its owner out."""
    os.chown(home, 65533, -1)
    with pytest.raises(KeyFileError, match=r"cannot be made: .* belongs to .*65533"):
        load_keys()
    assert os.listdir(home) == []


def test_a_home_is_written_as_a_tilde(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_key_file("~/team.key", "team")
    add_key(str(home / "team.list"), made.public)
    for keys in (load_keys("~/team.key"), load_keys("~/team.key", "~/team.list")):
        assert keys.path == str(home / "team.key")
    monkeypatch.setenv("MONARCH_KERNEL_KEY_FILE", "~/team.key")
    assert load_keys().name == "team"
    with pytest.raises(KeyFileError, match="there is no home folder for the ~no-such-user in"):
        load_keys("~no-such-user/key")


def test_another_host_needs_to_know_where_the_key_goes(home: Path) -> None:
    hint = load_keys().refusal_hint("node1")
    assert f"'scp -p {home}/.config/monarch_kernel/key node1:.config/monarch_kernel/key'" in hint
    assert f"{home}/.config/monarch_kernel/key.allow" in hint


# -- the secret ---------------------------------------------------------------------------------------------


def test_the_secret_stays_in_its_file(make: Make, tmp_path: Path) -> None:
    keys = make("alice")
    private = keys._identity.private
    for shown in (repr(keys), repr(keys._identity), str(keys), f"{keys}", keys.refusal_hint("node1")):
        assert repr(private)[2:20] not in shown
    before = set(os.listdir("/proc/self/fd"))
    keys.client_context()
    keys.server_context()
    assert set(os.listdir("/proc/self/fd")) <= before, "a copy of it is open still"
    assert os.listdir(tmp_path) == ["alice"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_that_may_not_be_looked_into_can_load_its_key(tmp_path: Path) -> None:
    """What keeps others from its memory must not keep itself from the file without a name."""
    program = """
import ctypes, os, ssl
from monarch_kernel.protocol.keys.identity import load_pair, new_identity
identity = new_identity("x")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0 and os.stat("/proc/self/fd").st_uid == 0
load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))
