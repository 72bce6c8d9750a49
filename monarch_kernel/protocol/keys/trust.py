"""The keys that a process needs for links: its own key, the keys that it trusts, and TLS contexts with both."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time

from monarch_kernel import environment
from monarch_kernel.protocol.keys.allow_list import AllowList
from monarch_kernel.protocol.keys.guarded_files import KeyFileError, KeyFileExistsError, expanded
from monarch_kernel.protocol.keys.identity import Identity, load_pair, make_key_file, parse_key, read_key_file
from monarch_kernel.protocol.private_files import user_name

log = logging.getLogger(__name__)

#: The maximum time that checking a list may block the caller (seconds).
PATIENCE = 0.2
#: The suffix of a key file's own list.
ALLOW_SUFFIX = ".allow"


class Keys:
    """A process's own key, and the keys that it trusts: its own, and those on the allow-list.

    ``load_keys`` creates an instance. An owner of links calls ``refresh()`` periodically (such as twice a second). When
    ``generation`` has changed, it ends the links whose certificate ``name_of`` no longer returns.

    Args:
        path: the key file.
        identity: the key in it.
        allowed: the list, which may change.
    """

    def __init__(self, path: str, identity: Identity, allowed: AllowList) -> None:
        #: The key file.
        self.path = path
        #: The allow-list, which need not exist.
        self.allow = allowed.path
        #: Incremented each time the set of trusted keys changes.
        self.generation = 0
        self._identity = identity
        self._allowed = allowed
        self._lock = threading.Lock()
        self._trusted = self._find_trusted()
        self._contexts: dict[int, ssl.SSLContext] = {}
        self._look: threading.Thread | None = None  # checks the list
        self._look_until = 0.0

    @property
    def name(self) -> str:
        """This key's name in its file."""
        return self._identity.public.name

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of this key's certificate, in hex."""
        return self._identity.public.fingerprint

    def same_as(self, other: Keys) -> bool:
        """Return whether this is the same key, with the same list."""
        return (self.fingerprint, self.allow) == (other.fingerprint, other.allow)

    def refresh(self) -> int:
        """Check whether the allow-list has changed. Return ``generation``.

        Another thread does the check, because a file system may take minutes to answer, and the caller must not wait
        for it.
        """
        with self._lock:
            look = self._look
            if look is None:
                look = self._look = threading.Thread(target=self._refresh, name="allow-list", daemon=True)
                self._look_until = time.monotonic() + PATIENCE
                try:
                    look.start()
                except RuntimeError:  # no thread can be started, as at interpreter shutdown
                    self._look = None
                    return self.generation
        look.join(max(0.0, self._look_until - time.monotonic()))
        return self.generation

    def _refresh(self) -> None:
        try:
            if self._allowed.refresh():
                with self._lock:
                    self._trusted = self._find_trusted()
                    self._contexts.clear()
                    self.generation += 1
        finally:
            with self._lock:
                self._look = None

    @property
    def described(self) -> str:
        """A description of this key and the trusted keys, for a log."""
        listed = len(self._allowed.keys)
        others = f" and {listed} on {self.allow}" if listed else ""
        return f"the key {self.name} ({self.fingerprint[:16]}) of {self.path}, which trusts itself{others}"

    def name_of(self, der: bytes) -> str | None:
        """Look up the name of a certificate's key on the list, as of the last ``refresh()``; None if it is not trusted.

        Call this for each link when ``generation`` has changed.
        """
        return self._trusted.get(der)

    def admitted(self, der: bytes) -> str | None:
        """Look up the name of a certificate's key on the current list, after TLS has proved the certificate.

        The list is read again, because the handshake may have taken a long time.
        """
        self.refresh()
        return self._trusted.get(der)

    def client_context(self) -> ssl.SSLContext:
        """Return the context for connecting; recreated when the list has changed."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        """Return the context for listening; recreated when the list has changed.

        No session is resumed: each handshake proves the key.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def refusal_hint(self, host: str) -> str:
        """Compose advice for a process of another host that has refused this key, or whose key is not trusted here."""
        there = self.path
        with contextlib.suppress(KeyFileError):
            there = there.removeprefix(expanded("~") + "/")  # relative to that host's home folder
        return (
            f"this process uses the key {self.path} ({self.name}, {self.fingerprint[:16]}). Either copy it there: "
            f"'scp -p {self.path} {host}:{there}', and start the worker anew; or {self.trust_hint}"
        )

    @property
    def trust_hint(self) -> str:
        """The same advice for a process of which only its own unverified data is known."""
        return (
            "let each trust the other's key: put the line that 'monarch-kernel keys show' prints of each on the "
            f"other's list with 'monarch-kernel keys add' (the list here: {self.allow})"
        )

    def _find_trusted(self) -> dict[bytes, str]:
        own = self._identity.public
        return {own.certificate: own.name} | {der: key.name for der, key in self._allowed.keys.items()}

    def _context(self, protocol: int) -> ssl.SSLContext:
        self.refresh()
        with self._lock:
            context = self._contexts.get(protocol)
            if context is None:
                context = self._contexts[protocol] = self._new_context(protocol)
            return context

    def _new_context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates have no host names: exactly these are trusted, on any host
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # each is trusted by itself, not through another
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        # Early releases of Python 3.11 set it, and a cut connection then looks like one that the other side has closed.
        # OpenSSL 1.1.1 does not have it, and always reports the cut.
        context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        load_pair(context, self._identity)
        context.load_verify_locations(cadata=b"".join(self._trusted))
        return context

    def __repr__(self) -> str:  # a secret must not get into logs
        return f"<Keys {self.name} {self.fingerprint[:16]}>"


def load_keys(path: str | os.PathLike[str] | None = None, allow: str | os.PathLike[str] | None = None) -> Keys:
    """Read a key and the list of those that it trusts.

    Args:
        path: the key file; by default the file in ``MONARCH_KERNEL_KEY_FILE``, or this user's own key file, which is
            created on first use.
        allow: the allow-list; by default the file in ``MONARCH_KERNEL_ALLOW``, or, if it exists, the key file's own
            list, which has its name with the suffix ``.allow``.

    Raises:
        KeyFileError: a named file is missing, others may use it, or it holds no key or no list.
    """
    key_file = expanded(path) if path is not None else key_file_named()
    try:
        identity = read_key_file(key_file)
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no key file {key_file}: make it with 'monarch-kernel keys {key_file}', or copy the team's there"
        ) from None
    listed = allow if allow is not None else environment.ALLOW.get()
    allowed = AllowList(expanded(listed), True) if listed else AllowList(key_file + ALLOW_SUFFIX, False)
    return Keys(key_file, identity, allowed)


def keys_in(text: bytes | str, where: str, allow: str | os.PathLike[str] | None = None) -> Keys:
    """Load a key from a pipe or a variable instead of a file, with its allow-list.

    Args:
        text: the contents of a key file, as one line or several.
        where: its origin, for messages.
        allow: the allow-list; by default the file in ``MONARCH_KERNEL_ALLOW``, if it is set.

    Raises:
        KeyFileError: the text is not a key, or the list cannot be used.
    """
    listed = allow if allow is not None else environment.ALLOW.get()
    allowed = AllowList(expanded(listed), True) if listed else AllowList(os.devnull + ALLOW_SUFFIX, False)
    return Keys(where, parse_key(text, where), allowed)


def key_file_named() -> str:
    """Find the default key file of this process: the one that the environment names, or this user's own.

    Raises:
        KeyFileError: this user's own file cannot be created.
    """
    named = environment.KEY_FILE.get()
    return expanded(named) if named else default_key_file()


def default_key_file() -> str:
    """Find this user's own key file, ``~/.config/monarch_kernel/key``. It is created if it is missing.

    Raises:
        KeyFileError: it cannot be created.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        if not os.path.isabs(base):  # the XDG specification says to ignore such a setting
            base = expanded("~/.config")
        path = os.path.join(base, "monarch_kernel", "key")
        if not os.path.lexists(path):
            _check_home(path)
            for folder in (base, os.path.dirname(path)):
                os.makedirs(folder, 0o700, exist_ok=True)
            with contextlib.suppress(KeyFileExistsError):  # another process was first
                made = make_key_file(path).public
                log.info("made %s, the key of %s (%s)", path, made.name, made.fingerprint[:16])
    except (OSError, KeyFileError) as e:
        raise KeyFileError(
            f"TCP needs a key, and this user's own cannot be made: {e}. Make one elsewhere with "
            f"'monarch-kernel keys FILE', and name it by --key-file FILE, key_file= or {environment.KEY_FILE.name}"
        ) from e
    return path


def _check_home(path: str) -> None:
    """Raise if this path is in another user's home, which ``sudo`` may leave in the environment."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (owner := os.stat(folder).st_uid) not in (os.geteuid(), 0):
        raise KeyFileError(f"{folder} belongs to {user_name(owner)}")
