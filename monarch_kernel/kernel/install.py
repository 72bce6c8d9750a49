"""Install and remove the kernelspec, through which Jupyter finds the kernel of this environment."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

KERNEL_NAME = "monarch"
DISPLAY_NAME = "Monarch (Python 3)"
_SPEC = "kernel.json"


class InstallError(Exception):
    """The kernelspec cannot be written or removed. The message names the cause and a remedy."""


def _resources() -> Traversable:
    return files("monarch_kernel.kernel").joinpath("kernelspec")


def kernel_spec(display_name: str = DISPLAY_NAME) -> dict[str, object]:
    """Return the contents of ``kernel.json``, with the absolute path of this Python."""
    spec: dict[str, Any] = json.loads(_resources().joinpath("kernel.json").read_text("utf-8"))
    spec["argv"][0] = sys.executable
    spec["display_name"] = display_name
    return spec


def install(
    user: bool = False, prefix: str | None = None, name: str = KERNEL_NAME, display_name: str | None = None
) -> Path:
    """Write the kernelspec to Jupyter's search path.

    Args:
        user: install for the current user only.
        prefix: install in ``PREFIX/share/jupyter``, such as an environment's ``sys.prefix``.
        name: the kernelspec's name; several environments can each have one.
        display_name: the name in launchers; defaults to the kernel's own name, followed by ``name`` if it is custom.

    Returns:
        Its folder.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    if display_name is None:
        display_name = DISPLAY_NAME if name == KERNEL_NAME else f"{DISPLAY_NAME} [{name}]"
    # Jupyter would remove the whole folder, whatever it contains.
    _remove(_folder(user, prefix, name))
    with tempfile.TemporaryDirectory() as folder, as_file(_resources()) as resources:
        staged = Path(folder, KERNEL_NAME)
        shutil.copytree(resources, staged, ignore=shutil.ignore_patterns("__pycache__"))
        staged.chmod(0o755)
        spec = json.dumps(kernel_spec(display_name), indent=1)
        Path(staged, _SPEC).write_text(spec + "\n", "utf-8")
        try:
            place = KernelSpecManager().install_kernel_spec(str(staged), name, user=user, prefix=prefix)
        except ValueError as error:  # an invalid name
            raise InstallError(str(error)) from error
        except OSError as error:
            raise InstallError(
                f"Cannot write the kernelspec to {error.filename}: {error.strerror}. "
                "Install it with --user or --sys-prefix."
            ) from error
    return Path(place)


def uninstall(user: bool = False, prefix: str | None = None, name: str = KERNEL_NAME) -> Path:
    """Remove a kernelspec that ``install`` wrote with the same arguments.

    Returns:
        The removed folder.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    folder = _folder(user, prefix, name)
    if not (folder / _SPEC).is_file():
        known = KernelSpecManager().find_kernel_specs().get(name)
        hint = f" There is one in {known}." if known else ""
        raise InstallError(f"There is no kernelspec '{name}' in {folder.parent}.{hint}")
    _remove(folder)
    return folder


def _folder(user: bool, prefix: str | None, name: str) -> Path:
    """Return the folder of the kernelspec of that name, whether or not it exists."""
    from jupyter_core.paths import SYSTEM_JUPYTER_PATH, jupyter_data_dir

    if user:
        root = jupyter_data_dir()
    elif prefix:
        root = str(Path(prefix, "share", "jupyter"))
    else:
        root = SYSTEM_JUPYTER_PATH[0]
    return Path(root, "kernels", name.lower())


def _remove(folder: Path) -> None:
    """Remove a kernelspec that ``install`` wrote, if there is one, and only the files that ``install`` writes.

    Raises:
        InstallError: the folder belongs to another kernel, holds other files, or cannot be removed.
    """
    spec = folder / _SPEC
    if not folder.exists():
        return
    try:
        ours = "monarch_kernel" in json.loads(spec.read_text("utf-8"))["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise InstallError(
            f"{folder} is not a kernelspec of monarch_kernel, so it is left alone; choose another name (--name)."
        )
    written = {_SPEC, *(entry.name for entry in _resources().iterdir())}
    left = sorted(entry.name for entry in folder.iterdir() if entry.name not in written)
    if left:
        raise InstallError(
            f"{folder} holds other files ({', '.join(left)}), so it is left alone; move them away first."
        )
    try:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == _SPEC):  # the marker file goes last
            entry.unlink()
        folder.rmdir()
    except OSError as error:
        raise InstallError(f"Cannot remove {folder}: {error.strerror}.") from error
