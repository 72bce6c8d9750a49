"""What users may set of Slurm: by options of ``%mesh up --on slurm`` and ``monarch-kernel up``, and in profiles."""

from __future__ import annotations

from monarch_kernel.launchers.base import LauncherOption

#: How a job is asked for.
WAYS = ("salloc", "sbatch", "array")

OPTIONS = (
    *(
        LauncherOption(name=name, metavar=metavar, help=what, wish=True, plain=True)
        for name, metavar, what in (
            ("partition", "NAME", "where; by default the cluster's"),
            ("account", "NAME", "that is charged"),
            ("qos", "NAME", "the quality of service"),
            ("constraint", "FEATURES", "features that nodes must have"),
            ("reservation", "NAME", "take nodes of this reservation"),
            ("gres", "LIST", 'generic resources of a node, such as "gpu:a100:4"'),
            ("nodelist", "NODES", "nodes that must be among them"),
            ("exclude", "NODES", "nodes that must not"),
        )
    ),
    LauncherOption(name="way", choices=WAYS, help="how Slurm is asked (default: salloc)", plain=True),
    LauncherOption(name="exclusive", type=bool, help="whether nodes are for this job alone (default)", plain=True),
    LauncherOption(name="spares", type=int, metavar="N", help="more nodes, in place of lost ones", plain=True),
    LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
    LauncherOption(
        name="interface",
        metavar="NAME",
        help='where they listen, such as "ib0"',
        plain=True,
        pattern=r"[A-Za-z0-9_][A-Za-z0-9_.:-]*",
    ),
    LauncherOption(name="tunnel", type=bool, help="reach workers through ssh to their nodes", plain=True),
    LauncherOption(name="shared_home", type=bool, help="whether nodes see this home (default)"),
    LauncherOption(name="folder", metavar="FOLDER", help="for the scripts, the key and the logs"),
    LauncherOption(name="allocation", metavar="JOB", help="a running job in which workers are started"),
    LauncherOption(name="arguments", metavar="TEXT", help="further ones for salloc or sbatch"),
)
