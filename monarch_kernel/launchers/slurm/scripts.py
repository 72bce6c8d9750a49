"""Build the scripts of a Slurm job, for sh. They contain no secret: a worker reads its key from a file, or from munge.

``keeper`` runs in the allocation for as long as it is kept: as the command of ``salloc`` on the machine that requested
it, or as the batch script of ``sbatch``. It runs ``start`` for each host; a later program does so for a replacement.
``start`` runs ``worker`` on the node, as a separate step, and keeps its output and exit code.
"""

from __future__ import annotations

from monarch_kernel import environment
from monarch_kernel.launchers.base import MARKER, KeyWay, LaunchRequest
from monarch_kernel.launchers.scripts import Script, one_word, script

#: Variables of srun for one task, by which programs such as Lightning and MPI would consider a rank that task.
_OF_TASKS = script(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_NTASKS SLURM_NPROCS "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE"
)
#: Placeholders in the command line of a worker, for values that are known only on its node.
_ADDRESS, _NAME = "tcp://ADDRESS:0", "NODENAME"
#: The interval at which the keeper of an allocation without workers checks for new ones (seconds).
_PAUSE = 5


def keeper(folder: str, request: LaunchRequest) -> Script:
    """Build the command of an allocation.

    Its arguments are the number of its first host and the number of its hosts; an element of an array has one. A third
    argument ``salloc`` means that salloc is the parent.

    A salloc whose allocation is revoked just as its command ends may never end: the thread that gets the message reaps
    the command, and the main thread then waits for it in a busy loop, on a whole core (22.05; 1 of 1,700 here). SIGHUP
    ends that loop. salloc then relinquishes the allocation, as it does when its command ends.
    """
    linger = max(1, int(request.command.idle))
    return script(
        """#!/bin/sh
# Keeps an allocation of monarch_kernel while workers run in it.
n=$(($1 + ${SLURM_ARRAY_TASK_ID:-0})); end=$((n + $2))
[ "$3" != salloc ] || trap 'kill -HUP "$PPID"' EXIT
cd @{folder} || exit 1
trap 'kill $pause 2>/dev/null; exit 1' TERM HUP
i=$n
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  [ "$i" -lt "$end" ] || break
  sh ./start.sh "$SLURM_JOB_ID" "$i" "$node" &
  i=$((i + 1))
done
wait
# A worker that was lost may be replaced here: until its idle time is over.
lost=0; quiet=0
while [ "$n" -lt "$i" ]; do [ "$(cat "$n.exit")" = 0 ] || lost=1; n=$((n + 1)); done
while [ "$quiet" -lt @{linger} ]; do
  squeue -h -j "$SLURM_JOB_ID" -o '%A %T' 2>/dev/null | grep -qx "$SLURM_JOB_ID RUNNING" || break
  if squeue -h -s -j "$SLURM_JOB_ID" -o %j | grep -q @{steps}; then quiet=0
  elif [ "$lost" = 0 ]; then break
  else quiet=$((quiet + @{pause})); fi
  sleep @{rest} & pause=$!
  wait "$pause"
done
""",
        folder=folder,
        linger=linger,
        steps=f"^{request.command.job}[.]",
        pause=_PAUSE,
        rest=min(_PAUSE, linger),
    )


def start(folder: str, request: LaunchRequest, port: int, interface: str, shared_home: bool) -> Script:
    """Build the script that runs one worker as a step. Its arguments: the Slurm job, the host's number and its node."""
    # An expired credential still contains its payload, but unmunge then reports an error.
    credential = script('( umask 077; munge --restrict-uid="$(id -u)" < secret > "$2.credential" )\n')
    return script(
        """#!/bin/sh
# Runs a worker of monarch_kernel on a node. $1: the job, $2: the number of the host, $3: the node
cd @{folder} || exit 1
echo "$3" > "$2.node"
unset SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_NTASKS SLURM_NPROCS
address=$(scontrol show node --oneliner "$3" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
# One element of an array has the number of the array, for which squeue lists all of them.
end=$(squeue -h -j "$1" -o '%A %e' | sed -n "s/^$1 //p")
end=$(date -d "${end:-unknown}" +%s 2>/dev/null) && left=$((end - $(date +%s))) || left=
@{credential}srun --jobid="$1" --overlap --nodes=1 --ntasks=1 --nodelist="$3" --mem=0 --mpi=none --cpu-bind=none \\
  --job-name=@{step}"$2" @{input_none} \\
  sh -c @{worker} \\
  worker "$2" "${address:-$3}" "$left" > "$2.out" 2> "$2.log" @{key_in}
code=$?
# srun ends with 0 when it loses a node.
[ "$code" = 0 ] && grep -q '^srun: error: ' "$2.log" && code=255
echo "$code" > "$2.ended" && mv "$2.ended" "$2.exit"
""",
        folder=folder,
        credential=script("") if shared_home else credential,
        step=f"{request.command.job}.",
        input_none=["--input=none"] * shared_home,
        worker=one_word(_worker(folder, request, port, interface, shared_home)),
        key_in=script("</dev/null") if shared_home else script('--input=all < "$2.credential"'),
    )


def _worker(folder: str, request: LaunchRequest, port: int, interface: str, shared_home: bool) -> Script:
    command = request.command
    known = {_ADDRESS: script('"tcp://$a:"@{port}', port=port), _NAME: script('"${SLURMD_NODENAME:-$2}"')}
    argv = command.argv(_ADDRESS, key=KeyWay.STDIN, announce=("-",), name=_NAME)
    run = script(
        'exec env @{mark}"$1" @{line} ${3:+--walltime "$3"}',
        mark=f"{MARKER}={command.job}.",
        line=[known.get(word, word) for word in argv],
    )
    if shared_home:
        run = script("@{run} < @{secret}", run=run, secret=f"{folder}/secret")
    else:
        run = script("unmunge --metadata=/dev/null --output=- | ( @{run} )", run=run)
    if interface:
        address = script(
            r"a=$(ip -o addr show dev @{interface} | sed -n 's/.* inet6\{0,1\} \([^/ ]*\).*/\1/p' | head -n 1)",
            interface=interface,
        )
    else:
        # Some distributions map a host's own name to an address of the loopback network.
        address = script(
            """look() { getent "$1" "$2" | sed -n "1s/ .*//p"; }
a=$(look ahostsv4 "$2"); a=${a:-$(look ahosts "$2")}
case "$a" in ""|127.*|::1) a=$(hostname -I | cut -d " " -f 1);; esac"""
        )
    return script(
        """unset @{of_tasks}
@{address}
[ -n "$a" ] || { echo "$2 has no address"@{where} >&2; exit 2; }
case "$a" in *:*) a="[$a]";; esac
@{run}""",
        of_tasks=_OF_TASKS,
        address=address,
        where=f" at {interface}" if interface else "",
        run=run,
    )


def batch(program: list[str]) -> Script:
    """Build the script that runs a program in the allocation, where ``SlurmJob`` detects that it is the client."""
    return script(
        """#!/bin/sh
# Runs the client of a job of monarch_kernel in its allocation.
export @{variable}="$SLURM_JOB_ID"
exec @{program}
""",
        variable=environment.SLURM_BATCH,
        program=program,
    )
