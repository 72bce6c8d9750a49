"""Keys: control which processes may connect to this project's TCP endpoints.

Each process that uses TCP has one key, in a file that only its owner can read: a private key, its certificate, and a
name. Two processes can make a link if they trust each other's certificate and each proves that it owns its own (mutual
TLS 1.3). A process trusts its own key, and those on its allow-list, if it has one. Two setups are possible: one key
file that a team copies to all its hosts, or one key per person and per worker with lists of accepted keys.

``identity`` defines keys and their files, ``allow_list`` the lists, and ``trust`` combines both for links.
``guarded_files`` reads and writes files that no other user may change.
"""

from monarch_kernel.protocol.keys.guarded_files import KeyFileError
from monarch_kernel.protocol.keys.identity import key_text, make_key_file, new_key_text
from monarch_kernel.protocol.keys.trust import Keys, keys_in, load_keys

__all__ = ["KeyFileError", "Keys", "key_text", "keys_in", "load_keys", "make_key_file", "new_key_text"]
