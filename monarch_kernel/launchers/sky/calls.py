"""Call SkyPilot's SDK for a launcher, in the interpreter in which SkyPilot is installed.

A separate process runs this text: one request per line of JSON on standard input, one answer per line on standard
output. SkyPilot pins versions of packages that programs also use, prints, and unpickles data from its API server. None
of that belongs in a user's program. Nothing of this package is therefore imported here, and the text runs on Python
3.9. The process ends with standard input, or after a while without a request.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

#: The time without a request after which the process ends (seconds).
_REST = 120.0
#: States of a request to the API server that has ended.
_OVER = ("SUCCEEDED", "FAILED", "CANCELLED")


class SkyCalls:
    """The supported calls. Each method accepts and returns plain data."""

    def __init__(self) -> None:
        self._sky: ModuleType = importlib.import_module("sky")

    def optimize(self, task: dict[str, object]) -> None:
        """Check where a task could run. Raises SkyPilot's error if it can run nowhere."""
        dag = self._sky.Dag()
        dag.add(self._sky.Task.from_yaml_config(task))
        self._sky.get(self._sky.optimize(dag))

    def launch(self, task: dict[str, object], cluster: str, retry: bool) -> str:
        """Request a cluster that runs a task. Return the id of the request."""
        found = self._sky.Task.from_yaml_config(task)
        return str(self._sky.launch(found, cluster_name=cluster, retry_until_up=retry))

    def request(self, request: str) -> dict[str, Any]:
        """Return the progress of a request. An exception of the request is raised again."""
        found = self._sky.api_status([request])
        if not found:
            return {"state": "", "words": ""}
        told: dict[str, object] = {"state": found[0].status, "words": found[0].status_msg or ""}
        if told["state"] in _OVER:
            value = self._sky.get(request)
            told["job"] = value[0] if isinstance(value, (list, tuple)) and value else None
        return told

    def clusters(self, names: list[str] | None, refresh: bool) -> list[dict[str, object]]:
        """Return existing clusters by their names, or all of this user."""
        mode = self._sky.StatusRefreshMode
        found = self._sky.get(self._sky.status(names, refresh=mode.FORCE if refresh else mode.NONE))
        return [
            {
                "name": each["name"],
                "state": each["status"].value,
                "words": each.get("init_status_reason") or "",
                "nodes": each.get("nodes") or 1,
            }
            for each in found
        ]

    def running(self) -> bool:
        """Return whether the API server runs. This call does not start it."""
        try:
            self._sky.api_info()
        except Exception:  # with any error, it does not answer
            return False
        return True

    def job(self, cluster: str, job: int | None) -> str:
        """Return the state of a job of a cluster, by default of its last one; "": there is none."""
        found = self._sky.get(self._sky.job_status(cluster, None if job is None else [job]))
        state = next(iter(found.values()), None)
        return "" if state is None else str(state.value)

    def cancel(self, cluster: str, job: int | None) -> None:
        """End a job of a cluster that stays up."""
        self._sky.get(self._sky.cancel(cluster, job_ids=None if job is None else [job], all=job is None))

    def withdraw(self, request: str) -> None:
        """Cancel a request that has not ended."""
        self._sky.get(self._sky.api_cancel([request], silent=True))

    def down(self, cluster: str) -> str:
        """Request the end of a cluster. Return the id of the request."""
        return str(self._sky.down(cluster))

    def aliases(self, cluster: str) -> None:
        """Write the names of a cluster's nodes to the configuration of ssh, or remove them if the cluster is gone.

        Only SkyPilot's command line writes them.
        """
        command = importlib.import_module("sky.client.cli.command")
        command.cli.main(args=["status", "--output", "json", cluster], prog_name="sky", standalone_mode=False)

    def log(self, cluster: str, job: int | None, lines: int) -> str:
        """Return the last output of a job; None: of the creation of the cluster."""
        out = io.StringIO()
        if job is None:
            sdk = importlib.import_module("sky.client.sdk")
            sdk.tail_provision_logs(cluster, follow=False, tail=lines, output_stream=out)
        else:
            self._sky.tail_logs(cluster, job, follow=False, tail=lines, output_stream=out)
        return out.getvalue()


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)  # SkyPilot prints messages
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    calls: SkyCalls | None = None
    while select.select([sys.stdin.buffer], [], [], _REST)[0] and (line := sys.stdin.buffer.readline()):
        asked = json.loads(line)
        told: dict[str, object] = {"id": asked["id"]}
        try:
            calls = calls or SkyCalls()
            call: Callable[..., object] = getattr(calls, asked["call"])
            told["value"] = call(**asked["with"])
        except (Exception, SystemExit) as e:
            told["error"], told["said"] = type(e).__name__, str(e)
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
