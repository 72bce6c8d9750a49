"""Connect a controller to the workers of other hosts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from monarch_kernel import programs
from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.protocol.worker_addresses import dial_address, worker_address
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, HostRef, HostUse
from monarch_kernel.runtime.actor.process import System, get_system, started
from monarch_kernel.runtime.actor.system import shutdown
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node import coredumps
from monarch_kernel.runtime.node.future import Future, gathered

if TYPE_CHECKING:
    import subprocess

    from monarch_kernel.protocol.keys import Keys
    from monarch_kernel.runtime.node.poller import Poller


# Run worker processes, which make a host usable by controllers of other hosts.

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
    private_key: object = None,
    ca: object = None,
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
    private_key: object = None,
    ca: object = None,
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
    private_key: object = None,
    ca: object = None,
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


#: How long a worker may take to answer (seconds).
ATTACH_TIMEOUT = 30.0


class AttachTimeoutError(ConnectionError, RuntimeError):
    """A worker has not answered in time. (Monarch's error is a RuntimeError, too.)"""


def attach_to_workers(
    *,
    ca: object = None,
    workers: Sequence[str | Future[str] | WorkerFuture],
    name: str | None = None,
    key_file: StrPath | None = None,
    allow: StrPath | None = None,
    timeout: float | None = None,
) -> HostMesh:
    """Connect to workers. Procs spawned on them end with this process; the workers stay.

    Args:
        ca: accepted for compatibility with Monarch, without effect: TCP always needs a key.
        workers: the URLs of the workers, futures of URLs, or results of ``start_worker_loop_forever``, in the order of
            the mesh.
        name: a label for messages.
        key_file: the key for these workers; other workers may be attached with another key. By default the file in
            ``MONARCH_KERNEL_KEY_FILE``, or this user's own key.
        allow: the list of further worker keys to trust (see ``docs/security.md``). By default the list in
            ``MONARCH_KERNEL_ALLOW``, or the key file's own list, if there is one.
        timeout: the time limit for connecting (seconds). By default the setting ``mesh_attach_config_timeout``; errors
            are then raised when the mesh is used, as in Monarch.

    Returns:
        A host mesh with one dimension, ``hosts``. If workers have not answered within the setting, ``initialized`` and
        all uses of the mesh raise the same AttachTimeoutError.

    Raises:
        AttachTimeoutError: some workers have not answered within ``timeout``; it is also a ConnectionError.
        ConnectionError: some workers refuse the connection, or have another version; the message names each, and why.
        ValueError: a URL is invalid, or there is no key.
        RuntimeError: this is not the controller.
    """
    del ca
    limit = ATTACH_TIMEOUT if timeout is None else timeout
    system = get_system()
    if not system.is_root:
        raise RuntimeError(
            "attach_to_workers() is for the controller: attach there, and pass the host mesh to the actor that needs it"
        )
    given = (worker.url if isinstance(worker, WorkerFuture) else worker for worker in workers)
    urls = [dial_address(worker.get(limit) if isinstance(worker, Future) else worker) for worker in given]
    if not urls:
        raise ValueError("attach_to_workers() needs at least one worker")
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ValueError(f"{twice} is named twice: a worker is one host of the mesh")
    keys = keys_for(system, key_file, allow) if any(url.startswith("tcp://") for url in urls) else None
    region = Region.from_extent(Extent(("hosts",), (len(urls),)))
    try:
        refs = dial_all(system, urls, limit, keys)
    except AttachTimeoutError as error:
        if timeout is not None:
            raise
        told = AttachTimeoutError(f"attach failed: {error}; timed out after MESH_ATTACH_CONFIG_TIMEOUT")
        none = tuple(HostRef(ProcRef(url, "", url, url, ""), url) for url in urls)
        return HostMesh(system, none, region, use=HostUse(unreached=told), name=name or "")
    system.workers.update({ref.id: ref for ref in refs})
    hosts = tuple(HostRef(ref, ref.host) for ref in refs)
    return HostMesh(system, hosts, region, use=HostUse(), name=name or "")


#: The runtime that ``attach`` started, and the URL of its worker.
_attached: tuple[System, str] | None = None


def attach(addr: str, timeout: float | None = None) -> None:
    """Connect this controller to a worker before any other use of the API, like Monarch's clients behind a firewall.

    A controller never needs to be reachable: it connects to workers, and answers return over the same connections. This
    function exists only for compatibility with Monarch. It fails early if the worker cannot be reached. Every worker
    passed to ``attach_to_workers`` must be reachable from here, too. A second call with the same address has no effect.

    Args:
        addr: the worker's URL.
        timeout: the time limit for connecting (seconds); by default the setting ``mesh_attach_config_timeout``.

    Raises:
        ConnectionError: the worker cannot be reached, or refuses the connection.
        RuntimeError: the API has been used before, or another worker is attached.
        ValueError: the address is invalid, or there is no key.
    """
    global _attached
    url = dial_address(addr)
    if started():
        known = _attached[1] if _attached is not None and _attached[0] is get_system() else ""
        if url == known:
            return
        before = f"this process is attached to {known}" if known else "the API has already been used without it"
        raise RuntimeError(f"attach({addr!r}) comes too late: {before}; call it before anything else of monarch.actor")
    try:
        attach_to_workers(workers=[url], name="gateway", timeout=ATTACH_TIMEOUT if timeout is None else timeout)
    except BaseException:
        shutdown()  # the runtime has not been used, so the process may still attach elsewhere
        raise
    _attached = (get_system(), url)


def dial_all(system: System, urls: list[str], timeout: float, keys: Keys | None = None) -> list[ProcRef]:
    """Connect to all of these workers, or to none of them. TCP uses these keys, by default those of this process."""
    node = system.node
    attached = set(system.workers)
    began = time.monotonic()
    dials: list[Future[Any]] = []
    for url in urls:
        answered: Future[object] = Future(node.poller, f"attach to {url}")
        dials.append(answered)
        node.dial(url, answered._resolve, timeout, keys)
    found = gathered(node.poller, dials, "attach_to_workers").get()
    failed = [outcome for outcome in found if isinstance(outcome, Exception)]
    if failed:
        for ref in found:
            if isinstance(ref, ProcRef) and ref.id not in attached:
                _let_go(system, ref)
        names = f"{len(failed)} of {len(urls)} workers" if len(urls) > 1 else "the worker"
        said = f"cannot attach to {names}: " + "; ".join(str(error) for error in failed)
        if time.monotonic() - began < timeout:
            raise ConnectionError(said)
        raise AttachTimeoutError(said)
    return [_near(system, ref) for ref in found]


def _near(system: System, ref: ProcRef) -> ProcRef:
    """Return the reference to a worker of this machine, which other hosts reach in the same way as this process."""
    here = system.node.ref
    if ref.site == here.site:
        ref = msgspec.structs.replace(ref, gateway=here.gateway, gateway_address=here.gateway_address)
        system.node.refs[ref.id] = ref
    return ref


def _let_go(system: System, ref: ProcRef) -> None:
    link = system.node.links.pop(ref.id, None)
    if link is not None:
        link.close()
