"""What a front end shows of a cell after it applied every update."""

from __future__ import annotations

from typing import Any

from tests.kernel.harness import Outcome


def shown(outcome: Outcome) -> list[dict[str, Any]]:
    """The MIME bundles of a cell as they are in the end, in the order in which they first came."""
    bundles: dict[str, dict[str, Any]] = {}
    for message in outcome.messages:
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            key = content.get("transient", {}).get("display_id") or str(len(bundles))
            if message["msg_type"] == "update_display_data":
                assert key in bundles, "an update of what was never shown"
            bundles[key] = content["data"]
    return list(bundles.values())


def text(outcome: Outcome) -> str:
    """The text of a cell as it is in the end."""
    return "\n".join(bundle["text/plain"] for bundle in shown(outcome) if bundle.get("text/plain"))


def ever(outcome: Outcome) -> str:
    """All that the cell has shown at any time."""
    return "\n".join(bundle.get("text/plain", "") for bundle in [*outcome.displays, *outcome.updates])


def lines(outcome: Outcome) -> list[str]:
    """What the cell shows in the end, line by line, in the order in which it stands there."""
    found: list[str] = []
    places: dict[str, int] = {}
    for message in outcome.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            found.append(content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            shown = content["data"]["text/plain"] + "\n"
            key = content.get("transient", {}).get("display_id", "")
            if kind == "update_display_data":
                found[places[key]] = shown
                continue
            places[key] = len(found)
            found.append(shown)
        elif kind == "error":
            found.append(content["ename"] + "\n")
    return [line for line in "".join(found).split("\n") if line]
