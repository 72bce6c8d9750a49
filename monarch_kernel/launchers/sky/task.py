"""The task that SkyPilot runs: its command keeps the nodes while workers of the job live on them.

The workers are not this command: they are started by ssh, so that their key is in nothing that SkyPilot keeps. The
command notes the environment that SkyPilot gives to its jobs, for them. While it runs SkyPilot counts the cluster as in
use; once no worker lives it ends, and so does the cluster, whether or not the program that asked for it still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.launchers.base import MARKER, InfeasibleError, Resources
from monarch_kernel.launchers.scripts import Script, script

#: Of the environment of SkyPilot's jobs, what workers get: where programs are, devices, and the places of nodes.
_VARIABLES = script(
    "PATH LD_LIBRARY_PATH CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV CUDA_VISIBLE_DEVICES SKYPILOT_TASK_ID "
    "SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_CLUSTER_INFO"
)
#: Sets ``d`` to the folder for that. On Slurm SkyPilot's jobs have a home of their own, and ssh that of the account.
_FOLDER = script(
    'h=$(eval echo "~$(id -un 2>/dev/null)"); [ -d "$h" ] || h=$HOME; d="$h/.local/state/monarch_kernel/workers";'
)
#: How long a place is held without a worker, so that a lost one can be replaced there; how often to look (seconds).
_GRACE, _STEP = 60, 2
#: How long the first worker may take where workers never end as idle (seconds).
_FIRST_TIME = 600
#: How long a start waits for that environment (tenths of a second).
_WAIT = 100


def task(
    job: str,
    name: str,
    nodes: int,
    resources: Mapping[str, Any],
    *,
    setup: str,
    workdir: str,
    file_mounts: Mapping[str, Any],
    idle: float,
) -> dict[str, Any]:
    """A task, by the fields of SkyPilot's YAML.

    Args:
        job: the id of the job.
        name: of the task.
        nodes: how many.
        resources: of each, by SkyPilot's fields.
        setup: commands that run once on each node.
        workdir: a folder here that nodes get, and in which the commands run.
        file_mounts: what else they get.
        idle: seconds without a controller after which workers end; 0: never.
    """
    found: dict[str, Any] = {"name": name, "num_nodes": nodes, "resources": dict(resources), "run": _hold(job, idle)}
    for field, value in (("setup", setup), ("workdir", workdir), ("file_mounts", dict(file_mounts))):
        if value:
            found[field] = value
    return found


def _hold(job: str, idle: float) -> Script:
    """The command of the task, for bash. It has no secret."""
    return script(
        r"""@{folder} mkdir -p "$d"; chmod 700 "$d"
f="$d"/@{job}."$(uname -n)".env
umask 077
q="'\\''"
for n in @{variables}; do
  if [ -n "${!n+set}" ]; then printf "export %s='%s'\n" "$n" "${!n//\'/$q}"; fi
done > "$f.new"
mv "$f.new" "$f"
trap 'rm -f "$f"' EXIT
trap 'exit 0' TERM INT HUP
left=@{first}
while [ "$left" -gt 0 ]; do
  if grep -szq @{mark} /proc/[0-9]*/environ; then left=@{grace}; else left=$((left - @{step})); fi
  sleep @{step} & wait $!
done
""",
        folder=_FOLDER,
        job=job,
        variables=_VARIABLES,
        first=int(idle) or _FIRST_TIME,
        mark=rf"^{MARKER}={job}\.",
        grace=_GRACE,
        step=_STEP,
    )


def preparation(job: str) -> Script:
    """What sh does on a node before it starts a worker of the job.

    It takes the environment that the command has noted, and sets ``a`` to the address of the node, as SkyPilot has it.
    """
    return script(
        '@{folder} f="$d"/@{job}."$(uname -n)".env; '
        'i=0; while [ ! -e "$f" ] && [ $i -lt @{wait} ]; do i=$((i+1)); sleep 0.1; done; [ ! -e "$f" ] || . "$f"; '
        'a=$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | sed -n "$((${SKYPILOT_NODE_RANK:-0} + 1))p"); '
        '[ -n "$a" ] || a=$(hostname -I | cut -d " " -f 1); '
        '[ -n "$a" ] || { echo "this node has no address (hostname -I)" >&2; exit 2; }; '
        'case "$a" in *:*) a="[$a]";; esac;',
        folder=_FOLDER,
        job=job,
        wait=_WAIT,
    )


def resource_fields(given: Mapping[str, Any], wishes: Resources) -> dict[str, Any]:
    """What each node must have, by the fields of SkyPilot's YAML.

    Args:
        given: fields that the launcher was made with.
        wishes: of the job; its options are further fields.

    Raises:
        InfeasibleError: SkyPilot cannot be asked for this.
    """
    fields = {**given, **wishes.options}
    kind = fields.get("accelerators")
    if wishes.gpus and not kind:
        raise InfeasibleError(
            f"SkyPilot takes no number of devices without their kind: write accelerators=NAME:{wishes.gpus}, such as "
            f"H100:{wishes.gpus} ('sky gpus list' shows the kinds)"
        )
    if wishes.gpus and isinstance(kind, str):
        name, _, count = kind.partition(":")
        if count and float(count) != wishes.gpus:
            raise InfeasibleError(f"accelerators={kind} and gpus={wishes.gpus} differ: leave out one of the numbers")
        fields["accelerators"] = f"{name}:{wishes.gpus}"
    if wishes.cpus:
        fields["cpus"] = f"{wishes.cpus}+"
    if wishes.memory:
        fields["memory"] = f"{wishes.memory / 10**9:g}+"
    return fields


def alias(cluster: str, node: int) -> str:
    """What ssh calls a node of a cluster, by its number there."""
    return f"{cluster}-worker{node}" if node else cluster
