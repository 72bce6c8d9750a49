"""Record the generations of a workspace on one host, and switch the symbolic link to the current one."""

from __future__ import annotations

import errno
import os
import re
import stat

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.errors import TamperedError
from workspace_sync.store.failures import explain, explained
from workspace_sync.store.records import Generation, read_record, remove_record, write_record
from workspace_sync.store.tree import Descriptor

CURRENT = "current"
_NEXT = "current.new"
_GENERATION = re.compile(r"generations/([1-9][0-9]*)")
_NAME = re.compile(r"([1-9][0-9]*)(\.state(?:\.new)?)?")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Pattern of the name of a slot: its part, and a number.
SLOT = re.compile(r"([a-z]+)-([1-9][0-9]*)")


class Generations:
    """The folder ``generations`` of a workspace: links for the current one, and a record of each kept one.

    Args:
        workspace: the folder of the workspace, with the link ``current``.
        folder: its folder ``generations``.
    """

    def __init__(self, workspace: PrivateFolder, folder: PrivateFolder) -> None:
        self._workspace = workspace
        self._folder = folder

    def close(self) -> None:
        """Close the folder's descriptor."""
        self._folder.close()

    def current(self) -> tuple[int, str]:
        """Return the number of the link ``current`` (0 if there is none), and its problem ("" if it is valid).

        Whether the link should exist (because there are ``records``) is for the caller to decide.

        Raises:
            TamperedError: it is not a link.
            StoreError: it cannot be read.
        """
        path = f"{self._workspace.path}/{CURRENT}"
        try:
            target = os.readlink(CURRENT, dir_fd=self._workspace.fd)
        except FileNotFoundError:
            return 0, ""
        except OSError as e:
            if e.errno == errno.EINVAL:
                raise TamperedError(f"{path} is not a link any more: move it away, and sync again") from e
            raise explained(e, path) from e
        match = _GENERATION.fullmatch(target)
        if match is None:
            return 0, f"the link {path} leads to {target!r}, which is no generation"
        number = int(match[1])
        if not self.linked(number):
            return number, f"the link {path} leads to generation {number}, which is not there"
        return number, ""

    def records(self) -> tuple[list[Generation], str]:
        """Return all records, newest first, and the problem of a damaged one.

        Raises:
            StoreError: a newer version has written one, or it cannot be read.
        """
        found: list[Generation] = []
        problem = ""
        for name in self._folder.names():
            match = _NAME.fullmatch(name)
            if match is None or match[2] != ".state":
                continue
            try:
                record = read_record(self._folder, name, Generation)
            except FileNotFoundError:
                continue
            except TamperedError as e:
                problem = str(e)
                continue
            if record.number == int(match[1]) and all(SLOT.fullmatch(slot) for slot, _ in record.parts.values()):
                found.append(record)
            else:
                problem = f"{self._folder.path}/{name} is damaged: it does not describe generation {match[1]}"
        return sorted(found, key=lambda each: -each.number), problem

    def next_number(self) -> int:
        """Return the number of the next generation."""
        matches = [match for name in self._folder.names() if (match := _NAME.fullmatch(name))]
        return max([self.current()[0], *(int(match[1]) for match in matches)]) + 1

    def switch(self, generation: Generation) -> None:
        """Record a generation and make it current; the last step is one ``rename``.

        Raises:
            StoreError: it cannot be written; the current generation is unchanged.
        """
        number = str(generation.number)
        self.note(generation)
        with explain(self._folder.path):
            os.mkdir(number, 0o700, dir_fd=self._folder.fd)
            for part, (slot, _) in generation.parts.items():
                os.symlink(f"../../slots/{slot}", f"{number}/{part}", dir_fd=self._folder.fd)
            remove_record(self._workspace, _NEXT)
            os.symlink(f"generations/{number}", _NEXT, dir_fd=self._workspace.fd)
            os.rename(_NEXT, CURRENT, src_dir_fd=self._workspace.fd, dst_dir_fd=self._workspace.fd)

    def drop_others(self) -> None:
        """Remove the links and records of generations that no rollback can go to.

        These are the links of all generations but the current one, the records of generations that were never switched
        to, and damaged records of earlier ones. If none is current, nothing is removed.
        """
        current, problem = self.current()
        if not current or problem:
            return
        with explain(self._folder.path):
            remove_record(self._workspace, _NEXT)
            for name in self._folder.names():
                match = _NAME.fullmatch(name)
                if match is None:
                    continue
                if match[2] is None and int(match[1]) != current:
                    self._remove_links(name)
                elif match[2] is not None and (int(match[1]) > current or match[2] != ".state"):
                    remove_record(self._folder, name)
                elif match[2] == ".state" and int(match[1]) < current:
                    try:
                        read_record(self._folder, name, Generation)
                    except TamperedError:
                        remove_record(self._folder, name)

    def linked(self, number: int) -> dict[str, str]:
        """Return the slot of each part of a generation, from the links."""
        found: dict[str, str] = {}
        try:
            fd = os.open(str(number), _FOLDER, dir_fd=self._folder.fd)
        except FileNotFoundError:
            return found
        except OSError as e:
            raise explained(e, f"{self._folder.path}/{number}") from e
        with Descriptor(fd):
            for part in os.listdir(fd):
                try:
                    slot = os.path.basename(os.readlink(part, dir_fd=fd))
                except OSError:
                    continue
                match = SLOT.fullmatch(slot)
                if match is not None and match[1] == part:
                    found[part] = slot
        return found

    def note(self, generation: Generation) -> None:
        """Write the record of a generation."""
        write_record(self._folder, f"{generation.number}.state", generation)

    def remove_all(self) -> None:
        """Remove the link ``current``, then all links and records. Other files stay."""
        self.current()  # raises if the link was replaced by something else
        with explain(self._folder.path):
            remove_record(self._workspace, CURRENT)
            remove_record(self._workspace, _NEXT)
            for name in self._folder.names():
                match = _NAME.fullmatch(name)
                if match is not None and match[2] is None:
                    self._remove_links(name)
                elif match is not None:
                    remove_record(self._folder, name)

    def forget(self, number: int) -> None:
        """Remove the record of a generation that is not the current one."""
        with explain(self._folder.path):
            remove_record(self._folder, f"{number}.state")

    def _remove_links(self, name: str) -> None:
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._folder.fd)
        except OSError:
            return
        try:
            for link in os.listdir(fd):
                if stat.S_ISLNK(os.stat(link, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(link, dir_fd=fd)
            os.rmdir(name, dir_fd=self._folder.fd)
        except OSError:
            return  # it contains other files
        finally:
            os.close(fd)
