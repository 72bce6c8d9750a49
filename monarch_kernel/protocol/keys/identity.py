"""One key: a private key, its certificate and its name; and the files and lines that hold them.

The certificate is self-signed and cannot sign others. It is trusted because a list contains exactly this certificate,
never because of a signature. It contains no name, because any stranger that connects to a listener sees it: a key's own
file or the list gives it a name. The validity period has no meaning, because clocks of cluster nodes may be wrong: a
key is valid as long as it is on a list.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.keys.guarded_files import (
    KeyFileError,
    KeyFileExistsError,
    expanded,
    read_guarded,
    write_new,
)

if TYPE_CHECKING:
    import ssl

VERSION = 2
#: The first word of a public line.
LINE_TYPE = "monarch-key"

_ABOUT = "A key of monarch_kernel. Whoever has this file is let in wherever the key is trusted, and can run code there."
_LONGEST_NAME = 128
_PUNCTUATION = "._@+-"  # in names, beside letters and digits
_LARGEST_CERTIFICATE = 8192


class Public(msgspec.Struct, frozen=True):
    """The public part of a key: its given name, and its certificate (DER)."""

    name: str
    certificate: bytes

    def __repr__(self) -> str:
        return f"Public({self.name!r})"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the certificate, in hex."""
        return hashlib.sha256(self.certificate).hexdigest()

    @property
    def line(self) -> str:
        """The one-line form for allow-lists."""
        return f"{LINE_TYPE} {self.name} {base64.b64encode(self.certificate).decode('ascii')}"


class Identity(msgspec.Struct, frozen=True):
    """A key with its private part."""

    public: Public
    private: bytes  # PKCS #8, DER

    def __repr__(self) -> str:
        return f"Identity({self.public!r})"  # a secret must not get into logs

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("public", self.public)]

    def pem(self) -> bytes:
        """Encode the private key and the certificate in the form that TLS libraries load."""
        return _armoured("PRIVATE KEY", self.private) + _armoured("CERTIFICATE", self.public.certificate)


def _armoured(what: str, der: bytes) -> bytes:
    return f"-----BEGIN {what}-----\n".encode() + base64.encodebytes(der) + f"-----END {what}-----\n".encode()


def default_name() -> str:
    """Return the default name of a key: this user and host."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in containers
        user = f"uid{os.getuid()}"
    name = re.sub(r"[^A-Za-z0-9._@+-]+", "-", f"{user}@{socket.gethostname()}").lstrip(".-_@+")
    return name[:128] or "key"


def check_name(name: str) -> str:
    """Check the name of a key, and return it.

    Raises:
        KeyFileError: it has characters that are not allowed in lists and logs.
    """
    known = name.isascii() and all(c.isalnum() or c in _PUNCTUATION for c in name)
    if not known or not name[:1].isalnum() or len(name) > _LONGEST_NAME:
        raise KeyFileError(f"{name!r} cannot be the name of a key: use up to 128 letters, digits and any of . _ @ + -")
    return name


# -- making ---------------------------------------------------------------------------------------


def new_identity(name: str | None = None) -> Identity:
    """Create a key.

    Raises:
        KeyFileError: the name is invalid.
    """
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    name = check_name(name if name is not None else default_name())
    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    number = hashlib.sha256(public.public_bytes_raw()).digest()
    # Each certificate has its own subject, by which a verifier finds a trusted certificate.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"monarch-kernel {number[:16].hex()}")])
    usage = dict.fromkeys(
        (
            "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
            "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(int.from_bytes(number[:16], "big") >> 1 | 1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(Public(name, certificate.public_bytes(serialization.Encoding.DER)), private)


def make_key_file(path: str | os.PathLike[str], name: str | None = None) -> Identity:
    """Create a key and write it to a new file that only this user can read.

    Args:
        path: the file; it must not exist yet.
        name: the key's name in lists and logs; ``user@host`` by default.

    Raises:
        KeyFileError: the file exists, or cannot be written.
    """
    named = expanded(path)
    identity = new_identity(name)
    try:
        write_new(named, _encode(identity))
    except FileExistsError:
        raise KeyFileExistsError(
            f"{named} exists already, and a key in use must not get lost: name another file, or remove it"
        ) from None
    except OSError as e:
        raise KeyFileError(f"cannot write the key file {named}: {e.strerror}") from e
    return identity


def _encode(identity: Identity) -> bytes:
    fields = {
        "about": _ABOUT,
        "version": VERSION,
        "name": identity.public.name,
        "certificate": base64.b64encode(identity.public.certificate).decode("ascii"),
        "private": base64.b64encode(identity.private).decode("ascii"),
    }
    import json  # workers only read

    return json.dumps(fields, indent=1).encode("ascii") + b"\n"


# -- reading ----------------------------------------------------------------------------------------


def read_key_file(path: str) -> Identity:
    """Read a key file.

    Raises:
        FileNotFoundError: the file does not exist.
        KeyFileError: the file cannot be read, others may use it, or it holds no key.
    """
    return parse_key(read_guarded(path, "key file", secret=True), path)


def new_key_text(name: str | None = None) -> str:
    """Create a key and return it as one line, without writing a file.

    Raises:
        KeyFileError: the name is invalid.
    """
    return key_line(new_identity(name))


def key_text(path: str | os.PathLike[str]) -> str:
    """Read the key in a file as one line.

    Raises:
        KeyFileError: the file is missing or cannot be read, others may use it, or it holds no key.
    """
    try:
        return key_line(read_key_file(expanded(path)))
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}: make it with 'monarch-kernel keys {path}'") from None


def key_line(identity: Identity) -> str:
    """Encode a key with its private part as one line, for a pipe: the content of a key file without line breaks."""
    import json

    return json.dumps(json.loads(_encode(identity)), separators=(",", ":"))


def parse_key(data: bytes | str, path: str) -> Identity:
    """Read the contents of a key file, or the result of ``key_line``.

    Args:
        path: its origin, for messages.

    Raises:
        KeyFileError: it is not a key.
    """
    try:
        fields: Any = msgspec.json.decode(data)
    except (ValueError, msgspec.DecodeError):
        fields = None
    if isinstance(fields, dict) and fields.get("version", 1) != VERSION:
        raise KeyFileError(
            f"{path} was made by another version of monarch_kernel, for another kind of key: "
            "make a new one with 'monarch-kernel keys FILE', and copy it to where this one was used"
        )
    try:
        private = base64.b64decode(fields["private"], validate=True)
        certificate = base64.b64decode(fields["certificate"], validate=True)
        identity = Identity(Public(check_name(fields["name"]), certificate), private)
        _load_once(identity)
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        raise KeyFileError(f"{path} is not a key file: make one with 'monarch-kernel keys FILE'") from None
    return identity


def _load_once(identity: Identity) -> None:
    """Raise if the certificate does not belong to this private key, or if one of them is invalid."""
    import ssl

    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)


def load_pair(context: ssl.SSLContext, identity: Identity) -> None:
    """Load this key into a TLS context. ``ssl`` loads only files, so this uses a temporary anonymous file.

    Raises:
        ssl.SSLError: the certificate does not belong to this private key, or one of them is invalid.
    """
    with open(os.memfd_create("key", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(identity.pem())
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def parse_line(line: str) -> Public:
    """Read a public line, ``monarch-key NAME BASE64``.

    Raises:
        ValueError: the line is invalid; the message has the reason.
    """
    words = line.split()
    if len(words) != 3 or words[0] != LINE_TYPE:
        raise ValueError(f"a key is given as '{LINE_TYPE} NAME BASE64', as 'monarch-kernel keys show FILE' prints it")
    _, name, text = words
    try:
        certificate = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError(f"the key of {name} is not base64: it was cut or changed on the way") from None
    _check_certificate(name, certificate)
    return Public(check_name(name), certificate)


def _check_certificate(name: str, certificate: bytes) -> None:
    import ssl

    try:
        if len(certificate) > _LARGEST_CERTIFICATE:
            raise ValueError
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
    except (ValueError, ssl.SSLError):
        raise ValueError(f"the key of {name} is not a certificate: it was cut or changed on the way") from None
