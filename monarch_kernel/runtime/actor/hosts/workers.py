"""Workers: making a host usable by controllers of other hosts, and attaching to such hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.protocol.worker_addresses import dial_address, worker_address
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, HostRef, HostUse
from monarch_kernel.runtime.actor.system import System, get_system, shutdown, started
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node import coredumps
from monarch_kernel.runtime.node.future import Future, gathered

#: How long a worker may take to start, and to end (seconds).
START_TIMEOUT = 30.0
END_TIMEOUT = 10.0

Path = str | os.PathLike[str]


# -- being a worker ---------------------------------------------------------------------------


def run_worker_loop_forever(
    *,
    private_key: Any = None,
    ca: Any = None,
    address: str,
    key_file: Path | None = None,
    allow: Path | None = None,
    audit: Path | None = None,
) -> NoReturn:
    """Make this host usable by controllers, until the end of this process: it exits when the worker has ended.

    Args:
        private_key, ca: accepted for Monarch's sake. They change nothing: TCP always needs a key.
        address: where to listen, such as ``tcp://node1:26600`` (see ``docs/hosts.md``).
        key_file: this worker's key, or the team's; by default the file that ``MONARCH_KERNEL_KEY_FILE`` names, or this
            user's own key.
        allow: the list of the keys that may connect beside this one's (see ``docs/security.md``); by default the list
            that ``MONARCH_KERNEL_ALLOW`` names, or the key file's own, if there is one.
        audit: a file to which a line is appended for whoever connects or is refused.

    Raises:
        ValueError: the address cannot be meant, or there is no key.
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
    key_file: Path | None = None,
    allow: Path | None = None,
    audit: Path | None = None,
) -> None:
    """As ``run_worker_loop_forever``, but return when a controller has shut the worker down.

    Raises:
        ValueError: the address cannot be meant, or there is no key.
        RuntimeError: the worker could not start (it has said why on stderr), or was killed.
    """
    del private_key, ca
    lifeline, process = _start(address, key_file, allow, audit, None)
    try:
        status = process.wait()
    finally:
        os.close(lifeline)  # after an interrupt; it ends with all its ranks
        _wait(process)
    if status != 0:
        raise RuntimeError(f"the worker at {address} ended with {_described(status)}; what it said is on stderr")


def start_worker_loop_forever(
    *,
    private_key: Any = None,
    ca: Any = None,
    address: str,
    key_file: Path | None = None,
    allow: Path | None = None,
    audit: Path | None = None,
) -> Future[str]:
    """Start a worker beside this process, which ends with it.

    Returns:
        A future of its URL, done when it listens; ``attach_to_workers`` takes it as it is.

    Raises:
        ValueError: the address cannot be meant, or there is no key.
    """
    del private_key, ca
    node = get_system().node
    lifeline, process = _start(address, key_file, allow, audit, subprocess.PIPE)

    def end() -> None:
        os.close(lifeline)
        _wait(process)

    node.on_close.append(end)
    url: Future[str] = Future(node.poller, f"start_worker_loop_forever(address={address!r})")

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            line = output.readline().decode()
        if line:
            url._resolve(line.split()[-1])
        else:
            url._reject(RuntimeError(f"the worker at {address} could not start; what it said is on stderr"))

    threading.Thread(target=read, name="monarch-worker-start", daemon=True).start()
    return url


def _start(
    address: str, key_file: Path | None, allow: Path | None, audit: Path | None, stdout: int | None
) -> tuple[int, subprocess.Popen[bytes]]:
    """A worker in a process of its own, and the descriptor at whose end it ends."""
    if worker_address(address).listen.startswith("tcp://"):
        _load_keys(key_file, allow)
    read, write = os.pipe()
    command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen", address, "--lifeline", str(read)]
    for option, path in (("--key-file", key_file), ("--allow", allow), ("--audit", audit)):
        if path is not None:
            command += [option, os.fspath(path)]
    try:
        with coredumps.users_limit():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=(read,),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
            )
    except OSError:
        os.close(write)
        raise
    finally:
        os.close(read)
    return write, process


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _described(status: int) -> str:
    return f"code {status}" if status >= 0 else signal.Signals(-status).name


# -- attaching ----------------------------------------------------------------------------------


def attach_to_workers(
    *,
    ca: Any = None,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
    key_file: Path | None = None,
    allow: Path | None = None,
    timeout: float = 30.0,
) -> HostMesh:
    """Connect to workers; what is spawned on them ends with this process, and they stay.

    Args:
        ca: accepted for Monarch's sake. It changes nothing: TCP always needs a key.
        workers: their URLs, or futures of these, in the order of the mesh.
        name: for people.
        key_file: this process's key, or the team's; by default the file that ``MONARCH_KERNEL_KEY_FILE`` names, or this
            user's own key.
        allow: the list of the workers' keys that are trusted beside this one (see ``docs/security.md``); by default the
            list that ``MONARCH_KERNEL_ALLOW`` names, or the key file's own, if there is one.
        timeout: for so long it is tried (seconds).

    Returns:
        A host mesh with one dimension, ``hosts``.

    Raises:
        ConnectionError: some cannot be reached, or will not have us; names each of them, and why.
        ValueError: a URL cannot be meant, or there is no key.
        RuntimeError: this is not the controller.
    """
    del ca
    system = get_system()
    if not system.is_root:
        raise RuntimeError(
            "attach_to_workers() is for the controller: attach there, and pass the host mesh to the actor that needs it"
        )
    urls = [dial_address(worker.get(timeout) if isinstance(worker, Future) else worker) for worker in workers]
    if not urls:
        raise ValueError("attach_to_workers() needs at least one worker")
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ValueError(f"{twice} is named twice: a worker is one host of the mesh")
    if any(url.startswith("tcp://") for url in urls):
        _have_keys(system, key_file, allow)
    refs = dial_all(system, urls, timeout)
    system.workers.update({ref.id: ref for ref in refs})
    hosts = tuple(HostRef(ref, ref.host) for ref in refs)
    region = Region.from_extent(Extent(("hosts",), (len(hosts),)))
    return HostMesh(system, hosts, region, use=HostUse(), name=name or "")


#: The runtime that ``attach`` has started, and where it attached that.
_attached: tuple[System, str] | None = None


def attach(addr: str, timeout: float = 30.0) -> None:
    """Connect this controller to a worker before anything else, as Monarch's clients behind a firewall do.

    Nothing ever needs to reach a controller here: it connects to workers, and their answers come back over those
    connections. So a program needs this call for Monarch's sake alone. It fails early where the worker cannot be
    reached; every worker that ``attach_to_workers`` names must be reachable from here, too. The same address again is a
    no-op.

    Args:
        addr: the worker's URL.
        timeout: for so long it is tried (seconds).

    Raises:
        ConnectionError: it cannot be reached, or will not have us.
        RuntimeError: the API was used before, or another worker was attached.
        ValueError: the address cannot be meant, or there is no key.
    """
    global _attached
    url = dial_address(addr)
    if started():
        known = _attached[1] if _attached is not None and _attached[0] is get_system() else ""
        if url == known:
            return
        before = f"this process is attached to {known}" if known else "the API was used without it already"
        raise RuntimeError(f"attach({addr!r}) comes too late: {before}; call it before anything else of monarch.actor")
    try:
        attach_to_workers(workers=[url], name="gateway", timeout=timeout)
    except BaseException:
        shutdown()  # it was not used before, and may be attached elsewhere yet
        raise
    _attached = (get_system(), url)


def dial_all(system: System, urls: list[str], timeout: float) -> list[ProcRef]:
    """Connect to all of these workers, or to none."""
    node = system.node
    attached = set(system.workers)
    dials: list[Future[Any]] = []
    for url in urls:
        answered: Future[Any] = Future(node.poller, f"attach to {url}")
        dials.append(answered)
        node.dial(url, answered._resolve, timeout)
    found = gathered(node.poller, dials, "attach_to_workers").get()
    failed = [outcome for outcome in found if isinstance(outcome, Exception)]
    if failed:
        for ref in found:
            if isinstance(ref, ProcRef) and ref.id not in attached:
                _let_go(system, ref)
        names = f"{len(failed)} of {len(urls)} workers" if len(urls) > 1 else "the worker"
        raise ConnectionError(f"cannot attach to {names}: " + "; ".join(str(error) for error in failed))
    return [_near(system, ref) for ref in found]


def _near(system: System, ref: ProcRef) -> ProcRef:
    """A worker of this machine is reached by others as this process is."""
    here = system.node.ref
    if ref.site == here.site:
        ref = msgspec.structs.replace(ref, gateway=here.gateway, gateway_address=here.gateway_address)
        system.node.refs[ref.id] = ref
    return ref


def _let_go(system: System, ref: ProcRef) -> None:
    link = system.node.links.pop(ref.id, None)
    if link is not None:
        link.close()


def _load_keys(key_file: Path | None, allow: Path | None) -> Any:
    from monarch_kernel.protocol.keys import load_keys

    return load_keys(key_file, allow)


def _have_keys(system: System, key_file: Path | None, allow: Path | None) -> None:
    """This process's key, read when it is first needed; another one only while it is of no use."""
    node = system.node
    if node.keys is not None and key_file is None and allow is None:
        return
    coredumps.give_up(for_good=False)
    keys = _load_keys(key_file, allow)
    if node.keys is not None and keys.same_as(node.keys):
        return  # those are the ones that its links look at
    if node.keys is not None and any(ref.site != node.ref.site for ref in system.workers.values()):
        raise RuntimeError(
            f"{keys.path} (with the list {keys.allow}) is not the key of the workers that this process is attached to, "
            f"{node.keys.path} (with the list {node.keys.allow}): a process has one key and one list; put what is "
            "missing on that list with 'monarch-kernel keys add'"
        )
    node.keys = keys
