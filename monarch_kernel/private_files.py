"""Files and Unix sockets that only this user can access.

``read_own_file`` and ``write_own_file`` reject a file that another user could have written. ``peer_of`` and ``is_ours``
return the process at the other end of a Unix socket and whether it belongs to this user. ``listens`` returns whether a
process listens on a socket, and ``remove_socket`` removes a socket of this user. ``PrivateFolder`` is a folder of mode
0700, opened component by component. ``AppendOnlyFile`` is a log file of mode 0600. ``NotPrivateError`` names the owner
of a folder or file that other users can access. ``written_whole`` writes a file that appears only when it is complete;
its folder need not be private. ``is_own`` returns whether a connection to a loopback port comes from this user.

This module only exports names; ``monarch_kernel.protocol`` and ``monarch_kernel.runtime.node`` have the code.
"""

from monarch_kernel.protocol.private_files import (
    AppendOnlyFile,
    NotPrivateError,
    PrivateFolder,
    read_own_file,
    remove_socket,
    write_own_file,
    written_whole,
)
from monarch_kernel.protocol.socket_peers import is_ours, is_own, peer_of
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
