"""Find folders of this machine, with the names of ``monarch.tools.utils``."""

from __future__ import annotations

import os
import pathlib

__all__ = ["MONARCH_HOME", "conda"]


def MONARCH_HOME(*subdir_paths: str) -> pathlib.Path:  # noqa: N802  # Monarch's name
    """Return the folder of this user's settings for programs of Monarch: ``MONARCH_HOME``, else ``~/.monarch``."""
    home = os.environ.get("MONARCH_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".monarch").joinpath(*subdir_paths)


class conda:  # noqa: N801  # Monarch's name
    """The active conda environment."""

    @staticmethod
    def active_env_dir() -> str | None:
        """Return its folder; None: none is active."""
        return os.environ.get("CONDA_PREFIX")

    @staticmethod
    def active_env_name() -> str | None:
        """Return its name; None: none is active."""
        return os.environ.get("CONDA_DEFAULT_ENV")
