"""Workers, which make their host available to controllers, and the keys that authenticate both.

* ``attach_to_workers`` returns the hosts of workers. ``attach`` connects this process to a single worker first.
* ``run_worker_loop_forever`` and ``run_worker_loop_until_shutdown`` run a worker in this process.
  ``start_worker_loop_forever`` starts a worker that ends with this process. ``start_daemon`` starts one that outlives
  this process, for launchers; its files are in a folder (``make_job_folder``, ``is_job_folder``,
  ``remove_job_folder``).
* ``place_ranks`` sets the folders in which ranks of hosts start (``Placement``), ``unplace_ranks`` removes the setting,
  and ``placement_of`` returns it. ``client_path`` translates a path on a host to the source path on this machine.
* ``make_key_file`` creates a key, and ``load_keys`` reads a key with its allow-list. ``new_key_text`` and ``key_text``
  return a key as one line of text, which can be sent to a worker through a pipe.

This module only exports names; ``monarch_kernel.runtime.actor.hosts`` and ``monarch_kernel.protocol.keys`` have the
code.
"""

from monarch_kernel.protocol.keys import KeyFileError, Keys, key_text, load_keys, make_key_file, new_key_text
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.runtime.actor.hosts.attachment import (
    attach,
    attach_to_workers,
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
)
from monarch_kernel.runtime.actor.hosts.daemons import is_job_folder, make_job_folder, remove_job_folder, start_daemon
from monarch_kernel.runtime.actor.hosts.placing import client_path, place_ranks, placement_of, unplace_ranks

__all__ = [
    "KeyFileError",
    "Keys",
    "Placement",
    "attach",
    "attach_to_workers",
    "client_path",
    "is_job_folder",
    "key_text",
    "load_keys",
    "make_job_folder",
    "make_key_file",
    "new_key_text",
    "place_ranks",
    "placement_of",
    "remove_job_folder",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "start_daemon",
    "start_worker_loop_forever",
    "unplace_ranks",
]
