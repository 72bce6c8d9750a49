"""Let notebooks of the same user join and debug this process by ``import monarch_kernel.join`` (docs/join.md).

``python -m monarch_kernel.join [--name NAME] SCRIPT ARGS`` makes a script joinable; ``-m MODULE`` runs a module. In
a Ray job, set ``runtime_env={"worker_process_setup_hook": "monarch_kernel.join.ray_worker"}`` for the workers. The
cost is one sleeping thread per process until a notebook joins. The job gets the name in ``MONARCH_KERNEL_JOIN``, or
the name of the script.
"""

from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.listener import prepare, prepare_or_warn, ray_worker

__all__ = ["JoinError", "prepare", "ray_worker"]

if __name__ == "__main__":
    from monarch_kernel.engines.join.launch import main

    main()
else:
    prepare_or_warn()
