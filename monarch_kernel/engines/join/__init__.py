"""Tools in jobs that others have started: torchrun, srun, mpirun, Ray and their kin (docs/join.md).

* In a rank: ``door`` has one sleeping thread, which listens at a Unix socket; ``identity`` tells which rank of which
  job this is, and ``announcements`` writes that down where this user's programs look. They import the standard
  library only. The first viewer that enters makes ``guest``, the tools in the rank.
* In a viewer: ``places`` finds ranks and connects to them, and ``controller`` makes meshes of them for the tools.

Both sides send frames through a ``frame_loop``.
"""
