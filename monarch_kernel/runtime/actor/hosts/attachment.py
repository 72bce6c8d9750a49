"""Connect a controller to the workers of other hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.messages import ProcRef
from monarch_kernel.protocol.worker_addresses import dial_address
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, HostRef, HostUse
from monarch_kernel.runtime.actor.hosts.worker_process import StrPath, WorkerFuture, keys_for
from monarch_kernel.runtime.actor.process import System, get_system, started
from monarch_kernel.runtime.actor.system import shutdown
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node.future import Future, gathered

if TYPE_CHECKING:
    from monarch_kernel.protocol.keys import Keys


#: How long a worker may take to answer (seconds).
ATTACH_TIMEOUT = 30.0


class AttachTimeoutError(ConnectionError, RuntimeError):
    """A worker has not answered in time. (Monarch's error is a RuntimeError, too.)"""


def attach_to_workers(
    *,
    ca: Any = None,
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
        answered: Future[Any] = Future(node.poller, f"attach to {url}")
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
