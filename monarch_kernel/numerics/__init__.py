"""Recordings of training runs, their comparison, rules that watch a run, and captures that replay one rank's step.

The names are loaded at first use, so importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.numerics.comparison import compare
    from monarch_kernel.numerics.recording import Recording, record
    from monarch_kernel.numerics.rules import rule
    from monarch_kernel.numerics.step_capture import capture
    from monarch_kernel.numerics.step_replay import replay
    from monarch_kernel.numerics.summaries import Replicate, Shard

__all__ = ["Recording", "Replicate", "Shard", "capture", "compare", "record", "replay", "rule"]

_MODULES = {
    "Recording": "recording",
    "Replicate": "summaries",
    "Shard": "summaries",
    "capture": "step_capture",
    "compare": "comparison",
    "record": "recording",
    "replay": "step_replay",
    "rule": "rules",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
