"""A comparison of values as JSON-compatible dictionaries, lists, strings and numbers."""

from __future__ import annotations

from typing import Any

from monarch_kernel.debugger.controller.values.compare import Difference
from monarch_kernel.debugger.controller.values.report import Diff


def data_of(diff: Diff) -> dict[str, Any]:
    """The result of `Diff.to_dict`."""
    return {
        "expression": diff.expression,
        "mesh": diff.mesh,
        "where": diff.where,
        "same": diff.same,
        "seconds": diff.seconds,
        "groups": [
            {
                "ranks": list(each.ranks),
                "text": each.reading.text,
                "digest": each.reading.digest.hex(),
                "number": each.reading.number,
            }
            for each in diff.groups
        ],
        "differences": [_difference(each) for each in diff.differences],
        "failed": [{"kind": each.kind, "why": each.why, "ranks": list(each.ranks)} for each in diff.failed],
        "running": list(diff.running),
        "notes": list(diff.notes),
    }


def _difference(row: Difference) -> dict[str, Any]:
    contrast = row.contrast
    return {
        "path": row.path,
        "ranks": list(row.ranks),
        "against": list(row.against),
        "ours": row.ours.text if row.ours is not None else None,
        "theirs": row.theirs.text if row.theirs is not None else None,
        "complete": row.is_complete,
        "contrast": None
        if contrast is None
        else {
            "index": list(contrast.index) if contrast.index is not None else None,
            "ours": contrast.ours,
            "theirs": contrast.theirs,
            "count": contrast.count,
            "most": contrast.most,
            "relative": contrast.relative,
        },
    }
