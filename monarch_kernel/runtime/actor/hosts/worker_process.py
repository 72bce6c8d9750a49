"""Run worker processes, which make a host usable by controllers of other hosts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_kernel import programs
from monarch_kernel.protocol.worker_addresses import worker_address
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.node import coredumps
from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    import subprocess

    from monarch_kernel.protocol.keys import Keys
    from monarch_kernel.runtime.node.poller import Poller


# The TCP keys of this process, read on first use.

StrPath = str | os.PathLike[str]


def load_key_files(key_file: StrPath | None, allow: StrPath | None) -> Keys:
    """Return the keys in these files. This imports the TLS library, which is not loaded before."""
    from monarch_kernel.protocol.keys import load_keys

    return load_keys(key_file, allow)


def keys_for(system: System, key_file: StrPath | None, allow: StrPath | None) -> Keys:
    """Return the keys for links to some workers, loaded on first use.

    A process may use several: each worker is dialled with the keys with which it was attached. The first ones become
    the process's own keys, for workers that it learns of from others.
    """
    node = system.node
    if node.keys is not None and key_file is None and allow is None:
        return node.keys
    coredumps.give_up(for_good=False)
    keys = load_key_files(key_file, allow)
    if node.keys is None:
        node.keys = keys
    return node.routes.known_keys(keys)


#: The time limit for a worker to start, and to end (seconds).
START_TIMEOUT = 30.0
END_TIMEOUT = 10.0


def run_worker_loop_forever(
    *,
    private_key: Any = None,
    ca: Any = None,
    address: str,
    key_file: StrPath | None = None,
    allow: StrPath | None = None,
    audit: StrPath | None = None,
) -> NoReturn:
    """Make this host usable by controllers; exit the process when the worker has ended.

    Args:
        private_key, ca: accepted for compatibility with Monarch, without effect: TCP always needs a key.
        address: the address to listen on, such as ``tcp://node1:26600`` (see ``docs/hosts.md``).
        key_file: this worker's key, or the team's; by default the file in ``MONARCH_KERNEL_KEY_FILE``, or this user's
            own key.
        allow: the list of further keys that may connect (see ``docs/security.md``); by default the list in
            ``MONARCH_KERNEL_ALLOW``, or the key file's own list, if there is one.
        audit: a file that gets a line for each peer that connects or is refused.

    Raises:
        ValueError: the address is invalid, or there is no key.
    """
    run_worker_loop_until_shutdown(
        private_key=private_key, ca=ca, address=address, key_file=key_file, allow=allow, audit=audit
    )
    sys.exit(0)


def run_worker_loop_until_shutdown(
    *,
    private_key: Any = None,
    ca: Any = None,
    address: str,
    key_file: StrPath | None = None,
    allow: StrPath | None = None,
    audit: StrPath | None = None,
) -> None:
    """Like ``run_worker_loop_forever``, but return when a controller has shut the worker down.

    Raises:
        ValueError: the address is invalid, or there is no key.
        RuntimeError: the worker could not start (stderr says why), or was killed.
    """
    del private_key, ca
    lifeline, process = _start(address, key_file, allow, audit, None)
    try:
        status = process.wait()
    finally:
        os.close(lifeline)  # after an interrupt, this ends the worker with all its ranks
        _wait(process)
    if status != 0:
        raise _ended(address, status)


class WorkerFuture(Future[None]):
    """The future of a worker process of this process: done when it has ended, as in Monarch.

    ``url`` is done when it listens.
    """

    __slots__ = ("url",)

    def __init__(self, poller: Poller, address: str) -> None:
        super().__init__(poller, f"start_worker_loop_forever(address={address!r})")
        self.url: Future[str] = Future(poller, f"the start of the worker at {address}")


def start_worker_loop_forever(
    *,
    private_key: Any = None,
    ca: Any = None,
    address: str,
    key_file: StrPath | None = None,
    allow: StrPath | None = None,
    audit: StrPath | None = None,
) -> WorkerFuture:
    """Start a worker process that ends with this one.

    Returns:
        A future that is done when the worker has ended; ``attach_to_workers`` accepts it. Its attribute ``url`` is a
        future of the worker's URL, done when it listens. Both raise RuntimeError if the worker could not start, and the
        first also if it was killed.

    Raises:
        ValueError: the address is invalid, or there is no key.
    """
    from subprocess import PIPE

    del private_key, ca
    node = get_system().node
    lifeline, process = _start(address, key_file, allow, audit, PIPE)

    def end() -> None:
        os.close(lifeline)
        _wait(process)

    node.on_close.append(end)
    worker = WorkerFuture(node.poller, address)

    def follow() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            line = output.readline().decode()
        if line:
            worker.url._resolve(line.split()[-1])
            status = process.wait()
            worker._reject(_ended(address, status)) if status else worker._resolve(None)
        else:
            error = RuntimeError(f"the worker at {address} could not start; see its output on stderr")
            worker.url._reject(error)
            worker._reject(error)

    threading.Thread(target=follow, name="monarch-worker", daemon=True).start()
    return worker


def _start(
    address: str, key_file: StrPath | None, allow: StrPath | None, audit: StrPath | None, stdout: int | None
) -> tuple[int, subprocess.Popen[bytes]]:
    """Start a worker process. Return the descriptor whose closing ends it, and the process."""
    import subprocess

    if worker_address(address).listen.startswith("tcp://"):
        load_key_files(key_file, allow)
    read, write = os.pipe()
    command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen", address, "--lifeline", str(read)]
    for option, path in (("--key-file", key_file), ("--allow", allow), ("--audit", audit)):
        if path is not None:
            command += [option, os.fspath(path)]
    try:
        with coredumps.users_limit():
            process = programs.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=(read,),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
            )
    except OSError:
        os.close(write)
        raise
    finally:
        os.close(read)
    return write, process


def _wait(process: subprocess.Popen[bytes]) -> None:
    from subprocess import TimeoutExpired

    try:
        process.wait(END_TIMEOUT)
    except TimeoutExpired:
        process.kill()
        process.wait()


def _ended(address: str, status: int) -> RuntimeError:
    how = f"code {status}" if status >= 0 else signal.Signals(-status).name
    return RuntimeError(f"the worker at {address} ended with {how}; see its output on stderr")
