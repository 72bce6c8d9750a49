"""``import monarch_kernel.join`` lets notebooks of the same user join this process, and debug it (docs/join.md).

``python -m monarch_kernel.join [--name NAME] SCRIPT ARGS`` does so, and runs a script; ``-m MODULE`` runs a module.
``runtime_env={"worker_process_setup_hook": "monarch_kernel.join.ray_worker"}`` is for the workers of a job of Ray.
Each costs one sleeping thread until somebody joins. The name of the job is ``MONARCH_KERNEL_JOIN``, or that of the
script.
"""

from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.engines.join.listener import prepare, prepare_or_warn, ray_worker

__all__ = ["JoinError", "prepare", "ray_worker"]

if __name__ == "__main__":
    from monarch_kernel.engines.join.launch import main

    main()
else:
    prepare_or_warn()
