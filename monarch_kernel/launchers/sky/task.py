"""Build the task that SkyPilot runs. Its command keeps the nodes while workers of the job run on them.

The workers are not started by this command but by ssh, so that SkyPilot stores no copy of their key. For them, the
command records the environment that SkyPilot sets for its jobs. While it runs, SkyPilot considers the cluster in use.
Once no worker is alive, it ends, and so does the cluster, whether or not the requesting program still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.launchers.base import MARKER, InfeasibleError, Resources
from monarch_kernel.launchers.scripts import Script, script

#: Variables of SkyPilot's jobs that workers get: paths of programs, devices, and the placement of nodes.
_VARIABLES = script(
    "PATH LD_LIBRARY_PATH CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV CUDA_VISIBLE_DEVICES SKYPILOT_TASK_ID "
    "SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_CLUSTER_INFO"
)
#: Sets ``d`` to the folder for that. On Slurm, SkyPilot's jobs have a separate home, while ssh uses the account's.
_FOLDER = script(
    'h=$(eval echo "~$(id -un 2>/dev/null)"); [ -d "$h" ] || h=$HOME; d="$h/.local/state/monarch_kernel/workers";'
)
#: How long a node is kept without a worker, so that a lost one can be replaced, and the interval of checks (seconds).
_GRACE, _STEP = 60, 2
#: The time limit for the first worker if workers never end as idle (seconds).
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
    """Build a task with the fields of SkyPilot's YAML.

    Args:
        job: the id of the job.
        name: the name of the task.
        nodes: the number of nodes.
        resources: the resources of each node, by SkyPilot's fields.
        setup: commands that run once on each node.
        workdir: a local folder that is copied to nodes, and in which the commands run.
        file_mounts: further files for nodes.
        idle: the time without a controller after which workers end (seconds); 0: never.
    """
    found: dict[str, Any] = {"name": name, "num_nodes": nodes, "resources": dict(resources), "run": _hold(job, idle)}
    for field, value in (("setup", setup), ("workdir", workdir), ("file_mounts", dict(file_mounts))):
        if value:
            found[field] = value
    return found


def _hold(job: str, idle: float) -> Script:
    """Build the command of the task, for bash. It contains no secret."""
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
    """Build the preparation that sh runs on a node before it starts a worker of the job.

    It reads the environment that the command has recorded, and sets ``a`` to SkyPilot's address of the node.
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
    """Return the requirements of each node, by the fields of SkyPilot's YAML.

    Args:
        given: fields from the arguments of the launcher.
        wishes: the job's requirements; its options are further fields.

    Raises:
        InfeasibleError: SkyPilot does not support these requirements.
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
    """Return the name of a cluster's node for ssh, from its number there."""
    return f"{cluster}-worker{node}" if node else cluster
