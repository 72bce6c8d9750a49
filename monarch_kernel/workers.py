"""Workers, which offer their host to controllers, and the keys with which both authenticate.

* ``attach_to_workers`` returns the hosts of workers; ``attach`` connects to a single worker before anything else.
* ``run_worker_loop_forever`` and ``run_worker_loop_until_shutdown`` run a worker, and ``start_worker_loop_forever``
  starts one that ends with this process. ``start_daemon`` starts one that outlives this process, for launchers, and
  keeps its files in a folder (``make_job_folder``, ``is_job_folder``, ``remove_job_folder``).
* ``place_ranks`` has ranks start in other folders of hosts (``Placement``), ``unplace_ranks`` ends that,
  ``placement_of`` returns what is placed, and ``client_path`` translates a host's path back, for sources.
* ``make_key_file`` makes a key, and ``load_keys`` reads a key with its allow-list. ``new_key_text`` and ``key_text``
  give a key as one line, to be sent to a worker by a pipe.

This module holds names only; ``monarch_kernel.runtime.actor.hosts`` and ``monarch_kernel.protocol.keys`` have the
code.
"""

from monarch_kernel.protocol.keys import KeyFileError, Keys, key_text, load_keys, make_key_file, new_key_text
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.runtime.actor.hosts.attachment import attach, attach_to_workers
from monarch_kernel.runtime.actor.hosts.daemons import is_job_folder, make_job_folder, remove_job_folder, start_daemon
from monarch_kernel.runtime.actor.hosts.placing import client_path, place_ranks, placement_of, unplace_ranks
from monarch_kernel.runtime.actor.hosts.worker_process import (
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
)

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
