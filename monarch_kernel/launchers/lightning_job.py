"""``LightningJob``: hosts from the Lightning platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.launchers.base import Resources
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.lightning import LightningLauncher, inside_studio


class LightningJob(EngineJob):
    """Hosts from the Lightning platform: machines that it gives a job, with a worker on each (``docs/lightning.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name.
        machine: the type of machine, by its name in ``lightning_sdk.Machine`` ("L4_X_4"), or its slug.
        studio: run in a copy of this Studio's environment, by its name or id; by default of the one that this program
            runs in, if there is one.
        image: run in this container image instead; it needs monarch_kernel, ``sh`` and ``hostname``.
        teamspace: by its name or id; by default that of this Studio, or the only one of the user.
        account: the cloud account; by default that of the Studio, or what the teamspace prefers.
        interruptible: whether cheaper machines are asked for, which the platform may take away.
        time_limit: after how long the workers end (seconds); 0: never.
        way: "group" or "single"; see ``LightningLauncher``.
        address: "own", "private" or "public"; see ``LightningLauncher``.
        port: where workers listen; 0: any free port.
        image_secret: the name of the platform's secret with the login for a private image.
        python: the interpreter on the machines; by default the path of this one in the Studio that this program runs
            in, and else "python".
        options: those of ``EngineJob``. The platform shows ``env`` to all who may read the job.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        machine: str = "CPU",
        *,
        studio: str = "",
        image: str = "",
        teamspace: str = "",
        account: str = "",
        interruptible: bool = False,
        time_limit: float = 0.0,
        way: str = "group",
        address: str = "own",
        port: int = 0,
        image_secret: str = "",
        python: str = "",
        **options: Any,
    ) -> None:
        launcher = LightningLauncher(
            machine,
            studio=studio,
            image=image,
            teamspace=teamspace,
            account=account,
            interruptible=interruptible,
            way=way,
            address=address,
            port=port,
            image_secret=image_secret,
        )
        if not python and (image or not inside_studio(studio)):
            python = "python"
        options = {"resources": Resources(walltime=time_limit), **options}
        super().__init__(launcher, meshes, python=python, **options)
