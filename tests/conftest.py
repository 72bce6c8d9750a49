"""What all tests share: the leak check, waiting for events, and every kind of death."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import waiting

waiting.measure()  # before what counts with it is loaded

from tests.deaths import KINDS, Death  # noqa: E402
from tests.waiting import patience, wait_until  # noqa: E402

#: How long a test waits for what must happen (seconds); never reached when things work.
PATIENCE = patience(60)

# A shell ignores SIGINT in background jobs, nohup ignores SIGHUP, and every process below inherits that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


#: Where ``tests.run`` reads what the files of a batch have computed; another pytest, of a test, does not write there.
_COMPUTED = os.environ.pop("MK_TEST_COMPUTED", "")


def pytest_configure() -> None:
    """Keys that are made when they are first needed do not go into the home folder of the user that runs the tests."""
    config = tempfile.mkdtemp(prefix="mk-config-", dir="/tmp")
    atexit.register(shutil.rmtree, config, ignore_errors=True)
    os.environ["XDG_CONFIG_HOME"] = config
    os.environ["XDG_STATE_HOME"] = os.path.join(config, "state")
    for named in ("MONARCH_KERNEL_KEY_FILE", "MONARCH_KERNEL_ALLOW"):
        os.environ.pop(named, None)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a file with generated examples is loaded: none of them is too slow, on a machine that has other work."""
    if "from hypothesis import" in module_path.read_text():
        from hypothesis import HealthCheck, settings

        settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Tell ``tests.run`` what has been computed until the end of each file of a batch."""
    result = yield
    if _COMPUTED and (nextitem is None or nextitem.path != item.path):
        with open(_COMPUTED, "a") as file:
            print(item.path, _computed(), file=file)
    return result


def _computed() -> float:
    """The processor time of this process, of all below it, and of those that any of them has waited for (seconds)."""
    total = sum(os.times()[:4])
    for pid in children():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def children(pid: int | None = None) -> set[int]:
    """Pids of all living descendants of a process (this one by default)."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # without Path and text: every test of the suite does this twice at least
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as stat:
                    state, parent, _ = stat.read().rpartition(b")")[2].split(None, 2)
            except OSError:
                continue
            if state != b"Z":
                parents.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    todo = [pid or os.getpid()]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (one that only waits to be reaped does not)."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def needs(package: str) -> None:
    """Skip the test or file where this package is missing; importing it here would take seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


def describe(pid: int) -> str:
    """A process as a failure message shows it."""
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:120]}"
    except OSError:
        return f"{pid}: (gone)"


def _sockets() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if "monarch-" in line}


def _threads() -> set[threading.Thread]:
    """Living threads, without the one that watches over the time of each test."""
    return {t for t in threading.enumerate() if t.is_alive() and not t.name.startswith("pytest_timeout")}


_NUMBER = re.compile(r"\d+")


@contextmanager
def leak_check(what: str = "test", deadline: float = 20) -> Generator[None]:
    """Ends the runtime afterwards, and fails if a process, run folder, socket, shared memory or thread is left.

    It names all that is left, and ends the processes: the next test begins as if nothing had been.
    """
    processes = children()
    threads = set(threading.enumerate())
    memory = set(os.listdir("/dev/shm"))
    yield
    family = {os.getpid(), *children()}
    from monarch_kernel.runtime.actor import process, system

    folder = process.get_system().node.run_dir if process.started() else None
    left: list[str] = []
    try:
        system.shutdown()
    except Exception as e:
        left.append(f"a runtime that cannot be shut down: {type(e).__name__}: {e}")
        process.set_system(None)
    if not _within(deadline, lambda: not children() - processes):
        stray = children() - processes
        left.append("processes:\n" + "\n".join(map(describe, stray)))
        for pid in stray:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _within(deadline, lambda: not any(map(alive, stray)))
    if folder is not None:
        if os.path.exists(folder):
            left.append(f"its run folder, with {os.listdir(folder)}")
        # A process counts as ended when its main thread has; the others hold its sockets a moment longer.
        if not _within(10, lambda: not {s for s in _sockets() if s.startswith(folder)}):
            left.append(f"open sockets in {folder}")
    if not _within(10, lambda: all(t.daemon and not t.name.startswith("monarch") for t in _threads() - threads)):
        left.append(f"threads: {', '.join(sorted(t.name for t in _threads() - threads))}")
    if not _within(5, lambda: not _left_memory(memory, family)):
        left.append(f"shared memory: {', '.join(sorted(_left_memory(memory, family)))}")
    assert not left, f"the {what} left behind " + "; ".join(left)


def _left_memory(before: set[str], family: set[int]) -> set[str]:
    """Shared memory that was not there before, and is these processes' by its name: ``torch_PID_...``, or ours.

    Other programs of this machine come and go with theirs.
    """
    new = set(os.listdir("/dev/shm")) - before
    return {
        name for name in new if name.startswith(("mk-", "monarch")) or family & set(map(int, _NUMBER.findall(name)))
    }


def _within(deadline: float, condition: Callable[[], object]) -> bool:
    try:
        wait_until(condition, "", deadline)
    except AssertionError:
        return False
    return True


#: What is checked at once where a check after each test would end what the tests share, or cost more than they do: by
#: folder, a fixture below. A test with the mark ``own_runtime`` is checked by itself wherever it is.
CHECKED = {
    **dict.fromkeys(("actor", "debugger", "spmd", "tensor", "transfer", "watch"), "runtime"),
    **dict.fromkeys(("display", "mesh", "supervision", "test_imports.py", "test_names.py"), "checked_module"),
    # Chromium keeps processes for pages to come; what kernels have left is checked after each test.
    "browser": "checked_session",
    "hub": "checked_session",
    # Runtimes live on hosts, which are watched; in the guest, everything is slow.
    "network": "",
    "rdma_guest": "checked_session",
}


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves anything behind fails, or its module or batch does, where they share what they start."""
    from monarch_kernel.runtime.actor import system

    together = CHECKED.get(request.path.relative_to(Path(__file__).parent).parts[0])
    if request.node.get_closest_marker("own_runtime"):
        system.shutdown()
    elif together is not None:
        if together:
            request.getfixturevalue(together)
        yield
        return
    with leak_check():
        yield


@pytest.fixture(scope="session")
def checked_session() -> Iterator[None]:
    """All tests of this process leave nothing behind; until then, what they start is one another's."""
    with leak_check("tests of this batch"):
        yield


@pytest.fixture(scope="module")
def checked_module() -> Iterator[None]:
    """The tests of a file leave nothing behind."""
    with leak_check("module"):
        yield


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest, checked_session: None) -> Iterator[None]:
    """One controller and host agent, with what its fork server has loaded; a file's meshes end with the file.

    Ranks that import a test file find pytest loaded: it is half of what they compute otherwise. So do ranks of tests of
    tensors with what sharded ones need, and one template serves both.
    """
    from monarch_kernel.runtime.actor.hosts import host_mesh

    with pytest.MonkeyPatch.context() as patch:
        loaded: tuple[str, ...] = ()
        if "tensor" in request.path.relative_to(Path(__file__).parent).parts:
            from monarch_kernel.runtime.tensor.sharded.controller.mesh import PRELOAD

            loaded = PRELOAD
        patch.setattr(host_mesh, "SHARED", (*dict.fromkeys((*loaded, *host_mesh.SHARED)), "pytest"))
        yield
    stop_all_meshes("the file is over")


def stop_all_meshes(reason: str) -> None:
    """End the meshes and actors of this process's runtime, if it has one; the runtime stays."""
    from monarch_kernel.protocol.messages import StopProcs
    from monarch_kernel.runtime.actor import process, system

    if not process.started():
        return
    running = system.get_actor_system()
    meshes = list(running.proc_meshes.values())
    running.tree.ending(ref.id for mesh in meshes for ref in mesh._procs)
    stopping = [mesh._ask_agents(lambda call, procs: StopProcs(call, procs, reason, 0.05), "stop") for mesh in meshes]
    for mesh, stopped in zip(meshes, stopping, strict=True):
        stopped.exception(PATIENCE)  # its agent may be dead
        mesh._stopped = True
        running.proc_meshes.pop(mesh._mesh_uid, None)
    running.stop_all_actors(reason, PATIENCE)
    wait_until(lambda: not running.actors, "the actors of this process are gone, and are made anew by the next test")
    running.client.owned.clear()
    agent = running.agent_process
    if agent is not None:
        wait_until(lambda: not _ranks(agent.pid), "all ranks of the test have ended")


def _ranks(agent: int) -> set[int]:
    """All below the agent but its fork server and templates."""
    return {pid for pid in children(agent) if not _command(pid).startswith(("monarch-forks", "monarch-templ"))}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture(params=KINDS)
def death(request: pytest.FixtureRequest) -> Death:
    """Every way in which a rank can die, one after the other."""
    return Death(request.param)
