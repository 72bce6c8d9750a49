"""Places on this machine, by the names of ``monarch.tools.utils``."""

from __future__ import annotations

import os
import pathlib

__all__ = ["MONARCH_HOME", "conda"]


def MONARCH_HOME(*subdir_paths: str) -> pathlib.Path:  # noqa: N802  # Monarch's name
    """The folder of this user's settings for programs of Monarch: ``~/.monarch``, or what ``MONARCH_HOME`` names."""
    home = os.environ.get("MONARCH_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".monarch").joinpath(*subdir_paths)


class conda:  # noqa: N801  # Monarch's name
    """The active conda environment."""

    @staticmethod
    def active_env_dir() -> str | None:
        """Its folder; None: none is active."""
        return os.environ.get("CONDA_PREFIX")

    @staticmethod
    def active_env_name() -> str | None:
        """Its name; None: none is active."""
        return os.environ.get("CONDA_DEFAULT_ENV")
