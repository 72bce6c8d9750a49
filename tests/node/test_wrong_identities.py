"""Eight kinds of wrong identity, at a worker, as a worker and at a meeting point; and no session is resumed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from monarch_kernel._version import __version__
from monarch_kernel.engines.join.join_gateway import JoinGateway
from monarch_kernel.protocol.gateway_messages import MeetAs
from monarch_kernel.protocol.keys import Keys, load_keys, make_key_file
from monarch_kernel.protocol.keys.allow_list import SETTLE, AllowList, add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import Identity, Public, read_key_file
from monarch_kernel.protocol.messages import encode
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import channel
from tests.attacks.holder import framed
from tests.conftest import wait_until
from tests.node.tcpside import Side, header

LONG = 60.0


@pytest.fixture
def alice(keys: Keys, tmp_path: Path) -> Keys:
    """A key that the team's trusts, and that trusts the team's."""
    made = another("alice", keys, tmp_path)
    add_key(keys.allow, made._identity.public)
    keys.refresh()
    return made


def another(name: str, keys: Keys, folder: Path) -> Keys:
    """A key that trusts the team's."""
    make_key_file(folder / name, name)
    add_key(f"{folder / name}.allow", read_key_file(keys.path).public)
    return load_keys(folder / name)


class _Chain(Keys):
    """Sends the certificate that has signed its own, too."""

    more: bytes

    def _new_context(self, protocol: int) -> ssl.SSLContext:
        context = super()._new_context(protocol)
        own = [self._identity.public.certificate, self.more]
        pem = "".join(map(ssl.DER_cert_to_PEM_cert, own))
        key = serialization.load_der_private_key(self._identity.private, None)
        kind = serialization.PrivateFormat.PKCS8
        text = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()).decode()
        path = Path(self.path).with_suffix(".chain")
        path.write_text(pem + text)
        context.load_cert_chain(path)
        return context


class _Older(Keys):
    """Speaks TLS 1.2."""

    def _new_context(self, protocol: int) -> ssl.SSLContext:
        context = super()._new_context(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context


def forged(alice: Keys, key: Any, signer: Any, subject: str = "", kind: type[Keys] = Keys) -> Keys:
    """A certificate that looks like Alice's, of a key, signed by one."""
    real = x509.load_der_x509_certificate(alice._identity.public.certificate)
    name = x509.Name.from_rfc4514_string(subject) if subject else real.subject
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(real.subject)
        .public_key(key.public_key())
        .serial_number(real.serial_number)
        .not_valid_before(real.not_valid_before_utc)
        .not_valid_after(real.not_valid_after_utc - timedelta(days=1))
        .sign(signer, hashes.SHA256() if isinstance(signer, ec.EllipticCurvePrivateKey) else None)
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.DER, form, serialization.NoEncryption())
    identity = Identity(Public("alice", made.public_bytes(serialization.Encoding.DER)), private)
    return kind(alice.path, identity, AllowList(alice.allow, required=True))


def own_key(keys: Keys) -> Any:
    return serialization.load_der_private_key(keys._identity.private, None)


def unknown(keys: Keys, alice: Keys, folder: Path) -> Keys:
    return another("stranger", keys, folder)


def revoked(keys: Keys, alice: Keys, folder: Path) -> Keys:
    bob = another("bob", keys, folder)
    add_key(keys.allow, bob._identity.public)
    keys.refresh()
    assert keys.name_of(bob._identity.public.certificate) == "bob"
    revoke_keys(keys.allow, "bob")
    wait_until(
        lambda: keys.refresh() and keys.name_of(bob._identity.public.certificate) is None, "it is out", SETTLE + LONG
    )
    return bob


def same_names(keys: Keys, alice: Keys, folder: Path) -> Keys:
    key = Ed25519PrivateKey.generate()
    return forged(alice, key, key)


def of_another_kind(keys: Keys, alice: Keys, folder: Path) -> Keys:
    key = ec.generate_private_key(ec.SECP256R1())
    return forged(alice, key, key)


def signed_by_a_trusted_key(keys: Keys, alice: Keys, folder: Path) -> Keys:
    return forged(alice, Ed25519PrivateKey.generate(), own_key(alice), "CN=mallory")


def signed_with_its_chain(keys: Keys, alice: Keys, folder: Path) -> Keys:
    made = forged(alice, Ed25519PrivateKey.generate(), own_key(alice), "CN=mallory", _Chain)
    assert isinstance(made, _Chain)
    made.more = alice._identity.public.certificate
    return made


def another_certificate_of_a_trusted_key(keys: Keys, alice: Keys, folder: Path) -> Keys:
    return forged(alice, own_key(alice), own_key(alice))


def an_older_tls(keys: Keys, alice: Keys, folder: Path) -> Keys:
    return _Older(alice.path, alice._identity, AllowList(alice.allow, required=True))


KINDS = (
    unknown,
    revoked,
    same_names,
    of_another_kind,
    signed_by_a_trusted_key,
    signed_with_its_chain,
    another_certificate_of_a_trusted_key,
    an_older_tls,
)


def said_to(port: int, impostor: Keys, words: bytes) -> bytes:
    """What a listener answers to one that goes on as if it had been let in."""
    answer = b""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), LONG) as sock,
            impostor.client_context().wrap_socket(sock) as wrapped,
        ):
            wrapped.sendall(channel.accept(steady=False) + words)
            while more := wrapped.recv(4096):
                answer += more
    except OSError:
        pass
    return answer


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_identity_gets_nothing_at_a_worker(
    sides: Callable[..., Side],
    keys: Keys,
    alice: Keys,
    tmp_path: Path,
    kind: Callable[..., Keys],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = sides()
    port = int(worker.listen().rpartition(":")[2])
    assert not said_to(port, kind(keys, alice, tmp_path), framed(header("run this"), b"code"))
    wait_until(lambda: "refused - - 127.0.0.1: " in caplog.text, "a line in the log")
    assert not worker.links and not worker.got
    friend = sides(alice)
    link = friend.dial(worker.listeners[0].url)
    link.send(header("a friend"))
    worker.wait(lambda: worker.got, "the one that is trusted")
    assert worker.names() == ["a friend"] and worker.links[0].name == "alice"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_identity_gets_nothing_as_a_worker(
    sides: Callable[..., Side], keys: Keys, alice: Keys, tmp_path: Path, kind: Callable[..., Keys]
) -> None:
    false = sides(kind(keys, alice, tmp_path))
    url = false.listen()
    controller = sides()
    link = controller.dial(url, LONG)
    link.send(header("secret"), b"of the controller")
    controller.wait(lambda: controller.ended, "the refusal", LONG)
    assert link.closed and link.ended
    assert not false.got and not false.links and not controller.got


@pytest.fixture
def meeting(keys: Keys) -> Iterator[JoinGateway]:
    poller = Poller()
    audit = Audit(poller)
    made = JoinGateway(poller, "tcp://127.0.0.1:0", keys, audit)
    yield made
    made.close()
    audit.close()
    poller.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_identity_gets_nothing_at_a_meeting_point(
    meeting: JoinGateway, keys: Keys, alice: Keys, tmp_path: Path, kind: Callable[..., Keys]
) -> None:
    port = int(meeting.url.rpartition(":")[2])
    words = framed(encode(MeetAs(__version__, False, "a-machine")))
    assert not said_to(port, kind(keys, alice, tmp_path), words)
    assert not meeting._links and not meeting._machines
    assert b"not a message of this version" in said_to(port, alice, framed(b"\xc1"))


def test_no_session_is_resumed(sides: Callable[..., Side], keys: Keys) -> None:
    """The listener gives no ticket, so one that asks to resume proves its key anew."""
    worker = sides()
    port = int(worker.listen().rpartition(":")[2])
    context = keys.client_context()
    assert keys.server_context().num_tickets == 0
    kept: ssl.SSLSession | None = None
    for _ in range(2):
        with (
            socket.create_connection(("127.0.0.1", port), LONG) as sock,
            context.wrap_socket(sock, session=kept) as wrapped,
        ):
            wrapped.sendall(channel.accept(steady=False))
            assert wrapped.recv(4) == b"mkl\n"
            kept = wrapped.session
            assert kept is not None and not kept.has_ticket and not wrapped.session_reused
