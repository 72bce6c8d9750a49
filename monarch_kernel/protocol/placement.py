"""Where the folders of a controller are on one host, and how ranks start there. Pure values, without file access.

Paths are absolute and compared as text. A controller sends its own paths; the host agent that starts a rank translates
them to paths of the host. A message that starts procs is therefore the same for every host, and stays valid when the
placement changes.
"""

from collections.abc import Mapping

import msgspec


class Placement(msgspec.Struct, array_like=True, frozen=True):
    """How the ranks of one controller start on one host.

    Attributes:
        folders: the host's folder for each folder of the controller. A host's folder may be a symbolic link that is
            switched later: ranks that start afterwards run in its new target.
        env: environment variables to set in the ranks; None removes one.
        python: the interpreter of ranks for which the program specifies none; "": the host agent's own.
    """

    folders: dict[str, str] = {}
    env: dict[str, str | None] = {}
    python: str = ""

    def on_host(self, path: str) -> str | None:
        """Translate a path of the controller to the host's path; None if it is in none of the folders."""
        return moved(path, self.folders)

    def updated(self, newer: "Placement") -> "Placement":
        """Merge this placement with a newer one. Older entries inside the newer one's folders are replaced."""
        kept = {here: there for here, there in self.folders.items() if moved(here, newer.folders) is None}
        return Placement({**kept, **newer.folders}, {**self.env, **newer.env}, newer.python or self.python)

    def without(self, folder: str) -> "Placement":
        """Remove entries that name a folder of the host or a path inside it."""
        python = "" if is_below(self.python, folder) else self.python
        env = {name: None if value and is_below(value, folder) else value for name, value in self.env.items()}
        return Placement(
            {here: there for here, there in self.folders.items() if not is_below(there, folder)}, env, python
        )


def moved(path: str, folders: Mapping[str, str]) -> str | None:
    """Return a path below one of the keys, below the value of the longest such key instead.

    None if it is below none.
    """
    found = max((folder for folder in folders if is_below(path, folder)), key=len, default=None)
    return None if found is None else folders[found].rstrip("/") + path[len(found.rstrip("/")) :]


def is_below(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
