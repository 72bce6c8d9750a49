"""Join jobs that another program started with torchrun, srun, mpirun, Ray or similar launchers (docs/join.md).

* In a rank: ``listener`` runs one sleeping thread, which listens on a Unix socket. ``identity`` determines the rank and
  the job, and ``announcements`` publishes them for this user's programs. These modules import only the standard
  library. When the first viewer enters, it creates the tools in the rank (``joined_process``).
* In a viewer: ``rank_machines`` finds ranks and connects to them, and ``controller`` makes meshes of them for the
  tools.

Both sides send frames through a ``frame_loop``.
"""
