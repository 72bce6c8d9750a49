"""Files and Unix sockets that belong to this user alone.

``read_own_file`` and ``write_own_file`` reject a file that another user could have written. ``peer_of`` and ``is_ours``
identify the process at the other end of a Unix socket and its user, ``listens`` tells whether a process listens on a
socket, and ``remove_socket`` removes a socket of this user. ``PrivateFolder`` is a folder of mode 0700, opened
component by component, and ``AppendOnlyFile`` a log file of mode 0600; ``NotPrivateError`` says whose a folder or file
is that other users can access. ``written_whole`` writes a file anywhere, which appears when it is complete.
``is_own`` tells whether a connection to a loopback port is this user's.

This module holds names only; ``monarch_kernel.protocol`` and ``monarch_kernel.runtime.node`` have the code.
"""

from monarch_kernel.protocol.append_only_file import AppendOnlyFile
from monarch_kernel.protocol.loopback_peers import is_own
from monarch_kernel.protocol.private_files import (
    NotPrivateError,
    PrivateFolder,
    read_own_file,
    remove_socket,
    write_own_file,
    written_whole,
)
from monarch_kernel.protocol.socket_peers import is_ours, peer_of
from monarch_kernel.runtime.node.link import listens

__all__ = [
    "AppendOnlyFile",
    "NotPrivateError",
    "PrivateFolder",
    "is_ours",
    "is_own",
    "listens",
    "peer_of",
    "read_own_file",
    "remove_socket",
    "write_own_file",
    "written_whole",
]
