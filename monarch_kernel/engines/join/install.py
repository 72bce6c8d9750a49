"""Install a line in site-packages that makes processes with ``MONARCH_KERNEL_JOIN`` joinable."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

from monarch_kernel import environment
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.private_files import written_whole

NAME = "monarch_kernel_join.pth"
_PROGRAM = """\
try:
    from monarch_kernel.engines.join.startup import at_startup
    at_startup()
except Exception as error:
    import sys
    print("warning: this process cannot be joined:", error, file=sys.stderr)
"""


def line() -> str:
    """Return the line.

    It is a single line, as Python requires, and costs other programs one look at their environment.
    """
    return f"import os; {environment.JOIN.name!r} in os.environ and exec({_PROGRAM!r})\n"


def pth_path(user: bool = False) -> Path:
    """Return the path of the file.

    Args:
        user: for all environments of this user with this version of Python, instead of this environment.

    Raises:
        JoinError: this environment does not read that folder.
    """
    if not user:
        return Path(sysconfig.get_path("purelib"), NAME)
    if not site.ENABLE_USER_SITE:
        raise JoinError(
            f"{sys.prefix} has no packages of users (it is a virtual environment, or they are switched off): "
            "leave --user out"
        )
    return Path(site.getusersitepackages(), NAME)


def install(user: bool = False) -> Path:
    """Write the line.

    Returns:
        The file.

    Raises:
        JoinError: the file cannot be written, or another file has its name.
    """
    path = pth_path(user)
    _check_ours(path)
    try:
        if user:
            path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(str(path), None) as file:  # atomic: a new process reads all of it or nothing
            file.write(line().encode())
    except OSError as error:
        raise JoinError(
            f"{path} cannot be written: {error.strerror}; install it in an environment of your own, or start the ranks "
            "with -m monarch_kernel.join, which needs no installation"
        ) from error
    return path


def uninstall(user: bool = False) -> Path | None:
    """Remove the line that `install` has written, and nothing else.

    Returns:
        The removed file; None if there was none.

    Raises:
        JoinError: the file cannot be removed, or is not ours.
    """
    path = pth_path(user)
    if not _check_ours(path):
        return None
    try:
        path.unlink()
    except OSError as error:
        raise JoinError(f"{path} cannot be removed: {error.strerror}") from error
    return path


def _check_ours(path: Path) -> bool:
    """Return whether the file exists.

    Raises:
        JoinError: the file was written neither by this nor by an earlier version of this package.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise JoinError(f"{path} cannot be read: {error}") from error
    if (
        path.is_symlink()
        or not text.startswith(f"import os; {environment.JOIN.name!r} in os.environ")
        or (text.count("\n") != 1)
    ):
        raise JoinError(f"{path} is not what monarch-kernel join install has written: move it away first")
    return True
